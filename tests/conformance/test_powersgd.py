"""PowerSGD against its definition in NumPy, and against plain training: every rank, after every update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleetx import fleet
from tests.helpers.compression_reference import Array, PowerMatrix, Tensors, basis_of, is_compressed
from tests.helpers.compression_runs import Case, Slopes, distributed, heavy_tailed, leaves, powersgd, summed_by_node, train
from tests.helpers.harness import raised, run_ranks
from tests.helpers.localsgd_runs import flat, loss_of, net, on_nodes, rendezvous

SHAPES: list[tuple[int, ...]] = [(6, 10), (8, 5), (5, 2, 3), (7,)]
NAMES = tuple(f"rows.{i}" for i in range(len(SHAPES)))
RANK = 2
LOW: dict[str, Any] = {"rank": RANK, "min_compression": 1.0}
"""All but the last, of which two factors would be longer than itself."""
COMPRESSED = [is_compressed(shape, rank=RANK, min_compression=1.0) for shape in SHAPES]


def matrix_of(row: Array) -> Array:
    return row.reshape(row.shape[0], -1)


# --- by head ----------------------------------------------------------------------------------------------------------------


def _outer(rank: int, layout: str) -> tuple[list[Any], list[Any]]:
    """Slopes (1+2*rank) * a b', of rank 1, at rank 1."""
    a, b = torch.arange(1.0, 7.0), torch.tensor([1.0, -2.0, 0.5, 4.0, -1.0])
    start = torch.zeros(6, 5) if layout == "as usual" else torch.zeros(5, 6).T
    model = nn.Module()
    model.weight = nn.Parameter(start)
    model, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=1.0), powersgd(rank=1))
    seen, norms = [], []
    for _ in range(3):
        report = optimizer.minimize((model.weight * (1 + 2 * rank) * torch.outer(a, b)).sum() + rank)
        seen.append((-model.weight.detach()).numpy().copy())
        norms.append(report.residual_norm)
    return seen, norms


@pytest.mark.parametrize(
    "layout",
    [
        "as usual",
        "transposed",
    ],
)
def test_a_gradient_of_rank_one_arrives_whole_at_rank_one(layout: str) -> None:
    """Shares of 1/2 and 3/2: 2 a b' each update, and nothing is left to keep."""
    wanted = 2 * np.outer(np.arange(1.0, 7.0), [1.0, -2.0, 0.5, 4.0, -1.0])
    for seen, norms in run_ranks(_outer, 2, layout):
        np.testing.assert_allclose(seen, [wanted, 2 * wanted, 3 * wanted], rtol=0, atol=1e-4)
        assert all(norm < 1e-4 for norm in norms)


# --- dense, and full rank ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_dense_updates_equal_plain_training_to_the_bit(size: int) -> None:
    loop: dict[str, Any] = {"updates": 6, "decay": 0.01, "dtype": torch.float32}
    plain = run_ranks(train, size, Case(strategy={}, **loop))
    ours = run_ranks(train, size, Case(strategy=powersgd(begin_step=5), **loop))
    for mine, theirs in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(mine.weights[:5], theirs.weights[:5])
        assert not np.array_equal(mine.weights[5], theirs.weights[5])
        assert mine.densities[:5] == [1.0] * 5 and mine.residuals[:5] == [0.0] * 5 and theirs.densities == [None] * 6


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("merged", "weighted"), [(1, False), (3, True)])
def test_full_rank_equals_dense_training(merged: int, weighted: bool, size: int) -> None:
    loop: dict[str, Any] = {"updates": 15, "decay": 0.01, "dtype": torch.float32, "merged": merged, "weighted": weighted}
    plain = run_ranks(train, size, Case(strategy={}, **loop))
    ours = run_ranks(train, size, Case(strategy=powersgd(rank=4, begin_step=1), **loop))
    for mine, theirs in zip(ours, plain, strict=True):
        np.testing.assert_allclose(mine.weights, theirs.weights, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(mine.weights, ours[0].weights)


def _adam(rank: int, strategy: dict[str, Any]) -> list[Any]:
    model = net()
    model, optimizer = distributed(model, torch.optim.Adam(model.parameters(), lr=0.01), strategy)
    weights = []
    for update in range(1, 16):
        optimizer.minimize(loss_of(model, rank, update))
        weights.append(flat(model))
    return weights


def test_any_optimizer_takes_the_gradients_that_come_out() -> None:
    dense, full, low = (run_ranks(_adam, 2, s) for s in ({}, powersgd(rank=4), powersgd(rank=1, min_compression=1.0)))
    np.testing.assert_allclose(full, dense, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(low[0], low[1])
    assert np.abs(np.array(low) - np.array(dense)).max() > 1e-3


# --- low rank against the reference -----------------------------------------------------------------------------------------


def _low(rank: int, strategy: dict[str, Any], updates: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    model = Slopes(SHAPES, dtype)
    model, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), strategy)
    random = torch.get_rng_state()
    seen = []
    for update in range(1, updates + 1):
        optimizer.backward(model(heavy_tailed(SHAPES, rank, update)))
        reduced = [p.grad.detach().double().numpy().copy() for p in model.parameters()]
        report = optimizer.step()
        optimizer.zero_grad()
        state = leaves(optimizer.pipeline.stages.reduce.state_dict())
        found: dict[str, Any] = {"reduced": reduced, "density": report.density, "residual": report.residual_norm}
        found["errors"] = [state[f"/shares/error/{n}"].double().numpy() for n, c in zip(NAMES, COMPRESSED, strict=True) if c]
        found["rights"] = [state[f"/rights/{n}"].double().numpy() for n, c in zip(NAMES, COMPRESSED, strict=True) if c]
        found["weights"] = [p.detach().double().numpy().copy() for p in model.parameters()]
        found["random"] = torch.equal(random, torch.get_rng_state())
        seen.append(found)
    return seen


def shares_at(update: int, *, ranks: int, nodes: tuple[int, ...] | None = None) -> list[Tensors]:
    shares = [[g.astype(np.float64) / ranks for g in heavy_tailed(SHAPES, rank, update)] for rank in range(ranks)]
    return shares if nodes is None else summed_by_node(shares, nodes)


def assert_equals_reference(ranks: list[list[dict[str, Any]]], *, nodes: tuple[int, ...] | None = None) -> None:
    """From the first compressed update on, whose random factors are not known; of that one, that it is a projection."""
    workers = list(range(len(ranks))) if nodes is None else [nodes.index(node) for node in sorted(set(nodes))]
    first = shares_at(1, ranks=len(ranks), nodes=nodes)
    for i in range(3):
        whole = matrix_of(sum(share[i] for share in first))
        reduced = matrix_of(ranks[0][0]["reduced"][i])
        left = np.linalg.svd(reduced)[0][:, :RANK]
        np.testing.assert_allclose(reduced, left @ left.T @ whole, rtol=0, atol=1e-9)
        assert np.linalg.matrix_rank(reduced) == RANK
    tensors = [
        PowerMatrix(ranks[0][0]["rights"][i], [matrix_of(ranks[worker][0]["errors"][i]) for worker in workers]) for i in range(3)
    ]
    for update in range(2, len(ranks[0]) + 1):
        shares = shares_at(update, ranks=len(ranks), nodes=nodes)
        for i, tensor in enumerate(tensors):
            wanted = tensor.reduced([matrix_of(share[i]) for share in shares])
            for seen in ranks:
                np.testing.assert_allclose(matrix_of(seen[update - 1]["reduced"][i]), wanted, rtol=0, atol=1e-8)
            for worker, error in zip(workers, tensor.errors, strict=True):
                np.testing.assert_allclose(matrix_of(ranks[worker][update - 1]["errors"][i]), error, rtol=0, atol=1e-8)
        for seen in ranks:
            np.testing.assert_allclose(seen[update - 1]["reduced"][3], sum(share[3] for share in shares), rtol=0, atol=1e-12)
    for seen in ranks:
        for ours, theirs in zip(seen, ranks[0], strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(ours["weights"], theirs["weights"], strict=True))
            assert all(np.array_equal(a, b) for a, b in zip(ours["rights"], theirs["rights"], strict=True))


@pytest.mark.parametrize("size", [2, 4])
def test_low_rank_gradients_and_errors_equal_the_reference_over_twenty_updates(size: int) -> None:
    ranks = run_ranks(_low, size, powersgd(**LOW), 20, torch.float64)
    assert COMPRESSED == [True, True, True, False]
    assert_equals_reference(ranks)
    sent = RANK * ((6 + 10) + (8 + 5) + (5 + 6)) + 7
    for seen in ranks:
        for told in seen:
            assert told["density"] == sent / (60 + 40 + 30 + 7)
            assert told["residual"] == pytest.approx(float(np.sqrt(sum((e**2).sum() for e in told["errors"]))), rel=1e-6)
            assert told["random"], "the user's random numbers are the user's"


def test_two_nodes_of_two_ranks_equal_two_workers_with_the_sums_of_their_shares(tmp_path: Path) -> None:
    nodes = (0, 0, 1, 1)
    strategy = powersgd(**LOW, two_level=True)
    ranks = run_ranks(on_nodes, 4, nodes, rendezvous(tmp_path), _low, strategy, 12, torch.float64)
    assert_equals_reference(ranks, nodes=nodes)
    for mine, theirs in ((0, 1), (2, 3)):
        for ours, other in zip(ranks[mine], ranks[theirs], strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(ours["errors"], other["errors"], strict=True))


# --- conservation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_what_arrives_and_what_is_kept_add_up_to_what_there_was(rank: int) -> None:
    """Over all ranks, in float32: gradient + errors afterwards = errors before + shares."""
    ranks = run_ranks(_low, 4, powersgd(rank=rank, min_compression=1.0 if rank == 2 else 2.0 / rank), 10, torch.float32)
    for update in range(2, 11):
        shares = shares_at(update, ranks=4)
        for i in range(3):
            before, after = (sum(matrix_of(seen[at]["errors"][i]) for seen in ranks) for at in (update - 2, update - 1))
            there_was = before + matrix_of(sum(share[i] for share in shares))
            is_now = after + matrix_of(ranks[0][update - 1]["reduced"][i])
            np.testing.assert_allclose(is_now, there_was, rtol=0, atol=2e-6 * np.abs(there_was).max())
            assert np.abs(after).max() > 1e-3


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Parameter(torch.zeros(6, 10, dtype=torch.float64))
        self.branch = nn.Parameter(torch.zeros(8, 5, dtype=torch.float64))


def _branch(rank: int, odd: str) -> tuple[Array, Array, list[Any]]:
    """Plain SGD at lr 1; in updates 4 to 12 the branch is not used, or has gradients of 0, or of rank 1."""
    model = Branching()
    strategy = powersgd(**LOW) | {"find_unused_parameters": True}
    model, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=1.0), strategy)
    given, seen = np.zeros((8, 5)), []
    for update in range(1, 21):
        trunk, branch = (torch.from_numpy(g).double() for g in heavy_tailed([(6, 10), (8, 5)], rank, update))
        loss = (model.trunk * trunk).sum() + rank
        if 4 <= update <= 12:
            branch = torch.outer(branch[:, 0], branch[0]) if odd == "rank 1" else branch * 0.0
        if odd != "unused" or not 4 <= update <= 12:
            loss = loss + (model.branch * branch).sum()
        given += branch.numpy() / 2
        optimizer.minimize(loss)
        seen.append(model.branch.detach().numpy().copy())
    error = leaves(optimizer.pipeline.stages.reduce.state_dict())["/shares/error/branch"].numpy()
    return given, error, seen


@pytest.mark.parametrize("odd", ["unused", "zero", "rank 1"])
def test_nothing_is_lost_of_a_branch_that_is_unused_or_has_poor_gradients_for_a_while(odd: str) -> None:
    ranks = run_ranks(_branch, 2, odd)
    given, errors = sum(rank[0] for rank in ranks), sum(rank[1] for rank in ranks)
    for _, _, seen in ranks:
        np.testing.assert_allclose(-seen[-1] + errors, given, rtol=0, atol=1e-10)
        np.testing.assert_array_equal(seen, ranks[0][2])
    if odd != "rank 1":
        moved = np.abs(ranks[0][2][11] - ranks[0][2][2]).max()
        assert moved > 1e-2, "what was kept goes out while no gradient comes in"
        np.testing.assert_allclose(np.linalg.norm(basis_of(errors).T @ errors), np.linalg.norm(errors), rtol=1e-9)


# --- reports, refusals ------------------------------------------------------------------------------------------------------


def _old_reports(rank: int) -> list[float | None]:
    model = net()
    model, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1), powersgd(rank=1, min_compression=1.0))
    reports = [optimizer.minimize(loss_of(model, rank, update)) for update in range(1, 4)]
    return [report.residual_norm for report in reports]


def test_a_report_of_an_earlier_update_no_longer_knows_what_was_kept() -> None:
    for first, second, last in run_ranks(_old_reports, 2):
        assert first is None and second is None and last is not None and last > 0


def _refusals(rank: int) -> dict[str, str]:
    def told(**strategy: Any) -> str:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return raised(lambda: fleet.distribute(model, inner, fleet.DistributedStrategy(powersgd=True, **strategy)))

    return {name: told(**{name: True}) for name in ("localsgd", "bf16_allreduce", "dgc")}


def test_other_ways_to_reduce_are_refused_by_slot() -> None:
    for told in run_ranks(_refusals, 2):
        for part, said in told.items():
            assert said.startswith("StrategyConflict: ") and "powersgd" in said and part in said and "`reduce`" in said
