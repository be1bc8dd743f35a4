"""Every public name: listed by dir(), with a docstring that begins with what it does and has an example, which runs."""

from __future__ import annotations

import doctest
import inspect
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fleetx as X
from fleetx import fleet
from fleetx.config import log
from fleetx.engine.optimizer import FleetOptimizer
from fleetx.engine.report import Report
from fleetx.errors import ConfigError
from tests.helpers.harness import run_ranks

ROOT = Path(__file__).parents[2]
MODULES = {
    "fleetx": X,
    "fleetx.applications": X.applications,
    "fleetx.errors": X.errors,
    "fleetx.fleet": fleet,
    "fleetx.fleet.util": fleet.util,
    "fleetx.optim": X.optim,
    "fleetx.optim.schedules": X.optim.schedules,
    "fleetx.strategies": X.strategies,
    "fleetx.utils": X.utils,
}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL


def public_names() -> Iterator[tuple[str, Any]]:
    """Each public class and function by where it is found, and the two classes whose objects `fleet` returns."""
    for home, module in MODULES.items():
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value) and callable(value):
                yield f"{home}.{name}", value
    yield "FleetOptimizer", FleetOptimizer
    yield "Report", Report


NAMES = dict(public_names())


@pytest.mark.parametrize("home", MODULES)
def test_dir_shows_the_public_names_only(home: str) -> None:
    module = MODULES[home]
    assert dir(module) == sorted(module.__all__) and all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_docstring_with_an_example(name: str) -> None:
    text = NAMES[name].__dict__.get("__doc__") if isinstance(NAMES[name], type) else NAMES[name].__doc__
    assert text and text[0].isupper() and "Examples:\n" in text and ">>> " in text


def usual_names() -> dict[str, Any]:
    """What examples may use without a line of their own; docs/reference/index.md says so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), nn.CrossEntropyLoss()

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return criterion(model(batch[0]), batch[1])

    batch = {"x": torch.randn(6, 4), "y": torch.randint(2, (6,)), "loss_fn": loss_fn, "criterion": criterion}
    return {"X": X, "fleet": fleet, "torch": torch, "nn": nn, "model": model, "optimizer": optimizer, **batch}


def run_examples(rank: int) -> list[str]:
    """What went wrong, by name: empty if every example prints what it says."""
    said: list[str] = []
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False, optionflags=OPTIONS)
    for name, value in NAMES.items():
        before = os.getcwd()
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            os.chdir(folder)
            try:
                test = parser.get_doctest(inspect.getdoc(value) or "", usual_names(), name, None, 0)
                with log.muted():  # what a strategy says is not the example's
                    runner.run(test, out=said.append)
            finally:
                os.chdir(before)
    return said


def test_every_example_prints_what_it_says() -> None:
    (said,) = run_ranks(run_examples, 1)
    assert not said, "".join(said)


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    shown = re.findall(r"^::: ([\w.]+)$", pages, flags=re.MULTILINE)
    names = {name.rpartition(".")[2] for name in shown}
    names |= {name for home in shown if home in MODULES for name in MODULES[home].__all__}
    assert {name.rpartition(".")[2] for name in NAMES} <= names


def test_the_names_of_torch_are_answered_with_those_of_fleet() -> None:
    for theirs, ours in fleet.ELSEWHERE.items():
        with pytest.raises(AttributeError, match=re.escape(f"fleet has no attribute `{theirs}`. Here it is fleet.{ours}.")):
            getattr(fleet, theirs)
        found: Any = fleet
        for part in ours.partition("(")[0].split("."):
            found = getattr(found, part)
        assert callable(found)


@pytest.mark.parametrize(("given", "name"), [("nccl", "backend"), (fleet.DistributedStrategy(amp=True), "strategy")])
def test_a_backend_or_a_strategy_in_the_place_of_the_role_is_an_error_with_the_word_to_write(given: object, name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"Write fleet.init({name}=...).")):
        fleet.init(given)


def test_a_misspelt_method_of_the_optimizer_is_answered_with_the_right_one() -> None:
    optimizer = FleetOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'minimise'. Did you mean `minimize`?"):
        getattr(optimizer, "minimise")  # noqa: B009
    assert not hasattr(optimizer, "zzzzzz")
