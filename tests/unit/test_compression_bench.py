"""bench/compression_table and compression_speed: what each method is, the figures and verdicts, the traffic, the page."""

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.bytes import run as quantised
from bench.compression_speed import contestants as speed_rows
from bench.compression_speed import run as compression_speed
from bench.compression_speed import traffic
from bench.compression_speed.figures import complaint, figures_of, verdicts
from bench.compression_table.methods import METHODS, Settings
from bench.compression_table.page import page
from bench.compression_table.run import flags_of, main, summary
from bench.compression_table.verdicts import accuracy_verdicts, behind
from bench.lib.mlp import USUAL as MLP
from bench.localsgd_table.accuracy import Job, Plan, is_done
from bench.localsgd_table.methods import Settings as LocalSettings
from bench.localsgd_table.training import Training, begin_of, planned
from fleetx import fleet
from fleetx.errors import ConfigError

ROOT = Path(__file__).parents[2]

USUAL = Settings()


# The methods


def test_compression_begins_after_the_warm_up_and_dgc_ramps_over_the_next_twentieth():
    """1,953 updates, of which 98 are the warm-up."""
    dgc, updates = planned("dgc", Training(), USUAL, 50_000)
    assert updates == 1953
    ramp = {"rampup_begin_step": 98, "rampup_step": 98, "sparsity": [0.984375, 0.996, 0.999], "min_numel": 16384}
    assert dgc == {"dgc": True, "dgc_configs": ramp} and begin_of(dgc) == 98
    powersgd, _ = planned("powersgd", Training(), USUAL, 50_000)
    assert powersgd == {"powersgd": True, "powersgd_configs": {"rank": 4, "begin_step": 98}} and begin_of(powersgd) == 98
    assert begin_of(planned("bf16", Training(), USUAL, 50_000)[0]) is None


def test_every_method_is_a_strategy_that_is_accepted_and_has_a_label():
    for method in METHODS:
        fleet.DistributedStrategy(**USUAL.strategy_of(method, updates=1000, warmup=50))
    assert len({USUAL.label_of(method) for method in METHODS}) == len(METHODS)
    clipped = Settings(clip_norm=2.0, sparsity=0.99).strategy_of("dgc", updates=10, warmup=1)["dgc_configs"]
    assert clipped["clip_norm"] == 2.0 and clipped["sparsity"] == [0.984375, 0.99] and clipped["rampup_step"] == 1


@pytest.mark.parametrize("wrong", [{"sparsity": 1.0}, {"rank": True}, {"min_numel": 0}, {"clip_norm": float("nan")}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Settings(**wrong)


def test_a_synchronous_run_of_the_other_table_counts_as_done(tmp_path):
    theirs = Job("final", "synchronous", 1, 0.8).identity(Training(), LocalSettings(), 50_000)
    plan = Plan((), Training(), USUAL, "cpu", tmp_path / "images", tmp_path, tmp_path / "out", time.monotonic(), 1)
    assert is_done(Job("final", "synchronous", 1, 0.8), plan, [json.loads(json.dumps(theirs))])
    assert not is_done(Job("final", "dgc", 1, 0.8), plan, [theirs])
    assert not is_done(Job("final", "synchronous", 1, 0.8), replace(plan, training=Training(epochs=30)), [theirs])


def test_flags_that_need_another_are_refused():
    for wrong in (["--tune"], ["--speed", "a.json"], ["--seconds", "nan"]):
        with pytest.raises(ConfigError, match=wrong[0]):
            flags_of(wrong)
    for wrong in (["--rounds", "0"], ["--rates", "nan"]):
        with pytest.raises(ConfigError, match=wrong[0]):
            compression_speed.flags_of(wrong)


# Accuracy


def run(method, seed, accuracy, *, lr=0.8, phase="final", training=None, sent=8e9):
    training = training or Training()
    chosen, updates = planned(method, training, USUAL, 50_000)
    return {
        **{"part": "accuracy", "phase": phase, "method": method, "seed": seed, "lr": lr, "strategy": chosen},
        **{"training": asdict(training), "updates": updates, "dense_updates": begin_of(chosen) or updates, "rounds": 0},
        **{"accuracy": accuracy, "mean_period": None, "periods": [], "bytes_sent": sent, "train_loss": 0.5, "stopped": None},
        **{"seconds": 40.0, "label": USUAL.label_of(method), "device": "a GPU", "torch": "2.11", "commit": "abc"},
    }


def runs():
    shifts = {1: -0.1, 2: 0.0, 3: 0.1}
    found = {"synchronous": (94.0, 8e9), "bf16": (94.0, 4e9), "dgc": (93.8, 1e8), "powersgd": (93.4, 2e8)}
    return [run(method, seed, mean + by, sent=sent) for seed, by in shifts.items() for method, (mean, sent) in found.items()]


def test_rows_are_compared_over_the_seeds_that_both_have():
    own, base = {"seeds": [1, 2], "test": [90.0, 92.0]}, {"seeds": [2, 3], "test": [92.5, 99.0]}
    assert behind(own, base) == (0.5, 1) and behind(own, None) is None and behind(own, {"seeds": [4], "test": [1.0]}) is None


def test_an_accuracy_is_judged_over_three_seeds_only():
    def rows(points):
        return {name: {"seeds": [1, 2, 3], "test": [90 - points] * 3} for name in ("synchronous", "dgc", "powersgd")}

    near = rows(0.0) | {"dgc": {"seeds": [1, 2, 3], "test": [89.7] * 3}, "powersgd": {"seeds": [1, 2], "test": [89.9] * 2}}
    assert [one["holds"] for one in accuracy_verdicts(near).values()] == [True, None]
    far = rows(0.0) | {name: rows(0.6)[name] for name in ("dgc", "powersgd")}
    assert [one["holds"] for one in accuracy_verdicts(far).values()] == [False, False]
    assert [one["holds"] for one in accuracy_verdicts({}).values()] == [None, None]


def lines_in(tmp_path, lines):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return flags_of(["--out", str(tmp_path / "none"), "--earlier", str(file), "--note", "A note."])


def test_lines_of_the_other_table_count_only_with_the_same_training_and_learning_rate(tmp_path):
    other = {**run("synchronous", 1, 50.0), "method": "k4"}
    last = [run("synchronous", 1, 60.0, lr=0.4), run("synchronous", 1, 70.0, training=Training(epochs=9)), other]
    figures = summary(lines_in(tmp_path, [*runs(), *last]), Training(), USUAL)
    assert figures["accuracy"]["synchronous"]["test"] == [93.9, 94.0, 94.1] and len(figures["runs"]) == 12
    assert figures["verdicts"]["dgc"]["holds"] is True and figures["verdicts"]["powersgd"]["holds"] is False


# Speed


def measured(seconds, bytes_per_step=0):
    return {"seconds": seconds, "bytes_per_step": bytes_per_step, "link_bytes_per_step": None, "steps": 32}


def link(rate):
    """A step without communication takes 0.1 s, and one of DDP 4 s."""
    rows = {
        speed_rows.ALONE: measured([0.1, 0.1, 0.2]),
        speed_rows.DDP: measured([4.0, 4.0, 8.0], 42_000_000),
        speed_rows.BF16: measured([2.0, 2.0, 4.0], 21_000_000),
        speed_rows.DGC: measured([0.125, 0.125, 0.25], 125_000),
        speed_rows.POWERSGD: measured([0.25, 0.25, 0.5], 370_000),
        speed_rows.TORCH_POWERSGD: {"raised": "mismatch"},
    }
    return {"rate_mbit": rate, "goodput_mbit": 95.6, "rows": figures_of(rows, rate)}


def test_figures_are_compared_round_by_round_and_the_limit_is_computation_and_transfer():
    rows = link(100.0)["rows"]
    dgc = rows[speed_rows.DGC]
    assert (dgc["step_ms"], dgc["times_ddp"], dgc["of_alone"], dgc["limit_ms"]) == (125.0, 32.0, 0.8, 110.0)
    assert rows[speed_rows.DDP]["limit_ms"] == 3460.0 and rows[speed_rows.TORCH_POWERSGD] == {"raised": "mismatch"}


def test_speed_is_judged_at_the_rates_that_were_measured():
    found = verdicts({"100": link(100.0)})
    assert [one["numbers"]["measured"] for one in found.values()] == [32.0, 0.8, 16.0, 2.0]
    assert all(one["holds"] for one in found.values())
    slow = link(1000.0)
    slow["rows"][speed_rows.DGC]["times_ddp"] = 1.99
    assert [one["holds"] for one in verdicts({"1000": slow}).values()] == [False, True]


def test_the_complaint_of_a_job_is_its_first_error():
    assert complaint("step\nterminate called\n  what():  [pair.cc:456] a  mismatch?\nlater") == "[pair.cc:456] a mismatch?"
    assert complaint("10.0.0.1| RuntimeError: gone\nValueError: later") == "RuntimeError: gone"
    assert complaint("all is well") is None


def test_traffic_of_dgc_grows_with_the_ranks_and_that_of_powersgd_hardly():
    """Ten layers of 1024 x 1024: 10,485,760 weights and 10,240 biases; DGC sends 1,048 entries of each layer."""
    assert (MLP.weights, MLP.biases) == (10_485_760, 10_240)
    assert traffic.dense_bytes(2) == 41_984_000 and traffic.dense_bytes(2, 2) == 20_992_000
    assert traffic.dgc_bytes(2) == 10_480 * 8 + 40_960 and traffic.powersgd_bytes(2) == (81_920 + 10_240) * 4
    assert traffic.dgc_bytes(900) < traffic.dense_bytes(900) and traffic.dgc_bytes(1100) > traffic.dense_bytes(1100)
    assert traffic.powersgd_bytes(1000) < 2 * traffic.powersgd_bytes(2)


def test_all_that_is_timed_is_compressed():
    assert speed_rows.WARM_STEPS > speed_rows.DENSE_UPDATES
    for strategy, _ in speed_rows.STRATEGIES.values():
        fleet.DistributedStrategy(**strategy)


# The page


def speed():
    links = {"100": link(100.0)}
    facts = {"device": "a CPU", "torch": "2.13", "commit": "abc", "numel": 10_496_000, "batch": 192, "rounds": 3}
    return {"bench": "compression_speed", **facts, "links": links, "verdicts": verdicts(links)}


def test_the_page_shows_both_parts_or_says_what_was_not_measured(tmp_path):
    trained = json.loads(json.dumps(summary(lines_in(tmp_path, runs()), Training(), USUAL)))
    text = page(trained, speed())
    assert "| `dgc`, 99.9 % kept back | 93.80 | 0.20 | 3 | -0.20 | 0.10 (80.0 times less) |" in text
    assert "| dgc, 99.9 % kept back | 125.0 | 32.00 | 0.80 | 0.125 | 110.0 |" in text and "does not run: mismatch" in text
    assert "points behind, 3 seeds: 0.60 | **no** |" in text and "\n- A note.\n" in text
    assert "| 1024 | 83.89 | 41.94 | 85.85 | 0.74 |" in text and len([x for x in text.splitlines() if x[:8] == "| final "]) == 12
    assert "The steps were not measured." in page(trained, None) and "The trainings were not measured." in page(None, speed())


def test_a_page_is_made_of_the_files_that_are_named(tmp_path):
    file, target = tmp_path / "table.json", tmp_path / "page.md"
    figures = summary(lines_in(tmp_path, runs()), Training(), USUAL)
    file.write_text(json.dumps({"bench": "compression_table", **figures}))
    (tmp_path / "speed.json").write_text(json.dumps(speed()))
    arguments = ["--table", str(file), "--speed", str(tmp_path / "speed.json"), "--page", str(target)]
    main(arguments)
    assert target.read_text() == page(json.loads(json.dumps(figures)), speed())
    with pytest.raises(ConfigError, match="no figures of this bench"):
        main(["--table", str(tmp_path / "speed.json")])


@pytest.mark.campaign
def test_the_trainings_run_from_end_to_end_in_small():
    command = [sys.executable, "-m", "bench.compression_table.run", "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for method in METHODS:
        assert f"final {method} " in done.stdout


def test_bits_a_parameter_are_counted_and_read_from_the_link():
    seconds = {quantised.ALONE: 0.2, quantised.DDP: 4.0, quantised.BF16: 2.0, quantised.EIGHT: 1.0, quantised.FOUR: 0.5}
    outcome = {
        name: {"seconds": [s], "bytes_per_step": quantised.NUMBERS, "link_bytes_per_step": 2 * quantised.NUMBERS, "steps": 2}
        for name, s in seconds.items()
    }
    rows = quantised.rows_of(outcome, 100.0)
    assert (rows[quantised.EIGHT]["bits_counted"], rows[quantised.EIGHT]["bits_on_link"]) == (8.0, 16.0)
    assert rows[quantised.FOUR]["times_bf16"] == 4.0
    found = quantised.verdicts({"100": {"rows": rows}})
    assert [one["holds"] for one in found.values()] == [True, True]


@pytest.mark.campaign
def test_the_steps_with_integers_run_from_end_to_end_in_small():
    command = [sys.executable, "-m", "bench.bytes.run", "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1])) == set(quantised.IN_TURNS)


@pytest.mark.campaign
def test_the_steps_run_from_end_to_end_in_small():
    command = [sys.executable, "-m", "bench.compression_speed.run", "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1])) == set(speed_rows.IN_TURNS)
