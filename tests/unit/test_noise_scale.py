"""The gradient noise scale: the maths against numpy, and one rank that measures it over the micro-batches of a merge window."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.engine.noise_scale import estimates, noise_scale_of, require_measurable, samples_factor, smoothed, updates_factor
from fleetx.engine.slots import Merge
from fleetx.errors import ConfigError, FleetWarning
from fleetx.strategies import catalogue
from tests.helpers.harness import make_fake_comm
from tests.helpers.noise_reference import SIGNAL_SQ, TRACE, distributed, reference, samples, strategy

FLOAT32 = 1e-4
"""Norms in float32, whose difference is taken: a part in ten thousand is well above their rounding."""
NAN, INF = float("nan"), float("inf")


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


# --- the maths --------------------------------------------------------------------------------------------------------


def test_two_batch_sizes_tell_the_noise_and_the_signal() -> None:
    # |G|^2 = 5 and tr(C) = 24: the expected squared norms are 5 + 24/2 = 17 and 5 + 24/8 = 8.
    trace, signal = estimates(_number(17.0), _number(8.0), small=2.0, large=8.0)
    assert (float(trace), float(signal)) == pytest.approx((24.0, 5.0), rel=1e-14)


def test_gradients_of_known_covariance_give_their_noise_scale() -> None:
    generator = np.random.default_rng(3)
    deviations = np.linspace(0.5, 2.0, 300)
    true_gradient = generator.normal(size=300) * 0.4
    means = torch.zeros(3, dtype=torch.float64)
    for _ in range(200):
        draws = true_gradient + deviations * generator.normal(size=(8, 4, 300))
        small_sq = np.mean(np.sum(draws.mean(1) ** 2, axis=1))
        large_sq = np.sum(draws.mean((0, 1)) ** 2)
        means = smoothed(means, *estimates(_number(small_sq), _number(large_sq), small=4.0, large=32.0))
    wanted = np.sum(deviations**2) / np.sum(true_gradient**2)
    found = noise_scale_of(means)
    assert found == pytest.approx(wanted, rel=0.05)  # 200 measurements; twenty seeds stay within 3 %


def test_the_running_means_begin_with_the_first_measurement_and_forget_slowly() -> None:
    once = smoothed(torch.zeros(3, dtype=torch.float64), _number(24.0), _number(5.0))
    assert noise_scale_of(once) == pytest.approx(4.8, rel=1e-12)
    twice = smoothed(once, _number(10.0), _number(1.0), decay=0.5)
    # By weight: (0.5 * 0.24 + 0.5 * 10) / (0.5 * 0.05 + 0.5 * 1), not the mean of 4.8 and 10.
    assert noise_scale_of(twice) == pytest.approx(5.12 / 0.525, rel=1e-12)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_measurement_that_is_not_finite_changes_nothing(bad: float) -> None:
    before = smoothed(torch.zeros(3, dtype=torch.float64), _number(24.0), _number(5.0))
    torch.testing.assert_close(smoothed(before, _number(bad), _number(5.0)), before, rtol=0, atol=0)
    torch.testing.assert_close(smoothed(before, _number(24.0), _number(bad)), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "means", [[0.0, 0.0, 0.0], [1.0, 0.0, 1.0], [1.0, -1.0, 1.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [1e300, 1e-300, 1.0]]
)
def test_what_is_not_known_or_not_positive_is_none_and_nothing_is_divided_by_zero(means: list[float]) -> None:
    assert noise_scale_of(torch.tensor(means, dtype=torch.float64)) is None


def test_at_the_noise_scale_a_run_takes_twice_the_samples_and_twice_the_updates() -> None:
    assert (samples_factor(47_000, 47_000), updates_factor(47_000, 47_000)) == (2.0, 2.0)
    assert (samples_factor(1000, 4000), updates_factor(1000, 4000)) == (1.25, 5.0)
    with pytest.raises(ConfigError, match="noise_scale is 0; it must be a finite number above 0"):
        samples_factor(10, 0)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_one_rank_without_merging_cannot_know_it_and_is_told_what_to_write() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"one rank without merging has one\. Write strategy.gradient_merge = True"):
        fleet.distribute(model, optimizer, fleet.DistributedStrategy(noise_scale_steps=10))
    merging = fleet.DistributedStrategy(noise_scale_steps=10, gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    fleet.distribute(model, optimizer, merging)


@pytest.mark.parametrize("name", ["dgc", "powersgd", "quantized_allreduce", "localsgd", "adaptive_localsgd"])
def test_a_part_that_reduces_something_else_than_the_mean_is_refused(name: str) -> None:
    part = catalogue()[name]()
    with pytest.raises(ConfigError, match=f"`{name}` reduces something else"):
        require_measurable(10, parts=[part], merge=Merge(), comm=make_fake_comm())
    require_measurable(0, parts=[part], merge=Merge(), comm=make_fake_comm())


@pytest.mark.parametrize("name", ["fp16_allreduce", "bf16_allreduce", "clip_norm"])
def test_a_part_that_keeps_the_mean_is_not(name: str) -> None:
    comm = make_fake_comm()
    require_measurable(10, parts=[catalogue()[name]()], merge=Merge(), comm=comm)
    assert comm.size > 1  # or it would be refused for want of a second rank, whatever the part


@pytest.mark.parametrize("bad", [-1, 1.0, True, NAN, "10"])
def test_a_number_of_updates_is_an_integer_from_0(bad: Any) -> None:
    with pytest.raises(ConfigError, match="noise_scale_steps is .*; it must be an integer of at least 0"):
        fleet.DistributedStrategy(noise_scale_steps=bad)


def test_the_setting_is_shown_under_a_title_of_its_own() -> None:
    lines = [line.strip(" |") for line in str(fleet.DistributedStrategy(noise_scale_steps=7)).splitlines()]
    assert lines[lines.index("Diagnostics") + 2].split() == ["noise_scale_steps", "7"]


# --- one rank that merges ---------------------------------------------------------------------------------------------


def _train(optimizer: Any, model: nn.Module, batches: list[Tensor], *, weighted: bool = False) -> list[Any]:
    return [optimizer.minimize(model(x), weight=len(x) if weighted else None) for x in batches]


@pytest.mark.usefixtures("alone")
def test_merging_on_one_rank_measures_in_micro_batches() -> None:
    model, optimizer = distributed(strategy(merged=4))
    batches = [samples(i, rows=4) for i in range(40)]
    reports = [report for report in _train(optimizer, model, batches) if report.due]
    windows = [[batches[i : i + 4]] for i in range(0, 40, 4)]
    assert reports[0].noise_scale == pytest.approx(reference(windows[:1]), rel=FLOAT32)
    assert reports[-1].noise_scale == pytest.approx(reference(windows), rel=FLOAT32)
    # 8 samples are two micro-batches of 4; ten measurements of 4096 features.
    assert reports[-1].noise_scale == pytest.approx(TRACE / SIGNAL_SQ / 4, rel=0.1)


@pytest.mark.usefixtures("alone")
def test_weights_make_the_unit_samples() -> None:
    model, optimizer = distributed(strategy(merged=3))
    batches = [samples(i, rows=2 + i % 3) for i in range(30)]
    reports = _train(optimizer, model, batches, weighted=True)
    windows = [[batches[i : i + 3]] for i in range(0, 30, 3)]
    assert reports[-1].noise_scale == pytest.approx(reference(windows, weighted=True), rel=FLOAT32)
    assert reports[-1].noise_scale == pytest.approx(TRACE / SIGNAL_SQ, rel=0.2)


@pytest.mark.usefixtures("alone")
def test_a_window_that_sums_instead_of_averaging_has_the_same_noise_scale() -> None:
    batches = [samples(i, rows=4) for i in range(8)]
    found = []
    for mean in (True, False):
        chosen = strategy(merged=4)
        chosen.gradient_merge_configs["avg"] = mean
        model, optimizer = distributed(chosen)
        found.append(_train(optimizer, model, batches)[-1].noise_scale)
        del model, optimizer
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.usefixtures("alone")
def test_only_every_second_update_is_measured_and_between_them_the_last_value_stands() -> None:
    model, optimizer = distributed(strategy(2, merged=2))
    batches = [samples(i, rows=4) for i in range(12)]
    seen = [report.noise_scale for report in _train(optimizer, model, batches) if report.due]
    windows = [[batches[i : i + 2]] for i in range(0, 12, 2)]
    assert seen[0] is None
    assert seen[1] == seen[2] == pytest.approx(reference(windows[1:2]), rel=FLOAT32)
    assert seen[5] == pytest.approx(reference(windows[1::2]), rel=FLOAT32)


@pytest.mark.usefixtures("alone")
def test_clipping_and_the_form_of_the_loop_do_not_change_it() -> None:
    batches = [samples(i, rows=4) for i in range(6)]
    model, optimizer = distributed(strategy(merged=2))
    wanted = _train(optimizer, model, batches)[-1].noise_scale
    del model, optimizer
    model, optimizer = distributed(strategy(merged=2, clip_norm=True))
    assert _train(optimizer, model, batches)[-1].noise_scale == wanted
    del model, optimizer
    model, optimizer = distributed(strategy(merged=2))
    for x in batches:
        model(x).backward()
        report = optimizer.step()
        optimizer.zero_grad()
    assert report.noise_scale == wanted


@pytest.mark.usefixtures("alone")
def test_float16_is_measured_on_true_gradients_and_an_overflow_is_left_out() -> None:
    chosen = strategy(merged=2, amp=True)
    # The first update overflows; then the scale is 1024.
    shrink = {"init_loss_scaling": 2.0**40, "decr_ratio": 2.0**-30, "decr_every_n_nan_or_inf": 1}
    chosen.amp_configs = {"dtype": "float16", **shrink}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # 16 bits are slow on this CPU
        model, optimizer = distributed(chosen)
    batches = [samples(i, rows=4) for i in range(12)]
    reports = [report for report in _train(optimizer, model, batches) if report.due]
    assert (reports[0].skipped, reports[0].noise_scale, reports[-1].skipped) == (True, None, False)
    windows = [[batches[i : i + 2]] for i in range(2, 12, 2)]
    # float16 products and sums: eleven bits each.
    assert reports[-1].noise_scale == pytest.approx(reference(windows), rel=0.01)


@pytest.mark.usefixtures("alone")
def test_with_guards_off_a_nan_passes_by_and_leaves_the_means_as_they_were() -> None:
    model, optimizer = distributed(strategy(merged=2, on_nan_inf="off"))
    batches = [samples(i, rows=4) for i in range(4)]
    before = _train(optimizer, model, batches)[-1]
    poisoned = batches[0].clone()
    poisoned[0, 0] = NAN
    after = _train(optimizer, model, [poisoned, batches[1]])[-1]
    assert after.due and after.noise_scale == before.noise_scale == pytest.approx(
        reference([[batches[:2]], [batches[2:]]]), rel=FLOAT32
    )


@pytest.mark.usefixtures("alone")
def test_a_flushed_window_is_smaller_than_the_others_and_is_left_out() -> None:
    model, optimizer = distributed(strategy(merged=4))
    batches = [samples(i, rows=4) for i in range(6)]
    before = _train(optimizer, model, batches)[3].noise_scale
    assert optimizer.flush().noise_scale == before == pytest.approx(reference([[batches[:4]]]), rel=FLOAT32)


@pytest.mark.usefixtures("alone")
def test_a_parameter_unused_in_the_first_micro_step_counts_as_zero_there() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always = nn.Parameter(torch.zeros(64, 1))
            self.rarely = nn.Parameter(torch.zeros(2**19, 1))  # large: its view is not zeroed between windows

        def forward(self, x: Tensor, *, use: bool) -> Tensor:
            loss = (x @ self.always).mean()
            return loss + self.rarely.sum() if use else loss

    model = Sometimes()
    chosen = fleet.DistributedStrategy(noise_scale_steps=2, find_unused_parameters=True, gradient_merge=True)
    chosen.gradient_merge_configs["k_steps"] = 2
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0), chosen)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for use in (True, True, False, False):
        report = optimizer.minimize(model(x, use=use))
    # Both micro-batches of the second window are the same, and there is no noise in them; 2^19 stale ones would be.
    means = optimizer.pipeline.meter.means
    assert means is not None
    signal = float(x.double().mean(0).square().sum())
    assert [float(v) / float(means[2]) for v in means[:2]] == pytest.approx([0.0, signal], abs=1e-5 * signal)
    assert report.updated


@pytest.mark.usefixtures("alone")
def test_off_takes_no_norm_that_is_not_taken_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    real = torch._foreach_norm

    def counting(tensors: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        passes.append(sum(tensor.numel() for tensor in tensors))
        return real(tensors, *args, **kwargs)

    monkeypatch.setattr(torch, "_foreach_norm", counting)
    counts = {}
    for every, guard in ((0, "stop"), (0, "off"), (2, "stop"), (2, "off")):
        model, optimizer = distributed(strategy(every, merged=2, on_nan_inf=guard))
        passes.clear()
        _train(optimizer, model, [samples(i, rows=1) for i in range(4)])
        counts[every, guard] = sum(passes) / 4096
        del model, optimizer
    # In two updates: the guard looks at each; a measurement reads the small gradient and, with no guard, the large one.
    assert counts == {(0, "stop"): 2, (0, "off"): 0, (2, "stop"): 3, (2, "off"): 2}


@pytest.mark.usefixtures("alone")
def test_a_run_resumed_inside_a_window_goes_on_to_the_bit(tmp_path: Path) -> None:
    batches = [samples(i, rows=2) for i in range(18)]
    model, optimizer = distributed(strategy(merged=3))
    wanted = [report.noise_scale for report in _train(optimizer, model, batches)]
    del model, optimizer
    model, optimizer = distributed(strategy(merged=3))
    first = [report.noise_scale for report in _train(optimizer, model, batches[:10])]
    fleet.save_checkpoint(tmp_path, step=10, model=model, optimizer=optimizer)
    del model, optimizer
    model, optimizer = distributed(strategy(merged=3))
    fleet.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    assert first + [report.noise_scale for report in _train(optimizer, model, batches[10:])] == wanted
    assert wanted[-1] is not None


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_of_a_run_that_did_not_measure_starts_the_means_again(tmp_path: Path) -> None:
    batches = [samples(i, rows=2) for i in range(6)]
    model, optimizer = distributed(strategy(0, merged=2))
    _train(optimizer, model, batches[:3])
    fleet.save_checkpoint(tmp_path, step=3, model=model, optimizer=optimizer)
    del model, optimizer
    model, optimizer = distributed(strategy(1, merged=2))
    fleet.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    reports = _train(optimizer, model, batches[3:])
    assert reports[0].due and reports[0].noise_scale is None  # its first micro-step was before
    assert reports[2].noise_scale == pytest.approx(reference([[batches[4:6]]]), rel=FLOAT32)
