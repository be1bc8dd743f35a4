"""Local SGD saved in mid-period and resumed: the bits of a run that never stopped, each rank its own."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.harness import run_ranks
from tests.helpers.localsgd_runs import loss_of, on_nodes, rendezvous, snapshot, weight_of

DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run of `total` micro-steps, saved after `saved_after` of them."""

    strategy: dict[str, Any]
    adam: bool = False
    merged: int = 1
    weighted: bool = False
    total: int = 16
    saved_after: int = 8
    nodes: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    overflows: tuple[int, ...] = field(default=())
    """Micro-steps whose gradients are not finite on rank 1."""


def local(**configs: Any) -> dict[str, Any]:
    return {"localsgd": True, "localsgd_configs": configs}


FP16 = {"dtype": "float16", "init_loss_scaling": 1024.0, "decr_every_n_nan_or_inf": 1, "incr_every_n_steps": 3}
PLANS: dict[str, Plan] = {
    # Rounds after 4, 7, 10, ...: after update 8 that of 7 is under way.
    "a round under way, outer momentum": Plan(strategy=local(k_steps=3, overlap_steps=2, **DILOCO)),
    "averaged state, 16 bits, weighted": Plan(
        strategy=local(k_steps=4, average_state=True, wire_dtype="bfloat16", begin_step=2),
        adam=True, weighted=True, saved_after=9,
    ),
    "a round of 16 bits under way, over a whole period": Plan(
        strategy=local(k_steps=4, overlap_steps=4, wire_dtype="bfloat16", begin_step=2), adam=True, saved_after=7
    ),
    "adaptive, merged, weighted, in mid-window": Plan(
        strategy={
            "adaptive_localsgd": True,
            "adaptive_localsgd_configs": {"init_k_steps": 2, "max_k_steps": 6, "outer_lr": 0.9, "outer_momentum": 0.5},
        },
        merged=2, weighted=True, total=36, saved_after=17,
    ),
    "adaptive, with overlap": Plan(
        strategy={"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 3, "overlap_steps": 2}}, saved_after=8
    ),
    "each rank its own loss scale": Plan(
        strategy=local(k_steps=4, **DILOCO) | {"amp": True, "amp_configs": FP16}, overflows=(7,), saved_after=8
    ),
    "still dense": Plan(strategy=local(k_steps=3, begin_step=9), saved_after=5),
}  # fmt: skip
COMPRESSED: dict[str, tuple[int, Plan]] = {
    # Rounds after 3, 5, 7, ...: after update 8 what was kept back in the round of 7 waits for that of 9.
    "kept back by int4, averaged state, weighted": (2, Plan(
        strategy=local(k_steps=2, wire_dtype="int4", average_state=True, **DILOCO), adam=True, weighted=True
    )),
    # After 5, 9, ..., settled 3 updates later: after 6 four ranks have the sums of owners still to send, after 7 no longer.
    "int8 under way": (4, Plan(strategy=local(k_steps=4, overlap_steps=3, wire_dtype="int8"), adam=True, saved_after=6)),
    "int8 under way, the sums too": (4, Plan(strategy=local(k_steps=4, overlap_steps=3, wire_dtype="int8"), saved_after=7)),
    "SparseLoCo, a round under way": (2, Plan(
        strategy=local(k_steps=3, overlap_steps=2, top_k=3, chunk=8, value_bits=2, error_decay=0.95), saved_after=8
    )),
    # Turns after 3, 5, 7, ..., each settled one update later: after 9 that of the first fragment is under way.
    "fragments, one under way, in turns": (4, Plan(
        strategy=local(k_steps=6, fragments=3, overlap_steps=1, wire_dtype="int8", **DILOCO), weighted=True, saved_after=9
    )),
    "adaptive, 4 bits, one overflow": (2, Plan(
        strategy={
            "adaptive_localsgd": True,
            "adaptive_localsgd_configs": {"init_k_steps": 2, "max_k_steps": 6, "wire_dtype": "int4", "error_decay": 0.9},
        } | {"amp": True, "amp_configs": FP16},
        overflows=(6,), saved_after=8,
    )),
}  # fmt: skip
"""With the number of ranks: of two, what is sent goes to all; of more, integers go to owners."""
ON_NODES = {
    # Rounds after 3 (inside), 5 (all), 7 (inside): the anchor is of 5, weights of each node its own.
    "two levels": Plan(strategy=local(k_steps=2, across_nodes_every=2, **DILOCO), nodes=(0, 0, 1, 1), saved_after=8),
    "two levels, 4 bits among all": Plan(
        strategy=local(k_steps=2, across_nodes_every=2, wire_dtype="int4", **DILOCO), nodes=(0, 0, 1, 1), saved_after=8
    ),
    "two levels, a round under way": Plan(
        strategy=local(k_steps=3, across_nodes_every=2, overlap_steps=2), nodes=(0, 0, 1, 1), saved_after=5
    ),
}


def net(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 2)).to(dtype)


class Run:
    def __init__(self, rank: int, plan: Plan, *, seed: int) -> None:
        self.rank, self.plan, self.done = rank, plan, 0
        model = net(plan.dtype)
        torch.manual_seed(seed + rank)
        inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        if plan.adam:
            inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        strategy = fleet.DistributedStrategy(fuse_grad_size_in_MB=0.0001, **plan.strategy)
        if plan.merged > 1:
            strategy.gradient_merge, strategy.gradient_merge_configs = True, {"k_steps": plan.merged}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FleetWarning)
            self.model, self.optimizer = fleet.distribute(model, inner, strategy)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [4, 9], gamma=0.2)
        self.reports: list[Any] = []

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            loss = loss_of(self.model, self.rank, self.done)
            if self.rank == 1 and self.done in self.plan.overflows:
                loss = loss + self.model[0].weight[0, 0].mul(0.0).sqrt()
            report = self.optimizer.minimize(loss, weight=weight_of(self.rank, self.done) if self.plan.weighted else None)
            if report.due:
                self.scheduler.step()
            told = (report.due, report.updated, report.period, report.averaged, report.loss, report.loss_scale, report.bytes_sent)
            self.reports.append(told)

    def everything(self) -> dict[str, Any]:
        found: dict[str, Any] = snapshot(self.model, self.optimizer)
        kept = leaves(self.optimizer.pipeline.stages.average.state_dict())
        found |= {f"average{name}": value for name, value in kept if not name.endswith("/rows")}  # those hold seconds waited
        found["groups"] = repr([{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups])
        found["random"] = torch.rand(3)
        found["skipped"] = self.optimizer.skipped
        with self.optimizer.averaged():
            found |= {f"mean of {name}": t.detach().clone() for name, t in self.model.state_dict().items()}
        return found


def leaves(tree: Any, name: str = "") -> list[tuple[str, Any]]:
    """The leaves of whatever the averaging keeps: anchors, outer momentum, what is under way."""
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in leaves(value, f"{name}/{key}")]
    if isinstance(tree, (list, tuple)):
        return [leaf for key, value in enumerate(tree) for leaf in leaves(value, f"{name}/{key}")]
    return [(name, tree.detach().clone() if isinstance(tree, Tensor) else tree)]


def _straight(rank: int, plan: Plan, folder: str, in_background: bool) -> tuple[dict[str, Any], list[Any]]:
    """One run to the end; on its way a checkpoint is saved, which must not disturb it."""
    run = Run(rank, plan, seed=1)
    run.train(plan.saved_after)
    saving = fleet.save_checkpoint(folder, step=plan.saved_after, done=run.done, async_save=in_background, **run.objects())
    run.train(plan.total)
    saving.wait()
    return run.everything(), run.reports[plan.saved_after :]


def _undisturbed(rank: int, plan: Plan) -> tuple[dict[str, Any], list[Any]]:
    run = Run(rank, plan, seed=1)
    run.train(plan.total)
    return run.everything(), run.reports[plan.saved_after :]


def _resumed(rank: int, plan: Plan, folder: str) -> tuple[dict[str, Any], list[Any]]:
    run = Run(rank, plan, seed=77)
    loaded = fleet.load_checkpoint(folder, done=0, **run.objects())
    assert loaded is not None
    run.done = loaded.values["done"]
    run.train(plan.total)
    return run.everything(), run.reports


def unequal(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)

    return [key for key in ours | theirs if key not in ours or key not in theirs or not same(ours[key], theirs[key])]


def launch(fn: Any, size: int, plan: Plan, tmp_path: Path, *args: Any) -> list[Any]:
    if plan.nodes is None:
        return run_ranks(fn, size, plan, *args)
    return run_ranks(on_nodes, size, plan.nodes, rendezvous(tmp_path), fn, plan, *args)


def assert_resumes(plan: Plan, size: int, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    wanted = launch(_undisturbed, size, plan, tmp_path)
    saving = launch(_straight, size, plan, tmp_path, str(folder), size == 4)
    resumed = launch(_resumed, size, plan, tmp_path, str(folder))
    for rank, ((theirs, _), (mine, _), (ours, _)) in enumerate(zip(wanted, saving, resumed, strict=True)):
        assert (rank, unequal(mine, theirs)) == (rank, [])
        assert (rank, unequal(ours, theirs)) == (rank, [])
    # Bytes of the first update aside: a run that starts agrees on a few things once.
    assert [[told[:-1] for told in reports] for _, reports in resumed] == [[t[:-1] for t in reports] for _, reports in wanted]
    assert any(told[3] for told in wanted[0][1])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", PLANS)
def test_a_run_resumed_in_mid_period_ends_with_the_bits_of_an_undisturbed_one(name: str, size: int, tmp_path: Path) -> None:
    assert_resumes(PLANS[name], size, tmp_path)


@pytest.mark.parametrize("name", COMPRESSED)
def test_so_does_one_whose_ranks_keep_what_they_have_not_sent(name: str, tmp_path: Path) -> None:
    size, plan = COMPRESSED[name]
    assert_resumes(plan, size, tmp_path)


@pytest.mark.parametrize("name", ON_NODES)
def test_so_does_one_with_two_levels_of_averaging(name: str, tmp_path: Path) -> None:
    assert_resumes(ON_NODES[name], 4, tmp_path)


def _own_weights(rank: int, folder: str) -> tuple[Tensor, Tensor, Tensor]:
    plan = PLANS["a round under way, outer momentum"]
    run = Run(rank, plan, seed=1)
    run.train(8)
    fleet.save_checkpoint(folder, step=8, **run.objects())
    again = Run(rank, plan, seed=2)
    fresh = again.model[0].weight.detach().clone()
    fleet.load_checkpoint(folder, **again.objects())
    return run.model[0].weight.detach().clone(), again.model[0].weight.detach().clone(), fresh


def test_a_checkpoint_in_mid_period_holds_each_ranks_own_weights(tmp_path: Path) -> None:
    (first, loaded_first, _), (second, loaded_second, _) = run_ranks(_own_weights, 2, str(tmp_path))
    assert not torch.equal(first, second)
    assert torch.equal(first, loaded_first) and torch.equal(second, loaded_second)
