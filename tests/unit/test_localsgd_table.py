"""bench/localsgd_table: the methods' settings, the fit and the verdicts, which trainings are made, the page."""

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from bench.lib.results import published
from bench.lib.table_flags import made
from bench.localsgd_table.accuracy import Job, Plan, final_jobs, is_done, tuning_jobs
from bench.localsgd_table.contest import Contestant
from bench.localsgd_table.flags import flags_of
from bench.localsgd_table.methods import METHODS, OURS, TRAINED, Settings, begin_step, choose, first_period, label, strategy
from bench.localsgd_table.page import page
from bench.localsgd_table.run import lines, summary
from bench.localsgd_table.summary import accuracy, fit, throughput, training_ms, verdicts, whole_trainings
from bench.localsgd_table.training import Diary, Training, planned
from bench.localsgd_table.worker import (
    MINIATURE_BEGIN,
    MINIATURE_STEPS,
    AdaptiveRow,
    Clock,
    FixedRow,
    PostLocalRow,
    begin_of,
    falling,
    order,
)
from fleetx import fleet
from fleetx.engine.report import Report
from fleetx.engine.sidecar import Verdict
from fleetx.errors import ConfigError

ROOT = Path(__file__).parents[2]

USUAL = Settings()


# The methods


def test_every_method_of_ours_is_a_strategy_that_is_accepted():
    for method in OURS:
        fleet.DistributedStrategy(**strategy(method, USUAL, 5))
    assert strategy("synchronous", USUAL, 5) == {}
    assert strategy("k4", USUAL, 1) == {"localsgd": True, "localsgd_configs": {"k_steps": 4, "begin_step": 1}}
    outer = strategy("diloco", USUAL, 3)["localsgd_configs"]
    assert (outer["outer_lr"], outer["outer_momentum"], outer["outer_nesterov"]) == (0.7, 0.9, True)


def test_methods_are_synchronous_for_as_long_as_they_must():
    begins = {method: begin_step(method, updates=1000, warmup=100, settings=USUAL) for method in TRAINED}
    assert begins["k16"] == 1 and begins["post_local"] == 500
    assert begins["adacomm"] == begins["diloco"] == 101  # the first update at the highest learning rate


def test_all_forms_of_local_sgd_can_share_a_synchronous_start():
    shared = Settings(begin_share=0.2)
    begins = [begin_step(method, updates=1000, warmup=100, settings=shared) for method in ("k4", "adacomm", "post_local")]
    assert begins == [200, 200, 500]


def test_methods_are_chosen_by_name_and_have_labels():
    assert choose("k4,adacomm", METHODS) == ["k4", "adacomm"] and choose(None, METHODS) == list(METHODS)
    with pytest.raises(ConfigError, match="'adacom'.*Did you mean `adacomm`"):
        choose("adacom", METHODS)
    assert len({label(method, USUAL) for method in METHODS}) == len(METHODS)
    assert first_period("accelerate_16", USUAL) == 16


@pytest.mark.parametrize(
    "wrong", [{"init_k": 0}, {"begin_share": 1.0}, {"max_k": True}, {"outer_momentum": 1.0}, {"formula": "papers"}]
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Settings(**wrong)


@pytest.mark.parametrize("wrong", [{"ranks": 1}, {"lr": float("nan")}, {"decay": "steps"}, {"epochs": True}])
def test_a_training_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Training(**wrong)


def test_flags_make_settings_and_refuse_what_cannot_be_measured():
    flags = flags_of(["--init-k", "4", "--epochs", "3"])
    assert made(flags, USUAL) == Settings(init_k=4) and made(flags, Training()).epochs == 3
    for wrong in (["--hosts", "1"], ["--models", "vgg"], ["--tune"], ["--seconds", "nan"], ["--lrs", "0"], ["--turns", "1"]):
        with pytest.raises(ConfigError, match=wrong[0]):
            flags_of(wrong)


# Throughput


def test_each_turn_begins_with_another_method():
    assert [order(["a", "b", "c", "d"], turn)[0] for turn in range(5)] == ["a", "b", "c", "d", "a"]
    assert sorted(order(["a", "b", "c"], 3)) == ["a", "b", "c"]


class Recorder:
    """Counts steps, and averages after the 3rd, 5th and 9th, as ADACOMM might, then every fourth."""

    def __init__(self):
        self.rates = []
        self.contestant = Contestant(self.step, 1)

    def step(self, lr):
        self.rates.append(lr)
        made = len(self.rates)
        averaged = made in (3, 5, 9) or (made > 9 and made % 4 == 1)
        return Report(due=True, _verdict=Verdict(True), bytes_sent=100 * averaged, averaged=averaged)


def test_a_row_of_a_fixed_period_is_timed_over_whole_periods_after_the_first_round(alone):
    recorder = Recorder()
    row = FixedRow(Clock(recorder.contestant), 4)
    row.warm()
    assert len(recorder.rates) == 5  # one synchronous update, one period
    for turn in range(3):
        row.block(turn)
    figures = row.figures()
    assert len(recorder.rates) == 17 and figures["steps"] == 12 and figures["counted_bytes_per_step"] == 25
    assert figures["range_ms"][0] <= figures["step_ms"] <= figures["range_ms"][1] and figures["link_bytes_per_step"] is None


def test_blocks_of_adacomm_end_with_an_averaging_and_lose_no_period(alone):
    recorder = Recorder()
    row = AdaptiveRow(Clock(recorder.contestant), 2)
    row.warm()
    for turn, updates in ((0, 21), (1, 41)):  # the first averagings from the 21st and the 40th update on
        row.block(turn)
        assert len(recorder.rates) == updates
    figures = row.figures()
    assert figures["periods"] == [1, 2, 4, *[4] * 8] and figures["steps"] == 39 and recorder.rates[-1] > 0


def test_post_local_sgd_is_synchronous_in_the_first_half_of_the_turns(alone):
    recorder = Recorder()
    row = PostLocalRow(Clock(recorder.contestant), Settings(post_local_k=8), 4)
    row.warm()
    for turn in range(4):
        row.block(turn)
    assert row.dense.steps == 6 and row.local.steps == 16 and begin_of("post_local", 4) == 8 == 2 + row.dense.steps
    figures = row.figures()
    assert figures["step_ms"] == pytest.approx(sum(figures["parts_ms"]) / 2, rel=0, abs=0.001)


def test_the_learning_rate_of_the_miniature_falls_in_a_line_after_its_synchronous_updates():
    assert falling(1) == falling(MINIATURE_BEGIN) == falling(MINIATURE_BEGIN + 1) * 39 / 38
    assert falling(MINIATURE_STEPS) == pytest.approx(falling(1) / 39, rel=0, abs=1e-12)


def test_the_fit_finds_the_update_and_the_averaging():
    t, r = fit({k: 100 + 400 / k for k in (1, 2, 4, 8, 16)})
    assert (t, r) == pytest.approx((100, 400), rel=0, abs=1e-9) and fit({4: 100.0}) is None


def row(method, step_ms, **more):
    facts = {"device": "a CPU", "torch": "2.13", "commit": "abc", "hosts": 2, "rate_mbit": 100.0, "run": 1}
    facts["settings"] = asdict(USUAL)
    figures = {"step_ms": step_ms, "samples_per_s": 2 * 192 / step_ms * 1e3, "steps": 32, "link_bytes_per_step": 42_000_000}
    return {"part": "throughput", "model": "mlp", "method": method, "batch": 192, **figures, **facts, **more}


def rows():
    fixed = [row(f"k{k}", 100 + 400 / k) for k in (1, 2, 4, 8, 16)]
    peer = {"part": "throughput", "model": "mlp", "method": "accelerate_4", "batch": 192, "why_not": "it is not installed"}
    facts = {"device": "a CPU", "torch": "2.13", "commit": "abc", "hosts": 2, "rate_mbit": 100.0, "run": 1}
    facts["settings"] = asdict(USUAL)
    return [row("alone", 95.0), row("synchronous", 480.0), *fixed, row("adacomm", 150.0, periods=[8, 8, 7]), {**peer, **facts}]


def test_of_a_row_measured_twice_the_last_counts():
    (table,) = throughput([*rows(), row("k4", 205.0)]).values()
    assert table["rows"]["k4"]["step_ms"] == 205.0 and table["rows"]["k8"]["step_ms"] == 150.0
    (table,) = throughput(rows()).values()
    assert table["alone_ms"] == 95.0 and table["fit_ms"] == [100.0, 400.0] and table["fit_error"] == 0


# Accuracy


def run(method, seed, found, *, rounds=0, dense=1, lr=0.8, phase="final", training=None, **more):
    training = training or Training()
    chosen, updates = planned(method, training, USUAL, 50_000 if phase == "final" else 45_000)
    return {
        **{"part": "accuracy", "phase": phase, "method": method, "seed": seed, "lr": lr, "strategy": chosen},
        **{"training": asdict(training), "updates": updates, "dense_updates": dense, "rounds": rounds, "accuracy": found},
        **{"mean_period": (updates - dense) / rounds if rounds else None, "periods": [[8, 3], [16, 2]], "bytes_sent": 5e8},
        **{"train_loss": 0.5, "stopped": None, "seconds": 17.0, "label": label(method, USUAL)},
        **{"device": "a GPU", "torch": "2.11", "commit": "abc", **more},
    }


def runs():
    """1,953 updates: ADACOMM makes 99 of them synchronous, and 180 averagings; k = 4 makes 488 averagings."""
    steps = {1: -0.1, 2: 0.0, 3: 0.1}
    return [
        line
        for seed, step in steps.items()
        for line in (
            run("synchronous", seed, 91.0 + step, dense=1953),
            run("k4", seed, 90.9 + step, rounds=488),
            run("adacomm", seed, 90.8 + step, rounds=180, dense=99),
        )
    ]


def test_forty_epochs_are_1953_updates_and_the_warm_up_is_a_twentieth_of_them():
    chosen, updates = planned("adacomm", Training(), USUAL, 50_000)
    assert updates == 1953 and chosen["adaptive_localsgd_configs"]["begin_step"] == 99


def test_a_diary_tells_the_periods_that_a_run_went_through():
    diary = Diary(20, torch.device("cpu"))
    for update in range(20):
        report = Report(due=True, _verdict=Verdict(True), bytes_sent=10, averaged=update + 1 in (6, 10, 14, 20))
        diary.note(update, report, torch.tensor(float(update)))
    figures = diary.figures(2, 20)
    assert figures["periods"] == [[4, 3], [6, 1]] and figures["rounds"] == 4 and figures["mean_period"] == 4.5
    assert figures["bytes_sent"] == 200 and figures["train_loss"] == 18.5  # of the last tenth


def test_a_row_has_the_mean_and_the_spread_of_its_last_settings():
    other = run("k4", 1, 50.0, lr=0.4)
    found = accuracy([other, *runs(), run("k4", 0, 99.0, phase="tune")])
    assert found["k4"]["test"] == pytest.approx([90.8, 90.9, 91.0]) and (found["k4"]["mean"], found["k4"]["spread"]) == (
        90.9,
        0.2,
    )


def test_a_whole_training_costs_its_synchronous_updates_its_local_ones_and_its_averagings():
    (table,) = throughput(rows()).values()
    found = accuracy(runs())
    assert training_ms(found["adacomm"], table) == pytest.approx((99 * 480 + 1854 * 100 + 180 * 400) / 1953)
    assert training_ms(found["synchronous"], table) == 480.0
    (rates,) = whole_trainings(found, throughput(rows())).values()
    assert rates["synchronous"] == 800.0


def test_verdicts_follow_from_the_numbers():
    tables = throughput(rows())
    near, faster = verdicts(accuracy(runs()), tables).values()
    assert near["holds"] is True and near["numbers"]["behind"] == 0.2
    assert faster["holds"] is True and faster["numbers"]["ADACOMM"] > faster["numbers"]["k = 4"]
    worse = [
        run("adacomm", 1, 90.7, rounds=1854, dense=99),
        run("synchronous", 1, 91.0, dense=1953),
        run("k4", 1, 91.0, rounds=488),
    ]
    assert [one["holds"] for one in verdicts(accuracy(worse), tables).values()] == [False, False]
    assert [one["holds"] for one in verdicts({}, tables).values()] == [None, None]


def plan(tmp_path):
    archive, out = tmp_path / "images", tmp_path / "accuracy.jsonl"
    return Plan((), Training(), USUAL, "cpu", archive, tmp_path, out, time.monotonic(), 1)


def test_final_runs_take_the_learning_rate_that_was_best_on_held_out_images(tmp_path):
    tuned = [run("k4", 0, 88.0, lr=0.8, phase="tune"), run("k4", 0, 89.0, lr=0.4, phase="tune")]
    of_others = run("k4", 0, 99.0, lr=1.6, phase="tune", training=Training(epochs=30))
    jobs = final_jobs(["k4", "diloco"], plan(tmp_path), [*tuned, of_others], [1, 2])
    assert [(job.method, job.seed, job.lr) for job in jobs] == [
        ("k4", 1, 0.4),
        ("diloco", 1, 0.2),
        ("k4", 2, 0.4),
        ("diloco", 2, 0.2),
    ]
    assert [job.lr for job in tuning_jobs(["k4", "diloco"], Training(), USUAL, [1.0, 2.0])] == [0.8, 0.2, 1.6, 0.4]


def test_a_training_is_done_only_if_all_its_settings_are_the_same(tmp_path):
    made_plan, known = plan(tmp_path), [json.loads(json.dumps(run("adacomm", 1, 90.0)))]
    assert is_done(Job("final", "adacomm", 1, 0.8), made_plan, known)
    assert not is_done(Job("final", "adacomm", 2, 0.8), made_plan, known)
    assert not is_done(Job("final", "adacomm", 1, 0.4), made_plan, known)
    assert not is_done(Job("final", "adacomm", 1, 0.8), replace(made_plan, settings=Settings(init_k=4)), known)


# The files and the page


def test_lines_of_several_files_are_merged_and_counted_once(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("".join(json.dumps(line) + "\n" for line in rows()))
    second.write_text("".join(json.dumps(line) + "\n" for line in [*runs(), runs()[0]]) + '{"part": "acc')
    flags = flags_of(["--out", str(tmp_path / "none"), "--earlier", str(first), str(second)])
    found = lines(flags)
    assert len(found["throughput"]) == len(rows()) and len(found["accuracy"]) == 9
    first.write_text('{"part": "other"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl holds a line that is of no part"):
        lines(flags)


def test_the_page_shows_both_parts_and_why_a_peer_was_not_run(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in [*rows(), *runs()]))
    flags = flags_of(["--out", str(tmp_path / "none"), "--earlier", str(file), "--note", "A note."])
    text = page(json.loads(json.dumps(summary(flags, Training(), USUAL))))
    assert "| Accelerate `LocalSGD`, k = 4 | not run: it is not installed |" in text
    assert "| ADACOMM, init_k = 6 | 90.80 | 0.20 | 3 | -0.20 | 180 | 10.30 | 0.50 | 2,459.5 (+207 %) |" in text
    assert "| Local SGD, k = 16 | 125.0 | 3,072.0 | +284 % | 0.76 | 42.00 | 32 updates |" in text
    assert "8, 8, 7" in text and "8 x 3, 16 x 2" in text and "\n- A note.\n" in text and "none was tuned" in text
    lines_of_table = [line for line in text.splitlines() if line.startswith("| final ")]
    assert len(lines_of_table) == 9


def test_what_was_trained_is_published_without_its_flags_being_written_again(tmp_path):
    file, longer = tmp_path / "a.jsonl", Training(epochs=30)
    file.write_text(json.dumps(runs()[0]) + "\n" + json.dumps(run("k4", 1, 93.0, training=longer)) + "\n")
    flags = flags_of(["--out", str(tmp_path / "none"), "--earlier", str(file)])
    assert [line["accuracy"] for line in summary(flags, Training(), USUAL)["runs"]] == [93.0]
    flags.accuracy = True
    assert [line["method"] for line in summary(flags, Training(), USUAL)["runs"]] == ["synchronous"]


def test_the_page_is_made_of_either_part_alone(tmp_path):
    file = tmp_path / "a.jsonl"
    for part in (rows(), runs()):
        file.write_text("".join(json.dumps(line) + "\n" for line in part))
        flags = flags_of(["--out", str(tmp_path / "none"), "--earlier", str(file)])
        assert "not measured" in page(summary(flags, Training(), USUAL))


def test_figures_of_another_bench_are_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"bench": "overhead"}')
    with pytest.raises(ConfigError, match="no figures of this bench"):
        published(tmp_path / "other.json", "localsgd_table")


@pytest.mark.campaign
def test_the_bench_runs_from_end_to_end_in_small():
    command = [sys.executable, "-m", "bench.localsgd_table.run", "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for method in METHODS:
        assert f"tiny     {method} " in done.stdout
    for method in TRAINED:
        assert f"final {method} " in done.stdout
