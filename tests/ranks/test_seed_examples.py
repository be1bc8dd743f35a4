"""One script per seed document. Those whose strategies are there run on two workers; the others say what is missing.

Which is which is asked of the strategies themselves: a script joins the runs on the day its last strategy lands.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fleetx as X
from fleetx import fleet
from fleetx.errors import ConfigError, StrategyConflict

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 240
LINE = re.compile(r"^worker_index: (\d+), step(\d+) cost = (\d+\.\d+), speed: (\d+\.\d+)$", flags=re.MULTILINE)
SMALL_IMAGES = ("--batch_size", "1", "--steps", "5")
SMALL_TEXT = ("--small", "--max_seq_len", "32", "--batch_size", "2", "--steps", "5", "--data", "texts")


@dataclass(frozen=True)
class Script:
    name: str
    parts: tuple[str, ...]
    flags: tuple[str, ...] = SMALL_IMAGES


SCRIPTS = (
    Script("resnet50_lars.py", ("lars",)),
    Script("resnet50_lars.py", ("lamb",), (*SMALL_IMAGES, "--lars", "false", "--lamb")),
    Script("resnet50_localsgd.py", ("adaptive_localsgd",)),
    Script("resnet50_dgc.py", ("dgc",)),
    Script("resnet50_dgc.py", ("powersgd",), (*SMALL_IMAGES, "--dgc", "false", "--powersgd", "--powersgd.begin_step", "2")),
    Script("bert_recompute.py", ("recompute",), SMALL_TEXT),
    Script("resnet50_gradient_merge.py", ("gradient_merge",)),
    Script("combination.py", ("amp", "recompute", "lars")),
    Script("auto.py", ("auto",)),
)

QUICK = SCRIPTS[5]
"""The one that `make test` runs; the others are campaigns."""


def shown_as(script: Script) -> str:
    return f"{script.name}-{'+'.join(script.parts)}"


def write_texts(folder: Path) -> None:
    (folder / "texts").mkdir()
    for number in range(4):
        lines = [f"sentence {line} of document {number} says that {line} and {number} are {line + number}." for line in range(60)]
        (folder / "texts" / f"{number}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def start(script: Script, monkeypatch: pytest.MonkeyPatch, *flags: str) -> dict[str, Any]:
    """The script in this process, as one worker; its names."""
    path = EXAMPLES / script.name
    monkeypatch.setattr(sys, "argv", [str(path), *script.flags, *flags])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=[] if script == QUICK else [pytest.mark.campaign]) for script in SCRIPTS],
    ids=shown_as,
)
def test_a_script_whose_strategies_are_there_runs_on_two_workers(script: Script, tmp_path: Path) -> None:
    write_texts(tmp_path)
    fleetrun = (sys.executable, "-m", "fleetx.launch", "--nproc_per_node", "2")
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "FLEETX_TTY")}
    env |= {"OMP_NUM_THREADS": "1", "FLEETX_DEVICE": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ended = subprocess.run(
        [*fleetrun, str(EXAMPLES / script.name), *script.flags],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "strategy: " in ended.stdout and "2 workers on 1 node, gloo, cpu" in ended.stdout
    for rank in (0, 1):
        lines = LINE.findall((tmp_path / "log" / f"workerlog.{rank}").read_text(encoding="utf-8"))
        assert [(int(worker), int(step)) for worker, step, _, _ in lines] == [(rank, step) for step in range(5)]
        assert all(0 < float(cost) < 20 for _, _, cost, _ in lines)


def test_the_scripts_are_short_and_an_unknown_flag_is_refused(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for script in SCRIPTS:
        assert len((EXAMPLES / script.name).read_text(encoding="utf-8").splitlines()) < 100
        with pytest.raises((SystemExit, ConfigError)):
            start(script, monkeypatch, "--step", "3")


@pytest.mark.parametrize(
    ("flags", "parts", "lr"),
    [
        ("", ["lars"], 3.0),
        ("--lamb", ["lamb"], 0.01),
        ("--lars false --lamb", ["lamb"], 0.01),
        ("--lamb --lr 0.5", ["lamb"], 0.5),
        ("--lars false", [], 0.1),
    ],
)
def test_lars_gives_way_when_another_optimizer_is_asked_for_and_each_has_its_rate(
    flags: str, parts: list[str], lr: float, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = start(SCRIPTS[0], monkeypatch, "--steps", "0", *flags.split())["configs"]
    assert [part.name for part in configs.strategy.parts()] == parts and configs.lr == lr


def test_lars_and_lamb_both_asked_for_are_still_a_conflict(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StrategyConflict, match="lamb and lars both claim `momentum` and both claim `update`"):
        start(SCRIPTS[0], monkeypatch, "--steps", "0", "--lars", "--lamb")


def test_the_loop_continues_where_its_checkpoint_is(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    loop = runpy.run_path(str(EXAMPLES / "seed_loop.py"))
    configs = X.parse_train_configs(["--resume", str(tmp_path), "--gradient_merge.k_steps", "2", "--batch_size", "4"])
    for _ in range(2):  # three steps each: one and a half windows
        model = X.applications.Resnet20(num_classes=10)
        loader = model.get_train_dataloader("digits", configs.batch_size)
        optimizer = torch.optim.SGD(model.parameters(), lr=configs.lr)
        model, optimizer = fleet.distribute(model, optimizer, configs.strategy)
        loop["train"](model, optimizer, loader, configs, steps=3)
    assert [int(step) for _, step, _, _ in LINE.findall(capsys.readouterr().out)] == [0, 1, 2, 3, 4, 5]
    assert loader.sampler.state_dict()["consumed"] == 24
