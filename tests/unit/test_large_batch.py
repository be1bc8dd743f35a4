"""bench/large_batch: learning rates and trials, what a run computes, the order of runs, the verdicts and the page."""

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from bench.large_batch.jobs import Job, final_jobs, in_time, tuning_jobs
from bench.large_batch.page import page
from bench.large_batch.recipe import GRID, Recipe, Trial, choose_cells, ema_keep, lr_at, read_trials
from bench.large_batch.run import Bench, Place, coloured_noise, on_device
from bench.large_batch.summary import summarise, verdicts
from bench.large_batch.train import Trainer, make_model, make_optimizer, why_stop
from bench.lib.resnet9 import ResNet9
from fleetx.errors import ConfigError

ROOT = Path(__file__).parents[2]

SGD = Trial("sgd", 64, 0.1, 5e-4)
LARS = Trial("lars", 64, 0.4, 5e-4, lars_coeff=0.02)
TINY = Recipe(epochs=1, micro_batch=16, ema_images=64, bn_images=32, width=2)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The recipe


def test_the_learning_rate_rises_in_a_line_and_falls_to_nothing():
    rates = [lr_at(update, 11, peak=2.0, warmup_share=0.28, decay="linear") for update in range(11)]
    assert rates == [0.5, 1.0, 1.5, 2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5, 0.25]


def test_quadratic_and_cosine_decays_are_checkable_by_hand():
    assert lr_at(7, 10, peak=2.0, warmup_share=0.2, decay="quadratic") == 2.0 * (3 / 8) ** 2
    assert lr_at(6, 10, peak=2.0, warmup_share=0.2, decay="cosine") == pytest.approx(1.0, rel=0, abs=1e-15)
    assert lr_at(0, 10, peak=2.0, warmup_share=0.0, decay="cosine") == 2.0


def test_thirty_epochs_are_183_updates_of_8192_images():
    assert [Recipe().updates(50_000, batch) for batch in (512, 2048, 8192)] == [2929, 732, 183]


def test_a_moving_average_forgets_by_images_and_not_by_updates():
    assert ema_keep(512, 8192) ** 16 == pytest.approx(ema_keep(8192, 8192), rel=0, abs=1e-12) == pytest.approx(1 / math.e)


def test_every_cell_has_the_same_number_of_different_trials():
    cells = choose_cells(GRID, None)
    assert len(cells) == 9 and {len(trials) for trials in cells.values()} == {5} and len(set(GRID)) == len(GRID)


def test_cells_are_chosen_by_name():
    assert list(choose_cells(GRID, "lars@8192,sgd@512")) == ["lars@8192", "sgd@512"]
    with pytest.raises(ConfigError, match="'lars@819'.*Did you mean `lars@8192`"):
        choose_cells(GRID, "lars@819")


def test_trials_come_from_a_file(tmp_path):
    path = tmp_path / "trials.json"
    path.write_text(json.dumps([asdict(LARS), SGD.settings()]))
    assert read_trials(path) == (LARS, SGD)


@pytest.mark.parametrize(
    "entry, message",
    [
        ({**SGD.settings(), "warmup": 0.1}, "trial 1 has the key 'warmup'"),
        ({**SGD.settings(), "lr": math.nan}, "lr is nan"),
        ({**SGD.settings(), "batch": True}, "batch of a trial is True"),
        ({**SGD.settings(), "lars_coeff": 0.01}, "lars alone has one"),
        ({**LARS.settings(), "lars_coeff": None}, "lars_coeff is None in a trial of lars"),
        ({**SGD.settings(), "optimizer": "larz"}, "Did you mean `lars`"),
        ({**SGD.settings(), "decay": "steps"}, "decay is 'steps'"),
        ({"optimizer": "sgd"}, "missing"),
        ([1], "a trial is an object"),
    ],
)
def test_a_trial_that_cannot_be_run_is_refused(tmp_path, entry, message):
    path = tmp_path / "trials.json"
    path.write_text(json.dumps([entry]))
    with pytest.raises(ConfigError, match=message):
        read_trials(path)


# Training


def test_resnet9_has_its_parameters_and_ten_logits():
    assert sum(p.numel() for p in ResNet9().parameters()) == 6_573_120
    assert ResNet9(width=2)(torch.zeros(4, 3, 32, 32)).shape == (4, 10)


def test_norms_are_without_decay_in_all_optimizers_and_not_adapted():
    model = ResNet9(width=2)
    decayed, plain = make_optimizer(SGD, model).param_groups
    assert decayed["weight_decay"] == 5e-4 and len(decayed["params"]) == 9 and plain["weight_decay"] == 0
    for trial in (LARS, Trial("lamb", 64, 0.01, 0.02, beta2=0.99)):
        lines = make_optimizer(trial, model).describe().splitlines()[1:]
        assert len(lines) == 25
        for line in lines:
            assert line.split()[2:4] == (["no", "no"] if ".norm." in line else ["yes", "yes"])


def test_gradients_of_micro_batches_add_up_to_their_mean():
    torch.manual_seed(0)
    trainer = Trainer(TINY, torch.device("cpu"))
    if trainer.recipe.whiten:
        trainer.model.fit_whitening(torch.from_numpy(coloured_noise(16).images))
    reference = make_model(TINY)
    reference.load_state_dict(trainer.model.state_dict())
    images, labels = torch.randn(4, 16, 3, 32, 32), torch.randint(10, (4, 16))
    trainer.share.fill_(1 / 4)
    for part in range(4):
        trainer.images.copy_(images[part])
        trainer.labels.copy_(labels[part])
        trainer.micro_step()
    losses = [F.cross_entropy(reference(images[part]), labels[part], label_smoothing=0.1) for part in range(4)]
    (sum(losses) / 4).backward()
    for ours, theirs in zip(trainer.gradients, (p for p in reference.parameters() if p.requires_grad), strict=True):
        torch.testing.assert_close(ours, theirs.grad, rtol=0, atol=1e-5)  # of 0.2; another memory format rounds otherwise
    torch.testing.assert_close(trainer.loss_sum, sum(losses) / 4, rtol=0, atol=1e-6)


def test_a_run_is_the_same_again_after_another_one():
    split = on_device(coloured_noise(128), torch.device("cpu"))
    trainer = Trainer(TINY, torch.device("cpu"))
    sgd, lars = replace(SGD, batch=16), replace(LARS, batch=16)
    first, other, again = (trainer.run(trial, 3, split, split) for trial in (sgd, lars, sgd))
    for figures in (first, other, again):
        figures.pop("seconds")
    assert first == again != other and first["updates"] == 8 and first["stopped"] is None


def test_a_run_whose_loss_is_lost_stops_and_counts_as_chance():
    split = on_device(coloured_noise(128), torch.device("cpu"))
    wild = Trial("sgd", 16, 1e30, 5e-4, warmup_share=0.0)
    figures = Trainer(TINY, torch.device("cpu")).run(wild, 0, split, split)
    assert figures["accuracy"] == 10 and figures["train_loss"] is None and "NaN" in figures["stopped"] and figures["updates"] < 8


def test_a_run_that_still_guesses_late_is_stopped():
    assert why_stop(2.30, 79, 200) is None and why_stop(2.30, 80, 200) == "the loss was still 2.300 after 80 of 200 updates"
    assert why_stop(2.2, 190, 200) is None and why_stop(2.30, 40, 80) is None  # so short a run may need all of it


# The order of runs, and what they say


def test_runs_go_in_turns_over_the_cells():
    cells = {"sgd@64": [SGD, Trial("sgd", 64, 0.2, 0.0)], "lars@64": [LARS]}
    assert [job.trial.cell for job in tuning_jobs(cells)] == ["sgd@64", "lars@64", "sgd@64"]


def record(phase, trial, seed, accuracy, **more):
    figures = {
        "updates": 7,
        "train_loss": 1.0,
        "stopped": None,
        "accuracy_last": accuracy,
        "accuracy_two_views": accuracy,
        "seconds": 2.0,
    }
    facts = {"recipe": asdict(Recipe()), "device": "a GPU", "torch": "2.11", "commit": "abc"}
    return {"phase": phase, "trial": trial.settings(), "seed": seed, "accuracy": accuracy, **figures, **facts, **more}


def test_final_runs_take_the_best_trial_of_each_cell_seed_by_seed():
    better = Trial("sgd", 64, 0.2, 0.0)
    cells, records = {"sgd@64": [SGD, better], "lars@64": [LARS]}, [record("tune", SGD, 0, 80.0), record("tune", better, 0, 81.0)]
    jobs = final_jobs(cells, records, (1, 2))
    assert [(job.trial, job.seed) for job in jobs] == [(better, 1), (LARS, 1), (better, 2), (LARS, 2)]
    with pytest.raises(ConfigError, match="no tuning result of sgd@64"):
        final_jobs(cells, [], (1, 2))


def test_a_run_begins_only_if_it_and_what_must_follow_end_in_time():
    assert in_time(0.0, 1.0, [], reserved=5) and not in_time(1.0, 1.0, [], reserved=0)
    assert in_time(0.0, 46.1, [10.0], reserved=3) and not in_time(0.0, 45.9, [10.0], reserved=3)


def test_runs_made_before_are_read_once_without_a_line_cut_short(tmp_path):
    earlier = tmp_path / "earlier.jsonl"
    other = record("tune", LARS, 0, 70.0, recipe=asdict(TINY))
    earlier.write_text("".join(json.dumps(line) + "\n" for line in (record("tune", SGD, 0, 80.0), other)))
    out = tmp_path / "out"
    bench = Bench(Place(Recipe(), "cpu", None, tmp_path, compiled=False, deadline=0.0), out, [earlier], 1)
    (out / "runs.jsonl").write_text(json.dumps(record("tune", SGD, 0, 80.0)) + "\n" + '{"phase": "tu')
    assert [line["accuracy"] for line in bench.records()] == [80.0]
    bench.make([Job("tune", SGD, 0)])
    assert len(list(out.iterdir())) == 1


def all_records(lars_large=92.9):
    trials = {trial.cell: trial for trial in reversed(GRID)}
    tests = {"sgd@512": 94.0, "lars@2048": 93.7, "lars@8192": lars_large, "sgd@8192": 92.0}
    tuned = [record("tune", trials[cell], 0, accuracy - 1) for cell, accuracy in tests.items()]
    worse = record("tune", GRID[1], 0, 10.0, stopped="the loss became NaN or infinite", train_loss=None)
    steps = {1: -0.1, 2: 0.0, 3: 0.1}
    finals = [record("final", trials[cell], seed, a + step) for cell, a in tests.items() for seed, step in steps.items()]
    return [*tuned, worse, *finals]


def test_a_cell_has_the_mean_and_the_spread_of_its_chosen_settings():
    stray = record("final", GRID[1], 1, 50.0)
    cell = summarise([*all_records(), stray])["sgd@512"]
    assert (cell["trials"], cell["stopped"], cell["held_out"], cell["chosen"]) == (2, 1, 93.0, GRID[0].settings())
    assert cell["test"] == [93.9, 94.0, 94.1] and (cell["mean"], cell["spread"]) == (94.0, 0.2)


def test_verdicts_follow_from_the_means():
    judged = verdicts(summarise(all_records()))
    assert {name: (one["number"], one["holds"]) for name, one in judged.items()} == {
        "sgd_512": (94.0, True),
        "lars_2048": (0.3, True),
        "lars_8192": (1.1, True),
        "lars_over_sgd_8192": (0.9, True),
    }
    judged = verdicts(summarise(all_records(lars_large=92.1)))
    assert judged["lars_8192"]["holds"] is False and judged["lars_over_sgd_8192"]["holds"] is False  # 0.1 in a spread of 0.2
    assert {one["holds"] for one in verdicts({}).values()} == {None}


def test_the_page_shows_every_run_and_says_when_budgets_differ():
    records = all_records(lars_large=92.1)
    cells = summarise(records)
    figures = {"date": "2025-01-02T03:04", "device": "a GPU", "torch": "2.11", "commit": "abc", "note": "A note."}
    text = page({**figures, "recipe": asdict(Recipe()), "cells": cells, "verdicts": verdicts(cells), "runs": records})
    assert "| SGD (Nesterov) | 94.00 (spread 0.20, 3 seeds) | not measured | 92.00 (spread 0.20, 3 seeds) |" in text
    assert "| lars@8192 is at most 1.5 points behind sgd@512 | 1.90 | **no** |" in text
    assert "**unequal** budgets: sgd@512 2, sgd@8192 1" in text and "\n- A note.\n" in text and "2025-01-02" in text
    assert "| sgd@512 | 0 | **93.00** |" in text and "the loss became NaN or infinite" in text
    assert sum(line.startswith(("| sgd@", "| lars@")) and len(line.split("|")) == 18 for line in text.splitlines()) == len(
        records
    )
    equal = {cell: {**summary, "trials": 6} for cell, summary in cells.items()}
    text = page({**figures, "recipe": asdict(Recipe()), "cells": equal, "verdicts": verdicts(cells), "runs": records})
    assert "the same budget, 6 trials" in text


@pytest.mark.campaign
def test_the_bench_runs_from_end_to_end_with_all_three_optimizers(tmp_path):
    command = [sys.executable, "-m", "bench.large_batch.run", "--smoke", "--out", str(tmp_path), "--seeds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(run["phase"], run["trial"]["optimizer"]) for run in runs] == [
        (phase, name) for phase in ("tune", "final") for name in ("sgd", "lars", "lamb")
    ]
    assert all(run["stopped"] is None and run["train_loss"] < 2.4 for run in runs)
