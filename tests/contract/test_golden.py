"""Checkpoints that an earlier version of FleetX has written load, and continue to the bit (tests/golden/write.py wrote them)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from fleetx import fleet
from tests.helpers.golden_runs import (
    CASES,
    FOLDER,
    SIZE,
    draw,
    generators,
    load_values,
    read_expected,
    resumed,
    stored_strategy,
    text_of,
    tolerance_of,
    values,
)
from tests.helpers.golden_texts import switches
from tests.helpers.harness import run_ranks

NAMES = sorted(path.name for path in FOLDER.iterdir())


class Resumed(NamedTuple):
    name: str
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module", params=NAMES)
def golden(request: pytest.FixtureRequest) -> Resumed:
    """Loaded on two ranks and trained on, once for all that is asked of it."""
    return Resumed(request.param, run_ranks(resumed, SIZE, request.param))


def _differing(golden: Resumed, part: str) -> list[str]:
    _, expected, _ = read_expected(golden.name)
    assert len(expected) == len(golden.ranks) == SIZE
    pairs = zip(golden.ranks, expected, strict=True)
    return [
        f"rank {rank}: {what}"
        for rank, (ours, theirs) in enumerate(pairs)
        for what in theirs[part]
        if ours[part][what] != theirs[part][what]
    ]


def test_an_old_checkpoint_loads_to_the_bit(golden: Resumed) -> None:
    assert _differing(golden, "loaded") == []


def test_a_run_that_goes_on_from_it_ends_where_it_did(golden: Resumed) -> None:
    """Whatever the processor and torch's version: within a tolerance."""
    tolerance = tolerance_of(stored_strategy(golden.name))
    _, _, expected = read_expected(golden.name)
    for ours, theirs in zip(golden.ranks, expected, strict=True):
        assert ours["rows"].keys() == theirs.keys()
        for what, row in theirs.items():
            np.testing.assert_allclose(ours["rows"][what], row, rtol=tolerance, atol=tolerance, err_msg=what)


def test_a_run_that_goes_on_from_it_has_the_same_bits(golden: Resumed) -> None:
    written_with, _, _ = read_expected(golden.name)
    here = golden.ranks[0]["arithmetic"]
    if here != written_with:
        pytest.skip(f"written with {written_with}, and here is {here}: last bits may differ, with or without FleetX")
    assert _differing(golden, "continued") == []


def test_old_values_and_generators_load_as_they_were() -> None:
    held = generators(3)
    draw(held)
    expected = {name: text_of(value) for name, value in values().items()}, draw(held)
    assert run_ranks(load_values, SIZE) == [(rank, *expected) for rank in range(SIZE)]


def test_there_is_a_checkpoint_of_every_case_of_a_strategy_alone_and_of_five_combinations() -> None:
    """New strategies need none: theirs are not old."""
    assert sorted(CASES) == NAMES, "write those that are missing: python -m tests.golden.write checkpoints"
    assert {*switches()} > {name for name, settings in CASES.items() if settings.get(name)}
    assert len([name for name in NAMES if "+" in name]) == 5


def test_the_golden_runs_still_have_the_strategies_that_wrote_them() -> None:
    """Every line is still written, in its place; keys that came later have their defaults, which are lines in between."""
    for name in NAMES:
        text = (FOLDER / name / "strategy.yaml").read_text(encoding="utf-8")
        ours = fleet.DistributedStrategy.from_yaml(text).to_yaml().splitlines()
        later = iter(ours)
        assert all(line in later for line in text.splitlines()), name
        defaults = [line for other in switches() for line in fleet.DistributedStrategy(**{other: True}).to_yaml().splitlines()]
        assert {*ours} - {*text.splitlines()} <= {*defaults}, name
