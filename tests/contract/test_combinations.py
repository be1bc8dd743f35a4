"""Every set of up to three strategies: legal pairs and sets with a name do all that is asked of them, illegal ones are refused.

Legal sets of three that have no name are left to bench/combinations, which takes all."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from fleetx import fleet
from fleetx.recompute import replay
from tests.helpers import combination_checks
from tests.helpers.combination_checks import Case, checked, verdict
from tests.helpers.combination_sets import ADAPTIVE_WITH_ADAM, BEYOND_FLEET, FLEETS_TEN, PARTS, all_sets, is_legal, refusal
from tests.helpers.harness import run_ranks

NAMED = [tuple(sorted(names)) for names in (*FLEETS_TEN, *BEYOND_FLEET)]
SMALL = [names for names in all_sets([1, 2]) if is_legal(names)]
CASES = [*(Case(names) for names in dict.fromkeys([*SMALL, *NAMED])), Case(*ADAPTIVE_WITH_ADAM)]
ILLEGAL = [names for names in all_sets() if not is_legal(names)]


def test_sets_with_a_name_are_legal_and_all_strategies_are_tried() -> None:
    assert all(is_legal(names) for names in NAMED) and len(FLEETS_TEN) == 10
    assert {name for case in CASES for name in case.names} == set(PARTS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_legal_set_learns_is_neutral_resumes_and_survives(case: Case) -> None:
    assert verdict(case, run_ranks) == []


@pytest.mark.parametrize("names", ILLEGAL, ids=" + ".join)
def test_an_illegal_set_is_refused_with_every_slot_and_what_to_do(names: tuple[str, ...]) -> None:
    text, wrong = refusal(names)
    assert wrong == [], text


# --- and the checks themselves --------------------------------------------------------------------------------------------------


def sabotaged(rank: int, case: Case, folder: str, how: str) -> dict[str, Any]:
    load = fleet.load_checkpoint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combination_checks, "_known", {})
        if how == "the optimizer is not loaded":
            patch.setattr(fleet, "load_checkpoint", lambda folder, model, optimizer: load(folder, model=model))
        elif how == "overflows pass":
            patch.setattr(combination_checks, "ON_OVERFLOW", "off")
        elif how == "something is done":
            patch.setattr(combination_checks, "neutral_settings", lambda names, is_linear: {"gradient_merge": {"k_steps": 2}})
        elif how == "other dropout when computed again":
            patch.setattr(replay, "set_back", lambda states: contextlib.nullcontext())
        return checked(rank, case, folder)


SABOTAGES = {
    "the optimizer is not loaded": ["a resumed run ends with other bits"],
    "overflows pass": ["weights are lost after an overflow", "after an overflow nan of the loss is left"],
    "something is done": ["gradient_merge, set to do nothing, change the weights"],
    "other dropout when computed again": ["recompute changes bits"],
}


@pytest.mark.parametrize("how", SABOTAGES)
def test_whatever_goes_wrong_is_seen(how: str) -> None:
    """The checks could be blind: each is shown what it looks for."""

    def run_sabotaged(_: Any, size: int, case: Case, folder: str) -> list[dict[str, Any]]:
        return run_ranks(sabotaged, size, case, folder, how)

    wrong = verdict(Case(("gradient_merge", "recompute")), run_sabotaged)
    for text in SABOTAGES[how]:
        assert f"rank 0: {text}" in wrong, wrong
