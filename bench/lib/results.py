"""Where every bench ends: one JSON object on the last line, and the same in bench/results/NAME.json."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fleetx.errors import ConfigError

ROOT = Path(__file__).parents[2]
"""Of the checkout: where benches are started, and where Python finds them."""
FOLDER = ROOT / "bench" / "results"


def publish(name: str, figures: dict[str, Any]) -> None:
    """Print and keep the figures, with what is needed to judge them: date, device, versions, commit."""
    record = {"bench": name, "date": datetime.now(UTC).isoformat(timespec="seconds"), **surroundings(), **figures}
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


def published(file: Path, name: str) -> dict[str, Any]:
    """The figures that an earlier call of the bench `name` has published, for its page."""
    wanted = f"Give it what the bench published: bench/results/{name}.json."
    try:
        figures = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--table {file} cannot be read as JSON: {error}. {wanted}") from error
    if not isinstance(figures, dict) or figures.get("bench") != name:
        raise ConfigError(f"--table {file} holds no figures of this bench. {wanted}")
    return figures


def write_page(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def surroundings() -> dict[str, Any]:
    cpu = f"{platform.machine()} CPU, {os.cpu_count()} cores"
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else cpu
    return {"device": device, "python": platform.python_version(), "torch": torch.__version__, "commit": _commit()}


def _commit() -> str:
    if "BENCH_COMMIT" in os.environ:  # of a copy of the tree that came without its history
        return os.environ["BENCH_COMMIT"]
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout.strip() or "unknown"
