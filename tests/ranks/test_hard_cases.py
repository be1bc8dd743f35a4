"""Cases that went wrong once, or would silently: each kept by a test."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch, cnn, mlp


def _sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


class Branching(nn.Module):
    """BatchNorm between layers, and a branch that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.norm, self.leave = nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 4)
        self.branch = nn.Linear(4, 4)

    def forward(self, x: Tensor, use_branch: bool) -> Tensor:
        out: Tensor = self.leave(self.norm(self.enter(x)))
        return self.branch(out) if use_branch else out


def _sync_norm_and_unused(rank: int, allowed: bool) -> Any:
    model = Branching()
    strategy = fleet.DistributedStrategy(sync_batch_norm=True, find_unused_parameters=allowed, fuse_grad_size_in_MB=0.001)
    model, optimizer = fleet.distribute(model, _sgd(model), strategy)
    if not allowed:
        return raised(lambda: optimizer.minimize(F.cross_entropy(model(batch(rank)[0], rank == 0), batch(rank)[1])))
    for step in range(4):
        x, y = batch(2 * step + rank)
        optimizer.minimize(F.cross_entropy(model(x, rank == 0), y))
    return torch.cat([t.detach().double().flatten() for t in model.state_dict().values()])


def test_synchronised_norm_beside_a_parameter_one_rank_does_not_use() -> None:
    """Its collectives lie inside backward; a bucket started early on one rank and late on another must not meet them."""
    first, second = run_ranks(_sync_norm_and_unused, 2, True)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    for message in run_ranks(_sync_norm_and_unused, 2, False):
        assert "rank 1: `branch." in message


def _own_forward(rank: int) -> str:
    class NormAct(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    model = nn.Sequential(nn.Linear(8, 4), NormAct(4))
    return raised(lambda: fleet.distribute(model, _sgd(model), fleet.DistributedStrategy(sync_batch_norm=True)))


def test_a_norm_layer_with_a_forward_of_its_own_is_refused_by_name() -> None:
    for message in run_ranks(_own_forward, 2):
        assert "sync_batch_norm cannot take over `1`: NormAct has a forward of its own" in message


class RunningMax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("largest", torch.tensor([float("-inf")]))

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.max()))
        out: Tensor = self.linear(x)
        return out


def _running_max(rank: int) -> float:
    warnings.filterwarnings("ignore", message="the ranks have changed these buffers differently")
    model = RunningMax()
    model, optimizer = fleet.distribute(model, _sgd(model))
    for step in range(3):
        x, y = batch(2 * step + rank)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return model.largest.item()


def test_a_buffer_that_starts_at_minus_infinity_becomes_finite_and_equal() -> None:
    first, second = run_ranks(_running_max, 2)
    assert first == second and 0 < first < 10


def _clamped(rank: int, k_steps: int) -> Tensor:
    model = nn.Linear(2, 1, bias=False)
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": k_steps})
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0), strategy)
    model.weight.register_hook(lambda g: g.clamp(-0.5, 0.5))
    for micro in range(k_steps):
        optimizer.backward(model(torch.tensor([[3.0 + rank + micro, -0.25]])).sum())
    assert model.weight.grad is not None
    return model.weight.grad.clone()


@pytest.mark.parametrize("k_steps", [1, 3])
def test_the_users_gradient_hooks_see_each_ranks_own_gradient(k_steps: int) -> None:
    for grad in run_ranks(_clamped, 2, k_steps):
        torch.testing.assert_close(grad, torch.tensor([[0.5, -0.25]]))


def _zeroed_in_window(rank: int) -> str:
    model = mlp()
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    model, optimizer = fleet.distribute(model, _sgd(model), strategy)
    optimizer.minimize(F.cross_entropy(model(batch(rank)[0]), batch(rank)[1]))
    model.zero_grad(set_to_none=False)
    return raised(lambda: optimizer.minimize(F.cross_entropy(model(batch(9 + rank)[0]), batch(rank)[1])))


def test_gradients_zeroed_in_place_inside_a_window_are_not_lost_silently() -> None:
    for message in run_ranks(_zeroed_in_window, 2):
        assert "inside a merge window" in message and "optimizer.zero_grad()" in message


def _heavy_weights(rank: int, weight: float) -> int:
    model = mlp()
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "float16", "decr_every_n_nan_or_inf": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        model, optimizer = fleet.distribute(model, _sgd(model, 0.01), strategy)
    skipped = 0
    for step in range(12):
        x, y = batch(2 * step + rank)
        skipped += optimizer.minimize(F.cross_entropy(model(x), y), weight=weight).skipped
    return skipped


def test_large_weights_do_not_overflow_float16_beyond_the_first_update() -> None:
    assert max(run_ranks(_heavy_weights, 2, 4e6)) <= 1


def _other_settings(rank: int, what: str) -> str:
    model = mlp()
    if what == "frozen":
        model.register_parameter("extra", nn.Parameter(torch.zeros(2 + rank), requires_grad=False))
    return raised(lambda: fleet.distribute(model, _sgd(model, 0.1 * (1 + rank) if what == "lr" else 0.1)))


@pytest.mark.parametrize(("what", "named"), [("frozen", "extra (3,)"), ("lr", "lr=0.2")])
def test_ranks_that_differ_in_what_would_drive_them_apart_are_told(what: str, named: str) -> None:
    for message in run_ranks(_other_settings, 2, what):
        assert "ConfigError" in message and named in message


def _uneven_flush(rank: int) -> str:
    model = mlp()
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 4})
    model, optimizer = fleet.distribute(model, _sgd(model), strategy)
    if rank == 0:
        optimizer.minimize(F.cross_entropy(model(batch(0)[0]), batch(0)[1]))
    return raised(optimizer.flush)


def test_a_flush_of_windows_of_which_one_is_empty_is_an_error_on_every_rank() -> None:
    for message in run_ranks(_uneven_flush, 2):
        assert "optimizer.flush() found [1, 0] micro-batches" in message


def test_autocast_ends_with_the_pair_that_asked_for_it(alone: None) -> None:
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        model, optimizer = fleet.distribute(model, _sgd(model), fleet.DistributedStrategy(amp=True))
    with fleet.autocast():
        assert torch.is_autocast_enabled("cpu")
    del optimizer
    model, _ = fleet.distribute(model, _sgd(model))
    with fleet.autocast():
        assert not torch.is_autocast_enabled("cpu")
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    model(batch(0)[0])
    assert seen == [torch.float32], "the patch of the pair before is gone too"


def test_a_loss_of_another_pair_and_a_wrong_weight_are_refused(alone: None) -> None:
    one, other = mlp(), cnn()
    one, first = fleet.distribute(one, _sgd(one))
    other, _ = fleet.distribute(other, _sgd(other))
    x, y = batch(0, shape=(1, 6, 6))
    assert "depends on no parameter of this optimizer" in raised(lambda: first.minimize(F.cross_entropy(other(x), y)))
    first.zero_grad()
    loss = F.cross_entropy(one(batch(0)[0]), batch(0)[1])
    assert "weight is 'many'" in raised(lambda: first.minimize(loss, weight="many"))  # type: ignore[arg-type]
    assert "before .item()" in raised(lambda: first.minimize(loss.item()))  # type: ignore[arg-type]


def test_a_lazy_module_is_refused_with_what_to_do(alone: None) -> None:
    model = nn.LazyLinear(3)
    assert "Run one batch through the model" in raised(lambda: fleet.distribute(model, _sgd(model)))


def test_settings_are_not_attributes() -> None:
    strategy = fleet.DistributedStrategy()
    with pytest.raises(ValueError, match=r'strategy.gradient_merge_configs\["k_steps"\] = 4'):
        strategy.gradient_merge_configs.k_steps = 4
