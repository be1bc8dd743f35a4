"""Texts that users keep or read: strategies as JSON and YAML, and --help. They change on purpose, or not at all."""

from __future__ import annotations

import sys

import pytest

from fleetx import fleet
from tests.helpers.golden_texts import COMMANDS, HELP, ON_PURPOSE, STRATEGIES, help_of, strategy_of, switches

NAMES = sorted({path.stem for path in STRATEGIES.iterdir()})


def test_every_file_is_of_a_strategy_that_is_there() -> None:
    """New strategies need none."""
    assert {"default", *switches()} >= {*NAMES} > {"default"}


@pytest.mark.parametrize("ending", ["json", "yaml"])
@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_is_written_as_before(name: str, ending: str) -> None:
    strategy = strategy_of(name)
    text = strategy.to_json() if ending == "json" else strategy.to_yaml()
    assert text == (STRATEGIES / f"{name}.{ending}").read_text(encoding="utf-8"), f"{ON_PURPOSE} strategies"


@pytest.mark.parametrize("ending", ["json", "yaml"])
@pytest.mark.parametrize("name", NAMES)
def test_an_old_file_is_read_and_written_back_as_it_was(name: str, ending: str) -> None:
    path = STRATEGIES / f"{name}.{ending}"
    strategy = fleet.DistributedStrategy.load(path)
    assert strategy == strategy_of(name)
    assert (strategy.to_json() if ending == "json" else strategy.to_yaml()) == path.read_text(encoding="utf-8")


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse of Python 3.13 lays its help out in another way")
@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_it_said(command: str) -> None:
    assert help_of(command) == (HELP / f"{command}.txt").read_text(encoding="utf-8"), f"{ON_PURPOSE} help"
