"""`auto` and compiled blocks: measured where compiling works, told with what it takes once, left alone where the user said."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from fleetx import fleet
from fleetx.auto import run_measurements
from fleetx.auto.candidate import Candidate
from fleetx.auto.measurements import forecast
from fleetx.auto.plan import from_json, to_json
from fleetx.engine.modules import compiling
from fleetx.strategy import DistributedStrategy
from tests.helpers.auto_runs import batch, changed, loss_of, net, picture, planned, sgd, short_measuring

pytestmark = pytest.mark.usefixtures("alone", "fresh_compiler")


@pytest.fixture(autouse=True)
def compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By torch's own kernels, which need no compiler of C++."""
    monkeypatch.setattr(run_measurements, "COMPILED_ON", ("cpu",))
    monkeypatch.setattr(run_measurements, "MEASURING_S", 600.0)
    torch.compiler.set_default_backend("aot_eager")
    with short_measuring(few=True):
        yield
    torch.compiler.set_default_backend(None)


def test_compiled_blocks_are_measured_told_and_leave_no_trace() -> None:
    model = net(2)
    optimizer = sgd(model)
    before = picture(model, optimizer)
    face = planned(model, optimizer, batch(0))
    plan = face.plan
    [precision] = plan.measured.compiled
    one = plan.measured.pass_of(Candidate(precision, 64, compiles=True))
    assert one is not None and one.forward_s > 0 and one.ladder
    # The precision is the one that is faster here. In 32 bits the kernels are the same; in 16 autocast keeps copies of weights
    # until backward ends, where compiled code makes them as it needs them.
    peak, eager = (found.ladder[0].peak_bytes for found in (one, plan.measured.pass_of(Candidate(precision, 64))))
    assert peak == eager if precision == "float32" else peak <= eager
    told = plan.rejected.get("compile") or next(note for note in plan.notes if note.startswith("compiling takes"))
    assert re.search(r"compiling (took|takes) [\d.]+ s, once", told)
    assert from_json(to_json(plan), source="").measured == plan.measured
    fleet.distribute(model, optimizer, DistributedStrategy())  # ends the pair
    of_the_pair = {"hooks": 0, "step": 0}  # what a pair leaves behind, whatever was planned
    assert changed({**before, **of_the_pair}, {**picture(model, optimizer), **of_the_pair}) == []


def test_batches_of_all_sizes_share_one_graph_while_they_are_measured() -> None:
    model = net(2)
    plan = planned(model, sgd(model), batch(0), global_batch=128).plan
    assert {one.batch for one in plan.measured.passes if one.is_compiled} == {one.batch for one in plan.measured.passes}


def test_what_compiling_takes_is_shared_out_among_the_updates_to_come() -> None:
    model = net(2)
    measured = planned(model, sgd(model), batch(0), trials=1).plan.measured
    [precision] = measured.compiled
    wanted = Candidate(precision, 64, compiles=True)
    endless, short = forecast(measured, wanted), forecast(measured, wanted, total_steps=10)
    one = measured.pass_of(wanted)
    assert not isinstance(endless, str) and not isinstance(short, str) and one is not None
    assert endless.once_s == 0 and short.once_s == pytest.approx(one.compile_s / 10)
    assert short.seconds_per_sample == pytest.approx(endless.seconds_per_sample + one.compile_s / 10 / 64)
    assert wanted.strategy().compile and not Candidate(precision, 64).strategy().compile
    assert wanted.name.endswith(", compile") and wanted.risk.value == "rounding"


def test_the_number_of_updates_is_a_part_of_what_was_asked() -> None:
    model = net(1)
    assert planned(model, sgd(model), batch(0), total_steps=7).plan.key["asked"]["total_steps"] == 7


def test_compile_that_was_set_is_in_all_that_is_measured() -> None:
    model = net(2)
    strategy = DistributedStrategy(auto=True, compile={"dynamic": False})
    plan = fleet.distribute(model, sgd(model), strategy, sample=batch(0), loss_fn=loss_of)[1].plan
    assert plan.strategy.compile_configs["dynamic"] is False
    assert plan.measured.compiled == [] and "compile" not in plan.rejected


WHY_NOT = {
    "a CPU": "is not tried on a CPU, for which compiling takes long and wins little.",
    "the risk": "changes results by rounding",
    "no compiler": "cannot be: there is no C++ compiler",
    "a compiled model": "the model is compiled already.",
    "no time": "was not measured, for want of time.",
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, while it compiles
@pytest.mark.parametrize("why", WHY_NOT)
def test_what_is_not_measured_has_its_sentence(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(1)
    settings = {"risk": "exact"} if why == "the risk" else {}
    if why == "a CPU":
        monkeypatch.setattr(run_measurements, "COMPILED_ON", ("cuda",))
    elif why == "no compiler":
        monkeypatch.setattr(run_measurements, "cannot_compile", lambda device: "there is no C++ compiler: `g++` is not found")
    elif why == "a compiled model":
        model[0].compile(backend="aot_eager")
    elif why == "no time":
        monkeypatch.setattr(run_measurements, "MEASURING_S", -1.0)
    plan = planned(model, sgd(model), batch(0), **settings).plan
    assert plan.rejected["compile"].startswith(WHY_NOT[why]) and not plan.strategy.compile
    assert {compiling.compiled_by(module) for module in model.modules()} <= {None, "user"}
