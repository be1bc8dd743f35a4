"""Guards compressors at the edges: unused parameters, other memory layouts, mixed types, skipped updates, nothing to compress."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx.errors import ConfigError, FleetWarning
from tests.helpers.compressed_pairs import DGC, POWERSGD, pair, step, weights
from tests.helpers.harness import run_ranks


def quiet(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch says that a gradient lies otherwise than its parameter, and we that all ranks have the same batch. Both are true."""

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fn(*args)

    return run


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


def test_decay_follows_a_parameter_that_was_laid_out_again_in_memory() -> None:
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
