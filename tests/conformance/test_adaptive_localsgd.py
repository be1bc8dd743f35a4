"""Adaptive Local SGD: the period by the formula, worked out from the losses and rates that a run has reported."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.harness import run_ranks
from tests.helpers.localsgd_reference import Rule, clamped, unrounded_period
from tests.helpers.localsgd_runs import LR, Case, Trace, expected, loss_of, net, rate, train


def adaptive(**configs: Any) -> dict[str, Any]:
    return {"adaptive_localsgd": True, "adaptive_localsgd_configs": configs}


DROPS = {10: 0.03, 22: 0.004}
CASES: dict[str, tuple[Case, Rule]] = {
    "paper": (
        Case(strategy=adaptive(init_k_steps=3, begin_step=2), drops=DROPS, updates=40, momentum=0.5),
        Rule(k=3, begin=2, formula="paper"),
    ),
    "fleet": (
        Case(strategy=adaptive(init_k_steps=3, begin_step=2, formula="fleet"), drops=DROPS, updates=40, momentum=0.5),
        Rule(k=3, begin=2, formula="fleet"),
    ),
    "bounded": (
        Case(strategy=adaptive(init_k_steps=6, max_k_steps=4), drops=DROPS, updates=25),
        Rule(k=6, formula="paper", max_k=4),
    ),
    "overlap longer than the period": (
        Case(strategy=adaptive(init_k_steps=2, max_k_steps=12, overlap_steps=2), drops=DROPS, updates=40),
        Rule(k=2, formula="paper", max_k=12, overlap=2),
    ),
    "merged, with an outer optimizer": (
        Case(
            strategy=adaptive(init_k_steps=2, outer_lr=0.7, outer_momentum=0.9, outer_nesterov=True),
            drops=DROPS, updates=30, merged=2,
        ),
        Rule(k=2, formula="paper", outer_lr=0.7, outer_momentum=0.9, nesterov=True),
    ),
    "merged and weighted": (
        Case(strategy=adaptive(init_k_steps=2), drops=DROPS, updates=30, merged=2, weighted=True),
        Rule(k=2, formula="paper"),
    ),
}  # fmt: skip


def rounds_by_hand(traces: list[Trace], case: Case, rule: Rule) -> tuple[list[int], list[int]]:
    """The updates at which rounds were due, and the period from each: from reported losses alone."""
    means, smoothed = [], np.array([trace.losses[0] for trace in traces])
    for t in range(1, case.updates + 1):
        if t > 1:
            smoothed = 0.9 * smoothed + 0.1 * np.array([trace.losses[t - 1] for trace in traces])
        means.append(float(smoothed.mean()))
    period = clamped(rule.k, rule)
    rounds, periods, t = [], [period], rule.begin + period
    while t <= case.updates:
        first = {"first_loss": means[rule.begin - 1], "first_lr": rate(rule.begin, case.drops)}
        k = unrounded_period(rule, loss=means[t - 1], lr=rate(t, case.drops), **first)
        assert abs(k - round(k)) > 1e-6  # rounding must not decide
        rounds.append(t)
        periods.append(clamped(k, rule))
        t += max(periods[-1], rule.overlap)
    return rounds, periods


@pytest.mark.parametrize("name", CASES)
def test_the_period_is_the_formula_of_reported_losses_and_rates(name: str) -> None:
    case, rule = CASES[name]
    traces = run_ranks(train, 2, case)
    rounds, periods = rounds_by_hand(traces, case, rule)
    assert len(set(periods)) >= 2 or name == "bounded"
    applied = [t + rule.overlap for t in rounds if t + rule.overlap <= case.updates]
    for trace in traces:
        assert [t for t, averaged in enumerate(trace.averaged, start=1) if averaged] == applied
        assert trace.periods[: rule.begin - 1] == [None] * (rule.begin - 1)
        known = [rule.begin, *(t + rule.overlap for t in rounds)]  # a round under way has not told its losses yet
        for start, end, period in zip(known, [*known[1:], case.updates + 1], periods, strict=True):
            assert set(trace.periods[start - 1 : end - 1]) <= {period}


@pytest.mark.parametrize("name", CASES)
def test_the_weights_equal_the_simulation_after_every_update(name: str) -> None:
    case, rule = CASES[name]
    wanted = expected(case, rule, ranks=2)
    for rank, trace in enumerate(run_ranks(train, 2, case)):
        np.testing.assert_allclose(trace.weights, [rows[rank] for rows in wanted.history], rtol=0, atol=1e-12)


def test_the_first_period_keeps_to_the_largest_one() -> None:
    trace, _ = run_ranks(train, 2, CASES["bounded"][0])
    assert trace.averaged.index(True) + 1 == 1 + 4 and set(trace.periods[1:]) <= {1, 2, 3, 4}


def test_four_ranks_agree_on_every_period() -> None:
    case, rule = CASES["paper"]
    traces, wanted = run_ranks(train, 4, case), expected(case, rule, ranks=4)
    assert all(trace.periods == traces[0].periods and trace.averaged == wanted.averaged for trace in traces)


def test_the_older_spelling_with_auto_is_adaptive_from_the_same_period() -> None:
    keys = {"begin_step": 2, "outer_lr": 0.7, "outer_momentum": 0.9, "overlap_steps": 1}
    older = {"localsgd": True, "auto": True, "localsgd_configs": {"k_steps": 3, **keys}}
    ours = run_ranks(train, 2, Case(strategy=older, drops=DROPS, updates=20))
    theirs = run_ranks(train, 2, Case(strategy=adaptive(init_k_steps=3, **keys), drops=DROPS, updates=20))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine.weights, other.weights)
        assert mine.periods == other.periods


# --- what must not upset it -------------------------------------------------------------------------------------------------


def _with_a_nan(rank: int, nan_at: int, updates: int) -> tuple[list[int | None], list[bool], bool]:
    model = net()
    strategy = fleet.DistributedStrategy(on_nan_inf="skip", **adaptive(init_k_steps=3, begin_step=1))
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=LR), strategy)
    periods, averaged = [], []
    for update in range(1, updates + 1):
        optimizer.param_groups[0]["lr"] = rate(update, {8: 0.003})
        loss = loss_of(model, rank, update)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FleetWarning)
            report = optimizer.minimize(loss * math.nan if rank == 1 and update == nan_at else loss)
        periods.append(report.period)
        averaged.append(report.averaged)
    return periods, averaged, all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_loss_that_is_not_finite_on_one_rank_never_stops_the_averaging() -> None:
    """Nor do the ranks disagree on when the next round is: each would wait for the other."""
    (periods, averaged, finite), theirs = run_ranks(_with_a_nan, 2, 3, 20)
    assert theirs == (periods, averaged, finite) and finite
    assert averaged.index(True) + 1 == 4 and sum(averaged) >= 2


def _useless(rank: int, sign: float, last_rate: float) -> list[int | None]:
    model = net()
    model, optimizer = fleet.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.001), fleet.DistributedStrategy(**adaptive(init_k_steps=3))
    )
    periods = []
    for update in range(1, 12):
        optimizer.param_groups[0]["lr"] = 0.001 if update < 4 else last_rate
        periods.append(optimizer.minimize(loss_of(model, rank, update) * (1.0 if update == 1 else sign)).period)
    return periods


@pytest.mark.parametrize(("sign", "last_rate"), [(1.0, 0.0), (-100.0, 0.001)])
def test_a_rate_of_zero_or_a_negative_loss_leaves_the_period(sign: float, last_rate: float) -> None:
    assert run_ranks(_useless, 2, sign, last_rate) == [[3] * 11] * 2


def _rising(rank: int) -> list[str]:
    model = net()
    model, optimizer = fleet.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.01), fleet.DistributedStrategy(**adaptive(init_k_steps=2))
    )
    told = []
    for update in range(1, 10):
        optimizer.param_groups[0]["lr"] = 0.01 if update < 3 else 0.02
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.minimize(loss_of(model, rank, update))
        told += [str(warning.message) for warning in caught if issubclass(warning.category, FleetWarning)]
    return told


def test_a_rate_above_the_first_one_is_told_once_by_rank_0() -> None:
    (told,), silent = run_ranks(_rising, 2)
    assert "0.02" in told and "0.01" in told and silent == []
