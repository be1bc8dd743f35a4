"""The page for those who come from Paddle Fleet: what it says of our names is so."""

from __future__ import annotations

import re

import pytest
import torch

import fleetx
from fleetx import fleet
from fleetx.engine.report import Report
from fleetx.engine.setup.conflicts import check_parts
from fleetx.errors import ConfigError, StrategyConflict
from fleetx.launch.flags import parse
from fleetx.optim import schedules
from tests.helpers.documents import ROOT

PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
STATES = ("same", "renamed", "differs", "refused")
FLAG_VALUES = {
    "--gpus": "0,1",
    "--selected_gpus": "0",
    "--devices": "0",
    "--ips": "10.0.0.1,10.0.0.2",
    "--nproc_per_node": "2",
    "--log_dir": "log",
    "--run_mode": "collective",
    "--master": "10.0.0.1",
    "--nnodes": "2",
    "--rank": "0",
    "--host": "10.0.0.1",
    "--start_port": "6070",
    "--job_id": "mine",
    "--max_restart": "3",
}


def rows(heading: str) -> list[tuple[str, str, str]]:
    """Of the tables under a heading that have a state: the name, the state, and what is said."""
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    [text] = [part for part in section if part.startswith(heading + "\n")]
    found = re.findall(r"^\| `([^|]+)` \| (\w+) \| ?(.*?) ?\|$", text, flags=re.MULTILINE)
    assert found and all(state in STATES for _, state, _ in found)
    return found


def named(text: str) -> str:
    """The name that the third column begins with."""
    return re.match(r"`([^`]+)`", text)[1]  # type: ignore[index]


def reach(name: str) -> object:
    """`fleet.util.all_reduce`, `X.applications.Resnet50`, or what a call is of; AttributeError where there is none."""
    words = re.match(r"[\w.]+", name)[0].split(".")  # type: ignore[index]
    roots = {"fleet": fleet, "X": fleetx, "strategy": fleet.DistributedStrategy(), "fleetx": fleetx, "report": Report}
    found: object = roots.get(words[0], torch.nn)
    if words[0] == "optimizer":
        found = fleet.distribute(model := torch.nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=0.1))[1]
    for word in words[1:]:
        found = getattr(found, word)
    return found


@pytest.mark.parametrize(("name", "state", "said"), rows("Strategy fields"))
def test_a_strategy_field_is_there_or_refused_as_told(name: str, state: str, said: str) -> None:
    strategy = fleet.DistributedStrategy()
    if state == "refused":
        with pytest.raises(ConfigError, match=name):
            setattr(strategy, name, True)
        assert said
    else:
        assert hasattr(strategy, name)


@pytest.mark.parametrize(("name", "state", "said"), rows("Keys of `*_configs`"))
def test_a_key_is_there_or_refused_as_told(name: str, state: str, said: str) -> None:
    configs, key = re.fullmatch(r'(\w+)\["(\w+)"\]', name).groups()  # type: ignore[union-attr]
    settings = getattr(fleet.DistributedStrategy(), configs)
    if state in ("refused", "renamed"):
        with pytest.raises(ConfigError, match=f"{configs} has no key '{key}'"):
            settings[key] = True
    else:
        default = re.match(r"(?:`(.+?)`|([\d.]+|True))[,; ]*", said)
        if default is not None and default[0] and (default[1] or default[2]):
            assert str(settings[key]).replace("'", '"').removesuffix(".0") == (default[1] or default[2])
        assert key in settings
    if state == "renamed":
        theirs, new = re.fullmatch(r'(\w+)\["(\w+)"\]', named(said)).groups()  # type: ignore[union-attr]
        assert new in getattr(fleet.DistributedStrategy(), theirs)


@pytest.mark.parametrize("heading", ["Calls", "The package `fleetx`"])
def test_calls_are_there_or_not_as_told(heading: str, alone: None) -> None:
    for name, state, said in rows(heading):
        if state in ("same", "differs"):
            assert callable(reach(name)), name
        else:
            with pytest.raises((AttributeError, ConfigError)):
                reach(name)
        if state == "renamed":
            reach(named(said))


@pytest.mark.parametrize(("flag", "state", "said"), rows("The launcher"))
def test_a_launcher_flag_is_taken_or_refused_as_told(flag: str, state: str, said: str) -> None:
    value = [FLAG_VALUES[flag]] if flag in FLAG_VALUES else []
    if state == "refused":
        with pytest.raises(ConfigError, match=flag):
            parse([flag, "1", "train.py"])
        assert said
    else:
        assert parse([flag, *value, "train.py"]).command == ["train.py"]


def test_defaults_of_the_launcher_are_those_told() -> None:
    options = parse(["train.py"])
    assert (options.max_restart, options.log_dir, options.nproc_per_node) == (0, "log", "auto")


def test_a_range_of_nodes_and_other_modes_are_refused() -> None:
    for words in (["--nnodes", "2:3"], ["--run_mode", "ps"]):
        with pytest.raises(ConfigError):
            parse([*words, "train.py"])
    with pytest.raises(ConfigError, match="parameter servers"):
        fleet.init(is_collective=False)


def test_what_fleet_drops_works_or_is_refused_as_told() -> None:
    found = re.findall(r"^\| `(\w+)` \+ `(\w+)` \| `\w+` \| (works|refused)", PAGE, flags=re.MULTILINE)
    assert len(found) >= 9
    for first, second, told in found:
        parts = fleet.DistributedStrategy(**{first: True, second: True}).parts()
        if told == "works":
            check_parts(parts)
        else:
            with pytest.raises(StrategyConflict):
                check_parts(parts)


def test_what_is_new_is_there_and_the_schedules_too() -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith("New here:"))
    for name in re.findall(r"`(\w+)`", line):
        assert hasattr(fleet.DistributedStrategy(), name)
    assert schedules.Polynomial


def test_every_strategy_is_named_on_the_page() -> None:
    from fleetx.strategies import catalogue

    assert all(f"`{name}`" in PAGE for name in catalogue())
