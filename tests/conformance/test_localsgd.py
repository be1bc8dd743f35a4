"""Local SGD against a simulation in NumPy, and against plain torch averaged by hand: every rank, after every update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fleetx import fleet
from tests.helpers.harness import raised, run_ranks
from tests.helpers.localsgd_reference import Rule, Workers, net_gradient
from tests.helpers.localsgd_runs import LR, Case, Trace, expected, flat, loss_of, net, on_nodes, rendezvous, rows_of, train

EXACT = 1e-12
"""For float64: sums may be taken in another order, nothing else."""


def local(**configs: Any) -> dict[str, Any]:
    return {"localsgd": True, "localsgd_configs": configs}


def assert_equals_simulation(traces: list[Trace], wanted: Workers, atol: float = EXACT) -> None:
    for rank, trace in enumerate(traces):
        for update, (ours, theirs) in enumerate(zip(trace.weights, wanted.history, strict=True), start=1):
            np.testing.assert_allclose(ours, theirs[rank], rtol=0, atol=atol, err_msg=f"rank {rank}, update {update}")
        assert trace.averaged == wanted.averaged


# --- the reference itself ---------------------------------------------------------------------------------------------------


def test_the_hand_written_gradient_is_autograds() -> None:
    model = net()
    loss = loss_of(model, 1, 3)
    loss.backward()
    told, g = net_gradient(flat(model), *rows_of(1, 3))
    assert told == pytest.approx(float(loss.detach()), abs=1e-15)
    np.testing.assert_allclose(g, np.concatenate([p.grad.numpy().ravel() for p in model.parameters()]), rtol=0, atol=1e-15)


# --- numbers checkable in the head ------------------------------------------------------------------------------------------


def _one_weight(rank: int, configs: dict[str, Any], updates: int, now_after: int = 0) -> list[float]:
    """loss = slope * w with slope 1 on rank 0 and 3 on rank 1; w starts at 1 and lr is 0.1."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    model, optimizer = fleet.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(**local(**configs))
    )
    slope = torch.tensor([[1.0 + 2.0 * rank]], dtype=torch.float64)
    seen = []
    for update in range(1, updates + 1):
        optimizer.minimize(model(slope).sum())
        if update == now_after:
            optimizer.average()
        seen.append(float(model.weight.detach()))
    return seen


BY_HEAD = {
    # update 1 is dense: 1 - 0.1*2 = 0.8; then 0.1 and 0.3 a step, and their mean after two
    "every two updates": ({"k_steps": 2}, [0.8, 0.7, 0.4, 0.3, 0.0], [0.8, 0.5, 0.4, 0.1, 0.0]),
    # the mean 0.4 of update 3 arrives at update 4, on top of that update's own 0.1 and 0.3
    "one update late": ({"k_steps": 2, "overlap_steps": 1}, [0.8, 0.7, 0.6, 0.3], [0.8, 0.5, 0.2, 0.1]),
    # g = 0.4, m = 0.4, A = 0.8 - 0.5*0.4 = 0.6;  then g = 0.4, m = 0.5*0.4 + 0.4 = 0.6, A = 0.6 - 0.3 = 0.3
    "outer momentum": (
        {"k_steps": 2, "outer_lr": 0.5, "outer_momentum": 0.5},
        [0.8, 0.7, 0.6, 0.5, 0.3],
        [0.8, 0.5, 0.6, 0.3, 0.3],
    ),
    # s = g + 0.5*m: 0.6 then 0.7;  A = 0.8 - 0.3 = 0.5, then 0.5 - 0.35 = 0.15
    "outer nesterov": (
        {"k_steps": 2, "outer_lr": 0.5, "outer_momentum": 0.5, "outer_nesterov": True},
        [0.8, 0.7, 0.5, 0.4, 0.15],
        [0.8, 0.5, 0.5, 0.2, 0.15],
    ),
    "dense for three updates": ({"k_steps": 2, "begin_step": 3}, [0.8, 0.6, 0.4, 0.3, 0.0], [0.8, 0.6, 0.4, 0.1, 0.0]),
}


@pytest.mark.parametrize("name", BY_HEAD)
def test_one_weight_with_slopes_one_and_three_takes_the_values_worked_out_by_head(name: str) -> None:
    configs, first, second = BY_HEAD[name]
    ours = run_ranks(_one_weight, 2, configs, len(first))
    np.testing.assert_allclose(ours, [first, second], rtol=0, atol=1e-14)


def test_average_now_is_a_whole_round_with_its_outer_step_and_the_next_comes_when_it_would_have_come() -> None:
    """As "outer momentum" above, but the first round is asked for after update 3; that of k=4 is after update 5."""
    configs = {"k_steps": 4, "outer_lr": 0.5, "outer_momentum": 0.5}
    ours = run_ranks(_one_weight, 2, configs, 5, 3)
    np.testing.assert_allclose(ours, [[0.8, 0.7, 0.6, 0.5, 0.3], [0.8, 0.5, 0.6, 0.3, 0.3]], rtol=0, atol=1e-14)


# --- k = 1 is synchronous training ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("weighted", "merged", "momentum"), [(False, 1, 0.0), (False, 1, 0.9), (True, 1, 0.0), (True, 2, 0.0)])
def test_a_period_of_one_with_plain_sgd_equals_synchronous_training(
    weighted: bool, merged: int, momentum: float, dtype: torch.dtype
) -> None:
    loop: dict[str, Any] = {"weighted": weighted, "merged": merged, "momentum": momentum, "dtype": dtype, "updates": 8}
    wire = EXACT if dtype == torch.float64 else 1e-6
    dense = run_ranks(_weights_of_dense_training, 3, Case(strategy={}, **loop))
    ours = run_ranks(train, 3, Case(strategy=local(k_steps=1), **loop))
    for mine, theirs in zip(ours, dense, strict=True):
        np.testing.assert_allclose(mine.weights, theirs, rtol=0, atol=wire)
    assert ours[0].averaged == [False] + [True] * 7 and ours[0].periods == [1] * 8


def _weights_of_dense_training(rank: int, case: Case) -> list[Any]:
    return train(rank, case).weights


# --- fixed periods against the simulation -----------------------------------------------------------------------------------

DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}
FIXED: dict[str, tuple[Case, Rule]] = {
    "k=4": (Case(strategy=local(k_steps=4), momentum=0.9), Rule(k=4)),
    "post-local": (Case(strategy=local(k_steps=3, begin_step=7), momentum=0.9, updates=15), Rule(k=3, begin=7)),
    "weighted": (Case(strategy=local(k_steps=3), weighted=True), Rule(k=3)),
    "diloco": (
        Case(strategy=local(k_steps=3, **DILOCO), momentum=0.9),
        Rule(k=3, outer_lr=0.7, outer_momentum=0.9),
    ),
    "diloco with nesterov": (
        Case(strategy=local(k_steps=3, outer_nesterov=True, **DILOCO), momentum=0.9),
        Rule(k=3, outer_lr=0.7, outer_momentum=0.9, nesterov=True),
    ),
    "overlap 1": (Case(strategy=local(k_steps=3, overlap_steps=1), momentum=0.9), Rule(k=3, overlap=1)),
    "overlap 2": (Case(strategy=local(k_steps=3, overlap_steps=2), weighted=True), Rule(k=3, overlap=2)),
    "overlap k": (Case(strategy=local(k_steps=3, overlap_steps=3), momentum=0.9), Rule(k=3, overlap=3)),
    "k and overlap 1": (Case(strategy=local(k_steps=1, overlap_steps=1)), Rule(k=1, overlap=1)),
    "diloco with overlap": (
        Case(strategy=local(k_steps=4, overlap_steps=3, outer_nesterov=True, begin_step=2, **DILOCO), updates=16),
        Rule(k=4, overlap=3, begin=2, outer_lr=0.7, outer_momentum=0.9, nesterov=True),
    ),
    "merged": (Case(strategy=local(k_steps=2), merged=3, momentum=0.9, updates=7), Rule(k=2)),
    "merged and weighted": (Case(strategy=local(k_steps=2), merged=3, weighted=True, updates=7), Rule(k=2)),
    "many small buckets": (Case(strategy=local(k_steps=2) | {"fuse_grad_size_in_MB": 0.0001}), Rule(k=2)),
}


@pytest.mark.parametrize("name", FIXED)
def test_two_workers_equal_the_simulation_after_every_update(name: str) -> None:
    case, rule = FIXED[name]
    traces, wanted = run_ranks(train, 2, case), expected(case, rule, ranks=2)
    assert_equals_simulation(traces, wanted)
    assert [trace.periods for trace in traces] == [wanted.periods] * 2


@pytest.mark.parametrize("size", [3, 4])
def test_more_workers_equal_it_too(size: int) -> None:
    case, rule = FIXED["diloco with overlap"]
    assert_equals_simulation(run_ranks(train, size, case), expected(case, rule, ranks=size))


@pytest.mark.parametrize("outer", [False, True])
def test_one_worker_alone_takes_the_outer_step_where_one_is_asked_for(outer: bool) -> None:
    case = Case(strategy=local(k_steps=3, **(DILOCO if outer else {})), momentum=0.9)
    rule = Rule(k=3, outer_lr=0.7, outer_momentum=0.9) if outer else Rule(k=10**6)
    (trace,), wanted = run_ranks(train, 1, case), expected(case, rule, ranks=1)
    np.testing.assert_allclose(trace.weights, [rows[0] for rows in wanted.history], rtol=0, atol=EXACT)


def test_each_rank_clips_by_the_norm_of_its_own_gradients() -> None:
    case = Case(strategy=local(k_steps=3) | {"clip_norm": True, "clip_norm_configs": {"max_norm": 0.4}}, momentum=0.9)
    wanted = expected(case, Rule(k=3, max_norm=0.4), ranks=2)
    assert not np.allclose(wanted.history[1], expected(case, Rule(k=3), ranks=2).history[1], rtol=0, atol=1e-3)
    # The norm is taken in float32.
    assert_equals_simulation(run_ranks(train, 2, case), wanted, atol=1e-6)


# --- two levels -------------------------------------------------------------------------------------------------------------

TWO_LEVELS: dict[str, tuple[Case, Rule]] = {
    "every second round": (
        Case(strategy=local(k_steps=2, across_nodes_every=2), momentum=0.9, updates=11),
        Rule(k=2, across_every=2, nodes=(0, 0, 1, 1)),
    ),
    "every third, with overlap and an outer optimizer": (
        Case(strategy=local(k_steps=2, across_nodes_every=3, overlap_steps=1, **DILOCO), updates=15),
        Rule(k=2, across_every=3, overlap=1, outer_lr=0.7, outer_momentum=0.9, nodes=(0, 1, 0, 1)),
    ),
    "every round": (
        Case(strategy=local(k_steps=2, across_nodes_every=1), updates=7),
        Rule(k=2, nodes=(0, 0, 1, 1)),
    ),
}


@pytest.mark.parametrize("name", TWO_LEVELS)
def test_two_nodes_of_two_ranks_equal_the_simulation(name: str, tmp_path: Path) -> None:
    case, rule = TWO_LEVELS[name]
    assert rule.nodes is not None
    traces = run_ranks(on_nodes, 4, rule.nodes, rendezvous(tmp_path), train, case)
    assert_equals_simulation(traces, expected(case, rule, ranks=4))


def test_rounds_inside_a_node_leave_the_nodes_apart_and_their_ranks_together(tmp_path: Path) -> None:
    case, rule = TWO_LEVELS["every second round"]
    traces = run_ranks(on_nodes, 4, rule.nodes, rendezvous(tmp_path), train, case)
    inside, everywhere = 2, 4  # updates 3 and 5
    weights = [trace.weights for trace in traces]
    assert np.array_equal(weights[0][inside], weights[1][inside]) and np.array_equal(weights[2][inside], weights[3][inside])
    assert not np.allclose(weights[0][inside], weights[2][inside], rtol=0, atol=1e-4)
    assert all(np.array_equal(weights[0][everywhere], other[everywhere]) for other in weights)


# --- the wire ---------------------------------------------------------------------------------------------------------------

PARAMETERS = 26
"""Of the net: 4*3 + 4 + 2*4 + 2."""


@pytest.mark.parametrize(("wire_dtype", "unit"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
@pytest.mark.parametrize("size", [2, 4])
def test_a_16_bit_wire_rounds_each_delta_once_and_each_sum_once_more(size: int, wire_dtype: str, unit: float) -> None:
    """`unit` is the rounding error of one number; each rank's share is rounded, then every sum of two shares."""
    begin, k = 1, 4
    loop: dict[str, Any] = {"dtype": torch.float32, "updates": begin + k}
    full = run_ranks(train, size, Case(strategy=local(k_steps=k), **loop))
    half = run_ranks(train, size, Case(strategy=local(k_steps=k, wire_dtype=wire_dtype), **loop))
    before_round = expected(Case(strategy={}, updates=begin + k), Rule(k=10**6), ranks=size).history
    sum_of_shares = np.abs(before_round[-1] - before_round[begin - 1]).sum(axis=0) / size
    bound = sum_of_shares * unit * size + 1e-6
    for ours, theirs in zip(half, full, strict=True):
        difference = np.abs(ours.weights[-1] - theirs.weights[-1])
        assert np.all(difference <= bound)
        assert np.max(difference) > 0.0
        np.testing.assert_array_equal(ours.weights[-1], half[0].weights[-1])


@pytest.mark.parametrize(("size", "weighted"), [(2, True), (4, False)])
def test_a_16_bit_wire_sends_half_the_bytes_of_the_deltas_and_local_updates_send_none(size: int, weighted: bool) -> None:
    loop: dict[str, Any] = {"dtype": torch.float32, "updates": 9, "weighted": weighted}
    unchecked = {"desync_check_steps": 0}  # or the ranks are compared after the first update
    full = run_ranks(train, size, Case(strategy=local(k_steps=4) | unchecked, **loop))
    for wire_dtype in ("bfloat16", "float16"):
        half = run_ranks(train, size, Case(strategy=local(k_steps=4, wire_dtype=wire_dtype) | unchecked, **loop))
        deltas = 2 * (size - 1) / size * PARAMETERS
        for ours, theirs in zip(half, full, strict=True):
            for round_at in (5, 9):
                saved = theirs.bytes_sent[round_at - 1] - ours.bytes_sent[round_at - 1]
                assert saved == pytest.approx(2 * deltas, abs=0.5)  # a report has whole bytes
    for trace in full:
        assert [sent for sent, averaged in zip(trace.bytes_sent[1:], trace.averaged[1:], strict=True) if not averaged] == [0] * 6
        assert trace.bytes_sent[4] >= 4 * 2 * (size - 1) / size * PARAMETERS - 0.5


def test_float64_weights_travel_as_float64_unless_16_bits_are_asked_for() -> None:
    """An anchor or a delta kept in float32 would be off by 1e-8."""
    case = Case(strategy=local(k_steps=1, overlap_steps=1, **DILOCO), updates=10)
    assert_equals_simulation(
        run_ranks(train, 2, case), expected(case, Rule(k=1, overlap=1, outer_lr=0.7, outer_momentum=0.9), ranks=2), atol=1e-13
    )


# --- what is refused --------------------------------------------------------------------------------------------------------


def _refusals(rank: int) -> list[str]:
    def distribute(**strategy: Any) -> Any:
        model = net()
        return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=LR), fleet.DistributedStrategy(**strategy))

    def bare() -> None:
        model, optimizer = distribute(adaptive_localsgd=True)
        for update in (1, 2, 3):
            loss_of(model, rank, update).backward()
            optimizer.step()

    return [raised(lambda: distribute(**local(k_steps=2, overlap_steps=3))), raised(bare)]


def test_an_overlap_longer_than_the_period_and_an_adaptive_run_without_losses_are_refused() -> None:
    for overlap, bare in run_ranks(_refusals, 2):
        assert overlap.startswith("ConfigError: ") and "overlap_steps" in overlap and "k_steps" in overlap
        assert bare.startswith("ConfigError: ") and "optimizer.backward(loss)" in bare


# --- other spellings of the loop --------------------------------------------------------------------------------------------


def _three_calls(rank: int, bare: bool) -> list[Any]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    model, ours = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**local(k_steps=4)))
    seen = []
    for update in range(1, 13):
        loss = loss_of(model, rank, update)
        if bare:
            loss.backward()
        else:
            ours.backward(loss)
        ours.step()
        ours.zero_grad()
        seen.append(flat(model))
    return seen


@pytest.mark.parametrize("bare", [False, True])
def test_three_calls_equal_minimize(bare: bool) -> None:
    wanted = expected(*FIXED["k=4"], ranks=2).history
    for rank, seen in enumerate(run_ranks(_three_calls, 2, bare)):
        np.testing.assert_allclose(seen, [rows[rank] for rows in wanted], rtol=0, atol=EXACT)
