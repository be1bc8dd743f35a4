"""The speed of computing that a monitor shows: counted in the first update, and in proportion to samples afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.engine.modules.flops import FlopCount
from fleetx.engine.setup import registry
from fleetx.monitor import monitor as monitors
from fleetx.monitor.device_peak import peak_of
from fleetx.monitor.line import RunState, flops_text, pieces
from fleetx.recompute.chunked_loss import chunked_cross_entropy
from fleetx.report.facts import facts_of, flops_words, one_line
from fleetx.report.read import read_run
from tests.helpers.fitting import compile_by_torchs_kernels
from tests.helpers.models import batch
from tests.helpers.monitor_runs import summary

pytestmark = pytest.mark.usefixtures("alone")
ROWS = 8
FORWARD = 2 * ROWS * (8 * 16 + 16 * 16 + 16 * 4)
"""A multiplication and an addition for each weight and row."""


@pytest.fixture(autouse=True)
def closed_afterwards() -> Iterator[None]:
    yield
    if monitors._open is not None:
        monitors._open.close()
    registry.forget()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.ReLU())])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.enter(x)))  # type: ignore[no-any-return]


def counted(folder: Path, *, merges: int = 1, **strategy: Any) -> float | None:
    """Return the operations of an update, as counted in the first."""
    model = Net()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(**strategy))
    with fleet.Monitor(folder, show=False, tensorboard=False) as monitor:
        for step in range(3 * merges):
            x, y = batch(step)
            monitor.log(optimizer.minimize(nn.functional.cross_entropy(model(x), y)), samples=len(x))
        found = monitor._shown.flops
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    return found


STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": {"checkpoints": ["blocks.0"]}},
    "compile": {"compile": True},
    "the whole compiled": {"compile": {"scope": "model"}},
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", STRATEGIES)
def test_an_update_takes_three_forwards_whatever_is_computed_again(name: str, tmp_path: Path) -> None:
    if "compile" in name:
        compile_by_torchs_kernels()
    assert counted(tmp_path, **STRATEGIES[name]) == 3 * FORWARD


def test_all_micro_steps_of_an_update_count(tmp_path: Path) -> None:
    assert counted(tmp_path, merges=2, gradient_merge={"k_steps": 2}) == 2 * 3 * FORWARD


def test_the_summary_and_the_report_have_the_speed(tmp_path: Path) -> None:
    counted(tmp_path)
    ended = summary(tmp_path)
    assert ended["flops_per_second"] * ended["samples"] / ended["samples_per_second"] == pytest.approx(3 * 3 * FORWARD)
    assert ended["peak_share"] is None  # a CPU's is not known
    facts = facts_of(read_run(tmp_path))
    assert facts.flops_per_second == ended["flops_per_second"]
    assert flops_words(facts) is None  # a net of three layers
    fast = replace(facts, flops_per_second=4e14, peak_share=0.4)
    assert flops_words(fast) == ("400", "TFLOP/s, 40 % of peak") and ", 400 TFLOP/s, 40 % of peak, " in one_line("run", fast)


def test_a_loss_in_chunks_counts_its_early_gradients_once() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(10, 4, requires_grad=True)
    count = FlopCount()
    count.begin()
    chunked_cross_entropy(hidden, weight, None, torch.arange(6))
    count.end()
    assert count.total == 3 * 2 * 6 * 4 * 10 and not count.unknown


def test_an_operation_that_the_formulas_do_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    count = FlopCount()
    monkeypatch.setitem(count._formulas, torch.ops.aten.mm, lambda *args, **kwargs: 1 // 0)
    count.begin()
    torch.randn(2, 2) @ torch.randn(2, 2)
    count.end()
    assert count.unknown == "aten.mm.default" and count.total == 0


def test_another_mode_that_was_begun_since_ends_first() -> None:
    inner, outer = FlopCount(), FlopCount()
    outer.begin()
    inner.begin()
    outer.end()  # too early: it stays on
    inner.end()
    torch.randn(2, 2) @ torch.randn(2, 2)
    outer.end()
    assert (inner.total, outer.total) == (0, 3 * 2 * 8)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_devices_are_known_by_the_words_of_their_name() -> None:
    assert peak_of("NVIDIA H200") == peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("NVIDIA H100 PCIe") == 756e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of("Tesla T4") == 65e12 and peak_of("NVIDIA L40S") == 362e12
    assert peak_of("NVIDIA A1000 Laptop GPU") is None


def test_the_line_shows_speed_and_share_of_the_peak() -> None:
    assert flops_text(1.234e14, 0.125) == "123.4 TFLOP/s (12 % of peak)"
    assert flops_text(2.5e9, None) == "2.5 GFLOP/s"
    assert flops_text(None, None) is flops_text(5e8, None) is None
    assert pieces(RunState(step=1, samples_per_second=4.0, flops_per_second=2.5e9))[1:] == ["4 samples/s", "2.5 GFLOP/s"]
