"""fleet.Monitor on a GPU: it waits for nothing, and its times are the device's. Skipped without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fleetx import fleet
from fleetx.dist import world
from fleetx.dist.heartbeat import Phase
from fleetx.monitor.split import MOST_EVENTS, DeviceStopwatch
from tests.helpers.monitor_runs import records, summary

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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("parts", [{}, {"lars": True}, {"amp": True}, MERGED], ids=["plain", "lars", "amp", "merged"])
@pytest.mark.parametrize("weight", [None, 3.0], ids=["unweighted", "weighted"])
def test_a_log_call_never_waits_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], weight: float | None
) -> None:
    monkeypatch.setattr("fleetx.monitor.monitor.FULL_SECONDS", 0.0)  # trust ratios with every log
    model, optimizer = pair(**parts)
    x = torch.randn(4096, 1024, device="cuda")
    with fleet.Monitor(tmp_path, show=False, tensorboard=False) as watch:
        for _ in range(4):
            watch.log(optimizer.minimize(model(x).square().mean(), weight=weight), samples=len(x))
        torch.cuda.synchronize()
        for _ in range(20):
            report = optimizer.minimize(model(x).square().mean(), weight=weight)
            try:
                torch.cuda.set_sync_debug_mode("error")
                watch.log(report, samples=len(x), mean=report.loss_on_device())
            finally:
                torch.cuda.set_sync_debug_mode("default")
    lines = records(tmp_path)
    assert len(lines) == 24 // parts.get("gradient_merge_configs", {"k_steps": 1})["k_steps"]
    assert all(line["loss"] is not None for line in lines)
    assert any(line.get("trust_ratios") for line in lines) == ("lars" in parts)
    if parts is not MERGED:
        assert all(line["values"]["mean"] == line["loss"] for line in lines[4:])


def test_a_log_call_returns_while_the_device_is_busy(tmp_path: Path) -> None:
    """The debug mode above does not see a wait for an event."""
    model, optimizer = pair(lars=True)
    x = torch.randn(256, 1024, device="cuda")
    with fleet.Monitor(tmp_path, show=False, tensorboard=False) as watch:
        for _ in range(5):
            watch.log(optimizer.minimize(model(x).square().mean()))
        report, awake = optimizer.minimize(model(x).square().mean()), torch.cuda.Event()
        torch.cuda._sleep(4_000_000_000)  # cycles: about two seconds
        awake.record()
        watch.log(report, loss_again=report.loss_on_device())
        assert not awake.query()
    assert records(tmp_path)[-1]["values"]["loss_again"] == records(tmp_path)[-1]["loss"]


def test_the_events_of_a_rank_that_does_not_log_do_not_pile_up() -> None:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    watch = DeviceStopwatch(Phase.SCRIPT, torch.device("cuda"))
    for index in range(5 * MOST_EVENTS):
        watch.changed(Phase.FORWARD if index % 2 else Phase.BACKWARD)
        torch.cuda._sleep(1000)
        if index % 1000 == 0:
            torch.cuda.synchronize()
    assert len(watch._marks) <= 1.5 * MOST_EVENTS
    taken = watch.take()
    ended.record()  # before the events are read, which takes the host some milliseconds
    split = taken.value()
    torch.cuda.synchronize()
    assert sum(split.values()) == pytest.approx(began.elapsed_time(ended) / 1e3, rel=0.01)


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
    model, optimizer = pair()
    x = torch.randn(16384, 1024, device="cuda")
    with fleet.Monitor(tmp_path, show=False, tensorboard=False) as watch:
        for _ in range(6):
            watch.log(optimizer.minimize(model(x).square().mean()))
    drawn = json.loads((tmp_path / "memory.json").read_text())
    assert drawn["kind"] == "allocated"
    curve = drawn["curves"][0]
    held = dict(zip(curve["seconds"], curve["bytes"], strict=True))
    begun = {name: held[at] for name, at in curve["marks"]}
    activations = 16384 * 4096 * 4  # after the activation function; the loss's are a quarter of it
    assert begun["backward"] - begun["forward"] > 0.9 * activations
    assert begun["update"] - begun["forward"] < 0.1 * activations
