"""Processes that have imported torch before they start: forked from one that has done nothing else (warm.py)."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

CONTEXT = mp.get_context("forkserver")


def start_process(target: Callable[..., None], *args: Any, daemon: bool = True) -> Any:
    """Start `target(*args)`. A daemon ends with the tests, and may start no process of its own."""
    process = CONTEXT.Process(target=target, args=args, daemon=daemon)
    process.start()
    return process


def start_forker() -> None:
    """Start the process that forks, before any test: it imports while tests are collected, in the environment of the whole run.

    Multiprocessing gives it no sys.path, and passes over what it cannot import."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *([before] if before else [])])
    CONTEXT.set_forkserver_preload(["tests.helpers.warm"])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
