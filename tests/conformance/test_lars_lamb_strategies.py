"""strategy.lars and strategy.lamb on 1, 2 and 4 ranks: one process with the joined batch, whatever is combined with them."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.engine.setup.optimizer_state import check_optimizer_state, optimizer_state
from fleetx.errors import CheckpointError, FleetWarning
from fleetx.optim import Lamb, Lars
from tests.helpers.harness import run_ranks
from tests.helpers.models import batch

both = pytest.mark.parametrize("part", ["lars", "lamb"])
UPDATES = 5
CONFIGS: dict[str, dict[str, Any]] = {
    "lars": {"lars_coeff": 0.02, "lars_weight_decay": 0.01, "epsilon": 1e-9},
    "lamb": {"lamb_weight_decay": 0.02},
}


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3], "lr": 0.2}, {"params": params[3:]}]


def inner(part: str, model: nn.Module) -> torch.optim.Optimizer:
    if part == "lars":
        return torch.optim.SGD(two_groups(model), lr=0.1, momentum=0.8)
    return torch.optim.Adam(two_groups(model), lr=0.1, betas=(0.8, 0.9), eps=1e-4)


def alone(part: str, model: nn.Module) -> torch.optim.Optimizer:
    if part == "lars":
        return Lars(two_groups(model), lr=0.1, momentum=0.8, model=model, **CONFIGS["lars"])
    return Lamb(two_groups(model), lr=0.1, betas=(0.8, 0.9), eps=1e-4, model=model, **CONFIGS["lamb"])


def rate_of(step: int) -> float:
    return 1.0 / (1 + step)


def with_part(part: str, **settings: Any) -> fleet.DistributedStrategy:
    return fleet.DistributedStrategy(**{part: True, f"{part}_configs": CONFIGS[part]}, **settings)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _train(rank: int, size: int, part: str, settings: dict[str, Any], micro_steps: int) -> tuple[Tensor, str]:
    model = net()
    optimizer = inner(part, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of)  # built before: it holds the optimizer that was given
    groups = optimizer.param_groups
    model, ours = fleet.distribute(model, optimizer, with_part(part, **settings))
    assert ours.param_groups is groups and ours.update.param_groups is groups
    for update in range(UPDATES):
        for micro in range(micro_steps):
            x, y = batch(100 * update + 10 * micro + rank, dtype=torch.float64)
            report = ours.minimize(F.cross_entropy(model(x), y))
        assert report.due and report.updated
        scheduler.step()
    assert ours.describe() == ours.update.describe()
    return flat(model), ours.describe()


def joined(size: int, part: str, micro_steps: int, *, max_norm: float | None = None, summed: bool = False) -> tuple[Tensor, str]:
    model = net()
    optimizer = alone(part, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of)
    for update in range(UPDATES):
        parts = [batch(100 * update + 10 * m + r, dtype=torch.float64) for m in range(micro_steps) for r in range(size)]
        x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * (micro_steps if summed else 1)).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
    return flat(model), optimizer.describe()


@pytest.mark.parametrize("size", [1, 2, 4])
@both
def test_ranks_equal_one_process_with_the_joined_batch(part: str, size: int) -> None:
    wanted, description = joined(size, part, 1)
    for ours, told in run_ranks(_train, size, size, part, {}, 1):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
        assert told == description


@both
def test_merged_micro_batches_equal_one_batch(part: str) -> None:
    """Excluded tensors as well, which a forgotten mean would move k times as far: adapted ones would hide it."""
    wanted, _ = joined(2, part, 3)
    merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3}}
    for ours, _ in run_ranks(_train, 2, 2, part, merge, 3):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


@both
def test_summed_micro_batches_equal_a_loss_that_many_times_as_large(part: str) -> None:
    summed, mean = joined(2, part, 3, summed=True)[0], joined(2, part, 3)[0]
    merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3, "avg": False}}
    for ours, _ in run_ranks(_train, 2, 2, part, merge, 3):
        torch.testing.assert_close(ours, summed, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(summed, mean, rtol=1e-6)


@both
def test_the_rule_sees_clipped_gradients(part: str) -> None:
    wanted, _ = joined(2, part, 1, max_norm=0.05)
    for ours, _ in run_ranks(_train, 2, 2, part, {"clip_norm": True, "clip_norm_configs": {"max_norm": 0.05}}, 1):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)  # torch adds 1e-6 to the norm, ours does not
    assert not torch.allclose(wanted, joined(2, part, 1)[0], rtol=1e-3)


# --- float16: true gradients ------------------------------------------------------------------------------------------


def _in_float16(rank: int, part: str, scale: float) -> dict[str, Any]:
    model = net(torch.float32)
    amp = {"dtype": "float16", "init_loss_scaling": scale, "use_dynamic_loss_scaling": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # 16 bits are slow on this CPU
        model, ours = fleet.distribute(model, inner(part, model), with_part(part, amp=True, amp_configs=amp))
    ratios = []
    for step in range(UPDATES):
        x, y = batch(10 * step + rank)
        ours.minimize(F.cross_entropy(model(x), y))
        ratios.append(ours.update.trust_ratios().by_name)
    return {"state": flat(model), "ratios": ratios}


@both
def test_a_loss_scale_does_not_change_ratios_or_weights(part: str) -> None:
    small, large = (run_ranks(_in_float16, 2, part, scale)[0] for scale in (2.0**8, 2.0**15))
    for a, b in zip(small["ratios"], large["ratios"], strict=True):
        assert a == pytest.approx(b, rel=2e-3) and set(a) == {"0.weight", "3.weight"}
    torch.testing.assert_close(small["state"], large["state"], rtol=0, atol=2e-3)


def everything(model: nn.Module, ours: Any) -> list[Tensor]:
    return [t.detach().clone() for t in [*model.state_dict().values(), *(t for s in ours.state.values() for t in s.values())]]


def _overflow(rank: int, part: str) -> list[tuple[bool, bool]]:
    model = net(torch.float32)
    amp = {"dtype": "float16", "decr_every_n_nan_or_inf": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        model, ours = fleet.distribute(model, inner(part, model), with_part(part, amp=True, amp_configs=amp))
    history = []
    for step in range(4):
        x, y = batch(10 * step + rank)
        before = everything(model, ours)
        poison = float("inf") if (step, rank) == (2, 1) else 1.0
        report = ours.minimize(F.cross_entropy(model(x), y) * poison)
        after = everything(model, ours)
        same = len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        history.append((bool(report.skipped), same))
    if part == "lamb":
        assert {float(s["step"]) for s in ours.state.values()} == {3.0}
    return history


@both
def test_an_overflow_on_one_rank_leaves_weights_state_and_counters_to_the_bit_on_all(part: str) -> None:
    for history in run_ranks(_overflow, 2, part):
        assert history == [(False, False), (False, False), (True, True), (False, False)]


# --- state ------------------------------------------------------------------------------------------------------------


def _updates(model: nn.Module, ours: Any, scheduler: Any, rank: int, steps: range) -> None:
    for step in steps:
        x, y = batch(10 * step + rank, dtype=torch.float64)
        ours.minimize(F.cross_entropy(model(x), y))
        scheduler.step()


def _stopped_and_loaded(rank: int, part: str, before: bool) -> tuple[Tensor, Tensor]:
    """By the optimizer's own state dict; the schedulers hold the optimizer that was given, or the one returned."""

    def pair() -> tuple[nn.Module, Any, Any]:
        model = net()
        optimizer = inner(part, model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of) if before else None
        model, ours = fleet.distribute(model, optimizer, with_part(part))
        return model, ours, scheduler or torch.optim.lr_scheduler.LambdaLR(ours, rate_of)

    whole, ours, scheduler = pair()
    _updates(whole, ours, scheduler, rank, range(6))
    model, ours, scheduler = pair()
    _updates(model, ours, scheduler, rank, range(3))
    weights, state, rates = copy.deepcopy((model.state_dict(), ours.state_dict(), scheduler.state_dict()))
    resumed, ours, scheduler = pair()
    resumed.load_state_dict(weights)
    ours.load_state_dict(state)
    scheduler.load_state_dict(rates)
    _updates(resumed, ours, scheduler, rank, range(3, 6))
    return flat(resumed), flat(whole)


@pytest.mark.parametrize("before", [True, False])
@both
def test_loading_the_optimizers_state_continues_to_the_bit_and_schedulers_go_on_acting(part: str, before: bool) -> None:
    for resumed, whole in run_ranks(_stopped_and_loaded, 2, part, before):
        torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def _checkpointed_in_bfloat16(rank: int, part: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], set[torch.dtype]]:
    def pair() -> tuple[nn.Module, Any]:
        model = net(torch.bfloat16)
        return fleet.distribute(model, inner(part, model), with_part(part))

    def updates(model: nn.Module, ours: Any, steps: range) -> dict[str, Tensor]:
        for step in steps:
            x, y = batch(10 * step + rank, dtype=torch.bfloat16)
            ours.minimize(F.cross_entropy(model(x).float(), y))
        return {n: ours.state[p]["master"].clone() for n, p in model.named_parameters()}

    whole = updates(*pair(), range(6))
    model, ours = pair()
    updates(model, ours, range(3))
    fleet.save_checkpoint(folder, step=3, model=model, optimizer=ours)
    model, ours = pair()
    assert fleet.load_checkpoint(folder, model=model, optimizer=ours) is not None
    resumed = updates(model, ours, range(3, 6))
    return resumed, whole, {p.dtype for p in model.parameters()}


@both
def test_a_checkpoint_of_16_bit_parameters_keeps_their_float32_copies_to_the_bit(part: str, tmp_path: Path) -> None:
    ranks = run_ranks(_checkpointed_in_bfloat16, 2, part, str(tmp_path))
    for resumed, whole, dtypes in ranks:
        assert dtypes == {torch.bfloat16} and {t.dtype for t in resumed.values()} == {torch.float32}
        for name, master in resumed.items():
            torch.testing.assert_close(master, whole[name], rtol=0, atol=0)
            torch.testing.assert_close(master, ranks[0][0][name], rtol=0, atol=0)


OTHER_SETTINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "coefficient": ("lars", {"lars_coeff": 0.01}, "lars_coeff 0.02 in group 0, this one 0.01; lars_coeff 0.02 in group 1"),
    "decay of lars": ("lars", {"lars_weight_decay": 0.5}, "lars_weight_decay 0.01 in group 0, this one 0.5"),
    "epsilon": ("lars", {"epsilon": 0.25}, "epsilon 1e-09 in group 0, this one 0.25"),
    "decay of lamb": ("lamb", {"lamb_weight_decay": 0.5}, "lamb_weight_decay 0.02 in group 0, this one 0.5"),
    "adapted": ("lamb", {"always_adapt": True}, "always_adapt False in group 0, this one True"),
    "excluded": (
        "lars", {"exclude_from_weight_decay": ["norm"]}, "decay=False for 0.bias, this one True; adapt=False for 0.bias",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", OTHER_SETTINGS)
def test_a_checkpoint_of_a_rule_with_other_settings_is_refused_and_nothing_is_changed(case: str, tmp_path: Path) -> None:
    part, changed, told = OTHER_SETTINGS[case]
    model = net()
    model, ours = fleet.distribute(model, inner(part, model), with_part(part))
    _updates(model, ours, torch.optim.lr_scheduler.LambdaLR(ours, rate_of), 0, range(2))
    fleet.save_checkpoint(tmp_path, step=2, model=model, optimizer=ours)
    del ours
    model = net()
    strategy = fleet.DistributedStrategy(**{part: True, f"{part}_configs": {**CONFIGS[part], **changed}})
    model, ours = fleet.distribute(model, inner(part, model), strategy)
    before, groups = flat(model), copy.deepcopy(ours.state_dict()["param_groups"])
    with pytest.raises(CheckpointError, match=f"{told}.*leave the optimizer out of fleet.load_checkpoint"):
        fleet.load_checkpoint(tmp_path, model=model, optimizer=ours)
    torch.testing.assert_close(flat(model), before, rtol=0, atol=0)
    assert ours.state_dict()["param_groups"] == groups and not ours.state
    with pytest.warns(FleetWarning, match="also holds optimizer"):
        fleet.load_checkpoint(tmp_path, model=model)


@pytest.mark.usefixtures("alone")
@both
def test_rate_and_momentum_come_from_the_checkpoint_as_torch_does_it(part: str, tmp_path: Path) -> None:
    model = net()
    model, ours = fleet.distribute(model, inner(part, model), with_part(part))
    fleet.save_checkpoint(tmp_path, step=0, model=model, optimizer=ours)
    saved = ours.state_dict()["param_groups"]
    del ours
    model = net()
    given = inner(part, model)
    key, value = ("momentum", 0.5) if part == "lars" else ("betas", (0.5, 0.5))
    for group in given.param_groups:
        group["lr"], group[key] = 0.7, value
    model, ours = fleet.distribute(model, given, with_part(part))
    fleet.load_checkpoint(tmp_path, model=model, optimizer=ours)
    assert [(g["lr"], g[key]) for g in given.param_groups] == [(g["lr"], g[key]) for g in saved]


@pytest.mark.usefixtures("alone")
@both
def test_a_checkpoint_that_says_nothing_of_flags_is_taken(part: str) -> None:
    """As an older version wrote them."""
    optimizer = alone(part, net())
    state = optimizer_state(optimizer)
    assert set(state.pop("flags")) == {name for name, _ in net().named_parameters()}
    check_optimizer_state(optimizer, state)
