"""Compressors: one small run for each fault that a review found."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.errors import ConfigError, FleetWarning
from tests.helpers.harness import raised, run_ranks

SPARSE = {"sparsity": [0.9], "min_numel": 50}
DGC = {"dgc": True, "dgc_configs": SPARSE}
POWERSGD = {"powersgd": True, "powersgd_configs": {"rank": 1, "begin_step": 0, "min_compression": 1.0}}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))


def pair(strategy: dict[str, Any], model: nn.Module | None = None, **sgd: Any) -> tuple[nn.Module, Any]:
    model = net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **sgd})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        found: tuple[nn.Module, Any] = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**strategy))
    return found


def quiet(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch says that a gradient lies otherwise than its parameter, and we that all ranks have the same batch. Both are true."""

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fn(*args)

    return run


def step(model: nn.Module, optimizer: Any, update: int, rank: int = 0, **weight: Any) -> Any:
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(100 * update + rank))
    return optimizer.minimize(nn.functional.mse_loss(model(x), x[:, :8]), **weight)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_settings_changed_after_a_state_was_loaded_by_hand_are_obeyed(alone: None) -> None:
    """Loading makes new group dicts. Without momentum and decay, v is the gradient: entry by entry what was not sent."""
    model, optimizer = pair(DGC)
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    step(model, optimizer, 0)
    state = optimizer.pipeline.stages.reduce.state_dict()["shares"]
    step(model, optimizer, 1)
    for name, u in optimizer.pipeline.stages.reduce.state_dict()["shares"]["momentum"].items():
        assert not torch.equal(u, state["unsent"][name]) and float(u.abs().max()) < 1.0
    rules = optimizer.pipeline.stages.reduce._rules()
    assert {rule.momentum for rule in rules.values()} == {0.0}


def test_what_was_kept_goes_with_the_weights_it_was_of_when_a_state_is_loaded_by_hand(alone: None) -> None:
    model, optimizer = pair(DGC)
    assert optimizer.state_dict()["state"] == {}
    step(model, optimizer, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not any(optimizer.pipeline.stages.reduce.state_dict()["shares"].values())


def _resumed(rank: int, folder: str, saves: dict[str, Any], loads: dict[str, Any]) -> tuple[str, bool]:
    model, optimizer = pair(saves)
    for update in range(4):
        step(model, optimizer, update, rank)
    fleet.save_checkpoint(folder, step=4, model=model, optimizer=optimizer)
    model, optimizer = pair(loads)
    for update in range(2):
        step(model, optimizer, update, rank)
    before = weights(model).clone()
    told = raised(lambda: fleet.load_checkpoint(folder, model=model, optimizer=optimizer))
    if told == "nothing raised":
        step(model, optimizer, 4, rank)
    return told, torch.equal(weights(model), before)


DENSE = {"dgc": True, "dgc_configs": {**SPARSE, "rampup_begin_step": 9}}


@pytest.mark.parametrize(
    ("saves", "loads", "told"),
    [
        (DGC, DENSE, "compressed already, and this run's next update is dense"),
        (DGC, {}, "saved under strategy.dgc, with gradients that were kept back, and this run has a strategy that keeps nothing"),
        (DGC, POWERSGD, "and this run has strategy.powersgd"),
        ({}, DGC, "nothing raised"),
        ({}, POWERSGD, "nothing raised"),
        (DENSE, DGC, "nothing raised"),
        (DENSE, {}, "nothing raised"),
    ],
)
def test_a_checkpoint_goes_into_another_strategy_where_nothing_is_lost_by_it(
    saves: dict[str, Any], loads: dict[str, Any], told: str, tmp_path: Path
) -> None:
    for found, untouched in run_ranks(_resumed, 2, str(tmp_path), saves, loads):
        assert told in found and untouched == (told != "nothing raised")


def _forgotten(rank: int, folder: str) -> bool:
    model, optimizer = pair({})
    step(model, optimizer, 0, rank)
    fleet.save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
    model, optimizer = pair(POWERSGD)
    for update in range(3):
        step(model, optimizer, update, rank)
    fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
    return any(optimizer.pipeline.stages.reduce.state_dict()["shares"].values())


def test_what_was_kept_for_other_weights_goes_when_a_plain_checkpoint_is_loaded(tmp_path: Path) -> None:
    assert run_ranks(_forgotten, 2, str(tmp_path)) == [False, False]


def conv() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 4))


@quiet
def _late_format(rank: int, late: bool) -> Tensor:
    model, optimizer = pair(DGC, conv(), weight_decay=0.5)
    for update in range(4):
        if update == 2 and late:
            model.to(memory_format=torch.channels_last)
        x = torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(10 * update + rank))
        optimizer.minimize(model(x).square().mean())
    return weights(model)


def test_decay_follows_a_parameter_that_was_laid_out_anew_in_memory() -> None:
    usual, late = run_ranks(_late_format, 2, False), run_ranks(_late_format, 2, True)
    torch.testing.assert_close(late[0], usual[0], rtol=0, atol=1e-6)


@quiet
def _clipped(rank: int, limit: float | None) -> Tensor:
    """Rank 0 weighs 3, rank 1 weighs 1; gradients of norm 0.5 on both."""
    model = nn.Linear(8, 8, bias=False)
    nn.init.zeros_(model.weight)
    strategy = {"dgc": True, "dgc_configs": {"sparsity": [0.5], "min_numel": 1, "clip_norm": limit}}
    model, optimizer = pair(strategy, model, lr=1.0, momentum=0.0)  # type: ignore[assignment]
    slope = torch.zeros(8, 8)
    slope[rank, :4] = 0.25
    optimizer.minimize((model.weight * slope).sum(), weight=3.0 - 2.0 * rank)  # type: ignore[union-attr, operator]
    return weights(model)


def test_a_heavy_rank_is_clipped_by_its_own_gradient_and_not_by_what_it_counts_for() -> None:
    """1 / sqrt(2) is above 0.5: nothing is clipped. Half of it, 0.3536, is not: both ranks are, alike."""
    plain, wide, narrow = (run_ranks(_clipped, 2, limit)[0] for limit in (None, 1.0, 0.5))
    torch.testing.assert_close(wide, plain, rtol=0, atol=0)
    torch.testing.assert_close(narrow, plain * (0.5 / 2**0.5 / 0.5), rtol=1e-6, atol=1e-7)


def test_a_model_of_which_nothing_is_compressed_says_so(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    pair({"dgc": True})
    told = capsys.readouterr().out
    assert "largest tensor is `0.weight` (16x12)" in told and 'Lower dgc_configs["min_numel"]' in told


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.never = nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.used(x)
        return found


def _never(rank: int, strategy: dict[str, Any]) -> tuple[bool, bool]:
    model, optimizer = pair(strategy | {"find_unused_parameters": True}, Branches(), weight_decay=0.1)
    before = model.never.weight.detach().clone()  # type: ignore[union-attr]
    for update in range(3):
        step(model, optimizer, update, rank)
    return torch.equal(model.never.weight, before), model.never.weight.grad is None  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("strategy", [DGC, POWERSGD])
def test_a_parameter_that_no_rank_ever_used_stays_as_it_is(strategy: dict[str, Any]) -> None:
    assert run_ranks(_never, 2, strategy) == [(True, True)] * 2


@quiet
def _two_types(rank: int) -> float:
    model = nn.Sequential(nn.Linear(12, 16).double(), nn.Linear(16, 8).bfloat16())
    model, optimizer = pair(POWERSGD, model)
    x = torch.randn(5, 12, dtype=torch.float64)
    return float(optimizer.minimize(model[1](model[0](x).bfloat16()).float().square().mean()).grad_norm)  # type: ignore[index]


def test_norms_are_taken_of_16_bits_beside_float64() -> None:
    assert all(norm > 0 for norm in run_ranks(_two_types, 2))


def test_the_optimizer_inside_is_not_stepped_by_hand(alone: None) -> None:
    model, optimizer = pair(DGC)
    step(model, optimizer, 0)
    with pytest.raises(ConfigError, match="optimizer.update is the SGD that fleet.distribute"):
        optimizer.update.step()


def test_an_update_that_was_skipped_has_sent_nothing_of_what_is_compressed(alone: None) -> None:
    model, optimizer = pair(DGC | {"on_nan_inf": "skip"})
    usual = step(model, optimizer, 0).density
    with pytest.warns(FleetWarning, match="was skipped"):
        skipped = optimizer.minimize(model(torch.full((2, 12), float("nan"))).sum())
    assert skipped.skipped and skipped.density < usual


def _damaged(rank: int, folder: str, saves: bool) -> str:
    model, optimizer = pair({})
    step(model, optimizer, 0, rank)
    if saves:
        torch.rand(rank + 1)  # random states differ, and each rank has a file
        fleet.save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
        return ""
    return raised(lambda: fleet.load_checkpoint(folder, model=model, optimizer=optimizer, new_world_size=True))


def test_another_number_of_ranks_needs_no_tensors_of_ranks_that_are_not_there(tmp_path: Path) -> None:
    run_ranks(_damaged, 2, str(tmp_path), True)
    (file,) = tmp_path.glob("step-*/rank-00001.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert run_ranks(_damaged, 1, str(tmp_path), False) == ["nothing raised"]
