"""DGC in the loops that users write: schedulers, groups, layouts of memory, unused branches, two levels; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleetx import fleet
from tests.helpers.compression_reference import DGCWorkers, Rule
from tests.helpers.compression_runs import (
    EXACT,
    LR,
    Case,
    assert_equals_reference,
    dgc,
    distributed,
    expected,
    heavy_tailed,
    train,
)
from tests.helpers.harness import raised, run_ranks
from tests.helpers.localsgd_reference import net_gradient, unflatten
from tests.helpers.localsgd_runs import flat, loss_of, net, on_nodes, rendezvous, rows_of

# --- groups, schedulers, reports, layouts -----------------------------------------------------------------------------------


def _one_cycle(rank: int) -> tuple[list[Any], list[tuple[float, float]], bool, bool]:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    groups = inner.param_groups
    model, optimizer = distributed(model, inner, dgc(sparsity=[0.65], rampup_begin_step=2))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=13)
    weights, used = [], []
    for update in range(1, 13):
        used.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        assert optimizer.minimize(loss_of(model, rank, update)).due
        scheduler.step()
        weights.append(flat(model))
    same = optimizer.param_groups[0] is groups[0] and len(groups) == 1
    return weights, used, same, "momentum_buffer" in repr(optimizer.state_dict()["state"])


def test_a_one_cycle_schedule_of_lr_and_momentum_is_obeyed_and_the_group_dicts_stay_the_users() -> None:
    ranks = run_ranks(_one_cycle, 2)
    used = ranks[0][1]
    assert len({lr for lr, _ in used}) > 8 and len({momentum for _, momentum in used}) > 8
    workers = DGCWorkers([piece.ravel() for piece in unflatten(flat(net()))], 2, Rule(begin=2, sparsity=(0.65,)))
    for update, (lr, momentum) in enumerate(used, start=1):
        row = np.concatenate(workers.p)
        shares = [[g.ravel() / 2 for g in unflatten(net_gradient(row, *rows_of(rank, update))[1])] for rank in range(2)]
        workers.step(update, shares, lr=lr, momentum=momentum)
    for weights, told, same, has_momentum in ranks:
        np.testing.assert_allclose(weights, workers.weights, rtol=0, atol=EXACT)
        assert told == used and same and not has_momentum


def _two_groups(rank: int) -> list[Any]:
    model = net()
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.1, "momentum": 0.9},
        {"params": list(model[2].parameters()), "lr": 0.02, "momentum": 0.5, "weight_decay": 0.1},
    ]
    model, optimizer = distributed(model, torch.optim.SGD(groups, lr=1.0), dgc(sparsity=[0.65]))
    weights = []
    for update in range(1, 11):
        optimizer.minimize(loss_of(model, rank, update))
        weights.append(flat(model))
    return weights


def test_groups_keep_their_own_lr_momentum_and_decay() -> None:
    start = [piece.ravel() for piece in unflatten(flat(net()))]
    first = DGCWorkers(start[:2], 2, Rule(sparsity=(0.65,)))
    second = DGCWorkers(start[2:], 2, Rule(sparsity=(0.65,), decay=0.1))
    for update in range(1, 11):
        row = np.concatenate(first.p + second.p)
        shares = [[g.ravel() / 2 for g in unflatten(net_gradient(row, *rows_of(rank, update))[1])] for rank in range(2)]
        first.step(update, [share[:2] for share in shares], lr=0.1, momentum=0.9)
        second.step(update, [share[2:] for share in shares], lr=0.02, momentum=0.5)
    wanted = np.concatenate([first.weights, second.weights], axis=1)
    for weights in run_ranks(_two_groups, 2):
        np.testing.assert_allclose(weights, wanted, rtol=0, atol=EXACT)


def _old_report(rank: int, strategy: dict[str, Any]) -> list[float | None]:
    model = net()
    model, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    reports = []
    for update in range(1, 4):
        reports.append(optimizer.minimize(loss_of(model, rank, update)))
    return [report.residual_norm for report in reports]


def test_a_report_of_an_earlier_update_no_longer_knows_what_was_kept() -> None:
    for first, second, last in run_ranks(_old_report, 2, dgc(sparsity=[0.65])):
        assert first is None and second is None and last is not None and last > 0


def _images(rank: int, layout: str) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3)).double()
    if layout == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    model, optimizer = distributed(model, inner, dgc(sparsity=[0.65], rampup_begin_step=2))
    weights = []
    for update in range(1, 9):
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * update + rank), dtype=torch.float64)
        optimizer.minimize(model(x).square().mean())
        weights.append(flat(model))
    return weights


def test_a_model_in_channels_last_takes_the_same_updates_decay_and_all() -> None:
    plain, last = (run_ranks(_images, 2, layout) for layout in ("contiguous", "channels_last"))
    np.testing.assert_allclose(last, plain, rtol=0, atol=EXACT)
    assert np.abs(np.array(plain[0])[2:] - np.array(plain[0])[1]).max() > 1e-3


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(40, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.zeros(40, dtype=torch.float32))


def _mixed(rank: int) -> list[Any]:
    model = Mixed()
    model, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9), dgc(sparsity=[0.9]))
    seen = []
    for update in range(1, 9):
        slope = torch.from_numpy(heavy_tailed([(40,)], rank, update)[0])
        optimizer.minimize((model.wide * slope).sum() + (model.narrow * slope).sum() + rank)
        seen.append([model.wide.detach().numpy().copy(), model.narrow.detach().double().numpy().copy()])
    return seen


def test_a_model_of_two_types_sends_each_in_its_own() -> None:
    wanted = DGCWorkers([np.zeros(40)], 2, Rule(sparsity=(0.9,)))
    for update in range(1, 9):
        wanted.step(update, [[heavy_tailed([(40,)], r, update)[0].astype(float) / 2] for r in range(2)], lr=0.125, momentum=0.9)
    for seen in run_ranks(_mixed, 2):
        for update, (wide, narrow) in enumerate(seen):
            np.testing.assert_allclose(wide, wanted.weights[update], rtol=0, atol=EXACT)
            np.testing.assert_allclose(narrow, wanted.weights[update], rtol=0, atol=1e-5)


# --- a branch that no rank uses for a while ---------------------------------------------------------------------------------


class Branching(nn.Module):
    """Slopes for a trunk, and for a branch of two tensors, which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Parameter(torch.zeros(12, dtype=torch.float64))
        self.branch = nn.Parameter(torch.zeros(12, dtype=torch.float64))
        self.small = nn.Parameter(torch.zeros(2, dtype=torch.float64))


BRANCH_SHAPES: list[tuple[int, ...]] = [(12,), (12,), (2,)]


def branch_used(update: int) -> bool:
    return update < 6 or update > 13


def _branch(rank: int, by_one: bool) -> list[Any]:
    model = Branching()
    inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    strategy = dgc(sparsity=[0.9], rampup_begin_step=2, min_numel=4) | {"find_unused_parameters": True}
    model, optimizer = distributed(model, inner, strategy)
    seen = []
    for update in range(1, 21):
        trunk, branch, small = (torch.from_numpy(s).double() for s in heavy_tailed(BRANCH_SHAPES, rank, update))
        loss = (model.trunk * trunk).sum() + rank
        if branch_used(update) or (by_one and rank == 0):
            loss = loss + (model.branch * branch).sum() + (model.small * small).sum()
        optimizer.minimize(loss)
        seen.append(np.concatenate([p.detach().numpy() for p in model.parameters()]))
    return seen


@pytest.mark.parametrize("by_one", [False, True])
def test_a_branch_that_no_rank_or_only_one_uses_for_a_while_still_gets_what_was_kept_for_it(by_one: bool) -> None:
    wanted = DGCWorkers([np.zeros(12), np.zeros(12), np.zeros(2)], 2, Rule(begin=2, sparsity=(0.9,), min_numel=4))
    for update in range(1, 21):
        shares = [[s.astype(np.float64) / 2 for s in heavy_tailed(BRANCH_SHAPES, rank, update)] for rank in range(2)]
        if not branch_used(update):
            for share in shares[1 if by_one else 0 :]:
                share[1:] = [np.zeros(12), np.zeros(2)]
        used = [True, True, by_one or branch_used(update)]
        wanted.step(update, shares, lr=0.125, momentum=0.5, used=used)
    for seen in run_ranks(_branch, 2, by_one):
        np.testing.assert_allclose(seen, wanted.weights, rtol=0, atol=EXACT)
        moved = np.abs(seen[12][12:24] - seen[5][12:24])
        assert moved.max() > 1e-2


# --- two levels -------------------------------------------------------------------------------------------------------------

NODES = {"next to each other": (0, 0, 1, 1), "every second": (0, 1, 0, 1)}


@pytest.mark.parametrize("name", NODES)
def test_two_nodes_of_two_ranks_equal_two_workers_with_the_sums_of_their_shares(name: str, tmp_path: Path) -> None:
    nodes = NODES[name]
    configs = {"rampup_begin_step": 2, "rampup_step": 6, "sparsity": [0.5, 0.75], "min_numel": 4, "two_level": True}
    case, rule = Case(strategy=dgc(**configs), decay=0.05), Rule(begin=2, ramp=6, sparsity=(0.5, 0.75), min_numel=4, decay=0.05)
    traces = run_ranks(on_nodes, 4, nodes, rendezvous(tmp_path), train, case)
    assert_equals_reference(traces, expected(case, rule, ranks=4, nodes=nodes), worker_of=nodes)


def test_nodes_clip_the_sums_of_their_ranks_as_two_workers_would(tmp_path: Path) -> None:
    nodes = NODES["next to each other"]
    case = Case(strategy=dgc(sparsity=[0.65], clip_norm=0.6, two_level=True), updates=10)
    traces = run_ranks(on_nodes, 4, nodes, rendezvous(tmp_path), train, case)
    assert_equals_reference(traces, expected(case, Rule(sparsity=(0.65,), clip=0.6), ranks=4, nodes=nodes), worker_of=nodes)


# --- what is refused --------------------------------------------------------------------------------------------------------


def _refusals(rank: int) -> dict[str, str]:
    def told(make: Any = None, **strategy: Any) -> str:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9) if make is None else make(model.parameters())
        return raised(lambda: fleet.distribute(model, inner, fleet.DistributedStrategy(**dgc(), **strategy)))

    return {
        "Adam": told(lambda params: torch.optim.Adam(params)),
        "dampening": told(lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9, dampening=0.1)),
        "maximize": told(lambda params: torch.optim.SGD(params, lr=LR, maximize=True)),
        "lars": told(lars=True),
        "lamb": told(lambda params: torch.optim.Adam(params), lamb=True),
        "clip_norm": told(clip_norm=True),
        "localsgd": told(localsgd=True),
        "powersgd": told(powersgd=True),
    }


def test_optimizers_and_parts_that_do_not_go_with_it_are_refused_by_name_and_slot() -> None:
    slots = {"lars": "momentum", "lamb": "momentum", "clip_norm": "clip", "localsgd": "reduce", "powersgd": "reduce"}
    for told in run_ranks(_refusals, 2):
        for word in ("Adam", "dampening", "maximize"):
            assert told[word].startswith("ConfigError: ") and word in told[word], told[word]
        for part, slot in slots.items():
            said = told[part]
            assert said.startswith("StrategyConflict: ") and "dgc" in said and part in said and f"`{slot}`" in said, said
