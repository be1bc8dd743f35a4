"""Types of the public names: stubs that say what the parts say, and checkers that find wrong uses and leave right ones alone."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from fleetx.errors import ConfigError
from tests.helpers.harness import run_ranks
from tests.helpers.stubs import FOLDER, stubs

ROOT = Path(__file__).parents[2]
RIGHT, WRONG = ROOT / "tests" / "uses" / "right.py", ROOT / "tests" / "uses" / "wrong.py"
FIRST_WRONG = WRONG.read_text().split("# From here on every line is wrong.\n")[0].count("\n") + 2
LINES = dict(enumerate(WRONG.read_text().splitlines()[FIRST_WRONG - 1 :], start=FIRST_WRONG))
PLANTED = {"unknown switch": "larz=True", "unknown key": '{"k_step": 4}', "wrong type": 'lars="yes"', "wrong value": '"fp16"'}
LIMIT_SECONDS = 600


@pytest.mark.parametrize("name", ["__init__.pyi", "switches.pyi"])
def test_the_stubs_say_what_the_parts_say(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == stubs()[name], "write them with: make types"


def test_there_are_thirty_uses_of_each_kind_with_the_usual_mistakes() -> None:
    assert len(LINES) >= 30 and sum(bool(re.match(r"\w", line)) for line in RIGHT.read_text().splitlines()[17:]) >= 30
    assert all(any(mistake in line for line in LINES.values()) for mistake in PLANTED.values())


def lines_named(output: str) -> dict[str, set[int]]:
    """The lines with an error, by file."""
    found: dict[str, set[int]] = {RIGHT.name: set(), WRONG.name: set()}
    for file, line in re.findall(r"(\w+\.py):(\d+)(?::\d+)?(?: -|:) error", output):
        found[file].add(int(line))
    return found


def checked_by(*command: str) -> dict[str, set[int]]:
    words = [sys.executable, "-m", *command, str(RIGHT.relative_to(ROOT)), str(WRONG.relative_to(ROOT))]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    return lines_named(ended.stdout)


def test_mypy_finds_every_wrong_use_and_no_right_one() -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    assert checked_by("mypy", "--strict") == {RIGHT.name: set(), WRONG.name: set(LINES)}


@pytest.mark.campaign
def test_pyright_finds_every_wrong_use_and_no_right_one() -> None:
    pytest.importorskip("pyright", reason="pyright is not installed")
    if shutil.which("node") is None:
        pytest.skip("no node on PATH, in which pyright runs")
    assert checked_by("pyright", "--pythonpath", sys.executable) == {RIGHT.name: set(), WRONG.name: set(LINES)}


def run_right_uses(rank: int) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return str(runpy.run_path(str(RIGHT))["strategy"].to_dict()["clip_norm_configs"])


def test_right_uses_run() -> None:
    assert run_ranks(run_right_uses, 1) == ["{'max_norm': 0.5}"]


@pytest.mark.parametrize("line", LINES.values())
def test_a_wrong_use_is_refused_when_it_runs(line: str) -> None:
    names: dict[str, object] = {}
    exec(WRONG.read_text().split("# From here on")[0], names)  # noqa: S102
    with pytest.raises((ConfigError, TypeError, AttributeError)):
        exec(line, names)  # noqa: S102
