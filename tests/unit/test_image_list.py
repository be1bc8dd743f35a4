"""Lists of images: what a line may be, and what is said about one that is not."""

import os
import re
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetx.data.images.files import read_list_file
from fleetx.data.images.image_list import parse_image_list
from fleetx.errors import ConfigError, DataError


def test_a_list_gives_paths_and_labels_in_order():
    entries = parse_image_list(b"a.jpg 3\nsub/b.png 0\n", "train.txt")
    assert [entries.path(i) for i in range(len(entries))] == [b"a.jpg", b"sub/b.png"]
    assert entries.labels.tolist() == [3, 0] and entries.labels.dtype == np.int64
    assert entries.place(1) == "train.txt, line 2"


def test_the_last_field_is_the_label_so_that_names_may_contain_spaces():
    entries = parse_image_list(b"my cat 2 .jpg\t7\ntwo  words.jpg   1  ", "t")
    assert entries.path(0) == b"my cat 2 .jpg" and entries.path(1) == b"two  words.jpg"
    assert entries.labels.tolist() == [7, 1]


def test_the_last_line_needs_no_line_end():
    assert len(parse_image_list(b"a 0\nb 1", "t")) == len(parse_image_list(b"a 0\nb 1\n", "t")) == 2


def test_dots_and_double_slashes_that_mean_nothing_are_removed():
    entries = parse_image_list("./a.jpg 0\nb//c/./ä..jpg 1\n.hidden 2\n".encode(), "t")
    assert [entries.path(i).decode() for i in range(3)] == ["a.jpg", "b/c/ä..jpg", ".hidden"]


BAD_LINES = {
    "no label": (b"cat.jpg", "expected `relative/path label`, got 'cat.jpg'"),
    "only a label": (b" 3", "expected `relative/path label`, got ' 3'"),
    "empty": (b"", "got '', an empty line: remove it"),
    "blank": (b"  \t", "an empty line: remove it"),
    "a word for a label": (b"cat.jpg cat", "the label must be an integer from 0 to 9, got 'cat' in 'cat.jpg cat'"),
    "a negative label": (b"cat.jpg -1", "the label must be an integer from 0 to 9, got '-1'"),
    "a fraction": (b"cat.jpg 1.0", "got '1.0'"),
    "underscores": (b"cat.jpg 0_1", "got '0_1'"),
    "digits of another script": ("cat.jpg ٣".encode(), "got '٣'"),
    "a label out of range": (b"cat.jpg 10", "the label must be an integer from 0 to 9, got '10'"),
    "a label of 5000 digits": (b"cat.jpg " + b"1" * 5000, "(5000 bytes)"),
    "an absolute path": (b"/etc/passwd 0", "got the absolute '/etc/passwd'"),
    "a path that leaves": (b"a/../../b.jpg 0", "got `..` in 'a/../../b.jpg'"),
    "only dots": (b".. 0", "got `..` in '..'"),
    "a leading space": (b" cat.jpg 0", "must not begin with a space"),
    "ten megabytes": (b"x" * 10_000_000 + b" 0", "nor exceed 4096 bytes"),
    "NUL": (b"a\0b.jpg 0", "contains a NUL byte"),
    "not UTF-8": (b"caf\xe9.jpg 0", r"the byte '\\xe9' is not UTF-8; convert with `iconv"),
    "a Windows line end": (b"a.jpg 0\r", "Windows line ends); convert with `sed -i 's/\\r$//' train.txt`"),
    "a lone carriage return": (b"a.jpg 0\rb.jpg 0", "contains a carriage return"),
}


@pytest.mark.parametrize("line,reason", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_named_with_file_number_and_reason(line, reason):
    text = b"a.jpg 1\n" * 16 + line + b"\nb.jpg 2\n"
    with pytest.raises(DataError, match="^train.txt, line 17: ") as caught:
        parse_image_list(text, "train.txt", num_classes=10)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_a_byte_order_mark_is_refused_with_the_command_that_removes_it():
    with pytest.raises(DataError, match="^train.txt, line 1: begins with a byte order mark; remove it with `sed -i"):
        parse_image_list(b"\xef\xbb\xbfa.jpg 1\n", "train.txt")


@pytest.mark.parametrize("text", [b"", b"\n"])
def test_an_empty_list_is_refused(text):
    with pytest.raises(DataError, match="is empty|line 1: .* an empty line"):
        parse_image_list(text, "train.txt")


def test_the_first_fault_is_told_and_the_others_are_counted():
    text = b"a 0\nb\nc 0\n" + b"d\n" * 7
    with pytest.raises(DataError, match=r"line 2: .* besides this one: 7 \(4, 5, 6, 7, 8, \.\.\.\)$"):
        parse_image_list(text, "t")
    with pytest.raises(DataError, match=r"besides this one: more than 999 \(2, 3, 4, 5, 6, \.\.\.\)$"):
        parse_image_list(b"d\n" * 5000, "t")


@pytest.mark.parametrize("num_classes", [0, -1, True, 2.0, "10"])
def test_a_number_of_classes_that_is_none_is_refused(num_classes):
    with pytest.raises(ConfigError, match="num_classes is .*; it must be an integer of at least 1"):
        parse_image_list(b"a 0\n", "t", num_classes=num_classes)


@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="./"), min_size=1),
                          st.integers(0, 999)), min_size=1))  # fmt: skip
def test_any_plain_names_come_back_as_written(pairs):
    text = "".join(f"{name} {label}\n" for name, label in pairs).encode()
    entries = parse_image_list(text, "t", num_classes=1000)
    assert [(entries.path(i).decode(), int(entries.labels[i])) for i in range(len(entries))] == pairs


def test_a_hundred_thousand_lines_are_read_at_once():
    text = b"".join(b"train/n%08d/n%08d_%d.JPEG %d\n" % (i % 1000, i % 1000, i, i % 1000) for i in range(100_000))
    start = time.process_time()
    entries = parse_image_list(text, "t", num_classes=1000)
    assert time.process_time() - start < 3  # a fifth of a second on an idle core
    assert len(entries) == 100_000 and entries.path(99_999) == b"train/n00000999/n00000999_99999.JPEG"


def test_a_list_that_is_missing_a_folder_or_a_fifo_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for name, reason in {"none": "No such file", "": "not a regular file", "fifo": "not a regular file"}.items():
        path = str(tmp_path / name)
        with pytest.raises(DataError, match=f"^{re.escape(path)}: {reason}"):
            read_list_file(path)
