"""What is said at the start of a run, by FLEETX_VERBOSE or by the script's own logging."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fleetx import __version__, fleet
from fleetx.config import log
from fleetx.errors import ConfigError
from tests.helpers.harness import run_ranks

RUN = f"fleetx {__version__}: 1 worker, cpu"
CHANGED = "strategy: bf16_allreduce, gradient_merge (k_steps=4); on_nan_inf='skip'"


def _distribute(strategy: fleet.DistributedStrategy | None = None) -> None:
    model = nn.Linear(2, 2)
    fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)


def _changed() -> fleet.DistributedStrategy:
    merge = {"k_steps": 4}
    return fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs=merge, bf16_allreduce=True, on_nan_inf="skip")


@contextlib.contextmanager
def _handler(logger: logging.Logger) -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler, level = logging.Handler(), logger.level
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(log.VARIABLE, raising=False)


def test_a_run_is_told_in_one_line_and_each_strategy_in_one_of_what_differs(
    alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    _distribute()
    _distribute(_changed())
    assert capsys.readouterr().out.splitlines() == [RUN, "strategy: plain data-parallel training", CHANGED]


def test_0_leaves_warnings_only(alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(log.VARIABLE, "0")
    _distribute(_changed())
    assert capsys.readouterr().out == ""
    log.say("nothing is compressed", logging.WARNING)
    assert capsys.readouterr().out == "nothing is compressed\n"


def test_2_shows_the_whole_table(alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(log.VARIABLE, "2")
    _distribute(_changed())
    assert capsys.readouterr().out == f"{RUN}\n{_changed()}\n"


def test_another_value_is_refused_when_the_job_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log.VARIABLE, "loud")
    with pytest.raises(ConfigError, match=r"FLEETX_VERBOSE is 'loud'; it must be 0 \(warnings only\), 1 or 2 \(whole tables\)"):
        fleet.init()


@pytest.mark.parametrize("name", ["", "fleetx"])
def test_a_scripts_own_handler_gets_the_messages_in_place_of_the_terminal(
    name: str, alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with _handler(logging.getLogger(name)) as records:
        logging.getLogger(name).setLevel(logging.INFO)
        _distribute(_changed())
    assert [(record.name, record.levelname, record.getMessage()) for record in records] == [
        ("fleetx", "INFO", RUN),
        ("fleetx", "INFO", CHANGED),
    ]
    assert records[0].filename == "fleet.py" and capsys.readouterr().out == ""


def test_a_scripts_own_levels_decide_unless_the_variable_is_set(
    alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with _handler(logging.getLogger()) as records:
        log.say("not shown at the root logger's level, WARNING")
        log.say("a warning", logging.WARNING)
        monkeypatch.setenv(log.VARIABLE, "1")
        log.say("shown, as the variable says")
        log.LOGGER.setLevel(logging.ERROR)
        log.say("not shown: the script has set the level of the logger", logging.WARNING)
        log.LOGGER.setLevel(logging.NOTSET)
    assert [record.getMessage() for record in records] == ["a warning", "shown, as the variable says"]
    log.LOGGER.setLevel(logging.ERROR)
    try:
        log.say("not shown without a handler either")
    finally:
        log.LOGGER.setLevel(logging.NOTSET)
    assert capsys.readouterr().out == ""


def test_nothing_is_said_of_what_is_only_tried(capsys: pytest.CaptureFixture[str]) -> None:
    with log.muted():
        log.say("tried", logging.ERROR)
    log.say("done")
    assert capsys.readouterr().out == "done\n"


def _said(rank: int) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        _distribute()
    return out.getvalue()


def test_only_worker_0_speaks() -> None:
    start = f"fleetx {__version__}: 2 workers on 1 node, gloo, cpu\nstrategy: plain data-parallel training\n"
    assert run_ranks(_said, 2) == [start, ""]
