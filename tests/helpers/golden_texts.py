"""The texts kept in tests/golden: strategies as files, and what the commands say to --help. Public names only."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from fleetx import fleet

ROOT = Path(__file__).parents[2]
STRATEGIES = ROOT / "tests" / "golden" / "strategies"
HELP = ROOT / "tests" / "golden" / "help"
SCALARS = ("find_unused_parameters",)
COMMANDS = {
    "fleetrun": ("fleetrun",),
    "fleetx": ("fleetx",),
    "fleetx-doctor": ("fleetx", "doctor"),
    "fleetx-plan": ("fleetx", "plan"),
    "fleetx-report": ("fleetx", "report"),
}
ON_PURPOSE = "If that is on purpose, write it again: python -m tests.golden.write"
TIME_LIMIT_S = 60


def switches() -> list[str]:
    """Every strategy that can be switched on."""
    plain = fleet.DistributedStrategy()
    return [name for name in dir(plain) if getattr(plain, name) is False and name not in SCALARS]


def strategy_of(name: str) -> fleet.DistributedStrategy:
    """The default one, or one with this switch on."""
    return fleet.DistributedStrategy(**({} if name == "default" else {name: True}))


def help_of(command: str) -> str:
    """What a command prints, 100 columns wide, started as pyproject.toml says."""
    program, *arguments = COMMANDS[command]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, function = scripts[program].partition(":")
    code = f"import sys; sys.argv[0] = {program!r}; from {module} import {function}; {function}()"
    env = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    line = [sys.executable, "-c", code, *arguments, "--help"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=TIME_LIMIT_S, env=env)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
