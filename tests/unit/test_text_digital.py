"""Fleet's lines of numbers: what is read from them, and what is said about bad ones."""

from __future__ import annotations

import gzip
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetx.data.text.digital import fault, parse_block
from fleetx.data.text.from_paths import text_source
from fleetx.data.text.text_source import TextSource
from fleetx.errors import ConfigError, DataError, FleetWarning

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(15))]
STRUCTURAL = np.array([True, False, True, True, True] + [False] * 15)
GOOD = "2 5 3 6 7 3;0 0 0 1 1 1;0 1 2 3 4 5;1\n2 8 9 3 10 3;0 0 0 0 1 1;0 1 2 3 4 5;0\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCABULARY))
    (tmp_path / "data").mkdir()
    return tmp_path


def load(folder: Path, **options: object) -> TextSource:
    options = {"max_seq_len": 16, "cache_dir": folder / "cache"} | options
    return text_source(folder / "data", folder / "vocab.txt", **options)  # type: ignore[arg-type]


def write(folder: Path, text: str | bytes, name: str = "part-0") -> None:
    (folder / "data" / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def original(source: TextSource, index: int) -> tuple[list[int], list[int], int]:
    """A sample with its masked tokens put back."""
    batch = source.finish(source.batch(0, np.array([index]))[0])
    ids, types, labels = batch["input_ids"], batch["token_type_ids"], batch["next_sentence_label"]
    positions, hidden = batch["mlm_positions"], batch["mlm_labels"]
    assert ids is not None and types is not None and labels is not None and positions is not None and hidden is not None
    ids.view(-1)[positions.long()] = hidden
    length = int((ids[0] != 0).sum())
    return ids[0, :length].tolist(), types[0, :length].tolist(), int(labels[0])


def test_a_line_becomes_a_sample_and_label_1_which_means_next_in_fleet_becomes_0_as_in_transformers(folder: Path) -> None:
    write(folder, GOOD)
    source = load(folder)
    assert len(source) == 2
    assert original(source, 0) == ([2, 5, 3, 6, 7, 3], [0, 0, 0, 1, 1, 1], 0)
    assert original(source, 1) == ([2, 8, 9, 3, 10, 3], [0, 0, 0, 0, 1, 1], 1)


def test_gzip_plain_and_a_missing_last_line_end_give_the_same_samples(folder: Path) -> None:
    write(folder, gzip.compress(GOOD.encode()), "part-0.gz")
    write(folder, GOOD.rstrip("\n"), "part-1")
    source = load(folder)
    assert len(source) == 4
    assert [original(source, index) for index in (0, 1)] == [original(source, index) for index in (2, 3)]


def test_a_list_names_the_files_in_its_own_order(folder: Path) -> None:
    first, second = GOOD.splitlines(keepends=True)
    write(folder, first, "a")
    write(folder, second, "b")
    write(folder, "not read", "c")
    write(folder, "b\na\n", "train.txt")
    write(folder, "a\nb\n", "val.txt")
    assert original(load(folder), 0)[0] == [2, 8, 9, 3, 10, 3]
    assert original(load(folder, train=False), 0)[0] == [2, 5, 3, 6, 7, 3]


def test_a_train_txt_that_holds_lines_of_numbers_is_data_and_no_list(folder: Path) -> None:
    write(folder, GOOD, "train.txt")
    assert len(load(folder)) == 2


def test_files_named_like_lists_that_hold_data_are_their_own_split(folder: Path) -> None:
    write(folder, GOOD, "train.txt")
    with pytest.raises(DataError, match="has train.txt, but no val.txt or test.txt for evaluation"):
        load(folder, train=False)
    write(folder, "".join(reversed(GOOD.splitlines(keepends=True))), "test.txt")
    write(folder, GOOD, "part-1")
    assert len(load(folder)) == 4  # and not what evaluation reads
    evaluation = load(folder, train=False)
    assert len(evaluation) == 2 and original(evaluation, 0)[0] == [2, 8, 9, 3, 10, 3]


def test_another_vocabulary_in_the_folder_is_no_data(folder: Path) -> None:
    write(folder, GOOD)
    write(folder, "[PAD]\n[UNK]\n", "vocab.txt")
    assert len(load(folder)) == 2


def test_lines_longer_than_max_seq_len_are_left_out_with_their_number_in_a_warning(folder: Path) -> None:
    write(folder, GOOD + "2 5 3 6 3;0 0 0 1 1;0 1 2 3 4;1\n")
    with pytest.warns(FleetWarning, match="2 of 3 lines are longer than max_seq_len = 5 and are left out"):
        assert len(load(folder, max_seq_len=5)) == 1
    (folder / "data" / "part-0").write_text(GOOD)
    with pytest.raises(DataError, match="all 2 lines are longer than max_seq_len = 5; the shortest has 6"):
        load(folder, max_seq_len=5)


def test_if_every_label_is_1_half_of_the_pairs_get_the_b_of_another_line(folder: Path) -> None:
    lines = [f"2 {5 + i} 3 {10 + i} 3;0 0 0 1 1;0 1 2 3 4;1\n" for i in range(5)]
    write(folder, "".join(lines * 40))
    source = load(folder)
    batch = source.finish(source.batch(3, np.arange(200))[0])
    labels = batch["next_sentence_label"]
    assert labels is not None and 70 <= int(labels.sum()) <= 130
    for index in range(50):
        tokens, types, not_next = original(source, index)
        assert types == [0, 0, 0, 1, 1] and tokens[1] == 5 + index % 5
        assert not_next or tokens[3] == 10 + index % 5


def test_a_b_taken_from_elsewhere_is_cut_to_the_place_it_gets_and_keeps_its_last_token(folder: Path) -> None:
    write(folder, "2 5 3 6 3;0 0 0 1 1;0 1 2 3 4;1\n2 7 3 8 9 10 11 3;0 0 0 1 1 1 1 1;0 1 2 3 4 5 6 7;1\n")
    source = load(folder)
    seen = set()
    for epoch in range(20):
        batch = source.finish(source.batch(epoch, np.array([0]))[0])
        ids, positions, hidden = batch["input_ids"], batch["mlm_positions"], batch["mlm_labels"]
        assert ids is not None and positions is not None and hidden is not None
        ids.view(-1)[positions.long()] = hidden
        seen.add(tuple(ids[0, :5].tolist()))
    assert seen == {(2, 5, 3, 6, 3), (2, 5, 3, 8, 3)}


def test_one_label_only_and_no_second_sentences_is_said_aloud(folder: Path) -> None:
    write(folder, "2 5 6 3;0 0 0 0;0 1 2 3;1\n")
    with pytest.warns(FleetWarning, match="every line has the label 1"):
        assert original(load(folder), 0) == ([2, 5, 6, 3], [0, 0, 0, 0], 0)


BAD_LINES = {
    "three fields": ("2 5 3;0 0 0;0 1 2", "has 3 fields; 4 are needed"),
    "five fields": ("2 5 3;0 0 0;0 1 2;1;1", "has 5 fields"),
    "unequal lengths": ("2 5 3;0 0;0 1 2;1", "has 3 token_ids, 2 sent_ids and 3 pos_ids"),
    "id beyond the vocabulary": ("2 20 3;0 0 0;0 1 2;1", "token id 20 is not in the vocabulary, which ends at 19"),
    "negative id": ("2 -5 3;0 0 0;0 1 2;1", "token_ids holds '-5'"),
    "id with too many digits": ("2 12345678901 3;0 0 0;0 1 2;1", "at most 9 digits"),
    "a word": ("2 x 3;0 0 0;0 1 2;1", "token_ids holds 'x'"),
    "a float": ("2 5.0 3;0 0 0;0 1 2;1", "token_ids holds '5.0'"),
    "other digits": ("2 ٣ 3;0 0 0;0 1 2;1", "token_ids holds"),
    "two spaces": ("2  5 3;0 0 0;0 1 2;1", "token_ids holds ''"),
    "space at the end": ("2 5 3;0 0 0;0 1 2;1 ", "label holds ''"),
    "no tokens": (";;;1", "token_ids holds ''"),
    "third sentence": ("2 5 3;0 0 2;0 1 2;1", "sent_ids holds 2"),
    "sentences mixed": ("2 5 3;0 1 0;0 1 2;1", "goes back from 1 to 0"),
    "positions": ("2 5 3;0 0 0;0 2 1;1", "pos_ids must count 0 to 2"),
    "label 2": ("2 5 3;0 0 0;0 1 2;2", "label is '2'; allowed is 1"),
    "two labels": ("2 5 3;0 0 0;0 1 2;1 0", "label is '1 0'"),
    "nothing to mask": ("2 3 3;0 0 1;0 1 2;1", "only special tokens"),
    "empty line": ("", "is empty"),
    "windows line end": ("2 5 3;0 0 0;0 1 2;1\r", "Windows line end"),
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("line, reason", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_an_error_that_names_file_and_line(folder: Path, line: str, reason: str, packed: bool) -> None:
    data = (GOOD + line + "\n" + GOOD).encode()
    write(folder, gzip.compress(data) if packed else data, "part.gz" if packed else "part")
    with pytest.raises(DataError, match=rf"data/part[.gz]*, line 3: .*{reason}"):
        load(folder)
    assert not [path for path in (folder / "cache").iterdir() if path.is_dir()]


BAD_FILES = {
    "empty": (b"", "line 1: the file is empty"),
    "byte order mark": (b"\xef\xbb\xbf" + GOOD.encode(), "line 1: begins with a byte order mark"),
    "not utf-8": (GOOD.encode() + b"2 \xff 3;0 0 0;0 1 2;1\n", "line 3: byte 0xff in column 3 is not UTF-8"),
    "utf-16": (GOOD.encode("utf-16"), "line 1: "),
    "only a line end": (b"\n", "line 1: is empty"),
}


@pytest.mark.parametrize("content, reason", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_file_that_is_no_file_of_lines_is_refused_by_name(folder: Path, content: bytes, reason: str) -> None:
    write(folder, GOOD, "a")
    write(folder, content, "b")
    with pytest.raises(DataError, match=rf"data/b, {reason}"):
        load(folder)


def test_the_number_of_further_bad_lines_is_said(folder: Path) -> None:
    write(folder, GOOD + "1\n2\n3\n")
    with pytest.raises(DataError, match=r"line 3: has 1 fields.* 2 more of the lines read so far are bad"):
        load(folder)


def test_truncated_and_damaged_gzip_names_the_line_it_came_to(folder: Path) -> None:
    packed = gzip.compress((GOOD * 500).encode())
    write(folder, packed[: len(packed) // 2], "part.gz")
    with pytest.raises(DataError, match=r"part.gz, line \d+: the gzip data is damaged"):
        load(folder)
    write(folder, packed[:-4] + b"\0\0\0\0", "part.gz")
    with pytest.raises(DataError, match=r"part.gz, line 1001: the gzip data is damaged"):
        load(folder)
    write(folder, GOOD, "part.gz")
    with pytest.raises(DataError, match=r"part.gz: named like a gzip file, but it is not one"):
        load(folder)


def test_a_gzip_bomb_ends_at_the_limit_and_a_line_without_end_at_its_own(folder: Path) -> None:
    write(folder, gzip.compress((GOOD * 100_000).encode()), "bomb.gz")
    with pytest.raises(DataError, match=r"bomb.gz: more than 1000000 bytes of text"):
        load(folder, max_file_bytes=10**6)
    write(folder, gzip.compress(b"1 " * 2**22), "bomb.gz")
    with pytest.raises(DataError, match=r"bomb.gz, line 1: longer than 1048576 bytes"):
        load(folder)


BAD_LISTS = {
    "parent folder": (b"a\n../vocab.txt\n", "line 2: '../vocab.txt' leads out of the folder"),
    "hidden parent": (b"a\nx/../../vocab.txt\n", "line 2: 'x/../../vocab.txt' leads out"),
    "absolute": (b"/etc/passwd\n", "line 1: '/etc/passwd' leads out"),
    "missing": (b"a\nb\n", "line 2: there is no file"),
    "twice": (b"a\na\n", "line 2: 'a' is listed twice"),
    "windows": (b"a\r\n", "line 1: has a Windows line end"),
    "byte order mark": (b"\xef\xbb\xbfa\n", "line 1: begins with a byte order mark"),
    "empty line": (b"a\n\n", "line 2: '' is no file name"),
    "not utf-8": (b"a\n\xff\n", "line 2: byte 0xff"),
    "nul": (b"a\na\0\n", "line 2: .* is no file name"),
    "link out": (b"a\nlink\n", "line 2: 'link' is a link that leads out"),
    "pipe": (b"pipe\n", "pipe: not a regular file"),
    "folder": (b"sub\n", "sub: not a regular file"),
    "empty": (b"", "line 1: the list is empty"),
}


@pytest.mark.parametrize("content, reason", BAD_LISTS.values(), ids=BAD_LISTS.keys())
def test_a_bad_list_of_files_is_an_error_that_names_its_line(folder: Path, content: bytes, reason: str) -> None:
    write(folder, GOOD, "a")
    (folder / "data" / "link").symlink_to(folder / "vocab.txt")
    (folder / "data" / "sub").mkdir()
    os.mkfifo(folder / "data" / "pipe")
    write(folder, content, "train.txt")
    with pytest.raises(DataError, match=reason):
        load(folder)


def test_evaluation_without_a_list_for_it_is_refused_rather_than_done_on_training_data(folder: Path) -> None:
    write(folder, GOOD, "a")
    write(folder, "a\n", "train.txt")
    with pytest.raises(DataError, match=r"has train.txt, but no list val.txt or test.txt for evaluation"):
        load(folder, train=False)


def test_lines_of_numbers_need_the_vocabulary_they_were_made_with(folder: Path) -> None:
    write(folder, GOOD)
    with pytest.raises(ConfigError, match="vocab_path='vocab.txt'"):
        text_source(folder / "data", None, max_seq_len=16, cache_dir=folder / "cache")


numbers = st.lists(st.sampled_from(["0", "1", "2", "3", "5", "19", "20", "-1", "", "x", "007"]), min_size=1, max_size=4)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Good lines, and lines with one thing changed, so that both outcomes are common."""
    length = draw(st.integers(1, 5))
    split = draw(st.integers(0, length))
    fields = [
        draw(st.lists(st.integers(0, 19).map(str), min_size=length, max_size=length)),
        ["0"] * split + ["1"] * (length - split),
        [str(position) for position in range(length)],
        [draw(st.sampled_from("01"))],
    ]
    if draw(st.booleans()):
        fields[draw(st.integers(0, 3))] = draw(numbers)
    return ";".join(" ".join(field) for field in fields).encode()


@settings(deadline=None, max_examples=300)
@given(st.lists(lines(), min_size=1, max_size=4))
def test_the_array_reader_accepts_exactly_the_lines_without_a_fault_and_reads_the_same_numbers(block: list[bytes]) -> None:
    good = [line for line in block if fault(line, vocab_size=20, structural=STRUCTURAL) is None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parsed = parse_block(b"".join(line + b"\n" for line in block), vocab_size=20, structural=STRUCTURAL)
    assert (parsed is not None) == (len(good) == len(block))
    if parsed is not None:
        fields = [line.decode().split(";") for line in block]
        assert parsed.tokens.tolist() == [int(word) for tokens, *_ in fields for word in tokens.split(" ")]
        assert parsed.splits.tolist() == [sentences.split(" ").count("0") for _, sentences, *_ in fields]
        assert parsed.follows.tolist() == [label == "1" for *_, label in fields]
