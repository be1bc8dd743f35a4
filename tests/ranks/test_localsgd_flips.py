"""A bit flips in a weight of one rank that trains alone: all ranks hear of it at the next averaging, and of nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fleetx import fleet
from tests.helpers.harness import raised, run_ranks

PERIOD = 4


def _net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def _pair(**configs: Any) -> tuple[nn.Sequential, Any]:
    scalars = {name: configs.pop(name) for name in ("desync_check_steps",) if name in configs}
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": PERIOD, **configs}, **scalars)
    model = _net()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), strategy)
    optimizer.pipeline.checks.flips.most_time = 1e9  # a net this small has too little time to spare
    return model, optimizer


def _loss(model: nn.Module, rank: int, update: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * update + rank)
    x, y = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
    return F.cross_entropy(model(x), y)


def _flip(weight: torch.Tensor, place: int, bit: int) -> None:
    weight.detach().view(-1).view(torch.int32).numpy()[place] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)


def _run(rank: int, when: str, bit: int, at: int, configs: dict[str, Any]) -> tuple[int, str]:
    """Train until an error; the updates made, and the error."""
    model, optimizer = _pair(**configs)
    weight = model[2].weight
    for update in range(1, 3 * PERIOD + 2):
        struck = rank == 1 and update == at
        handle = None
        if struck and when == "forward":
            handle = model[3].register_forward_hook(lambda *_: _flip(weight, 77, bit))
        elif struck and when == "backward":
            handle = model[3].register_full_backward_hook(lambda *_: _flip(weight, 77, bit))
        elif struck:
            _flip(weight, 77, bit)
        loss = _loss(model, rank, update)
        told = raised(lambda loss=loss: optimizer.minimize(loss))  # type: ignore[misc]
        if handle is not None:
            handle.remove()
        if told != "nothing raised":
            return update, told
    return update, "nothing raised"


@pytest.mark.parametrize("bit", [20, 23, 31])
@pytest.mark.parametrize("when", ["between", "forward", "backward"])
def test_a_flip_is_told_on_all_ranks_at_the_next_averaging(when: str, bit: int) -> None:
    """The first averaging is after update 5, the second after update 9."""
    for update, told in run_ranks(_run, 2, when, bit, 7, {}):
        assert update == 9
        assert told.startswith("FleetError: weights have changed by themselves, between two updates, ")
        assert f"rank 1: bit {bit} of a number in `2.weight`. The memory of that machine" in told


@pytest.mark.parametrize(
    "configs",
    [{"overlap_steps": 2}, {"outer_momentum": 0.5}, {"wire_dtype": "float16"}, {"wire_dtype": "int4"}, {"fragments": 2}],
    ids=str,
)
def test_a_flip_is_told_with_every_kind_of_averaging(configs: dict[str, Any]) -> None:
    for update, told in run_ranks(_run, 3, "between", 25, 7, configs):
        assert update <= 9 + configs.get("overlap_steps", 0)
        assert "rank 1: bit 25 of a number in `2.weight`" in told


def test_the_check_can_be_turned_off() -> None:
    assert run_ranks(_run, 2, "between", 20, 7, {"desync_check_steps": 0}) == [(13, "nothing raised")] * 2


def _flip_in_the_averaging(rank: int) -> tuple[int, str]:
    """What the ranks hold after an averaging is the same on all of them, but for this flip."""
    model, optimizer = _pair()
    values = optimizer.pipeline.stages.average._values
    settle = values.settle

    def and_flip(*args: Any, **more: Any) -> None:
        settle(*args, **more)
        if rank == 2:
            _flip(model[2].weight, 5, 21)

    for update in range(1, 3 * PERIOD + 2):
        values.settle = and_flip if update == 5 else settle
        loss = _loss(model, rank, update)
        told = raised(lambda loss=loss: optimizer.minimize(loss))  # type: ignore[misc]
        if told != "nothing raised":
            return update, told
    return update, "nothing raised"


def test_a_flip_in_the_averaging_itself_is_told_at_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the early looks, ranks are compared after every hundredth update only."""
    for update, told in run_ranks(_without_early_looks, 3):
        assert update == 9
        assert "did not leave the same weights on all ranks: unlike most, rank 2" in told


def _without_early_looks(rank: int) -> tuple[int, str]:
    from fleetx.engine.checks import desync

    before, desync.EARLY_LOOKS = desync.EARLY_LOOKS, ()
    try:
        return _flip_in_the_averaging(rank)
    finally:
        desync.EARLY_LOOKS = before


def _undisturbed(rank: int, folder: str, configs: dict[str, Any]) -> str:
    """What scripts do to weights between updates: nothing of it is an alarm."""
    model, optimizer = _pair(**configs)

    def train() -> None:
        for update in range(1, 8 * PERIOD):
            optimizer.minimize(_loss(model, rank, update))
            if update % 5 == 0:
                with torch.no_grad():
                    model[2].weight.clamp_(-0.2, 0.2)
                model[0].weight.data.clamp_(-0.3, 0.3)
                model[4].weight.data.mul_(2)
            if update % 7 == 0:
                with optimizer.averaged():
                    _loss(model, 0, 0)
            if update == 10:
                fleet.save_checkpoint(folder, step=update, model=model, optimizer=optimizer)
            if update == 18:
                fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
            if update == 21:
                optimizer.average()
            if update == 24:
                model.load_state_dict({name: value * 1.01 for name, value in model.state_dict().items()})

    told = raised(train)
    watch = optimizer.pipeline.checks.flips
    return told if watch.looks > 15 else f"looked only {watch.looks} times"


@pytest.mark.parametrize("configs", [{}, {"overlap_steps": 2}, {"average_state": True}], ids=str)
def test_what_scripts_do_to_weights_is_no_alarm(configs: dict[str, Any], tmp_path: Path) -> None:
    assert run_ranks(_undisturbed, 2, str(tmp_path), configs) == ["nothing raised"] * 2
