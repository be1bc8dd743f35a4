"""Notes of the ranks in a store that others can write to: only a rank's own, and its latest, is read."""

from __future__ import annotations

import pytest

from fleetx.dist.notes import NOTE_BYTES, NoteBook


def test_a_note_is_read_under_its_name_by_ranks_of_the_attempt_only() -> None:
    note = NoteBook("key").seal("fleetx/error", 3, "rank 3 has no more batches").encode()
    assert NoteBook("key").open("fleetx/error", note) == "rank 3 has no more batches"
    assert NoteBook("key").open("fleetx/other", note) is None
    assert NoteBook("another key").open("fleetx/error", note) is None


@pytest.mark.parametrize("note", [b"", b"garbage", b"[1, 2", b"0 0 0 0", b"\xff\xfe \0 \0 \0", b"x" * (NOTE_BYTES + 1)])
def test_garbage_is_no_note(note: bytes) -> None:
    assert NoteBook("key").open("fleetx/monitor/1/0", note) is None


def test_an_older_note_of_the_same_rank_is_not_read_again() -> None:
    writer, other, reader = NoteBook("key"), NoteBook("key"), NoteBook("key")
    first, second = (writer.seal("n", 1, text).encode() for text in ("first", "second"))
    beside = other.seal("n", 2, "beside").encode()
    assert [reader.open("n", note) for note in (first, first, second, beside, first)] == [
        "first",
        "first",
        "second",
        "beside",
        None,
    ]
