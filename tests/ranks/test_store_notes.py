"""Notes in the store of the ranks, into which any user of the machine can write: forged ones are missing ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from fleetx.dist import world
from fleetx.dist.comm import ERROR_KEY, TorchComm
from tests.helpers.harness import run_ranks
from tests.helpers.monitor_runs import summary, train

GARBAGE = ["", "garbage", "[true, 3]", "\x1b[2Jowned", '0 1 2 {"loss": "x"}', "x" * 2_000_000]


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _forge_errors(rank: int) -> list[str | None]:
    comm, read = world.current().comm, []
    for text in GARBAGE:
        if rank == 1:
            _store().set(ERROR_KEY, text)
        comm.barrier()
        read.append(comm.posted_error())
        comm.barrier()
    if rank == 1:
        comm.post_error("a real error")
    comm.barrier()
    read.append(comm.posted_error())
    comm.barrier()
    if rank == 1:
        comm.withdraw_error()
    comm.barrier()
    return [*read, comm.posted_error()]


def test_a_text_in_place_of_an_error_is_not_shown_and_a_real_one_is() -> None:
    for read in run_ranks(_forge_errors, 2):
        assert read == [None] * len(GARBAGE) + ["a real error", None]


def _forge_notes(rank: int) -> list[list[str] | None]:
    comm, read = world.current().comm, []
    comm.post_note(f"n/{rank}", "genuine")
    comm.barrier()
    read.append(comm.read_notes(["n/0", "n/1"]))
    overheard = _store().get("n/0")
    comm.barrier()
    if rank == 0:
        comm.post_note("n/0", "later")
    comm.barrier()
    read.append(comm.read_notes(["n/0", "n/1"]))
    comm.barrier()
    for text in (overheard, "garbage", b"\xff"):
        if rank == 1:
            _store().set("n/0", text)
        comm.barrier()
        read.append(comm.read_notes(["n/0", "n/1"]))
        comm.barrier()
    return read


def test_a_note_that_was_replaced_or_sent_again_counts_as_missing() -> None:
    for read in run_ranks(_forge_notes, 2):
        assert read == [["genuine", "genuine"], ["later", "genuine"], None, None, None]


def _meet_with_a_forged_arrival(rank: int) -> str:
    comm = world.current().comm
    if rank == 1:
        _store().set("place/0", "")
        _store().set("place/1", "")
    comm.barrier()
    if rank == 0:
        comm.post_note("place/ready", "")
    while comm.read_notes(["place/ready"]) is None:
        pass
    comm.wait_for_all("place", missing="have not come")
    return "met"


def test_an_arrival_that_was_forged_is_waited_for_until_it_is_real() -> None:
    assert run_ranks(_meet_with_a_forged_arrival, 2) == ["met", "met"]


def _train_while_notes_are_overwritten(rank: int, folder: str, text: str) -> list[float]:
    genuine = TorchComm.post_note
    if rank == 1:  # as a process that writes after each note of this rank
        TorchComm.post_note = lambda self, key, note: _store().set(key, text)  # type: ignore[method-assign]
    try:
        return train(folder, 6, slow_rank=1, slow_s=0.3)
    finally:
        TorchComm.post_note = genuine  # type: ignore[method-assign]


@pytest.mark.parametrize("text", GARBAGE[1:4])
def test_garbage_in_the_notes_of_a_monitor_ends_no_training(tmp_path: Any, text: str) -> None:
    losses = run_ranks(_train_while_notes_are_overwritten, 2, str(tmp_path), text)
    assert len(losses[0]) == 6 and summary(tmp_path)["state"] == "finished"
    assert "owned" not in str(summary(tmp_path))
