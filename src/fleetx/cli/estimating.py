"""Run `fleetx plan --estimate TARGET`: memory of training by arithmetic and tensors without data, in seconds, as a table."""

from __future__ import annotations

import argparse
import time

import torch

from ..auto.estimate import Estimate, estimated, without_data
from ..config.text import aligned, binary
from ..errors import ConfigError
from .target import target_of

OF_MEASURING = ("risk", "global_batch", "trials", "out", "strategy", "what_if", "chart")
"""Flags that mean something only where something is measured."""


def run_estimate(options: argparse.Namespace) -> None:
    if options.target.endswith(".json"):
        raise ConfigError(f"--estimate is for a model; {options.target} is a plan that was measured.")
    for name in OF_MEASURING:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for a plan that is measured, and --estimate measures nothing.")
    begun = time.monotonic()
    target = target_of(options.target, rows=options.batch, rank=0, making=without_data)
    found = estimated(target.model, target.optimizer, target.sample, target.loss_fn)
    memory = options.memory or _gpu_memory()
    name = type(target.optimizer).__name__
    print(estimate_text(options.target, name, found, memory, time.monotonic() - begun), flush=True)


def _gpu_memory() -> int | None:
    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def estimate_text(target: str, optimizer: str, found: Estimate, memory: int | None, seconds: float) -> str:
    """Return the table: one line a plan, with the most rows that fit where the memory is known."""
    head = [
        f"{target}: {found.parameters:,} parameters. Kept whatever the batch: weights {binary(found.weights)}, gradients "
        f"{binary(found.gradients)}, state of {optimizer} {binary(found.state)}; together {binary(found.kept)}.",
    ]
    columns = ["plan", f"memory at {found.rows:,} rows", "a row more"]
    columns += [] if memory is None else [f"most rows in {binary(memory)}"]
    rows = []
    for plan in found.plans:
        cells = [plan.name, binary(found.kept + plan.at(found.rows)), binary(plan.bytes_per_row)]
        rows.append(cells + ([] if memory is None else [f"{plan.most_rows(memory - found.kept):,}"]))
    notes = [f"  not estimated: {note}" for note in found.notes]
    last = [
        f"estimated in {seconds:.0f} s by arithmetic and steps on tensors without data. Workspaces of kernels, copies in the",
        "optimizer's step and what an allocator holds unused are not in it: leave a tenth, with recompute a fifth.",
    ]
    more = [] if memory is not None else ["  --memory 32GB adds the most rows that fit."]
    return "\n".join([*head, *aligned([columns, *rows], left=(0,)), *notes, *more, *last])
