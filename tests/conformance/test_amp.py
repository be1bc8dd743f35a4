"""Mixed precision: what autocast covers, and a float16 loss scale that agrees on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.harness import run_ranks
from tests.helpers.models import batch, mlp

pytestmark = pytest.mark.filterwarnings("ignore::fleetx.errors.FleetWarning")


def _amp(**configs: Any) -> fleet.DistributedStrategy:
    return fleet.DistributedStrategy(amp=True, amp_configs=configs)


def _distribute(model: nn.Module, strategy: fleet.DistributedStrategy, lr: float = 0.1) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # 16-bit arithmetic is slow on most CPUs, and says so
        return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), strategy)


class Watcher(nn.Module):
    """Notes the type its linear layer computes in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 4)
        self.head = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.linear(x)
        self.seen.append(hidden.dtype)
        return {"logits": self.head(hidden)}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.seen.append(hidden.dtype)
        with torch.autocast("cpu", enabled=False):
            return F.cross_entropy(self.head(hidden.float()), y)


def test_the_forward_runs_in_16_bits_and_its_outputs_come_back_as_float32(alone: None) -> None:
    model, _ = _distribute(Watcher(), _amp(dtype="bfloat16"))
    out = model(batch(0)[0])
    assert model.seen == [torch.bfloat16]
    assert out["logits"].dtype == torch.float32


def test_fleet_autocast_extends_over_the_users_loss(alone: None) -> None:
    model, _ = _distribute(Watcher(), _amp(dtype="bfloat16"))
    with fleet.autocast():
        assert model(batch(0)[0])["logits"].dtype == torch.bfloat16
    assert torch.is_autocast_enabled("cpu") is False


def test_a_loss_method_that_never_calls_forward_still_computes_its_layers_in_16_bits(alone: None) -> None:
    model = Watcher()
    kept: list[torch.dtype] = []
    original = model.linear.forward
    model.linear.forward = lambda x: (kept.append(F.linear(x, model.linear.weight).dtype), original(x))[1]  # type: ignore[method-assign]
    model, optimizer = _distribute(model, _amp(dtype="bfloat16"))
    optimizer.minimize(model.loss(*batch(0)))
    assert kept == [torch.bfloat16]
    assert model.seen == [torch.float32], "each outermost call gives float32 back"


def test_a_stretch_the_model_itself_keeps_in_float32_stays_so(alone: None) -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                out: Tensor = self.inner(x)
            assert out.dtype == torch.float32
            return out

    model, _ = _distribute(Careful(), _amp(dtype="bfloat16"))
    assert model(batch(0)[0]).dtype == torch.float32


def test_black_listed_modules_compute_in_float32(alone: None) -> None:
    model = mlp()
    seen: list[torch.dtype] = []
    model[2].register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    model, _ = _distribute(model, _amp(dtype="bfloat16", custom_black_list=["2"]))
    model(batch(0)[0])
    assert seen == [torch.float32]


def test_a_black_list_entry_that_matches_nothing_is_an_error(alone: None) -> None:
    with pytest.raises(ValueError, match=r"names `Linea`; no module or class has that name. Did you mean `Linear`"):
        _distribute(mlp(), _amp(dtype="bfloat16", custom_black_list=["Linea"]))


def test_slow_16_bit_arithmetic_is_warned_of_with_the_ratio(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetx.strategies.amp.slowdown", lambda device, dtype: 11.5)
    with pytest.warns(FleetWarning, match="bfloat16 takes 11.5 times as long as float32 on this cpu"):
        model = mlp()
        fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), _amp(dtype="bfloat16"))


def _train(rank: int, configs: dict[str, Any] | None, steps: int, poison: tuple[int, int] | None) -> dict[str, Any]:
    model = mlp()
    strategy = fleet.DistributedStrategy() if configs is None else _amp(**configs)
    model, optimizer = _distribute(model, strategy)
    history = []
    for step in range(steps):
        before = [p.detach().clone() for p in model.parameters()]
        x, y = batch(10 * step + rank)
        loss = F.cross_entropy(model(x), y)
        if poison == (step, rank):
            loss = loss * float("inf")
        report = optimizer.minimize(loss)
        moved = any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        history.append((report.due, report.updated, report.skipped, report.loss_scale, moved))
    momentum = [s["momentum_buffer"].clone() for s in optimizer.state.values()]
    return {"params": torch.cat([p.detach().flatten() for p in model.parameters()]), "history": history, "momentum": momentum}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_training_in_16_bits_stays_near_float32_and_equal_on_all_ranks(dtype: str) -> None:
    exact = run_ranks(_train, 2, None, 10, None)
    ours = run_ranks(_train, 2, {"dtype": dtype}, 10, None)
    torch.testing.assert_close(ours[0]["params"], ours[1]["params"], rtol=0, atol=0)
    torch.testing.assert_close(ours[0]["params"], exact[0]["params"], rtol=0, atol=2e-2)
    assert not torch.equal(ours[0]["params"], exact[0]["params"])


def test_an_overflow_on_one_rank_skips_the_update_on_all_and_shrinks_every_scale() -> None:
    configs = {"dtype": "float16", "init_loss_scaling": 1024.0, "decr_every_n_nan_or_inf": 1, "incr_every_n_steps": 3}
    ranks = run_ranks(_train, 2, configs, 8, (2, 1))
    for rank in ranks:
        # due, updated, skipped, the scale this window used, whether a parameter moved
        assert rank["history"][2] == (True, False, True, 1024.0, False)
        assert [h[3] for h in rank["history"]] == [1024.0, 1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0]
        assert all(h[1] and h[4] for i, h in enumerate(rank["history"]) if i != 2)
        assert bool(rank["params"].isfinite().all()) and all(bool(m.isfinite().all()) for m in rank["momentum"])
    torch.testing.assert_close(ranks[0]["params"], ranks[1]["params"], rtol=0, atol=0)


def _scaled_merge(rank: int, scale: float) -> Tensor:
    model = mlp()
    strategy = _amp(dtype="float16", init_loss_scaling=scale, use_dynamic_loss_scaling=False)
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 2}
    strategy.clip_norm = True
    strategy.clip_norm_configs = {"max_norm": 0.5}
    model, optimizer = _distribute(model, strategy)
    norms = []
    for micro in range(4):
        x, y = batch(10 * micro + rank)
        report = optimizer.minimize(F.cross_entropy(model(x), y))
        norms.append(report.grad_norm)
    assert norms[0] is None and norms[1] is not None
    return torch.cat([*[p.detach().flatten() for p in model.parameters()], torch.tensor([norms[1], norms[3]])])


def test_clipping_and_merging_see_true_gradients_whatever_the_scale() -> None:
    small, large = run_ranks(_scaled_merge, 2, 64.0), run_ranks(_scaled_merge, 2, 4096.0)
    torch.testing.assert_close(small[0], large[0], rtol=1e-3, atol=1e-4)
