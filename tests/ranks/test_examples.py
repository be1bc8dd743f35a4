"""What a newcomer meets first: the README says what is true, and the examples run as they are."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BEFORE, AFTER = "examples/plain_torch_before.py", "examples/plain_torch.py"
LIMIT_S = 120
EPOCHS = "8"  # both are past 98 % then, and no longer move
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FLEETX_TTY")


def run_python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As a user would, from a folder of their own, with no launcher around."""
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::FutureWarning"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def final_accuracy(ended: subprocess.CompletedProcess[str]) -> float:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return float(re.findall(r"test accuracy ([\d.]+)%", ended.stdout)[-1])


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def load_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fleetx_demo", ROOT / "examples" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def test_the_readme_shows_the_real_difference_between_the_two_scripts() -> None:
    before, after = ((ROOT / name).read_text(encoding="utf-8").splitlines() for name in (BEFORE, AFTER))
    real = list(difflib.unified_diff(before, after, BEFORE, AFTER, n=1, lineterm=""))
    assert blocks("diff") == ["\n".join(real) + "\n"]
    assert sum(line.startswith("+") for line in real[2:]) <= 13
    assert len(after) < 80


def test_the_readme_names_every_strategy_once() -> None:
    from fleetx.strategies import catalogue

    table = set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE))
    assert table == {name for name, part in catalogue().items() if part.available} == set(catalogue())


def test_the_readmes_python_runs_and_prints_what_the_readme_says(tmp_path: Path) -> None:
    printing, looping, enlarging, recomputing, budgeting, averaging, compressing, choosing, saving, _ = blocks("python")
    shown = run_python("-c", printing, folder=tmp_path)
    assert (shown.stdout, shown.stderr, shown.returncode) == (blocks("text")[0], "", 0)
    looped = run_python("-c", looping, folder=tmp_path)
    assert looped.returncode == 0, looped.stderr
    assert looped.stdout.splitlines()[-1].endswith(" True 0")  # updated; alone, nothing is sent
    enlarged = run_python("-c", enlarging, folder=tmp_path)
    assert enlarged.returncode == 0, enlarged.stderr
    described, ratios, noise = enlarged.stdout.split("parameter", 1)[1].strip().rsplit("\n", 2)
    assert "0.weight   8x3x3x3  yes      yes      not excluded" in described and "1.bias     8        no       no" in described
    assert ratios.startswith("TrustRatios(min ") and ratios.endswith("2 tensors)")
    assert noise == "None" or float(noise) > 0
    without = recomputing.replace("lr=0.001), strategy)", "lr=0.001))")
    assert without != recomputing
    again, stored = (run_python("-c", script, folder=tmp_path) for script in (recomputing, without))
    assert (again.returncode, stored.returncode) == (0, 0), again.stderr + stored.stderr
    assert float(again.stdout.splitlines()[-1]) > 0 and again.stdout.splitlines()[-1] == stored.stdout.splitlines()[-1]
    budgeted = run_python("-c", budgeting, folder=tmp_path)
    assert budgeted.returncode == 0, budgeted.stderr
    plan = re.search(r"Peak: ([\d.]+) MB predicted, ([\d.]+) MB real; the budget is 24.00 MB", budgeted.stdout)
    assert plan is not None and float(plan[1]) <= 24 and float(plan[2]) <= 24, budgeted.stdout
    size, steps = map(int, budgeted.stdout.splitlines()[-1].split(")")[-1].split())
    assert size * steps == 4096
    (tmp_path / "averaging.py").write_text(averaging, encoding="utf-8")
    averaged = run_python("-m", "fleetx.launch", "--nproc_per_node", "2", "averaging.py", folder=tmp_path)
    assert averaged.returncode == 0, averaged.stdout + averaged.stderr
    # Update 40 is two after the round of 38; both workers' waits are told.
    assert re.search(r"^4 True \{0: [\d.e-]+, 1: [\d.e-]+\}$", averaged.stdout, flags=re.MULTILINE), averaged.stdout
    assert load_file(tmp_path / "model.safetensors")["3.weight"].shape == (4, 32)
    (tmp_path / "compressing.py").write_text(compressing, encoding="utf-8")
    compressed = run_python("-m", "fleetx.launch", "--nproc_per_node", "2", "compressing.py", folder=tmp_path)
    assert compressed.returncode == 0, compressed.stdout + compressed.stderr
    assert "dgc: 0.001 of the entries of each large tensor are sent, 8 bytes each" in compressed.stdout
    figures = re.search(r"^(\d+) (0\.\d+) (\d+\.\d+)$", compressed.stdout, flags=re.MULTILINE)
    assert figures is not None, compressed.stdout
    # Of two matrices of 32,768 entries 32 each, 8 bytes of each of them; 576 biases, and what all updates carry.
    assert 64 * 8 + 576 * 4 < int(figures[1]) < 3000 and (64 + 576) / 66112 < float(figures[2]) < 0.0105 and float(figures[3]) > 0
    for told in ("planned in", "by the plan in plan.json"):  # the second finds the plan of the first
        chosen = run_python("-c", choosing, folder=tmp_path)
        assert chosen.returncode == 0 and told in chosen.stdout, chosen.stdout + chosen.stderr
        *_, size, steps = chosen.stdout.splitlines()[-1].split()
        assert int(size) * int(steps) == 2048
    for _ in range(2):  # the second finds the checkpoint of the first, and has nothing left to do
        saved = run_python("-c", saving, folder=tmp_path)
        assert saved.returncode == 0, saved.stderr
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-0000000050", "step-0000000100"]
    assert load_file(tmp_path / "model.safetensors")["weight"].shape == (1, 4)


def test_the_readmes_script_takes_its_flags_on_two_workers_and_refuses_a_misspelt_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks("python")[-1], encoding="utf-8")
    misspelt = run_python("train.py", "--batchsize", "48", folder=tmp_path)
    assert "ConfigError: unknown argument '--batchsize'. Did you mean `batch_size`?" in misspelt.stderr
    flags = ("--epochs", "2", "--batch_size", "48", "--gradient_merge.k_steps", "2")
    trained = run_python("-m", "fleetx.launch", "--nproc_per_node", "2", "train.py", *flags, folder=tmp_path)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    scores = ast.literal_eval(trained.stdout.splitlines()[-1])
    assert scores["count"] == 360 and 0 <= scores["acc1"] <= scores["acc5"] <= 1


def test_one_worker_and_two_reach_the_same_accuracy(tmp_path: Path) -> None:
    script = str(ROOT / AFTER)
    alone = run_python(script, "--epochs", EPOCHS, folder=tmp_path)
    fleetrun = ("-m", "fleetx.launch", "--nproc_per_node", "2", "--log_dir", "log", script)
    together = run_python(*fleetrun, "--epochs", EPOCHS, "--save", "digits.safetensors", folder=tmp_path)
    assert final_accuracy(alone) == pytest.approx(final_accuracy(together), abs=1.0)
    assert final_accuracy(alone) > 97
    assert load_file(tmp_path / "digits.safetensors")["0.weight"].shape == (32, 1, 3, 3)
    last_lines = {(tmp_path / "log" / f"workerlog.{rank}").read_text().splitlines()[-1].split()[-1] for rank in (0, 1)}
    assert len(last_lines) == 1, "every rank reports the accuracy over all shards"


def test_the_resume_example_goes_on_after_sigterm_and_ends_with_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    command = ["-m", "fleetx.launch", "--nproc_per_node", "2", str(ROOT / "examples" / "resume.py"), "--epochs", "3"]
    whole = run_python(*command, "--checkpoints", "whole", folder=tmp_path)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, *command], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as stopped:
        assert stopped.stdout is not None
        assert any("epoch 1:" in line for line in stopped.stdout)
        stopped.terminate()
        console, told = stopped.communicate(timeout=LIMIT_S)
    assert stopped.returncode == 143, told
    assert "weights" not in console
    again = run_python(*command, folder=tmp_path)
    assert again.returncode == 0 and "continuing after" in again.stdout
    assert again.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]
    assert whole.stdout.splitlines()[-1].startswith("weights ")


def test_the_script_before_runs_without_us(tmp_path: Path) -> None:
    assert "fleet" not in (ROOT / BEFORE).read_text(encoding="utf-8")
    assert final_accuracy(run_python(str(ROOT / BEFORE), "--epochs", "1", folder=tmp_path)) > 80


def test_the_demo_runs_to_its_picture_in_plain_lines(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = run_python(str(ROOT / "examples" / "demo.py"), "--epochs", "6", "--out", str(out), folder=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "\x1b" not in ended.stdout + ended.stderr and "\r" not in ended.stdout
    assert str(out / "demo.png") in ended.stdout.splitlines()[-1]
    last = {}
    for name in ("plain", "merged"):
        assert len(re.findall(rf"^{name} epoch +\d/6  loss .* samples/s .* MB sent$", ended.stdout, flags=re.MULTILINE)) == 6
        lines = (out / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3, 4, 5, 6]
        last[name] = json.loads(lines[-1])
    # 22 micro-steps an epoch: an update for each, or for every four of them, across the epochs.
    assert (last["plain"]["updates"], last["merged"]["updates"]) == (132, 33)
    assert 7.5 < last["plain"]["bytes_sent"] / last["merged"]["bytes_sent"] < 8
    assert (out / "demo.png").stat().st_size > 10_000
    with Image.open(out / "demo.png") as picture:
        picture.verify()
    assert list(tmp_path.iterdir()) == [out], "nothing is written outside --out"


def test_the_demo_fails_below_its_target_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = load_demo()
    entry = {"accuracy": 0.99, "updates": 1, "bytes_sent": 10, "seconds": 1.0, "samples": 64}
    curves = {"plain": [entry], "merged": [entry | {"accuracy": 0.949}]}
    monkeypatch.setattr(demo, "launch", lambda *_: 0)
    monkeypatch.setattr(demo, "draw", lambda *_: None)
    monkeypatch.setattr(demo, "read_curve", lambda folder: curves[folder.name])
    assert demo.shortfalls(curves) == ["merged: 94.9% test accuracy is below the target of 95%"]
    assert demo.main(["--out", str(tmp_path)]) == 1


def test_the_demo_passes_on_the_exit_code_of_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = load_demo()
    monkeypatch.setattr(demo, "launch", lambda *_: 7)
    assert demo.main(["--out", str(tmp_path)]) == 7
