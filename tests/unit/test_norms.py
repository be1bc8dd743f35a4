"""An optimizer that asks is given each gradient's norm where it was taken anyway; and the report shows its trust ratios."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.engine.buckets import global_norm, joined, norms_of

pytestmark = pytest.mark.usefixtures("alone")


class Recording(torch.optim.SGD):
    """Keeps what it is given, and what its gradients really are when it steps."""

    wants_gradient_norms = True

    def __init__(self, params: Any, lr: float = 0.0) -> None:
        super().__init__(params, lr=lr)
        self.given: dict[int, float] | None = None
        self.seen: list[dict[int, float] | None] = []
        self.real: list[dict[int, float]] = []

    def take_gradient_norms(self, params: Sequence[Tensor], norms: Sequence[Tensor]) -> None:
        assert all(norm.dim() == 0 for norm in norms)
        self.given = {id(param): float(norm) for param, norm in zip(params, norms, strict=True)}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.real.append({id(p): float(p.grad.double().norm()) for p in params})
        self.seen.append(self.given)
        self.given = None
        super().step()


class Silent(Recording):
    wants_gradient_norms = False


def _model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def _distributed(kind: type[Recording] = Recording, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Any, Any, Any]:
    model = _model(dtype)
    recording = kind(model.parameters())
    model, optimizer = fleet.distribute(model, recording, fleet.DistributedStrategy(fuse_grad_size_in_MB=0.0001, **settings))
    return model, optimizer, recording


def _loss(model: nn.Module, index: int = 0) -> Tensor:
    dtype = next(model.parameters()).dtype
    return 10 * model(torch.randn(4, 6, generator=torch.Generator().manual_seed(index)).to(dtype)).float().square().mean()


def _assert_given(recording: Recording, *, rel: float = 1e-6) -> None:
    assert recording.seen[-1] == pytest.approx(recording.real[-1], rel=rel)
    assert recording.real[-1]


# --- the maths --------------------------------------------------------------------------------------------------------


def test_the_norm_of_all_is_joined_from_the_norms_of_each() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([12.0])]
    assert [float(norm) for norm in norms_of(tensors)] == [5.0, 12.0]
    assert float(joined(norms_of(tensors))) == float(global_norm(tensors)) == 13.0


def test_16_bit_gradients_are_summed_in_float32() -> None:
    (norm,) = norms_of([torch.full((4,), 60000.0, dtype=torch.float16)])
    assert (norm.dtype, float(norm)) == (torch.float32, 120000.0)


# --- handed over ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"clip_norm": True}, {"clip_norm": True, "on_nan_inf": "off"}, {"find_unused_parameters": True}]
)
def test_minimize_hands_over_the_norms_of_what_the_update_sees(settings: dict[str, Any]) -> None:
    model, optimizer, recording = _distributed(**settings)
    for index in range(3):
        report = optimizer.minimize(_loss(model, index))
        _assert_given(recording)
        total = sum(norm**2 for norm in recording.real[-1].values()) ** 0.5
        if "clip_norm" in settings:
            assert report.grad_norm > 1.0 and total == pytest.approx(1.0, rel=1e-5)
        else:
            assert report.grad_norm == pytest.approx(total, rel=1e-6)


def test_bfloat16_gradients_have_float32_norms_scaled_by_the_rounded_clip_factor() -> None:
    model, optimizer, recording = _distributed(dtype=torch.bfloat16, clip_norm=True)
    optimizer.minimize(_loss(model))
    _assert_given(recording, rel=2e-3)  # each clipped number is rounded to eight bits, and the errors average out


def test_a_parameter_that_no_rank_used_has_no_gradient_and_no_norm() -> None:
    model, optimizer, recording = _distributed(find_unused_parameters=True)
    optimizer.minimize(model[0](torch.ones(1, 6)).square().sum())
    _assert_given(recording)
    assert set(recording.seen[-1] or {}) == {id(p) for p in model[0].parameters()}


def test_the_three_calls_hand_over_where_clipping_measures_again_and_only_there() -> None:
    model, optimizer, recording = _distributed(clip_norm=True)
    optimizer.backward(_loss(model))
    model[0].weight.grad.data.mul_(0.5)  # leaves no trace
    model[2].weight.grad = torch.ones_like(model[2].weight)
    optimizer.step()
    _assert_given(recording)
    del model, optimizer
    model, optimizer, recording = _distributed()
    optimizer.backward(_loss(model))
    model[0].weight.grad.data.mul_(0.5)
    optimizer.step()
    assert recording.seen == [None]


def _halve(model: nn.Module) -> None:
    model[0].weight.grad.mul_(0.5)  # type: ignore[index]


def _replace(model: nn.Module) -> None:
    model[0].weight.grad = torch.ones_like(model[0].weight)  # type: ignore[index]


@pytest.mark.parametrize("change", [_halve, _replace])
def test_gradients_that_a_hook_has_changed_or_replaced_are_not_described_by_old_norms(change: Any) -> None:
    model, optimizer, recording = _distributed()
    handle = optimizer.register_step_pre_hook(lambda *_: change(model))
    optimizer.minimize(_loss(model))
    assert recording.seen == [None]
    handle.remove()
    optimizer.minimize(_loss(model))
    _assert_given(recording)


def test_nothing_is_handed_over_where_no_norm_is_taken_or_asked_for() -> None:
    model, optimizer, recording = _distributed(on_nan_inf="off")
    optimizer.minimize(_loss(model))
    assert recording.seen == [None]
    del model, optimizer
    model, optimizer, recording = _distributed(Silent)
    report = optimizer.minimize(_loss(model))
    assert recording.seen == [None] and report.grad_norm is not None


def test_a_skipped_update_leaves_nothing_behind_for_the_next_one() -> None:
    model, optimizer, recording = _distributed(gradient_merge=True, gradient_merge_configs={"k_steps": 2}, on_nan_inf="skip")
    with pytest.warns(UserWarning, match="update 1 was skipped"):
        for bad in (float("nan"), 0.0):
            optimizer.minimize(_loss(model) + bad * model[0].weight.sum())
    assert (recording.seen, recording.given) == ([], None)
    for index in range(2):
        optimizer.minimize(_loss(model, index))
    _assert_given(recording)


# --- trust ratios -----------------------------------------------------------------------------------------------------


class Rated(torch.optim.SGD):
    def trust_ratios(self) -> Any:
        return "those of the last step"


def test_the_report_of_an_update_has_its_trust_ratios_and_no_other_report_does() -> None:
    model = _model()
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2}, on_nan_inf="skip")
    model, optimizer = fleet.distribute(model, Rated(model.parameters(), lr=0.01), strategy)
    inside, due = optimizer.minimize(_loss(model)), optimizer.minimize(_loss(model))
    assert (inside.due, inside.trust_ratios) == (False, None)
    assert (due.due, due.trust_ratios) == (True, "those of the last step")
    optimizer.minimize(_loss(model))
    with pytest.warns(UserWarning, match="was skipped"):
        skipped = optimizer.minimize(_loss(model) * float("nan"))
    assert (skipped.skipped, skipped.trust_ratios) == (True, None)


def test_an_optimizer_without_them_has_none() -> None:
    model, optimizer, _ = _distributed()
    assert optimizer.minimize(_loss(model)).trust_ratios is None


def test_nothing_is_handed_over_to_an_optimizer_whose_own_hooks_run_before_its_step() -> None:
    """They run inside step(), after the handing over, and may change gradients."""
    model, optimizer, recording = _distributed()
    handle = recording.register_step_pre_hook(lambda *_: _halve(model))
    optimizer.minimize(_loss(model))
    handle.remove()
    optimizer.minimize(_loss(model))
    assert recording.seen[0] is None and recording.seen[1] is not None
