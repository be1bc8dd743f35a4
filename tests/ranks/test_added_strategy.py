"""The strategy of docs/add_a_strategy.md, one file: `auto` lists, predicts, runs and explains it unchanged."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fleetx import fleet, strategies
from fleetx.auto import candidate
from fleetx.auto.candidate import Candidate, offered
from fleetx.auto.cost import Gradients, Reducer, Rung, wire
from fleetx.auto.explain import rejected
from fleetx.auto.link import LinkProfile
from fleetx.auto.measurements import Forecast, Measured, Pass, Reduced, forecast, from_plain, to_plain
from fleetx.auto.what_if import Question, curves, what_if
from fleetx.dist.predicted_cost import Link, dense
from fleetx.engine.slots import PlanContext
from fleetx.strategies import catalogue
from tests.helpers.auto_runs import batch, net, planned, sgd, short_measuring, strategies_tried
from tests.helpers.documents import ROOT, read_blocks
from tests.helpers.harness import run_ranks

NAME = "sign_vote"


def write_strategy(folder: Path) -> str:
    """The file of the page, in a folder of its own."""
    page = (ROOT / "docs" / "add_a_strategy.md").read_text(encoding="utf-8")
    (block,) = (block for block in read_blocks(page) if block.title == f"my_strategies/{NAME}.py")
    (folder / f"{NAME}.py").write_text(block.text, encoding="utf-8")
    return str(folder)


@contextlib.contextmanager
def in_the_catalogue(folder: str) -> Iterator[None]:
    """Add a folder as the page does, and take it out again: other tests have the strategies of this package alone."""
    strategies.__path__.append(folder)
    catalogue.cache_clear()
    try:
        yield
    finally:
        strategies.__path__.remove(folder)
        catalogue.cache_clear()
        sys.modules.pop(f"{strategies.__name__}.{NAME}", None)


@pytest.fixture
def _added(tmp_path: Path) -> Iterator[None]:
    with in_the_catalogue(write_strategy(tmp_path)):
        yield


def measured() -> Measured:
    """Two ranks over 10 MB/s, 4 MB of gradients. A sign vote was measured to send 1 MB in 105 ms."""
    points = tuple((float(count), count / 1e7) for count in (1e6, 4e6, 16e6))
    passes = (Pass("float32", 8, 0.010, 0.020, (Rung(100, 0.0, 0),)),)
    reduced = (Reduced(Reducer(), 0.402, 4e6), Reduced(Reducer.named(NAME), 0.107, 1e6))
    return Measured("CPU", LinkProfile(2, points, points), Gradients(((1000, 1000),)), 0.002, passes, reduced)


def predicted(reducer: Reducer) -> Forecast:
    found = forecast(measured(), Candidate(batch=8, reducer=reducer))
    assert isinstance(found, Forecast)
    return found


@pytest.mark.usefixtures("_added")
def test_it_is_offered_where_its_file_says_and_costs_what_its_file_says() -> None:
    labels = [one.label for one in offered(PlanContext(ranks=127))]
    assert labels.index("dgc 0.999") < labels.index(NAME) < labels.index("localsgd 2")  # the least risky first
    assert NAME not in [one.label for one in offered(PlanContext(ranks=128))]
    link = Link(8, 1e8, 1e-4)
    assert wire(Reducer.named(NAME), measured().gradients, link) == dense(1_000_000, link, item_bytes=1)


@pytest.mark.usefixtures("_added")
def test_an_update_with_it_is_predicted_here_and_over_other_links() -> None:
    one = predicted(Reducer.named(NAME))
    assert one.candidate.name == f"fp32, {NAME}" and one.candidate.risk.value == "schedule"
    # 30 ms of computing, 2 of the optimizer's step, 105 of the exchange; backward hides its 20.
    assert one.cost.seconds == pytest.approx(0.030 + 0.002 + 0.105 - 0.020) and one.cost.bytes_sent == 1e6
    outlook = what_if(measured(), Question("schedule", world=100))
    assert NAME in {one.candidate.reducer.kind for one in outlook.forecasts} and NAME not in outlook.unmeasured
    assert NAME not in {one.candidate.reducer.kind for one in what_if(measured(), Question("schedule", world=500)).forecasts}
    assert NAME in [curve.name for curve in curves(measured(), Candidate(batch=8), Question())]


@pytest.mark.usefixtures("_added")
def test_one_sentence_says_why_it_was_not_taken_with_its_own_note_at_the_end() -> None:
    def sentence(risk: str, ranks: int = 2) -> str:
        known: dict[str, Any] = {"memory": None, "asked_batch": False, "rules": {}, "ran": {}}
        here = replace(measured(), link=replace(measured().link, ranks=ranks))
        return rejected(here, predicted(Reducer()), risk=risk, **known)[NAME]

    assert sentence("schedule") == (
        "saves 295.0 ms of wire, costs 0.0 ms of work; an update takes 117.0 ms with it, and 412.0 ms as chosen. "
        "It needs the smaller learning rates of signSGD."
    )
    assert sentence("lossy").startswith("would send 1.00 MB in place of 4.00 an update, in 100.0 ms in place of 400.0 ms")
    assert 'its risk is "schedule", and auto_configs["risk"] is "lossy".' in sentence("lossy")
    many = "was not tried: it offers no settings for 200 ranks of this kind and this model."
    assert sentence("schedule", ranks=200) == many


@pytest.mark.usefixtures("_added")
def test_measurements_of_it_come_back_from_a_file() -> None:
    assert from_plain(json.loads(json.dumps(to_plain(measured())))) == measured()


def _plan(rank: int, folder: str) -> dict[str, Any]:
    tried: list[fleet.DistributedStrategy] = []
    with in_the_catalogue(folder), short_measuring(slow_from=0.0), strategies_tried(tried):
        model = net(1)
        with mock.patch.object(candidate, "MERGES", (1,)):
            plan = planned(model, sgd(model), batch(rank, 16), risk="schedule", trials=40).plan
        sent = next(one.bytes_sent for one in plan.measured.reduced if one.reducer.kind == NAME)
        rows = {row.name: row.measured_s is not None for row in plan.rows}
        return {
            "rows": rows,
            "why": dict(plan.rejected),
            "chosen": plan.chosen,
            "sent": sent,
            "numel": plan.measured.gradients.numel,
        }


def test_it_is_measured_run_and_explained_on_two_ranks(tmp_path: Path) -> None:
    one, other = run_ranks(_plan, 2, write_strategy(tmp_path))
    assert one == other
    assert any(name.endswith(NAME) and worked for name, worked in one["rows"].items())
    assert (NAME in one["why"]) != one["chosen"].endswith(NAME)
    assert one["numel"] <= one["sent"] < 2 * one["numel"]  # a byte for each number; buffers and flags as they are


def _train(rank: int, folder: str) -> list[list[float]]:
    with in_the_catalogue(folder):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1, bias=False)
        strategy = fleet.DistributedStrategy(sign_vote=True, sign_vote_configs={"size": 0.5})
        model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), strategy)
        before = model.weight.detach().clone()
        gradient = [[1.0, -2.0, 0.0], [3.0, 0.5, 4.0], [-9.0, -1.0, -2.0]][rank]
        optimizer.minimize((model.weight * torch.tensor([gradient])).sum())
        found: list[list[float]] = (model.weight.detach() - before).tolist()
        return found


def test_the_majority_decides_and_a_tie_moves_nothing(tmp_path: Path) -> None:
    moves = run_ranks(_train, 3, write_strategy(tmp_path))
    for move in moves:
        torch.testing.assert_close(move, [[-0.5, 0.5, 0.0]])


def test_auto_names_no_strategy_but_those_whose_place_in_a_step_it_measures_itself() -> None:
    """`localsgd` alone beside `auto` is the older spelling of another strategy, which a message explains."""
    known = {"auto", "amp", "compile", "recompute", "gradient_merge", "localsgd"}
    for file in (ROOT / "src" / "fleetx" / "auto").glob("*.py"):
        code = file.read_text(encoding="utf-8")
        named = {name for name in catalogue() if re.search(rf'"{name}"|strategies\.{name} import', code)}
        assert named <= known, f"{file.name} names {named - known}"
