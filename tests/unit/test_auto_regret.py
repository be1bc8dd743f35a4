"""bench/auto_regret: what counts as regret and as the right order, by numbers that can be checked by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.auto_regret import run as auto_regret
from bench.auto_regret.grid import budget_between, everything_on, grid, narrow_auto
from bench.auto_regret.page import page
from bench.auto_regret.summary import EVERYTHING, drift_of, finished, ordered_pairs, ranks, spearman, summary
from fleetx.auto import candidate
from fleetx.engine.slots import PlanContext
from fleetx.errors import ConfigError

ROOT = Path(__file__).parents[2]

BUDGET, SAMPLES = 100, 2


def cell(kind, **figures):
    return {"kind": kind, "run": 1, "model": "mlp", "rate_mbit": 100.0, **figures}


def plan(name, seconds, *, risk="exact", peak=None, budget=None):
    """`seconds`: of a sample, in both turns."""
    times = [cell("time", name=name, turn=i, seconds=SAMPLES * one, updates=4) for i, one in enumerate(seconds)]
    return [cell("plan", name=name, risk=risk, budget=budget, samples=SAMPLES, peak_bytes=peak), *times]


def asked(chosen, forecasts, *, budget=None, risk="lossy", peak=90, tried=()):
    told = {
        plain: {"name": name, "seconds": SAMPLES * seconds, "peak_bytes": room}
        for plain, (name, seconds, room) in forecasts.items()
    }
    figures = {"chosen": chosen, "chosen_peak_bytes": peak, "hidden_share": 0.5, "missing": {}, "seconds": 20.0}
    return cell("asked", budget=budget, risk=risk, tried=dict.fromkeys(tried, 1.0), forecasts=told, **figures)


def lines(*questions):
    facts = {"about": "a net", "numel": 10, "rows": 1, "goodput_mbit": 90.0, "plain_bytes": 120, "least_bytes": 80}
    measured = [
        *plan("fp32", (4.0, 4.0), peak=120),
        *plan("fp32, recompute", (5.0, 5.0), peak=99, budget=BUDGET),
        *plan("fp32, bf16_allreduce", (2.9, 3.1), risk="rounding", peak=110),
        *plan("fp32, dgc 0.999", (2.0, 2.0), risk="lossy", peak=130),
        *plan("fp32, localsgd 8", (1.0, 1.0), risk="schedule", peak=98),
        *plan("bf16", (40.0, 40.0), risk="rounding"),
        *plan(EVERYTHING, (30.0, 30.0), risk="schedule", peak=150),
    ]
    return [cell("cell", tight_bytes=BUDGET, **facts), *measured, *questions, cell("end", at_s=9.0)]


def test_regret_is_against_the_best_plan_that_the_risk_allows():
    found = summary(lines(asked("fp32, bf16_allreduce", {})))["cells"][0]
    assert (found["best"], found["legal"]) == ("fp32, dgc 0.999", 4)  # neither Local SGD, nor recompute for a budget
    assert found["regret"] == pytest.approx(0.5)
    assert found["regret_no_tuning"] == pytest.approx(1.0)
    assert found["regret_everything"] == pytest.approx(14.0) and found["everything_fits"]


def test_within_a_budget_only_plans_whose_measured_peak_keeps_to_it_count():
    found = summary(lines(asked("fp32, recompute", {}, budget=BUDGET, risk="schedule")))["cells"][0]
    assert (found["best"], found["legal"]) == ("fp32, localsgd 8", 2)
    assert found["regret"] == found["regret_no_tuning"] == pytest.approx(4.0)
    assert not found["everything_fits"] and not found["is_over_budget"]


@pytest.mark.parametrize(("chosen", "peak"), [("fp32", 90), ("fp32, recompute", 101)])
def test_a_choice_is_over_its_budget_if_either_measurement_says_so(chosen, peak):
    found = summary(lines(asked(chosen, {}, budget=BUDGET, risk="schedule", peak=peak)))
    assert found["cells"][0]["is_over_budget"] and found["totals"]["over_budget"] == 1
    assert found["verdicts"]["memory"]["holds"] is False


def test_errors_are_those_of_plans_that_were_not_run():
    forecasts = {
        "fp32": ("fp32", 4.0, 120),
        "fp32, bf16_allreduce": ("fp32, bf16_allreduce", 3.3, 121),
        "fp32, dgc 0.999": ("fp32, dgc 0.999", 1.9, 130),
    }
    found = summary(lines(asked("fp32, dgc 0.999", forecasts, tried=["fp32", "fp32, dgc 0.999"])))
    assert found["cells"][0]["step_errors"] == {"fp32, bf16_allreduce": pytest.approx(0.1)}
    assert found["cells"][0]["peak_errors"] == {"fp32, bf16_allreduce": pytest.approx(0.1)}
    assert found["verdicts"]["step"]["holds"] is True and found["verdicts"]["peak"]["holds"] is False
    assert found["cells"][0]["spearman"] == 1 and found["totals"]["pair_correlation"] == 1


def test_pairs_nearer_than_their_spread_say_nothing_about_order():
    steady = {"measured": 1.0, "predicted": 1.0, "spread": 0.01}
    near = {"measured": 1.04, "predicted": 0.9, "spread": 0.05}
    far = {"measured": 2.0, "predicted": 0.95, "spread": 0.01}
    assert ordered_pairs([steady, near]) == (0, 0)
    assert ordered_pairs([steady, far]) == (1, 0)
    assert ordered_pairs([steady, near, far]) == (2, 1)


def test_equal_numbers_share_their_rank():
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]
    assert spearman([1.0, 2.0, 3.0], [9.0, 5.0, 1.0]) == pytest.approx(-1.0)
    assert spearman([1.0, 2.0], [1.0, 2.0]) is None


def test_a_run_that_was_cut_short_is_measured_again_and_then_left_behind():
    whole = lines(asked("fp32", {}))
    again = [{**line, "run": 2} for line in whole]
    assert not finished(whole[:-1])
    assert {line["run"] for line in finished([*whole, *again])[("mlp", 100.0)]} == {2}
    assert {line["run"] for line in finished([*whole, *again[:-1]])[("mlp", 100.0)]} == {1}


def test_drift_is_how_much_longer_plans_took_that_were_run_both_then_and_later():
    plans = {name: {"measured": seconds, "samples": 8} for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 4.0))}
    assert drift_of({"a": 8.8, "b": 16.0 * 1.2, "c": 32.0 * 1.3, "d": 99.0, "e": None}, plans) == pytest.approx(1.2)
    assert drift_of({"d": 99.0}, plans) == 1.0


def test_auto_chooses_from_the_grid_and_nothing_else(monkeypatch):
    for name in ("MERGES", "offered"):
        monkeypatch.setattr(candidate, name, getattr(candidate, name))
    narrow_auto()
    merges = [(8, steps) for steps in candidate.MERGES]
    reducers = candidate.offered(PlanContext(ranks=2))
    found = candidate.every(("float32", "bfloat16"), merges, reducers, own_batch=True, risk="schedule")
    assert set(found) == set(grid(8)) and len(grid(8)) == 20
    assert budget_between(120, 80) == BUDGET


def test_everything_on_computes_every_block_again_without_a_budget():
    settings = everything_on(8).settings(None)
    assert settings["recompute_configs"] == {"budget": None}
    assert settings["amp"] and settings["gradient_merge"] and settings["dgc"]


def test_the_page_says_what_was_chosen_and_whether_it_holds():
    figures = summary(lines(asked("fp32, bf16_allreduce", {"fp32": ("fp32", 4.4, 118)})))
    shown = page({**json.loads(json.dumps(figures)), "device": "a CPU", "torch": "2", "commit": "0"})
    assert "| median regret at most 5% | measured: 0.500 | **no** |" in shown
    assert "| mlp | 100 | no limit | lossy | fp32, bf16_allreduce | 3,000,000 | fp32, dgc 0.999 | 2,000,000 | 50.0 % |" in shown
    assert "10 parameters" in shown


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--models", "vgg"], "--models names 'vgg'; there are mlp, resnet20, bert."),
        (["--budgets", "loose"], "--budgets names 'loose'; there are none, tight."),
        (["--risks", "wild"], "--risks names 'wild'"),
        (["--rates", "0"], "--rates names 0.0"),
        (["--seconds", "-1"], "--seconds is -1.0"),
    ],
)
def test_flags_that_mean_nothing_are_refused(argv, said):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        auto_regret.flags_of(argv)


@pytest.mark.campaign
def test_the_bench_runs_from_end_to_end_in_small():
    command = [sys.executable, "-m", "bench.auto_regret.run", "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["cells"] == 2 and found["over_budget"] == 0
    for one in grid(256):
        assert f"turn 2: {one.name} " in done.stdout
