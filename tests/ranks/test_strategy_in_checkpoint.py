"""The strategy lies in the checkpoint: a run with another one says so or is refused, and `auto` goes on with what it chose."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fleetx import fleet
from fleetx.auto import search
from fleetx.config import log
from fleetx.errors import CheckpointError, FleetWarning
from fleetx.strategy import DistributedStrategy
from tests.helpers import auto_runs
from tests.helpers.harness import run_ranks

Settings = dict[str, Any]


def _net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def _pair(settings: Settings) -> tuple[nn.Module, Any]:
    model = _net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        return fleet.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), DistributedStrategy(**settings)
        )


def _train(model: nn.Module, optimizer: Any, rank: int, updates: int) -> None:
    for step in range(updates):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.minimize(model(x).square().mean())


def _change(rank: int, folder: str, before: Settings, after: Settings, updates: int) -> tuple[str, list[str], list[str]]:
    """Save under one strategy and load under another: the error, the warnings and the lines that rank 0 says."""
    model, optimizer = _pair(before)
    _train(model, optimizer, rank, updates)
    fleet.save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
    model, optimizer = _pair(after)
    said: list[str] = []
    error = ""
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(log, "say", lambda text, *_, **__: said.append(str(text))),
    ):
        warnings.simplefilter("always", FleetWarning)
        try:
            fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
        except CheckpointError as failed:
            error = str(failed)
    return error, [str(one.message) for one in caught], [line for line in said if "was saved with" in line]


CLIP = {"clip_norm": True, "clip_norm_configs": {"max_norm": 1.0}}
CLIP_LESS = {"clip_norm": True, "clip_norm_configs": {"max_norm": 2.0}}
DILOCO = {"localsgd": True, "localsgd_configs": {"k_steps": 2, "outer_momentum": 0.9}}
LOCAL = {"localsgd": True, "localsgd_configs": {"k_steps": 2}}
MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}


@pytest.mark.parametrize(
    ("before", "after", "warned", "said"),
    [
        (CLIP, CLIP, "", ""),
        (CLIP, CLIP_LESS, "", "clip_norm max_norm was 1.0, now 2.0"),
        ({}, MERGE, "", "gradient_merge was off, now on"),
        (CLIP, {}, "clip_norm was on, now off", ""),
        ({}, {"bf16_allreduce": True}, "bf16_allreduce was off, now on", ""),
        (LOCAL, {"localsgd": True, "localsgd_configs": {"k_steps": 8}}, "", "localsgd k_steps was 2, now 8"),
        ({"fuse_grad_size_in_MB": 1}, {"desync_check_steps": 7}, "", ""),
    ],
    ids=str,
)
def test_another_strategy_is_said_by_rank_0(before: Settings, after: Settings, warned: str, said: str, tmp_path: Path) -> None:
    for rank, (error, warnings_of_rank, lines) in enumerate(run_ranks(_change, 2, str(tmp_path), before, after, 3)):
        assert error == ""
        if rank == 1:
            assert warnings_of_rank == lines == []
            continue
        assert len(warnings_of_rank) == bool(warned) and len(lines) == bool(said)
        assert f"was saved under another strategy: {warned}. Training goes on by" in "".join(warnings_of_rank) or not warned
        assert f"was saved with other settings: {said}." in "".join(lines) or not said


def test_an_outer_velocity_is_not_dropped(tmp_path: Path) -> None:
    for error, _, _ in run_ranks(_change, 2, str(tmp_path), DILOCO, LOCAL, 5):
        assert "whose velocity would be lost. Resume with an outer_momentum above 0" in error


ALONE: dict[str, Settings] = {
    "plain": {},
    "clip_norm": CLIP,
    "bf16_allreduce": {"bf16_allreduce": True},
    "powersgd": {"powersgd": True, "powersgd_configs": {"begin_step": 1}},
    "dgc": {"dgc": True, "dgc_configs": {"min_numel": 4, "sparsity": [0.5]}},
    "localsgd": LOCAL,
    "adaptive_localsgd": {"adaptive_localsgd": True},
    "gradient_merge": MERGE,
    "sync_batch_norm": {"sync_batch_norm": True},
}


@pytest.mark.parametrize(
    "after", ["plain", *(pytest.param(name, marks=pytest.mark.campaign) for name in ALONE if name != "plain")]
)
def test_no_strategy_loads_another_ones_checkpoint_without_a_word(after: str, tmp_path: Path) -> None:
    for before, settings in ALONE.items():
        told = run_ranks(_change, 2, str(tmp_path / before), settings, ALONE[after], 4)[0]
        assert any(told) == (before != after), before


# --- auto ---------------------------------------------------------------------------------------------------------------


def _planned(chosen: Settings, name: str, configs: Settings) -> tuple[nn.Module, Any]:
    """A pair of `auto`, whose measurements have come to this strategy."""
    real = search.chosen_plan

    def choose(subject: Any, auto: Any) -> Any:
        return dataclasses.replace(real(subject, auto), strategy=DistributedStrategy(**chosen), chosen=name)

    torch.manual_seed(0)
    model = auto_runs.net(1)
    with auto_runs.short_measuring(few=True), mock.patch.object(search, "chosen_plan", choose), warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        strategy = auto_runs.auto(trials=1, **configs)
        return fleet.distribute(model, auto_runs.sgd(model), strategy, sample=auto_runs.batch(0), loss_fn=auto_runs.loss_of)


def _restarted(rank: int, folder: str, again: Settings) -> Any:
    """Two starts of a run with `auto`, of which the second would choose another strategy. What the first would have come to."""
    first = {"powersgd": True, "powersgd_configs": {"begin_step": 1, "rank": 2}}
    model, optimizer = _planned(first, "fp32, powersgd 2", {"risk": "schedule"})
    auto_runs.trained_after(model, optimizer, rank, 4)
    fleet.save_checkpoint(folder, step=4, model=model, optimizer=optimizer)
    straight = auto_runs.trained_after(model, optimizer, rank, 4)
    model, optimizer = _planned({"localsgd": True, "localsgd_configs": {"k_steps": 4}}, "fp32, localsgd 4", again)
    said: list[str] = []
    error = ""
    with mock.patch.object(log, "say", lambda text, *_, **__: said.append(str(text))):
        try:
            fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
        except CheckpointError as failed:
            error = str(failed)
    if error:
        return error, optimizer.plan.chosen, [], True
    resumed = auto_runs.trained_after(model, optimizer, rank, 4)
    same = all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
    return error, optimizer.plan.chosen, [line for line in said if line.startswith("auto: ")], same


def test_auto_goes_on_with_what_it_chose_in_the_run_that_saved(tmp_path: Path) -> None:
    for rank, (error, chosen, said, same) in enumerate(run_ranks(_restarted, 2, str(tmp_path), {"risk": "schedule"})):
        assert (error, chosen, same) == ("", "fp32, powersgd 2", True)
        line = "auto: fp32, powersgd 2, as the run that saved the checkpoint; this start had chosen fp32, localsgd 4."
        assert said == ([line] if rank == 0 else [])


def test_auto_that_is_asked_something_else_does_not(tmp_path: Path) -> None:
    for error, chosen, _, _ in run_ranks(_restarted, 2, str(tmp_path), {"risk": "lossy"}):
        assert "it was saved under strategy.powersgd, with gradients that were kept back" in error
        assert chosen == "fp32, localsgd 4"
