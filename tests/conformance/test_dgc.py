"""DGC against its definition in NumPy, and against plain training: every rank, after every update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fleetx.engine.sidecar import ALARMS
from tests.helpers.compression_reference import DGCWorkers, Rule, sent_count, sparsity_at
from tests.helpers.compression_runs import (
    EXACT,
    Case,
    Slopes,
    assert_equals_reference,
    dgc,
    distributed,
    expected,
    heavy_tailed,
    share_rows,
    train,
)
from tests.helpers.harness import raised, run_ranks

# --- numbers checkable in the head ------------------------------------------------------------------------------------------


def _by_head(rank: int, slopes: list[list[float]], configs: dict[str, Any], momentum: float, updates: int) -> list[list[float]]:
    model = Slopes([(len(slopes[0]),)])
    inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)
    model, optimizer = distributed(model, inner, dgc(**configs))
    seen = []
    for _ in range(updates):
        optimizer.minimize(model([np.array(slopes[rank], np.float32)]))
        seen.append((-model.rows[0].detach()).tolist())
    return seen


def test_two_workers_that_send_one_entry_of_four_take_the_values_worked_out_by_head() -> None:
    """Shares [2 1 0 0] and [0 3 1 0], momentum 0.5; what each keeps is written beside what it sends."""
    wanted = [
        [2.0, 3.0, 0.0, 0.0],  # sent 2 at 0, kept [0 1 0 0]; and 3 at 1, kept [0 0 1 0]
        [2.0, 8.5, 0.0, 0.0],  # v = [2 2.5 0 0]: 2.5 at 1, u = [2 0 0 0]; and [0 3 2.5 0]: 3 at 1, u = [0 0 1.5 0]
        [7.0, 8.5, 4.25, 0.0],  # u = [3 1 0 0], v = [5 1 0 0]: 5 at 0; and u = [0 3 1.75 0], v = [0 3 4.25 0]: 4.25 at 2
    ]
    ranks = run_ranks(_by_head, 2, [[4.0, 2.0, 0.0, 0.0], [0.0, 6.0, 2.0, 0.0]], {"sparsity": [0.75]}, 0.5, 3)
    assert ranks == [wanted, wanted]


def test_of_equal_entries_the_first_are_sent_and_the_others_in_their_turn() -> None:
    """Eight slopes of 1 on both ranks, two sent each time, no momentum: an entry that waited t updates arrives as t."""
    wanted = [
        [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 0.0, 0.0],
        [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0],
        [5.0, 5.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0],
    ]
    assert run_ranks(_by_head, 2, [[1.0] * 8] * 2, {"sparsity": [0.75]}, 0.0, 5) == [wanted, wanted]


def test_momentum_of_the_dense_updates_is_carried_over() -> None:
    """Slopes 2 and 2 (shares 1), momentum 0.5, one of two entries sent. Dense: buffer 2, then 3. Then u = 1.5 on each rank:
    u = 0.5*1.5 + 1 = 1.75, sent by both: 3.5; the other entry follows with 1.75 + (0.5*1.75 + 1) = 3.625 of each: 7.25."""
    wanted = [[2.0, 2.0], [5.0, 5.0], [8.5, 5.0], [8.5, 12.25]]
    configs = {"sparsity": [0.5], "rampup_begin_step": 2}
    assert run_ranks(_by_head, 2, [[2.0, 2.0]] * 2, configs, 0.5, 4) == [wanted, wanted]


def test_the_reference_counts_what_is_sent_as_a_person_would() -> None:
    assert [sent_count(1000, s) for s in (0.9, 0.99, 0.999, 0.9999)] == [100, 10, 1, 1]
    assert [sent_count(n, 0.999) for n in (1, 999, 2000, 25_000_000)] == [1, 1, 2, 25_000]
    walked = [sparsity_at(t, begin=2, ramp=4, sparsity=(0.5, 0.75)) for t in range(1, 9)]
    assert walked == [0.0, 0.0, 0.5, 0.5, 0.75, 0.75, 0.75, 0.75]


# --- dense before the ramp --------------------------------------------------------------------------------------------------

DENSE = {
    "before the ramp": dgc(rampup_begin_step=10),
    "a list that begins with 0": dgc(sparsity=[0.0, 0.5], rampup_step=40),
    "all tensors small": dgc(min_numel=13, rampup_begin_step=3, sparsity=[0.5]),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", DENSE)
def test_dense_updates_equal_plain_momentum_sgd_to_the_bit(name: str, size: int) -> None:
    loop: dict[str, Any] = {"updates": 8, "nesterov": size == 4, "decay": 0.01, "dtype": torch.float32}
    plain = run_ranks(train, size, Case(strategy={}, **loop))
    ours = run_ranks(train, size, Case(strategy=DENSE[name], **loop))
    for mine, theirs in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(mine.weights, theirs.weights)
        assert mine.densities == [1.0] * 8 and theirs.densities == [None] * 8
        assert mine.residuals == [0.0] * 8 and theirs.residuals == [None] * 8


# --- an odd number of entries, in float64 --------------------------------------------------------------------------------------


def _odd(rank: int) -> tuple[str, list[Any]]:
    traces: list[Any] = []
    case = Case(strategy=dgc(sparsity=[0.75]), updates=4)
    return raised(lambda: traces.append(train(rank, case).weights)), traces


def test_an_odd_number_of_float64_entries_is_sent_like_any_other() -> None:
    """3 + 1 + 2 + 1 of the net's tensors. Cases below send an even number."""
    wanted = expected(Case(strategy={}, updates=4), Rule(sparsity=(0.75,)), ranks=2)
    for told, traces in run_ranks(_odd, 2):
        assert told == "nothing raised"
        np.testing.assert_allclose(traces[0], wanted.weights, rtol=0, atol=EXACT)


# --- 20 updates against the reference ---------------------------------------------------------------------------------------

CASES: dict[str, tuple[Case, Rule]] = {
    "momentum": (Case(strategy=dgc(sparsity=[0.65])), Rule(sparsity=(0.65,))),
    "a ramp after dense updates": (
        Case(strategy=dgc(rampup_begin_step=3, rampup_step=9, sparsity=[0.3, 0.65, 0.9])),
        Rule(begin=3, ramp=9, sparsity=(0.3, 0.65, 0.9)),
    ),
    "a list that begins with 0": (
        Case(strategy=dgc(rampup_begin_step=1, rampup_step=4, sparsity=[0.0, 0.4])),
        Rule(begin=1, ramp=4, sparsity=(0.0, 0.4)),
    ),
    "nesterov, decay": (
        Case(strategy=dgc(rampup_begin_step=2, sparsity=[0.65]), nesterov=True, decay=0.05),
        Rule(begin=2, sparsity=(0.65,), nesterov=True, decay=0.05),
    ),
    "small tensors dense": (
        Case(strategy=dgc(rampup_begin_step=2, sparsity=[0.65], min_numel=8), decay=0.05),
        Rule(begin=2, sparsity=(0.65,), min_numel=8, decay=0.05),
    ),
    "no momentum": (Case(strategy=dgc(sparsity=[0.9]), momentum=0.0), Rule(sparsity=(0.9,))),
    "merged and weighted": (
        Case(strategy=dgc(rampup_begin_step=2, sparsity=[0.65]), merged=3, weighted=True),
        Rule(begin=2, sparsity=(0.65,)),
    ),
    "weighted": (Case(strategy=dgc(sparsity=[0.65]), weighted=True), Rule(sparsity=(0.65,))),
    "momentum and lr that change": (
        Case(strategy=dgc(sparsity=[0.65], rampup_begin_step=2), lrs={6: 0.05, 14: 0.01}, momenta={5: 0.5, 11: 0.95}),
        Rule(begin=2, sparsity=(0.65,)),
    ),
    "many small buckets": (
        Case(strategy=dgc(sparsity=[0.75], min_numel=4) | {"fuse_grad_size_in_MB": 0.00005}),
        Rule(sparsity=(0.75,), min_numel=4),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "size"), [(name, 2) for name in CASES] + [(name, 4) for name in list(CASES)[1::2]])
def test_weights_momenta_and_what_is_kept_equal_the_reference_after_each_of_twenty_updates(name: str, size: int) -> None:
    case, rule = CASES[name]
    assert_equals_reference(run_ranks(train, size, case), expected(case, rule, ranks=size))


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_clips_its_own_whole_gradient_from_the_ramp_on(size: int) -> None:
    """The norm is taken in the type of the gradients; the limit is clip_norm * N**-0.5 of the whole gradient."""
    case = Case(strategy=dgc(rampup_begin_step=4, sparsity=[0.75], clip_norm=0.6, min_numel=4), decay=0.05)
    rule = Rule(begin=4, sparsity=(0.75,), clip=0.6, min_numel=4, decay=0.05)
    wanted = expected(case, rule, ranks=size)
    loose = expected(case, Rule(begin=4, sparsity=(0.75,), min_numel=4, decay=0.05), ranks=size)
    assert np.array_equal(wanted.weights[3], loose.weights[3]) and np.abs(wanted.weights[4] - loose.weights[4]).max() > 1e-3
    assert_equals_reference(run_ranks(train, size, case), wanted)


def test_one_worker_alone_keeps_and_sends_as_many_do() -> None:
    case, rule = CASES["a ramp after dense updates"]
    (trace,), wanted = run_ranks(train, 1, case), expected(case, rule, ranks=1)
    np.testing.assert_allclose(trace.weights, wanted.weights, rtol=0, atol=EXACT)
    np.testing.assert_allclose(trace.unsent, np.stack(wanted.unsent)[:, 0], rtol=0, atol=EXACT)


def test_a_gradient_that_is_zero_sends_what_was_kept_before() -> None:
    """One entry of three a time; slopes [3 2 1] once, then 0: no momentum, so each is sent once, and that is all."""
    ranks = run_ranks(_fading, 2)
    assert ranks == [[[3.0, 0.0, 0.0], [3.0, 2.0, 0.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]] * 2


def _fading(rank: int) -> list[list[float]]:
    model = Slopes([(3,)])
    model, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=1.0), dgc(sparsity=[0.6]))
    seen = []
    for update in range(4):
        optimizer.minimize(model([np.array([3.0, 2.0, 1.0]) * (update == 0)]))
        seen.append((-model.rows[0].detach()).tolist())
    return seen


# --- bits, in float32 -------------------------------------------------------------------------------------------------------

SHAPES: list[tuple[int, ...]] = [(1000,), (7, 9), (3,), (2, 5, 4)]
LADDER = {"rampup_step": 12, "sparsity": [0.5, 0.75, 0.9]}


def _replayed(rank: int, shapes: list[tuple[int, ...]], configs: dict[str, Any], updates: int) -> list[Any]:
    model = Slopes(shapes)
    inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    model, optimizer = distributed(model, inner, dgc(**configs))
    names, numels = tuple(f"rows.{i}" for i in range(len(shapes))), [p.numel() for p in model.parameters()]
    seen = []
    for update in range(1, updates + 1):
        report = optimizer.minimize(model(heavy_tailed(shapes, rank, update)))
        weights = np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])
        seen.append((weights, share_rows(optimizer, "unsent", names, numels), report.bytes_sent, report.density))
    return seen


def replay(shapes: list[tuple[int, ...]], rule: Rule, *, ranks: int, updates: int) -> DGCWorkers:
    """In float32, one rounding after the other. Learning rate, momentum and N are powers of two: products round nothing,
    and it does not matter whether a machine multiplies and adds in one go."""
    workers = DGCWorkers([np.zeros(int(np.prod(shape)), np.float32) for shape in shapes], ranks, rule)
    for update in range(1, updates + 1):
        shares = [[(g / np.float32(ranks)).ravel() for g in heavy_tailed(shapes, rank, update)] for rank in range(ranks)]
        workers.step(update, shares, lr=0.125, momentum=0.5)
    assert workers.p[0].dtype == np.float32
    return workers


@pytest.mark.parametrize("size", [2, 4])
def test_twenty_updates_in_float32_equal_a_replay_to_the_bit(size: int) -> None:
    """Sums over ranks are taken in rank order, from 0 on."""
    wanted = replay(SHAPES, Rule(ramp=12, sparsity=(0.5, 0.75, 0.9)), ranks=size, updates=20)
    for rank, seen in enumerate(run_ranks(_replayed, size, SHAPES, LADDER, 20)):
        for update, (weights, unsent, _, _) in enumerate(seen):
            np.testing.assert_array_equal(weights, wanted.weights[update])
            np.testing.assert_array_equal(unsent, wanted.unsent[update][rank])


def test_a_tensor_of_many_stretches_equals_a_replay_to_the_bit_and_its_density_and_bytes_are_those_of_its_entries() -> None:
    """300,000 entries are beyond what is looked at in one go; 300 are sent, of 4 bytes, with 4 for the place of each."""
    shapes: list[tuple[int, ...]] = [(300_000,), (20,)]
    wanted = replay(shapes, Rule(sparsity=(0.999,)), ranks=2, updates=4)
    for rank, seen in enumerate(run_ranks(_replayed, 2, shapes, {}, 4)):
        for update, (weights, unsent, sent, density) in enumerate(seen):
            np.testing.assert_array_equal(weights, wanted.weights[update])
            np.testing.assert_array_equal(unsent, wanted.unsent[update][rank])
            assert density == pytest.approx((301 + ALARMS) / (300_020 + ALARMS), rel=1e-12)
            assert 301 * 8 <= sent <= 301 * 8 + 64 or update == 0


# --- conservation -----------------------------------------------------------------------------------------------------------


def _conserved(rank: int, nesterov: bool) -> list[Any]:
    model = Slopes(SHAPES)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov)
    model, optimizer = distributed(model, inner, dgc(rampup_begin_step=2, **LADDER))
    names, numels = tuple(f"rows.{i}" for i in range(len(SHAPES))), [p.numel() for p in model.parameters()]
    seen = []
    for update in range(1, 15):
        before = [share_rows(optimizer, what, names, numels) for what in ("unsent", "momentum")]
        optimizer.backward(model(heavy_tailed(SHAPES, rank, update)))
        arrived = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        seen.append((*before, arrived.copy(), share_rows(optimizer, "unsent", names, numels)))
    return seen


@pytest.mark.parametrize("nesterov", [False, True])
def test_what_is_sent_and_what_is_kept_add_up_to_what_there_was(nesterov: bool) -> None:
    """Over all ranks: sent + v afterwards = v before + u (or g + m*u). Nothing of the reference is in it but that line."""
    ranks = run_ranks(_conserved, 4, nesterov)
    for update in range(4, 15):
        there_was, is_now = 0.0, ranks[0][update - 1][2].astype(np.float64)
        for rank, seen in enumerate(ranks):
            v, u, _, v_after = (row.astype(np.float64) for row in seen[update - 1])
            g = np.concatenate([slope.ravel() for slope in heavy_tailed(SHAPES, rank, update)]) / 4.0
            u = 0.9 * u + g
            there_was = there_was + v + (g + 0.9 * u if nesterov else u)
            is_now = is_now + v_after
        np.testing.assert_allclose(is_now, there_was, rtol=0, atol=1e-6 * np.abs(there_was).max())
    assert np.count_nonzero(ranks[0][13][2]) <= 4 * 0.1 * 1106 + 4  # sparse it is: a tenth of each rank's
