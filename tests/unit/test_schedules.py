"""Schedules against closed forms in numpy, against torch's own where they agree, and through checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, PolynomialLR, SequentialLR

from fleetx import fleet
from fleetx.errors import ConfigError
from fleetx.optim.schedules import (
    Cosine,
    Polynomial,
    Warmup,
    linear_scaled_lr,
    noise_scaled_lr,
    sqrt_scaled_lr,
    warmup_factor,
)

NAN, INF = float("nan"), float("inf")
CLOSE = {"rtol": 1e-13, "atol": 1e-15}
"""A few roundings in float64."""


def _optimizer(*lrs: Any) -> torch.optim.SGD:
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": lr} for lr in lrs or (0.8,)]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9)


def _rates(optimizer: torch.optim.Optimizer, schedule: LRScheduler, updates: int) -> np.ndarray:
    """The rate of each group in updates 0 .. updates - 1: a row per update."""
    rows = []
    for _ in range(updates):
        rows.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return np.array(rows)


def _numpy_decay(
    lr: float, *, total: int, warmup: int, end: float, left: Callable[[np.ndarray], np.ndarray], updates: int
) -> Any:
    t = np.arange(updates)
    p = np.clip((t - warmup) / (total - warmup), 0.0, 1.0)
    return np.where(t < warmup, lr * (t + 1) / (warmup + 1), end + (lr - end) * left(p))


# --- scaling ----------------------------------------------------------------------------------------------------------


def test_a_32_times_larger_batch_takes_32_times_the_rate_or_its_root() -> None:
    assert linear_scaled_lr(0.1, batch=8192, reference_batch=256) == pytest.approx(3.2, rel=1e-15)
    assert sqrt_scaled_lr(0.1, batch=4096, reference_batch=256) == pytest.approx(0.4, rel=1e-15)
    assert linear_scaled_lr(0.1, batch=256, reference_batch=256) == sqrt_scaled_lr(0.1, batch=256, reference_batch=256) == 0.1


def test_the_noise_scaled_rate_is_linear_far_below_the_noise_scale_and_level_far_above() -> None:
    assert noise_scaled_lr(0.1, batch=512, reference_batch=256, noise_scale=1e12) == pytest.approx(0.2, rel=1e-8)
    assert noise_scaled_lr(0.1, batch=512, reference_batch=256, noise_scale=0) == 0.1
    # At a batch of the noise scale, from a reference of a quarter: (1 + 4) / (1 + 1).
    assert noise_scaled_lr(0.1, batch=1024, reference_batch=256, noise_scale=1024) == pytest.approx(0.25, rel=1e-15)


@pytest.mark.parametrize("scale", [linear_scaled_lr, sqrt_scaled_lr])
@pytest.mark.parametrize("bad", [0, -1, NAN, INF, True, "256", None])
def test_a_batch_or_rate_that_is_no_positive_number_is_refused(scale: Any, bad: Any) -> None:
    with pytest.raises(ConfigError, match="lr is .* a finite number above 0"):
        scale(bad, batch=2, reference_batch=1)
    with pytest.raises(ConfigError, match="batch is .* a finite number above 0"):
        scale(0.1, batch=bad, reference_batch=1)
    with pytest.raises(ConfigError, match="reference_batch is .* a finite number above 0"):
        scale(0.1, batch=2, reference_batch=bad)


# --- of the update index ----------------------------------------------------------------------------------------------


def test_a_warm_up_over_three_updates_takes_quarters_and_the_fourth_update_is_at_the_full_rate() -> None:
    assert [warmup_factor(t, warmup_steps=3) for t in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [warmup_factor(t, warmup_steps=2, start_factor=0.5) for t in range(4)] == [0.5, 0.75, 1.0, 1.0]
    assert [warmup_factor(t, warmup_steps=2, start_factor=0.0) for t in range(3)] == [0.0, 0.5, 1.0]
    assert [warmup_factor(t, warmup_steps=0) for t in range(2)] == [1.0, 1.0]


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.0])
def test_polynomial_is_its_closed_form_for_each_group_and_stays_at_the_end_value(power: float) -> None:
    optimizer = _optimizer(0.8, 0.05)
    schedule = Polynomial(optimizer, total_steps=30, warmup_steps=7, power=power, end_lr=0.01)
    seen = _rates(optimizer, schedule, 40)
    for column, lr in enumerate((0.8, 0.05)):
        wanted = _numpy_decay(lr, total=30, warmup=7, end=0.01, left=lambda p: (1 - p) ** power, updates=40)
        np.testing.assert_allclose(seen[:, column], wanted, **CLOSE)
    assert seen[7].tolist() == [0.8, 0.05]
    assert seen[30:].ravel().tolist() == [0.01] * 20


def test_cosine_is_its_closed_form_for_each_group_and_stays_at_the_end_value() -> None:
    optimizer = _optimizer(0.8, 0.05)
    seen = _rates(optimizer, Cosine(optimizer, total_steps=30, warmup_steps=7, end_lr=0.01), 40)
    for column, lr in enumerate((0.8, 0.05)):
        wanted = _numpy_decay(lr, total=30, warmup=7, end=0.01, left=lambda p: (1 + np.cos(np.pi * p)) / 2, updates=40)
        np.testing.assert_allclose(seen[:, column], wanted, **CLOSE)
    assert seen[30:].ravel().tolist() == [0.01] * 20


def test_the_default_power_is_two_and_the_default_end_is_zero() -> None:
    optimizer = _optimizer(1.0)
    assert _rates(optimizer, Polynomial(optimizer, total_steps=4), 6).ravel().tolist() == [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]


def test_a_warm_up_alone_stays_at_the_rate() -> None:
    optimizer = _optimizer(1.0)
    assert _rates(optimizer, Warmup(optimizer, warmup_steps=3), 6).ravel().tolist() == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


# --- torch's own ------------------------------------------------------------------------------------------------------

PEERS: list[tuple[Callable[[Any], LRScheduler], Callable[[Any], LRScheduler]]] = [
    (lambda o: Cosine(o, total_steps=20, end_lr=0.01), lambda o: CosineAnnealingLR(o, T_max=20, eta_min=0.01)),
    (lambda o: Polynomial(o, total_steps=20), lambda o: PolynomialLR(o, total_iters=20, power=2.0)),
    (lambda o: Polynomial(o, total_steps=20, power=1.0), lambda o: PolynomialLR(o, total_iters=20, power=1.0)),
    (
        lambda o: Warmup(o, warmup_steps=6, start_factor=0.2),
        lambda o: LinearLR(o, start_factor=0.2, total_iters=6),
    ),
    (
        lambda o: Cosine(o, total_steps=20, warmup_steps=5, start_factor=0.2),
        lambda o: SequentialLR(o, [LinearLR(o, start_factor=0.2, total_iters=5), CosineAnnealingLR(o, T_max=15)], [5]),
    ),
]


@pytest.mark.parametrize("pair", range(len(PEERS)))
def test_torch_s_own_scheduler_gives_the_same_rates_up_to_the_rounding_of_its_recurrence(pair: int) -> None:
    ours, theirs = PEERS[pair]
    mine, other = _optimizer(0.8, 0.05), _optimizer(0.8, 0.05)
    np.testing.assert_allclose(_rates(mine, ours(mine), 20), _rates(other, theirs(other), 20), rtol=1e-12, atol=1e-15)


def test_our_schedules_can_follow_each_other_in_torch_s_sequence() -> None:
    optimizer = _optimizer(1.0)
    sequence = SequentialLR(optimizer, [Warmup(optimizer, warmup_steps=1), Polynomial(optimizer, total_steps=2, power=1.0)], [2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch's own use of step(epoch)
        assert _rates(optimizer, sequence, 5).ravel().tolist() == [0.5, 1.0, 1.0, 0.5, 0.0]


# --- optimizers -------------------------------------------------------------------------------------------------------


def test_a_tensor_rate_is_filled_in_place_and_keeps_its_full_value_aside() -> None:
    rate = torch.tensor(0.8, dtype=torch.float64)
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2))], lr=rate)
    schedule = Polynomial(optimizer, total_steps=4, warmup_steps=1, end_lr=0.1)
    held = optimizer.param_groups[0]["lr"]
    seen = _rates(optimizer, schedule, 6).ravel()
    assert optimizer.param_groups[0]["lr"] is held
    wanted = _numpy_decay(0.8, total=4, warmup=1, end=0.1, left=lambda p: (1 - p) ** 2, updates=6)
    np.testing.assert_allclose(seen, wanted, **CLOSE)


@pytest.mark.usefixtures("alone")
def test_a_distributed_optimizer_follows_the_schedule_by_its_updates_and_resumes_to_the_bit(tmp_path: Path) -> None:
    def start() -> tuple[nn.Module, Any, Polynomial]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}]
        strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
        model, optimizer = fleet.distribute(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9), strategy)
        return model, optimizer, Polynomial(optimizer, total_steps=9, warmup_steps=3, end_lr=0.001)

    def train(model: nn.Module, optimizer: Any, schedule: Polynomial, first: int, last: int) -> list[list[float]]:
        rates = []
        for index in range(first, last):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(index))
            report = optimizer.minimize(model(x).square().mean())
            if report.due:
                rates.append([group["lr"] for group in optimizer.param_groups])
                schedule.step()
        return rates

    whole = start()
    rates = train(*whole, 0, 24)
    for column, lr in enumerate((0.1, 0.02)):
        wanted = _numpy_decay(lr, total=9, warmup=3, end=0.001, left=lambda p: (1 - p) ** 2, updates=12)
        np.testing.assert_allclose(np.array(rates)[:, column], wanted, **CLOSE)

    first = start()
    before = train(*first, 0, 9)
    objects = dict(zip(("model", "optimizer", "schedule"), first, strict=True))
    fleet.save_checkpoint(tmp_path, step=9, **objects)
    again = start()
    fleet.load_checkpoint(tmp_path, **dict(zip(objects, again, strict=True)))
    assert before + train(*again, 9, 24) == rates
    assert again[2].state_dict() == whole[2].state_dict()
    torch.testing.assert_close(again[0].state_dict(), whole[0].state_dict(), rtol=0, atol=0)


def test_the_state_is_plain_numbers_and_another_schedule_than_the_saved_one_is_refused() -> None:
    optimizer = _optimizer()
    saved = Polynomial(optimizer, total_steps=10, warmup_steps=2).state_dict()
    assert all(isinstance(value, (int, float, bool, str, list, type(None))) for value in saved.values())
    other = Polynomial(_optimizer(), total_steps=20, warmup_steps=2)
    with pytest.raises(ConfigError, match="the saved schedule has total_steps=10, this Polynomial 20. Build it as it was saved"):
        other.load_state_dict(saved)
    assert other.total_steps == 20
    with pytest.raises(ConfigError, match="the saved schedule has kind='Cosine', this Polynomial 'Polynomial'"):
        other.load_state_dict(Cosine(_optimizer(), total_steps=20, warmup_steps=2).state_dict())
    with pytest.raises(ConfigError, match="the saved schedule has kind='Polynomial'"):
        Cosine(_optimizer(), total_steps=10, warmup_steps=2).load_state_dict(saved)


def test_last_epoch_goes_on_with_a_new_schedule_where_the_old_one_stopped() -> None:
    optimizer = _optimizer(1.0)
    _rates(optimizer, Polynomial(optimizer, total_steps=4), 2)
    longer = Polynomial(optimizer, total_steps=8, last_epoch=1)
    assert optimizer.param_groups[0]["lr"] == (1 - 2 / 8) ** 2
    assert longer.last_epoch == 2


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"total_steps": 0}, "total_steps is 0; it must be an integer of at least 1"),
        ({"total_steps": True}, "total_steps is True"),
        ({"total_steps": 10.0}, "total_steps is 10.0; it must be an integer"),
        ({"total_steps": 10, "warmup_steps": 11}, "warmup_steps is 11, total_steps is 10; the warm-up is a part of the total"),
        (
            {"total_steps": 10, "warmup_steps": 10},
            "warmup_steps is 10, total_steps is 10; the warm-up is a part of the total, and updates",
        ),
        ({"total_steps": 10, "warmup_steps": -1}, "warmup_steps is -1; it must be an integer of at least 0"),
        ({"total_steps": 10, "power": 0}, "power is 0; it must be a finite number above 0"),
        ({"total_steps": 10, "power": NAN}, "power is nan"),
        ({"total_steps": 10, "end_lr": -0.1}, "end_lr is -0.1; it must be a finite number at least 0"),
        ({"total_steps": 10, "end_lr": NAN}, "end_lr is nan"),
        ({"total_steps": 10, "end_lr": 0.9}, "end_lr is 0.9, and group 0 has the rate 0.8; a decay ends at or below"),
        ({"total_steps": 10, "warmup_steps": 2, "start_factor": 1.5}, "start_factor is 1.5; it must be None or a finite number"),
        ({"total_steps": 10, "warmup_steps": 2, "start_factor": False}, "start_factor is False"),
        ({"total_steps": 10, "last_epoch": -2}, "last_epoch is -2"),
    ],
)
def test_a_setting_that_makes_no_schedule_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        Polynomial(_optimizer(), **settings)


def test_something_that_is_no_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="Cosine was given Linear; it takes a torch"):
        Cosine(nn.Linear(1, 1), total_steps=3)  # type: ignore[arg-type]


def test_pi_s_half_way_is_half_the_rate() -> None:
    optimizer = _optimizer(1.0)
    schedule = Cosine(optimizer, total_steps=4)
    assert schedule.lr_at(2, 1.0) == pytest.approx(0.5, abs=1e-15)
    assert schedule.lr_at(1, 1.0) == pytest.approx((1 + math.sqrt(0.5)) / 2, abs=1e-15)
