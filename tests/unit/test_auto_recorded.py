"""The plans of `auto` for three nets, three groups of ranks and the strategies there are: names, settings, costs and sentences.

Nothing is timed: measurements follow from the sizes of the tensors. What must come out is in `auto_recorded.json`; delete that
file, and run this one as a script, to record it again after a change on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fleetx.auto.candidate import DENSE, Candidate, every, offered
from fleetx.auto.cost import Reducer, Rung, wire
from fleetx.auto.explain import rejected
from fleetx.auto.fixed_parts import Fixed
from fleetx.auto.link import LinkProfile
from fleetx.auto.measurements import Forecast, Measured, Pass, Reduced, forecast
from fleetx.auto.run_measurements import gradients_of
from fleetx.auto.what_if import Question, curves, what_if
from fleetx.dist.predicted_cost import Link
from fleetx.engine.slots import PlanContext
from fleetx.strategy import DistributedStrategy

RECORDED = Path(__file__).with_name("auto_recorded.json")
MB = 10**6
UPDATE_S = 0.002
NETS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(512, 1024), nn.LayerNorm(1024), nn.Linear(1024, 100)),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 64, 3), nn.Conv2d(64, 128, 3), nn.Linear(128, 10)
    ),
    "attention": lambda: nn.TransformerEncoderLayer(256, 4, 1024),
}
LINKS = {"fast": Link(2, 1e9, 5e-5), "slow": Link(8, 1.25e7, 2e-4), "wide": Link(1200, 1.25e9, 1e-5)}
FIXED: dict[str, dict[str, dict[str, Any]]] = {
    "nothing": {},
    "clip_norm": {"clip_norm": {}},
    "dgc": {"dgc": {"sparsity": [0.75, 0.99], "min_numel": 4096, "rampup_begin_step": 50, "rampup_step": 9}},
    "powersgd": {"powersgd": {"rank": 2, "min_compression": 4.0}},
    "localsgd": {"localsgd": {"k_steps": 8, "begin_step": 100, "overlap_steps": 3}},
    "adaptive_localsgd": {"adaptive_localsgd": {"init_k_steps": 4, "begin_step": 9}},
    "bf16_allreduce": {"bf16_allreduce": {}},
    "fp16_allreduce": {"fp16_allreduce": {}},
    "merged": {"amp": {"dtype": "float16"}, "gradient_merge": {"k_steps": 3}, "sync_batch_norm": {}},
}
"""Parts that are set beside `auto`, with their settings."""


def fixed_of(parts: dict[str, dict[str, Any]]) -> Fixed:
    strategy = DistributedStrategy(**dict.fromkeys(parts, True))
    for name, configs in parts.items():
        if configs:
            setattr(strategy, f"{name}_configs", configs)
    return Fixed.of(strategy.parts())


def reducers_beside(fixed: Fixed) -> list[Reducer]:
    if fixed.reducer is not None:
        return [fixed.reducer]
    return [one for one in offered(PlanContext(ranks=2)) if one == DENSE or fixed.refusal(one.kind) is None]


def measured_of(net: str, link: Link, fixed: Fixed) -> Measured:
    """As if the wire took a tenth more than it should, and each number of a tensor 2 ns of work."""
    gradients = gradients_of(NETS[net]().parameters())
    steps = 2 * (link.ranks - 1)
    points = tuple((n, steps * link.latency_s + n * steps / link.ranks / link.bytes_per_s) for n in (1e5, 1e6, 1e7))
    ladder = (Rung(100 * MB, 0.0, 0), Rung(60 * MB, 0.003, 2, ("0",)), Rung(40 * MB, 0.007, 4))
    precision = fixed.precision or "float32"
    passes = [Pass(precision, 8, 0.010, 0.020, ladder)]
    if fixed.precision is None:
        passes.append(Pass("bfloat16", 8, 0.006, 0.013, (Rung(70 * MB, 0.0, 0),)))
    reduced = []
    for reducer in dict.fromkeys(one.every_update() for one in reducers_beside(fixed)):
        cost = wire(reducer, gradients, link)
        work_s = 0.0 if reducer == Reducer() else 2e-9 * gradients.numel
        lasting = 0 if reducer.is_hidden else 4 * gradients.numel
        reduced.append(Reduced(reducer, UPDATE_S + 1.1 * cost.seconds + work_s, cost.bytes_sent, lasting, 20 * MB))
    return Measured(
        "CPU", LinkProfile(link.ranks, points, points), gradients, UPDATE_S, tuple(passes), tuple(reduced), hidden_share=0.8
    )


def row(one: Forecast) -> list[Any]:
    return [one.candidate.name, one.candidate.risk.value, one.cost.seconds, one.cost.bytes_sent, one.peak_bytes]


def planned(net: str, link: Link, fixed: Fixed) -> dict[str, Any]:
    """Every candidate with its cost and settings, the sentences, and forecasts of other links."""
    measured = measured_of(net, link, fixed)
    precisions = [one.precision for one in measured.passes]
    steps = [fixed.merge_steps] if fixed.merge_steps is not None else [1, 4]
    candidates = every(
        precisions, [(8, n) for n in steps], reducers_beside(fixed), own_batch=True, risk="schedule", kept=fixed.names
    )
    rows, settings, timed = [], {}, {}
    for candidate in candidates:
        one = forecast(measured, candidate, memory=90 * MB)
        assert isinstance(one, Forecast)
        rows.append(row(one))
        settings[candidate.name] = DistributedStrategy(**{**candidate.settings(), **fixed.settings}).to_dict()
        if candidate.merge_steps == steps[0] and candidate.precision == precisions[0]:
            tried = fixed.timed(replace(candidate, reducer=candidate.reducer.steady()).settings(), recomputes=True)
            timed[candidate.name] = DistributedStrategy(**tried).to_dict()
    plain = Candidate(precisions[0], 8, steps[0], fixed.reducer or Reducer(), kept=fixed.names)
    chosen = forecast(measured, plain)
    assert isinstance(chosen, Forecast)
    rules: dict[str, float | str] = {"lars": 0.003, "lamb": "takes the place of torch.optim.Adam."}
    sentences = {
        risk: rejected(measured, chosen, risk=risk, memory=None, asked_batch=False, rules=rules, ran={}, fixed=fixed)
        for risk in ("exact", "lossy", "schedule")
    }
    outlooks = {}
    for risk in ("rounding", "schedule"):
        outlook = what_if(measured, Question(risk, bytes_per_s=1e8, world=64), fixed)
        outlooks[risk] = {"chosen": outlook.chosen.candidate.name, "rows": [row(one) for one in outlook.forecasts[:12]]}
    lines = [[one.name, one.risk, *one.seconds.values()] for one in curves(measured, plain, Question(), (2, 64, 4096), fixed)]
    return {"rows": rows, "settings": settings, "timed": timed, "why": sentences, "what if": outlooks, "curves": lines}


CASES = [(net, link, "nothing") for net in NETS for link in LINKS]
CASES += [("attention", "slow", name) for name in FIXED if name != "nothing"]


def recorded(case: tuple[str, str, str]) -> dict[str, Any]:
    net, link, fixed = case
    found: dict[str, Any] = json.loads(json.dumps(planned(net, LINKS[link], fixed_of(FIXED[fixed]))))
    if fixed == "nothing" and (net, link) != ("layers", "slow"):
        del found["settings"], found["timed"]  # the same everywhere
    return found


def same(one: Any, other: Any, where: str = "") -> list[str]:
    """Differences; numbers may differ by rounding."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [line for key in one for line in same(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [line for i, pair in enumerate(zip(one, other, strict=True)) for line in same(*pair, f"{where}/{i}")]
    if isinstance(one, float) and isinstance(other, int | float) and one == pytest.approx(other, rel=1e-12):
        return []
    return [] if one == other else [f"{where}: {one!r} is not {other!r}"]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_plans_are_those_that_were_recorded(case: tuple[str, str, str]) -> None:
    assert same(json.loads(RECORDED.read_text(encoding="utf-8"))[" ".join(case)], recorded(case)) == []


if __name__ == "__main__":
    RECORDED.write_text(json.dumps({" ".join(case): recorded(case) for case in CASES}) + "\n", encoding="utf-8")
