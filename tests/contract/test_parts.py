"""What every part must satisfy. A new file in strategies/ is tested here without being named."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fleetx import fleet
from fleetx.engine.setup.conflicts import check_parts
from fleetx.engine.slots import Slot
from fleetx.errors import FleetWarning, StrategyConflict
from fleetx.strategies import catalogue
from tests.helpers.auto_runs import short_measuring
from tests.helpers.fitting import fitting
from tests.helpers.harness import run_ranks
from tests.helpers.models import batch, cnn

PARTS = catalogue()
NEUTRAL = [name for name in PARTS if PARTS[name].neutral() is not None]


def _strategy(*names: str, configs: dict[str, Any] | None = None) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    for name in names:
        setattr(strategy, name, True)
    for name, values in (configs or {}).items():
        if values:
            setattr(strategy, f"{name}_configs", values)
    return strategy


@pytest.mark.parametrize("name", PARTS)
def test_settings_survive_json_and_yaml(name: str) -> None:
    strategy = _strategy(name, configs={name: PARTS[name].neutral() or {}})
    assert fleet.DistributedStrategy.from_json(strategy.to_json()) == strategy
    assert fleet.DistributedStrategy.from_yaml(strategy.to_yaml()) == strategy


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_built_and_trains(name: str, alone: None) -> None:
    model = cnn()
    optimizer = fitting([name], model.parameters(), lambda params: torch.optim.SGD(params, lr=0.1))
    with warnings.catch_warnings(), short_measuring():
        warnings.simplefilter("ignore", FleetWarning)
        _, ours = fleet.distribute(model, optimizer, _strategy(name), **_steps_for(name))
    assert ours.minimize(F.cross_entropy(model(batch(0, shape=(1, 6, 6))[0]), batch(0)[1])).due


def _steps_for(name: str) -> dict[str, Any]:
    """What a part needs that must run steps itself."""
    if name != "auto":
        return {}
    return {"sample": batch(0, shape=(1, 6, 6)), "loss_fn": lambda model, given: F.cross_entropy(model(given[0]), given[1])}


def _train(rank: int, name: str | None, configs: dict[str, Any]) -> list[torch.Tensor]:
    model = cnn()
    strategy = _strategy(*([name] if name else []), configs={name: configs} if name else None)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy)
    for step in range(5):
        x, y = batch(10 * step + rank, shape=(1, 6, 6))
        optimizer.minimize(F.cross_entropy(model(x), y))
    return [t.detach().clone() for t in model.state_dict().values()]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", NEUTRAL)
def test_the_neutral_setting_equals_plain_synchronous_training(name: str, size: int) -> None:
    plain = run_ranks(_train, size, None, {})
    ours = run_ranks(_train, size, name, PARTS[name].neutral())
    for mine, theirs in zip(ours, plain, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(PARTS, 2)))
def test_every_pair_compiles_or_names_the_slot(first: str, second: str) -> None:
    if "auto" in (first, second):
        other = second if first == "auto" else first
        found = {part.name for part in _strategy(first, second).parts()}
        assert found == ({"adaptive_localsgd"} if other == "localsgd" else {"auto", other})
        check_parts(_strategy(first, second).parts())
        return
    shared = PARTS[first]().claims() & PARTS[second]().claims()
    parts = _strategy(first, second).parts()
    if shared:
        with pytest.raises(StrategyConflict) as caught:
            check_parts(parts)
        for slot in shared:
            assert f"claim `{slot.value}`" in str(caught.value)
        assert first in str(caught.value) and second in str(caught.value) and "Keep one of them." in str(caught.value)
    else:
        check_parts(parts)


def test_all_conflicts_are_reported_at_once() -> None:
    with pytest.raises(StrategyConflict) as caught:
        check_parts(_strategy("dgc", "lars", "localsgd", "clip_norm").parts())
    for slot in (Slot.REDUCE, Slot.MOMENTUM, Slot.CLIP):
        assert f"claim `{slot.value}`" in str(caught.value)
