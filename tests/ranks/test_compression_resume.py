"""Compressed training saved in mid-ramp and mid-window, and resumed: the bits of a run that never stopped, each rank its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fleetx import fleet
from tests.helpers.compression_runs import AMP, dgc, distributed, leaves, merged, powersgd, quantised, unequal
from tests.helpers.harness import raised, run_ranks
from tests.helpers.localsgd_runs import on_nodes, rendezvous, snapshot, weight_of
from tests.helpers.models import batch

RAMP = {"rampup_begin_step": 2, "rampup_step": 8, "sparsity": [0.5, 0.75, 0.9, 0.95], "min_numel": 32}
LOW = {"rank": 2, "begin_step": 2, "min_compression": 1.0}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run of `total` micro-steps, saved after `saved_after` of them."""

    strategy: dict[str, Any]
    adam: bool = False
    weighted: bool = False
    total: int = 12
    saved_after: int = 6
    nodes: tuple[int, ...] | None = None
    overflows: tuple[int, ...] = ()
    """Micro-steps whose gradients are not finite on rank 1."""


PLANS: dict[str, Plan] = {
    "dgc in mid-ramp": Plan(strategy=dgc(**RAMP)),
    "dgc, still dense": Plan(strategy=dgc(**RAMP), saved_after=1),
    "dgc, where dense updates have just ended": Plan(strategy=dgc(**RAMP), saved_after=2),
    "dgc in mid-window, weighted": Plan(strategy=dgc(**RAMP) | merged(3), weighted=True, total=24, saved_after=13),
    "dgc under float16, an overflow before and one after": Plan(strategy=dgc(**RAMP) | AMP, overflows=(5, 8)),
    "dgc under float16 in mid-window": Plan(
        strategy=dgc(**RAMP, clip_norm=0.5) | AMP | merged(2), total=20, saved_after=11, overflows=(9, 10, 14)
    ),
    "powersgd": Plan(strategy=powersgd(**LOW)),
    "powersgd, still dense": Plan(strategy=powersgd(**LOW), saved_after=2),
    "powersgd with adam, in mid-window": Plan(strategy=powersgd(**LOW) | merged(3), adam=True, total=24, saved_after=13),
    "powersgd under float16": Plan(strategy=powersgd(**LOW) | AMP, overflows=(5, 8)),
    "quantised with adam, in mid-window, many small buckets": Plan(
        strategy=quantised() | merged(3) | {"fuse_grad_size_in_MB": 0.0005}, adam=True, total=24, saved_after=13
    ),
    "quantised, sharded": Plan(strategy=quantised() | {"sharding": {"stage": 2}}, adam=True),
    "quantised to 4 bits under float16": Plan(strategy=quantised(bits=4) | AMP, overflows=(5, 8)),
    "many small buckets": Plan(strategy=dgc(**RAMP) | {"fuse_grad_size_in_MB": 0.0005}),
}
ON_NODES = {
    "dgc": Plan(strategy=dgc(**RAMP, two_level=True), nodes=(0, 0, 1, 1)),
    "powersgd": Plan(strategy=powersgd(**LOW, two_level=True), nodes=(0, 0, 1, 1)),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))


class Run:
    def __init__(self, rank: int, plan: Plan, *, seed: int) -> None:
        self.rank, self.plan, self.done = rank, plan, 0
        model = net()
        torch.manual_seed(seed + rank)
        inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        if plan.adam:
            inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.model, self.optimizer = distributed(model, inner, plan.strategy)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [4, 7], gamma=0.2)
        self.told: list[Any] = []

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            x, y = batch(10 * self.done + self.rank)
            loss = F.cross_entropy(self.model(x), y)
            if self.rank == 1 and self.done in self.plan.overflows:
                loss = loss + self.model[0].weight[0, 0].mul(0.0).sqrt()
            report = self.optimizer.minimize(loss, weight=weight_of(self.rank, self.done) if self.plan.weighted else None)
            if report.due:
                self.scheduler.step()
            flags = (report.due, report.updated, report.skipped)
            self.told.append((*flags, report.loss, report.loss_scale, report.density, report.residual_norm))

    def everything(self) -> dict[str, Any]:
        found: dict[str, Any] = snapshot(self.model, self.optimizer)
        found |= {f"kept{name}": leaf for name, leaf in leaves(self.optimizer.pipeline.stages.reduce.state_dict()).items()}
        found |= {"random": torch.rand(3), "skipped": self.optimizer.skipped}
        return found


def _undisturbed(rank: int, plan: Plan) -> tuple[dict[str, Any], list[Any]]:
    run = Run(rank, plan, seed=1)
    run.train(plan.total)
    return run.everything(), run.told[plan.saved_after :]


def _at_saving(rank: int, plan: Plan, folder: str) -> dict[str, Any]:
    run = Run(rank, plan, seed=1)
    run.train(plan.saved_after)
    fleet.save_checkpoint(folder, step=plan.saved_after, done=run.done, **run.objects())
    return run.everything()


def _resumed(rank: int, plan: Plan, folder: str, strayed: int) -> tuple[dict[str, Any], list[Any]]:
    """Into a run that has gone elsewhere for a while: nothing of that must be left."""
    run = Run(rank, plan, seed=77)
    run.train(strayed)
    loaded = fleet.load_checkpoint(folder, done=0, **run.objects())
    assert loaded is not None
    run.done, run.told = loaded.values["done"], []
    run.train(plan.total)
    return run.everything(), run.told


def assert_resumes(plan: Plan, size: int, tmp_path: Path) -> None:
    def launch(fn: Any, *args: Any) -> list[Any]:
        if plan.nodes is None:
            return run_ranks(fn, size, plan, *args)
        return run_ranks(on_nodes, size, plan.nodes, rendezvous(tmp_path), fn, plan, *args)

    folder = tmp_path / "checkpoints"
    folder.mkdir()
    wanted = launch(_undisturbed)
    launch(_at_saving, str(folder))
    for strayed in (0, 5):
        resumed = launch(_resumed, str(folder), strayed)
        for rank, ((theirs, told), (ours, retold)) in enumerate(zip(wanted, resumed, strict=True)):
            assert (rank, strayed, unequal(ours, theirs)) == (rank, strayed, [])
            assert retold == told
    assert any(update[5] is not None and update[5] < 1.0 for update in wanted[0][1]), "some were compressed"
    assert sum(update[2] for update in wanted[0][1]) == len([at for at in plan.overflows if at > plan.saved_after])


@pytest.mark.parametrize("name", PLANS)
def test_a_resumed_run_ends_with_the_bits_of_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    assert_resumes(PLANS[name], 2, tmp_path)


@pytest.mark.parametrize("name", ON_NODES)
def test_so_does_one_with_two_levels(name: str, tmp_path: Path) -> None:
    assert_resumes(ON_NODES[name], 4, tmp_path)


def test_what_each_rank_keeps_is_its_own(tmp_path: Path) -> None:
    first, second = run_ranks(_at_saving, 2, PLANS["dgc in mid-ramp"], str(tmp_path))
    apart = [name for name in unequal(first, second) if name.startswith("kept/shares")]
    assert len(apart) == 4  # momentum and unsent of two weights


# --- other settings than those that saved it --------------------------------------------------------------------------------


def _other(rank: int, folder: str, before: Plan, after: Plan) -> tuple[str, list[str]]:
    saved = Run(rank, before, seed=1)
    saved.train(before.saved_after)
    fleet.save_checkpoint(folder, step=before.saved_after, **saved.objects())
    run = Run(rank, after, seed=2)
    run.train(5)
    untouched = run.everything()
    state = torch.get_rng_state()
    told = raised(lambda: fleet.load_checkpoint(folder, **run.objects()))
    torch.set_rng_state(state)
    now = run.everything()
    return told, [name for name in unequal(untouched, now) if name != "random"]


OTHER: dict[str, tuple[Plan, Plan]] = {
    "min_numel": (Plan(strategy=dgc(**RAMP)), Plan(strategy=dgc(**(RAMP | {"min_numel": 100})))),
    "min_compression": (Plan(strategy=powersgd(**LOW)), Plan(strategy=powersgd(**(LOW | {"min_compression": 2.0})))),
    "dgc, then powersgd": (Plan(strategy=dgc(**RAMP)), Plan(strategy=powersgd(**LOW))),
    "quantised, then none": (Plan(strategy=quantised()), Plan(strategy={})),
    "quantised, then without error feedback": (Plan(strategy=quantised()), Plan(strategy=quantised(error_feedback=False))),
    "dgc, then none": (Plan(strategy=dgc(**RAMP)), Plan(strategy={})),
    "a rank of 1, then 2": (Plan(strategy=powersgd(**(LOW | {"rank": 1}))), Plan(strategy=powersgd(**LOW))),
    "a rank of 2, then 1": (Plan(strategy=powersgd(**LOW)), Plan(strategy=powersgd(**(LOW | {"rank": 1})))),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_checkpoint_of_other_settings_is_refused_and_nothing_is_touched(name: str, tmp_path: Path) -> None:
    for told, touched in run_ranks(_other, 2, str(tmp_path), *OTHER[name]):
        assert told.startswith("CheckpointError: "), told
        assert touched == []


def _with_levels(rank: int, folder: str, saves: bool, two_level: bool) -> tuple[str, dict[str, Any]]:
    run = Run(rank, Plan(strategy=dgc(**RAMP, two_level=two_level)), seed=1)
    if saves:
        run.train(6)
        fleet.save_checkpoint(folder, step=6, **run.objects())
        return "saved", run.everything()
    told = raised(lambda: fleet.load_checkpoint(folder, **run.objects()))
    return told, run.everything()


@pytest.mark.parametrize("two_level", [True, False])
def test_levels_switched_on_or_off_between_saving_and_loading_neither_lose_nor_double_what_is_kept(
    two_level: bool, tmp_path: Path
) -> None:
    """With two levels the ranks of a node keep the same, and count once. Refusing it is as good."""
    folder, nodes = str(tmp_path), (0, 0, 1, 1)
    saved = run_ranks(on_nodes, 4, nodes, rendezvous(tmp_path), _with_levels, folder, True, two_level)
    loaded = run_ranks(on_nodes, 4, nodes, rendezvous(tmp_path), _with_levels, folder, False, not two_level)
    if all(told.startswith("CheckpointError: ") for told, _ in loaded):
        return
    key = "kept/shares/unsent/0.weight"
    before = sum(saved[rank][1][key] for rank in ((0, 2) if two_level else range(4)))
    after = sum(loaded[rank][1][key] for rank in (range(4) if two_level else (0, 2)))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)
    if not two_level:
        assert torch.equal(loaded[0][1][key], loaded[1][1][key]), "one node, one residual"


def _of_other_size(rank: int, folder: str, plan: Plan) -> dict[str, Any]:
    run = Run(rank, plan, seed=1)
    loaded = fleet.load_checkpoint(folder, done=0, new_world_size=True, **run.objects())
    assert loaded is not None
    state = run.everything()
    run.done = loaded.values["done"]
    run.train(plan.total)
    return {"loaded": state, "weights": [p.detach().clone() for p in run.model.parameters()]}


@pytest.mark.parametrize("name", ["dgc in mid-ramp", "powersgd"])
def test_what_four_ranks_kept_back_is_all_there_when_two_resume(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    four = run_ranks(_at_saving, 4, plan, str(tmp_path))
    two = run_ranks(_of_other_size, 2, str(tmp_path), plan)
    names = [key for key in four[0] if key.startswith("kept/shares")]
    assert names
    for key in names:
        whole = sum(rank[key] for rank in four)
        torch.testing.assert_close(sum(rank["loaded"][key] for rank in two), whole, rtol=0, atol=1e-6)
        assert float(whole.abs().max()) > 0
    for ours, theirs in zip(two[0]["weights"], two[1]["weights"], strict=True):
        assert torch.equal(ours, theirs) and bool(ours.isfinite().all())
