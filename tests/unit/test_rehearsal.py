"""Rehearsed steps leave no trace: whatever they change, and wherever they fail."""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.dist import world
from fleetx.engine import dry_steps
from fleetx.engine.dry_run import OutOfMemory, Rehearsal, Sample, own_loss
from fleetx.engine.state import counters
from fleetx.errors import ConfigError, FleetWarning
from recompute_nets import NETS, WIDTH, Chain, Inner, Norm, Replacing, draw_from_python_and_numpy
from recompute_runs import random_now, rows, seed


class Everything(nn.Module):
    """Norms, dropout, a buffer that is replaced, one that is not saved, Python's and numpy's random numbers, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.replacing, self.draws = Norm(), Replacing(), Inner(draw_from_python_and_numpy)
        self.frozen, self.last = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)
        self.norm.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.frozen(self.draws(self.replacing(self.norm(x)))))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def made(optimizer_of: Callable[[Any], torch.optim.Optimizer], *, trained: int = 0, **settings: Any) -> Rehearsal:
    seed()
    model: nn.Module = Everything()
    optimizer = optimizer_of([p for p in model.parameters() if p.requires_grad])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        model, face = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**settings))
    for index in range(trained):
        face.minimize(cross_entropy(model, rows(index)))
    here = world.current()
    return Rehearsal(model, face, cross_entropy, Sample(rows(50), here.device), here.comm, here.device)


def everything(rehearsal: Rehearsal) -> dict[str, Any]:
    model, face = rehearsal.model, rehearsal.optimizer
    buffers = {name: (id(buffer), buffer.clone()) for name, buffer in model.named_buffers()}
    return {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "buffers": {name: value for name, (_, value) in buffers.items()},
        "buffer objects": {name: place for name, (place, _) in buffers.items()},
        "parameter objects": [(id(p), p.requires_grad) for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "optimizer": copy.deepcopy(face.state_dict()),
        "counters": counters(face.pipeline),
        "window": (face.pipeline.window.micro_steps, len(face.pipeline.window.losses), face.due),
        "scale": face.pipeline.stages.backward.scale(),
        "stages": copy.deepcopy(face.pipeline.stages.backward.state_dict()),
        "random": random_now(),
        "rehearsing": dry_steps.is_on(),
    }


def assert_unchanged(now: dict[str, Any], before: dict[str, Any]) -> None:
    for key in before:
        if key in ("weights", "buffers", "gradients", "optimizer"):
            torch.testing.assert_close(now[key], before[key], rtol=0, atol=0)
        else:
            assert now[key] == before[key], key


def steps_and_update(rehearsal: Rehearsal) -> None:
    for _ in range(2):
        rehearsal.step()
    rehearsal.gather_gradients()
    rehearsal.update()


def everything_moved(rehearsal: Rehearsal) -> None:
    steps_and_update(rehearsal)
    with torch.no_grad():
        for tensor in [*rehearsal.model.parameters(), *rehearsal.model.buffers()]:
            tensor.add_(1)
    random.random(), np.random.rand(), torch.rand(1)
    rehearsal.model.eval()


class Broken(Exception):
    pass


def breaks_in_forward(rehearsal: Rehearsal) -> None:
    everything_moved(rehearsal)
    rehearsal.forward()
    raise Broken


def breaks_in_backward(rehearsal: Rehearsal) -> None:
    everything_moved(rehearsal)
    loss = rehearsal.forward()

    def fails(_: Tensor) -> None:
        raise Broken

    next(p for p in rehearsal.model.last.parameters()).register_hook(fails)
    rehearsal.backward(loss)


def breaks_with_gradients_gathered(rehearsal: Rehearsal) -> None:
    everything_moved(rehearsal)
    rehearsal.gather_gradients()
    raise Broken


def breaks_inside_an_optimizers_step(rehearsal: Rehearsal) -> None:
    rehearsal.step()
    rehearsal.gather_gradients()

    def fails(*_: Any) -> None:
        raise Broken

    handle = rehearsal.optimizer.update.register_step_post_hook(fails)
    try:
        rehearsal.update()
    finally:
        handle.remove()


def interrupted(rehearsal: Rehearsal) -> None:
    everything_moved(rehearsal)
    raise KeyboardInterrupt


WAYS: dict[str, tuple[Callable[[Rehearsal], None], type[BaseException] | None]] = {
    "nothing fails": (steps_and_update, None),
    "everything is moved": (everything_moved, None),
    "forward fails": (breaks_in_forward, Broken),
    "backward fails": (breaks_in_backward, Broken),
    "gradients are gathered": (breaks_with_gradients_gathered, Broken),
    "the update fails": (breaks_inside_an_optimizers_step, Broken),
    "a key is pressed": (interrupted, KeyboardInterrupt),
}
SETTINGS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {}),
    "adamw, float16": (
        lambda p: torch.optim.AdamW(p, lr=0.1),
        {"amp": True, "amp_configs": {"dtype": "float16", "init_loss_scaling": 64.0, "incr_every_n_steps": 2}},
    ),
    "merged, clipped": (
        lambda p: torch.optim.SGD(p, lr=0.1),
        {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}, "clip_norm": True},
    ),
}


@pytest.mark.parametrize(("settings", "trained"), [("sgd", 0), *((settings, 2) for settings in SETTINGS)])
@pytest.mark.parametrize("way", WAYS)
def test_afterwards_everything_is_as_before_and_training_goes_on_the_same(
    way: str, settings: str, trained: int, alone: None
) -> None:
    work, error = WAYS[way]
    optimizer_of, chosen = SETTINGS[settings]
    rehearsal = made(optimizer_of, trained=trained, **chosen)
    before = everything(rehearsal)
    if error is None:
        with rehearsal.leaving_no_trace():
            work(rehearsal)
    else:
        with pytest.raises(error), rehearsal.leaving_no_trace():
            work(rehearsal)
    assert_unchanged(everything(rehearsal), before)
    if way == "backward fails":
        return  # its hook is still there
    after = _goes_on(rehearsal, trained)
    del rehearsal
    gc.collect()
    assert_unchanged(after, _goes_on(made(optimizer_of, trained=trained, **chosen), trained))


def _goes_on(rehearsal: Rehearsal, trained: int) -> dict[str, Any]:
    for index in range(trained, trained + 4):
        rehearsal.optimizer.minimize(cross_entropy(rehearsal.model, rows(index)))
    found = everything(rehearsal)
    del found["buffer objects"], found["parameter objects"]
    return found


def test_a_window_half_filled_is_filled_as_it_was(alone: None) -> None:
    optimizer_of, chosen = SETTINGS["merged, clipped"]
    found = []
    for rehearses in (True, False):
        rehearsal = made(optimizer_of, trained=1, **chosen)
        assert rehearsal.optimizer.pipeline.window.micro_steps == 1
        if rehearses:
            with rehearsal.leaving_no_trace():
                steps_and_update(rehearsal)
        found.append(_goes_on(rehearsal, 1))
        del rehearsal
        gc.collect()
    assert_unchanged(*found)


def test_inside_all_modules_train_and_afterwards_each_has_its_own_mode(alone: None) -> None:
    rehearsal = made(SETTINGS["sgd"][0])
    rehearsal.model.eval()
    rehearsal.model.draws.train()
    with rehearsal.leaving_no_trace():
        assert all(module.training for module in rehearsal.model.modules()) and dry_steps.is_on()
    assert [name for name, module in rehearsal.model.named_modules() if module.training] == [
        "draws",
        "draws.enter",
        "draws.leave",
    ]
    assert not dry_steps.is_on()


def test_a_step_inside_leaves_no_gradients_and_gathered_ones_are_zero(alone: None) -> None:
    rehearsal = made(SETTINGS["sgd"][0])
    with rehearsal.leaving_no_trace():
        rehearsal.step()
        assert not rehearsal.optimizer.pipeline.buckets.has_new()
        weights = [p.detach().clone() for p in rehearsal.model.parameters()]
        rehearsal.gather_gradients()
        rehearsal.update()
        assert all(torch.equal(p, before) for p, before in zip(rehearsal.model.parameters(), weights, strict=True))
        assert all("momentum_buffer" in state for state in rehearsal.optimizer.state.values())
    assert not rehearsal.optimizer.state


def test_out_of_memory_is_an_error_of_the_librarys_own_and_the_next_step_runs(alone: None) -> None:
    rehearsal = made(SETTINGS["sgd"][0])

    def fails() -> None:
        rehearsal.forward()
        raise torch.OutOfMemoryError("no more memory\nof 80 GB")

    with rehearsal.leaving_no_trace():
        with pytest.raises(OutOfMemory, match="^no more memory$"):
            rehearsal.everywhere(fails)
        assert rehearsal.everywhere(lambda: rehearsal.forward().item()) > 0
        rehearsal.step()


def test_lasting_tensors_are_all_that_a_step_finds(alone: None) -> None:
    rehearsal = made(SETTINGS["sgd"][0], trained=1)
    known = {tensor.data_ptr() for tensor in rehearsal.lasting()}
    momentum = [state["momentum_buffer"] for state in rehearsal.optimizer.state.values()]
    for tensor in [*rehearsal.model.parameters(), *rehearsal.model.buffers(), *momentum, *rehearsal.sample.value]:
        assert tensor.data_ptr() in known


def test_the_models_own_loss_is_used_where_no_other_is_given(alone: None) -> None:
    class Own(Chain):
        def loss(self, batch: Any) -> Tensor:
            return cross_entropy(self, batch)

    seed()
    model = Own(Inner()).eval()
    assert torch.equal(own_loss(model, rows(0)), cross_entropy(model, rows(0)))
    with pytest.raises(ConfigError, match=r"ConvNet has no method `loss\(batch\)`"):
        own_loss(NETS["convolutions"].build(), rows(0))


@pytest.mark.parametrize("settings", [{"lars": True}, {"lamb": True}, {"dgc": True}], ids=str)
def test_an_optimizer_that_a_strategy_put_in_place_can_be_rehearsed(settings: dict[str, Any], alone: None) -> None:
    kind = torch.optim.Adam if "lamb" in settings else lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
    rehearsal = made(kind, **settings)
    before = everything(rehearsal)
    with rehearsal.leaving_no_trace():
        steps_and_update(rehearsal)
    assert_unchanged(everything(rehearsal), before)
