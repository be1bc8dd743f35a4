"""What a newcomer runs first: the examples run as they are. What README and docs say is checked in test_docs.py."""

from __future__ import annotations

import importlib.util
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


def load_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fleetx_demo", ROOT / "examples" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.mark.campaign
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


@pytest.mark.campaign
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


@pytest.mark.campaign
def test_the_script_before_runs_without_us(tmp_path: Path) -> None:
    assert "fleet" not in (ROOT / BEFORE).read_text(encoding="utf-8")
    assert final_accuracy(run_python(str(ROOT / BEFORE), "--epochs", "1", folder=tmp_path)) > 80


@pytest.mark.campaign
def test_the_demo_runs_to_its_picture_in_plain_lines(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = run_python(str(ROOT / "examples" / "demo.py"), "--epochs", "6", "--out", str(out), folder=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "\x1b" not in ended.stdout + ended.stderr and "\r" not in ended.stdout
    assert str(out / "demo.png") in ended.stdout.splitlines()[-1]
    assert (
        len(re.findall(r"^finished after 0:\d+ · \d+ steps · loss .* · acc 0\.9\d+ · .* of dense\)", ended.stdout, re.MULTILINE))
        == 2
    )
    curves = {name: load_demo().read_curve(out / name) for name in ("plain", "merged")}
    # 22 micro-steps an epoch: an update for each, or for every four of them, across the epochs.
    assert [entry["updates"] for entry in curves["plain"]] == [22, 44, 66, 88, 110, 132]
    assert [entry["updates"] for entry in curves["merged"]] == [5, 11, 16, 22, 27, 33]
    assert 7.5 < curves["plain"][-1]["bytes_sent"] / curves["merged"][-1]["bytes_sent"] < 8
    assert "<html" in (out / "report.html").read_text(encoding="utf-8")
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
    monkeypatch.setattr(demo, "make_page", lambda *_: 0)
    monkeypatch.setattr(demo, "read_curve", lambda folder: curves[folder.name])
    assert demo.shortfalls(curves) == ["merged: 94.9% test accuracy is below the target of 95%"]
    assert demo.main(["--out", str(tmp_path)]) == 1


def test_the_demo_passes_on_the_exit_code_of_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = load_demo()
    monkeypatch.setattr(demo, "launch", lambda *_: 7)
    assert demo.main(["--out", str(tmp_path)]) == 7
