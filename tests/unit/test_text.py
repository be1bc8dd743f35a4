"""Lists that are cut, numbers of bytes, and tables."""

from __future__ import annotations

import pytest

from fleetx.config.kinds import size
from fleetx.config.text import aligned, binary, decimal, framed, listed


def test_a_list_is_cut_after_so_many_names_and_the_rest_is_counted() -> None:
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(["a", "b", "c", "d"], 2) == "a, b and 2 more"
    assert listed(["a", "b", "c"], 2, separator="; ") == "a; b and 1 more"
    assert listed([], 2) == ""


@pytest.mark.parametrize("text", ["8 GiB", "1.5 MiB", "512 KiB", "100 B", "1.25 TiB", "20 GiB", "1000 B"])
def test_a_size_as_a_user_writes_it_reads_back_the_same(text: str) -> None:
    assert binary(size().parse(text)) == text


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 B"), (1023, "1023 B"), (2**30 - 1, "1024 MiB"), (10**9, "953.67 MiB"), (2**52, "4096 TiB")]
)
def test_memory_is_shown_in_units_of_1024(count: float, expected: str) -> None:
    assert binary(count) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (999_900, "1 MB"), (5_000_000, "5 MB"), (3.2e12, "3.2 TB")],
)
def test_bytes_on_the_wire_are_shown_in_units_of_1000(count: float, expected: str) -> None:
    assert decimal(count) == expected


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert aligned([["plan", "ms"], ["a", "10.5"], ["longer", ""]], left=[0]) == ["plan      ms", "a       10.5", "longer"]


def test_a_frame_has_double_rules_around_blocks_and_single_ones_below_heads() -> None:
    assert framed([(["head"], []), (["a"], ["b", "c"])], 6) == [
        "+======+",
        "| head |",
        "+======+",
        "|  a   |",
        "+------+",
        "|  b   |",
        "|  c   |",
        "+======+",
    ]
