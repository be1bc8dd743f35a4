"""fleet.Monitor on a GPU: it waits for nothing, and its times are the device's. Skipped without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fleetx import fleet, world
from monitor_runs import records, summary

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    world.close_world()
    monkeypatch.setenv("FLEETX_DEVICE", "cuda")
    fleet.init()
    yield
    world.close_world()


def pair(**parts: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    strategy = fleet.DistributedStrategy(on_nan_inf="off", **parts)  # which looks at every update, and so waits
    return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), strategy)


MERGED = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}


@pytest.mark.parametrize("parts", [{}, {"lars": True}, {"amp": True}, MERGED], ids=["plain", "lars", "amp", "merged"])
@pytest.mark.parametrize("weight", [None, 3.0], ids=["unweighted", "weighted"])
def test_a_log_call_never_waits_for_the_device(tmp_path: Path, parts: dict[str, Any], weight: float | None) -> None:
    model, optimizer = pair(**parts)
    x = torch.randn(4096, 1024, device="cuda")
    with fleet.Monitor(tmp_path, show=False, tensorboard=False) as watch:
        for _ in range(4):
            watch.log(optimizer.minimize(model(x).square().mean(), weight=weight), samples=len(x))
        torch.cuda.synchronize()
        for _ in range(20):
            report = optimizer.minimize(model(x).square().mean(), weight=weight)
            torch.cuda.set_sync_debug_mode("error")
            try:
                watch.log(report, samples=len(x), mean=report.loss_on_device())
            finally:
                torch.cuda.set_sync_debug_mode("default")
    lines = records(tmp_path)
    assert len(lines) == 24 // parts.get("gradient_merge_configs", {"k_steps": 1})["k_steps"]
    assert all(line["loss"] is not None for line in lines)
    assert any(line.get("trust_ratios") for line in lines) == ("lars" in parts)
    if parts is not MERGED:
        assert all(line["values"]["mean"] == line["loss"] for line in lines[4:])


def test_the_split_is_that_of_the_device(tmp_path: Path) -> None:
    model, optimizer = pair()
    x = torch.randn(16384, 1024, device="cuda")
    with fleet.Monitor(tmp_path, show=False, tensorboard=False) as watch:
        for _ in range(12):
            watch.log(optimizer.minimize(model(x).square().mean()), samples=len(x))
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(12):
        optimizer.minimize(model(x).square().mean())
    ended.record()
    torch.cuda.synchronize()
    later = [line["split"] for line in records(tmp_path)[4:]]
    measured = sum(sum(split.values()) for split in later) / len(later)
    assert measured == pytest.approx(began.elapsed_time(ended) / 12 / 1e3, rel=0.25)
    for split in later:
        assert split["backward"] > split["forward"] > 0  # two products for each of forward's
    assert summary(tmp_path)["memory_bytes"] == torch.cuda.max_memory_allocated()


def test_memory_over_a_step_rises_in_forward_and_falls_in_backward(tmp_path: Path) -> None:
    import json

    model, optimizer = pair()
    x = torch.randn(16384, 1024, device="cuda")
    with fleet.Monitor(tmp_path, show=False, tensorboard=False) as watch:
        for _ in range(6):
            watch.log(optimizer.minimize(model(x).square().mean()))
    drawn = json.loads((tmp_path / "memory.json").read_text())
    assert drawn["kind"] == "allocated"
    assert max(drawn["curves"][0]["bytes"]) > min(drawn["curves"][0]["bytes"])
