"""`fleetx plan` as a user runs it: on an application, a module of their own, a plan file, two ranks; and every wrong input."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetx import applications
from fleetx.auto.plan import load
from fleetx.cli.flags import bandwidth, duration, settings
from fleetx.cli.main import main
from fleetx.cli.plan import APPLICATIONS, CHANGES, RISKS
from fleetx.dist import world
from fleetx.engine.slots import Risk
from fleetx.errors import ConfigError
from fleetx.recompute.batches import rows_in

ROOT = Path(__file__).parents[2]
MODULE = """
import torch
from torch import nn
from torch.nn import functional as F

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    sample = torch.randn(8, 16), torch.randint(4, (8,))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), sample, lambda model, xy: F.cross_entropy(model(xy[0]), xy[1])

def nothing(): return None
def two(): return 1, 2
def numbers(): return 1, 2, 3
def sampleless(): return (*make()[:2], None)
def lossless(): return make()[:3]
def strange_loss(): return (*make()[:3], 3)
def others(): return make()[0], *make()[1:]
def fails(): raise RuntimeError("the disk is on fire\\nor so")
a_number = 3
"""
PLAIN = {"LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"}


def fleetx(folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A process of its own, in this folder."""
    environment = {name: value for name, value in os.environ.items() if name not in PLAIN} | {"PYTHONPATH": str(ROOT / "src")}
    line = [sys.executable, *launcher, "-m", "fleetx.cli", *arguments]
    return subprocess.run(
        line, cwd=folder, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("plans")
    (found / "own.py").write_text(MODULE)
    (found / "broken.py").write_text("import nothing_of_that_name\n")
    (found / "wrong.json").write_text("{}")
    return found


@pytest.fixture(scope="module")
def plan_file(folder: Path) -> Path:
    """Of the module's model, measured on one rank."""
    ended = fleetx(folder, "plan", "own:make", "--trials", "1", "--risk", "exact", "--out", "plan.json")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("auto: fp32 (planned in") and "plan written to plan.json" in ended.stdout
    return folder / "plan.json"


# --- real runs --------------------------------------------------------------------------------------------------------------


def test_help_is_there_without_torch() -> None:
    code = "import sys; from fleetx.cli.main import main\ntry: main(['plan', '--help'])\nfinally: print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout.endswith("False\n") and ended.returncode == 0
    assert "fleetrun --nproc_per_node 2 -m fleetx.cli plan" in ended.stdout and "module:function" in ended.stdout


def test_a_function_of_ones_own_is_planned_for_and_its_plan_kept(plan_file: Path) -> None:
    plan = load(plan_file)
    assert plan.chosen == "fp32" and plan.measured.ranks == 1 and plan.key["asked"]["risk"] == "exact"
    assert plan.measured.gradients.numel == 16 * 32 + 32 + 32 * 4 + 4


@pytest.mark.campaign
def test_an_application_is_planned_for(folder: Path) -> None:
    ended = fleetx(folder, "plan", "Resnet20", "--batch", "2", "--trials", "1", "--risk", "exact")
    assert ended.returncode == 0, ended.stderr
    assert "auto: fp32 (planned in" in ended.stdout and "strategy: " in ended.stdout


def test_two_ranks_measure_their_link_and_one_of_them_tells(folder: Path) -> None:
    launcher = ("-m", "fleetx.launch", "--nproc_per_node", "2")
    ended = fleetx(folder, "plan", "own:make", "--trials", "1", "--risk", "exact", "--what-if", "world=8", launcher=launcher)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "CPU, 2 ranks)" in ended.stdout and "what if: 8 ranks, " in ended.stdout
    assert "as measured with 2 ranks" in ended.stdout and (folder / "log" / "workerlog.1").read_text() == ""


def test_a_plan_file_answers_what_if_without_its_model(plan_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    asked = ("--risk", "lossy", "--what-if", "bandwidth=100Mbit,latency=50us,world=64,memory=1GB", "--chart", "time.svg")
    ended = fleetx(tmp_path, "plan", str(plan_file), *asked)
    assert ended.returncode == 0, ended.stderr
    assert "what if: 64 ranks, 100 Mbit/s each, latency 50 us, 953.67 MiB each:" in ended.stdout
    assert "(work not measured)" in ended.stdout and "as measured (1 rank) fp32 was taken" in ended.stdout
    assert "chart written to time.svg" in ended.stdout and (tmp_path / "time.svg").stat().st_size > 1000


def test_parts_of_a_strategy_file_are_kept_in_the_plan_and_in_its_answers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "clipped.yaml").write_text("clip_norm: true\nclip_norm_configs: {max_norm: 0.5}\n")
    assert main(["plan", "own:make", "--strategy", "clipped.yaml", "--risk", "exact", "--trials", "1", "--out", "kept.json"]) == 0
    assert capsys.readouterr().out.count("  kept: clip_norm (max_norm=0.5)\n") == 1
    assert main(["plan", "kept.json", "--risk", "lossy", "--what-if", "bandwidth=100Mbit,world=8"]) == 0
    text = capsys.readouterr().out
    assert "  kept: clip_norm (max_norm=0.5)\n" in text and "clip_norm=True, clip_norm_configs={'max_norm': 0.5}" in text
    assert "powersgd" in text.split("what if:")[1] and "dgc" not in text.split("what if:")[1].split("the wire is")[0]


def test_wrong_input_ends_a_real_process_with_2_and_one_line(tmp_path: Path) -> None:
    ended = fleetx(tmp_path, "plan", "Resnet21")
    assert ended.returncode == 2 and ended.stdout == "" and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("fleetx: 'Resnet21' is no target") and "Did you mean `Resnet20`?" in ended.stderr


# --- wrong input ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Commands run in this process, as torch takes seconds to import; in the folder, and alone."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    for name in PLAIN:
        monkeypatch.delenv(name, raising=False)
    yield folder
    world.close_world()
    for name in ("own", "broken"):
        sys.modules.pop(name, None)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of an error."""
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert text.startswith("fleetx: ") and text.count("\n") == 1
    return text.removeprefix("fleetx: ").rstrip()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("plna", "invalid choice: 'plna'"),
        ("plan", "required: TARGET"),
        ("plan Resnet20 --rsik exact", "unrecognized arguments: --rsik exact"),
        ("plan Resnet20 --risk high", "invalid choice: 'high'"),
        ("plan Resnet20 --memory lots", "'lots' was given; it must be a size such as 32GB"),
        ("plan Resnet20 --global-batch 0", "a whole number from 1"),
        ("plan Resnet20 --trials 1.5", "a whole number from 1"),
        ("plan Resnet20 --batch -3", "a whole number from 1"),
        ("plan Resnet20 --out plan.txt", "a file that ends in .json"),
        ("plan Resnet20 --out nowhere/plan.json", "in a folder that is there"),
        ("plan Resnet20 --chart time.pdf", "ends in .png or .svg"),
        ("plan Resnet20 --strategy nowhere.yaml", "a file that is there and ends in .json or .yaml or .yml"),
        ("plan Resnet20 --what-if world", "takes NAME=VALUE,NAME=VALUE"),
        ("plan Resnet20 --what-if bandwith=1Gbit", "and not 'bandwith'. Did you mean `bandwidth`?"),
        ("plan Resnet20 --what-if world=2,world=4", "says world= twice"),
        ("plan Resnet20 --what-if bandwidth=fast", "bandwidth of --what-if is 'fast'; it must be a rate such as 10Gbit"),
        ("plan Resnet20 --what-if bandwidth=0Gbit", "must be a rate"),
        ("plan Resnet20 --what-if latency=50", "must be a time such as 50us"),
        ("plan Resnet20 --what-if world=0", "a whole number from 1 to 1000000"),
        ("plan Resnet20 --what-if memory=big", "a size such as 32GB"),
    ],
)
def test_flags_that_cannot_be_used(arguments: str, says: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in told(capsys, *arguments.split())


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nonsense", "is no target. Give one of Resnet20,"),
        ("absent:make", "there is no module 'absent' to be found from"),
        ("broken:make", "importing broken failed: ModuleNotFoundError: No module named 'nothing_of_that_name' ("),
        ("own:", "is not module:function"),
        ("own:mak", "own has no function 'mak'. Did you mean `make`?"),
        ("own:a_number", "own has no function 'a_number'"),
        ("own:nothing", "returned NoneType; it must return (model, optimizer, sample)"),
        ("own:two", "returned 2 values"),
        ("own:numbers", "returned int as the model"),
        ("own:sampleless", "returned None as the sample"),
        ("own:lossless", "has no method `loss(batch)`"),
        ("own:strange_loss", "loss_fn is 3"),
        ("own:others", "no trainable parameter of this model"),
        ("own:fails", "own:fails failed: RuntimeError: the disk is on fire ("),
        ("own:make --batch 4", "--batch is for applications"),
        ("own:make --what-if world=64", "as bandwidth=10Gbit"),
        ("own:make --what-if bandwidth=1Gbit", "as world=64"),
        ("own:make --chart time.png", "as bandwidth=10Gbit"),
        ("absent.json", "the plan absent.json cannot be read"),
        ("wrong.json", "wrong.json is not a plan of fleetx"),
    ],
)
def test_targets_that_cannot_be_used(target: str, says: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in told(capsys, "plan", *target.split())


def test_localsgd_alone_in_a_strategy_file_is_told_to_mean_something_else(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "alone.yaml").write_text("localsgd: true\n")
    said = told(capsys, "plan", "own:make", "--strategy", "alone.yaml")
    assert "alone.yaml sets `localsgd` alone" in said and "such as --trials 2." in said


def test_a_plan_file_is_not_measured_again(here: Path, plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "alone.yaml").write_text("localsgd: true\n")
    for flag, value in (("--trials", "2"), ("--batch", "4"), ("--out", "other.json"), ("--strategy", "alone.yaml")):
        assert f"{flag} is for a plan that is measured" in told(capsys, "plan", "plan.json", flag, value)
    assert "as bandwidth=10Gbit" in told(capsys, "plan", "plan.json", "--what-if", "world=64")
    assert "cannot be shared equally" in told(
        capsys, "plan", "plan.json", "--global-batch", "9", "--what-if", "world=4,bandwidth=1Gbit"
    )
    assert "that keeps to 1000 B" in told(capsys, "plan", "plan.json", "--what-if", "memory=1KB")


def test_a_plan_file_of_one_rank_is_drawn_by_a_rate_alone(
    here: Path, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["plan", "plan.json", "--what-if", "bandwidth=1Gbit", "--chart", "one.png"]) == 0
    text = capsys.readouterr().out
    assert "what if:" not in text and "predicted ms of an update, by ranks" in text and (here / "one.png").exists()
    assert main(["plan", "plan.json"]) == 0
    assert capsys.readouterr().out.startswith("auto: fp32 (planned in")


# --- texts and names --------------------------------------------------------------------------------------------------------


def test_rates_times_and_sizes_are_read() -> None:
    rates = {"10Gbit": 1.25e9, "100Mbit": 12.5e6, "10Gbit/s": 1.25e9, "2.5Gbps": 312.5e6, "1.25GB/s": 1.25e9, "8kbit": 1e3}
    assert {text: bandwidth().parse(text) for text in rates} == pytest.approx(rates)
    times = {"50us": 50e-6, "50µs": 50e-6, "1.5ms": 1.5e-3, "2s": 2.0, "10ns": 1e-8}
    assert {text: duration().parse(text) for text in times} == pytest.approx(times)
    asked = settings("--what-if", "bandwidth=10Gbit, latency=0us,world=64,memory=32GB", CHANGES)
    assert asked == {"bandwidth": 1.25e9, "latency": 0.0, "world": 64, "memory": 32 * 10**9}
    for text in ("10GB", "10gbit", "ten", "-1Gbit", "1e3Mbit", "Gbit"):
        with pytest.raises(ConfigError, match="must be a rate"):
            bandwidth().check("bandwidth", text)


def test_names_on_the_command_line_are_those_of_the_library() -> None:
    assert tuple(risk.value for risk in Risk) == RISKS and set(APPLICATIONS) <= set(applications.__all__)
    module, _, name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["fleetx"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("name", ["Resnet20", "Bert_base"])
def test_an_application_takes_its_random_sample(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetx.cli.target import application

    monkeypatch.setattr(applications, "Bert_base", lambda: applications.Bert_large(layers=1, hidden=32, heads=2))
    target, other = application(name, rows=2), application(name, rows=2, rank=1)
    loss = target.model.loss(target.sample)
    loss.backward()
    assert loss.isfinite() and all(p.grad is not None for p in target.model.parameters()) and rows_in(target.sample) == {2}
    assert json.dumps(loss.item()) != json.dumps(other.model.loss(other.sample).item())  # each rank has its own
