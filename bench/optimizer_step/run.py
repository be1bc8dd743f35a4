"""What one step of LARS and LAMB costs, beside what else one can get and beside what moving the bytes alone would cost.

    python -m bench.optimizer_step.run               on a GPU: BERT-large and ResNet-50, under two minutes
    python -m bench.optimizer_step.run --cpu         on a CPU: ResNet-50 and a BERT of four large layers
    python -m bench.optimizer_step.run --only lamb   some arenas (bert_large_lamb, resnet50_lars ...) or `checks`; nothing is kept

Floors are bytes over the bandwidth of a large copy, measured in turns with the contestants. The words of the figures:
    arena        one model under one optimizer: all contestants step over the same tensors, in turns
    two_pass     the floor of norms first, then the update: LAMB moves 40 bytes per parameter, LARS 28
    touch_once   the floor if all norms were known before, so that each byte moves once: 28 and 20
    exact        a floor that counts tensors without adaptation (norm layers, biases) once, since they need no norms
    plain        a floor that counts every parameter as adapted
    over_floor   wall time over what a row's own bytes cost: two passes for all LARS and LAMB, one for AdamW and SGD
On a CPU a floor is no bound: there a copy reads what it overwrites, which is not counted.
What the columns mean: bench/lib/step_clock.py. Every check is in the figures; one that fails makes the exit code 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.lib.results import publish, surroundings
from bench.lib.step_clock import Contestant, compete, launches, synchronisations, warm_up
from bench.optimizer_step.checks import Checks, Problem
from bench.optimizer_step.contestants import Arena, Missing, Row, first_line, on_cpu, on_gpu
from bench.optimizer_step.shapes import BERT_FOUR_LAYERS, BERT_LARGE, BERT_ONE_LAYER, RESNET50, TOUCH_ONCE, TWO_PASS, Shapes

FAMILIES = ("lamb", "lars")
COPY_BYTES = {"cuda": 2 * 2**30, "cpu": 2**28}
BLOCK_SECONDS = {"cuda": 0.1, "cpu": 0.1}
"""Long against the lead that the host needs at the start of a block: in a training step the backward gives it."""
SECONDS = {"cuda": 70.0, "cpu": 240.0}
WEIGHTS = {BERT_LARGE.name: 2, BERT_FOUR_LAYERS.name: 3, RESNET50.name: 1}
"""How the time is shared."""
ENOUGH_BLOCKS, MOST_BLOCKS = 15, 25
COLUMNS = ("wall_ms", "over_floor", "single_ms", "host_ms", "events_ms", "kernel_ms", "prepare_ms", "kernels", "moves", "syncs")
LIMITS = {"bert_large_lamb": 1.05, "bert_large_lars": 1.08}
"""Of the two-pass floor, with kept gradients."""
MORE_MS_WITH_NEW_GRADIENTS = 0.1
LIMITS_MS = {"resnet50_lamb": 0.30, "resnet50_lars": 0.24}
FASTER_ON_CPU = 2.0


def copy_contestant(device: torch.device) -> Contestant:
    source = torch.randn(COPY_BYTES[device.type] // 4, device=device)  # zeros may move faster than what is not zero
    target = torch.empty_like(source)
    return Contestant("copy", lambda: target.copy_(source), floor_bytes=2 * COPY_BYTES[device.type])


def floors(shapes: Shapes, family: str, bandwidth: float) -> dict[str, Any]:
    found = {}
    for title, table in (("two_pass", TWO_PASS), ("touch_once", TOUCH_ONCE)):
        plain, exact = table[family].adapted * shapes.numel, table[family].total(shapes)
        found[title] = {
            "bytes_per_parameter": table[family].adapted,
            "plain_bytes": plain,
            "exact_bytes": exact,
            "plain_ms": round(plain / bandwidth * 1e3, 4),
            "exact_ms": round(exact / bandwidth * 1e3, 4),
        }
    return found


def figures_of(contestant: Contestant, bandwidth: float) -> dict[str, Any]:
    wall = contestant.median("wall")
    row: dict[str, Any] = {f"{name}_ms": round(contestant.median(name) * 1e3, 4) for name in contestant.samples}
    quartiles = statistics.quantiles(contestant.samples["wall"], n=4) if len(contestant.samples["wall"]) > 1 else [wall] * 3
    row["wall_quartiles_ms"] = [round(q * 1e3, 4) for q in quartiles[::2]]
    if contestant.floor_bytes:
        row["over_floor"] = round(wall * bandwidth / contestant.floor_bytes, 4)
    row["steps_in_block"] = contestant.steps
    return row


def warmed(rows: Sequence[Row], device: torch.device) -> list[Row]:
    """A contestant that cannot take a step is out, with its reason."""
    kept: list[Row] = []
    for row in rows:
        if isinstance(row, Contestant):
            try:
                warm_up(row, device, BLOCK_SECONDS[device.type])
            except Exception as error:
                row = Missing(row.label, first_line(error), ours=row.ours)
        kept.append(row)
    return kept


def run(shapes: Shapes, family: str, device: torch.device, *, seconds: float) -> dict[str, Any]:
    """One arena: all contestants over the same tensors, in turns."""
    start = time.perf_counter()
    arena = Arena(shapes, family, device)
    entries: list[Row] = [copy_contestant(device), *(on_gpu if device.type == "cuda" else on_cpu)(arena)]
    rows = warmed(entries, device)
    contestants = [row for row in rows if isinstance(row, Contestant)]
    blocks = compete(contestants, device, most_rounds=MOST_BLOCKS, until=start + seconds)
    copy = contestants[0]
    bandwidth = copy.floor_bytes / copy.median("wall")
    figures: dict[str, Any] = {
        "tensors": shapes.tensors,
        "parameters": shapes.numel,
        "excluded_tensors": len(shapes.excluded),
        "excluded_parameters": shapes.excluded_numel,
        "copy_gb_s": round(bandwidth / 1e9, 1),
        "floors": floors(shapes, family, bandwidth),
        "blocks": blocks,
        "rows": {},
    }
    for row in rows:
        if isinstance(row, Missing):
            figures["rows"][row.label] = {"failed" if row.ours else "missing": row.reason}
            continue
        figures["rows"][row.label] = figures_of(row, bandwidth)
        if row is not copy and device.type == "cuda":
            figures["rows"][row.label] |= {**launches(row, device), "syncs": synchronisations(row, device)}
    if device.type == "cuda":
        figures["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    else:
        figures["times_faster"] = paired_ratios(contestants)
    figures["seconds"] = round(time.perf_counter() - start, 1)
    return figures


def paired_ratios(contestants: Sequence[Contestant]) -> dict[str, float]:
    """Of each round, the others' time over ours; the median."""
    walls = {c.label: c.samples["wall"] for c in contestants}
    if "ours" not in walls:
        return {}
    return {
        label: round(statistics.median(b / a for a, b in zip(walls["ours"], wall, strict=True)), 3)
        for label, wall in walls.items()
        if label not in ("ours", "copy")
    }


def print_table(name: str, figures: dict[str, Any]) -> None:
    two, once = figures["floors"]["two_pass"], figures["floors"]["touch_once"]
    print(f"\n{name}: {figures['tensors']} tensors, {figures['parameters']:,} parameters, copy {figures['copy_gb_s']} GB/s,")
    print(f"  two passes {two['exact_ms']} ms, touched once {once['exact_ms']} ms, {figures['blocks']} blocks")
    print(f"  {'':24}" + "".join(f"{column:>12}" for column in COLUMNS))
    for label, row in figures["rows"].items():
        reason = row.get("missing") or row.get("failed")
        cells = f"  {reason}" if reason else "".join(f"{row.get(column, ''):>12}" for column in COLUMNS)
        print(f"  {label:24}{cells}")
    if "times_faster" in figures:
        print(f"  ours is faster by {figures['times_faster']}")
    sys.stdout.flush()


def target(value: float, limit: float, *, at_least: bool = False) -> dict[str, Any]:
    return {"value": round(value, 4), "limit": limit, "met": value >= limit if at_least else value <= limit}


def targets(figures: dict[str, Any], *, on_device: bool) -> dict[str, Any]:
    """What was promised, of the arenas that ran."""
    found: dict[str, Any] = {}
    for name, arena in figures.items():
        ours, new = arena["rows"].get("ours", {}), arena["rows"].get("ours, new gradients", {})
        if "wall_ms" not in ours:
            continue
        if name in LIMITS:
            found[f"{name}_over_two_pass"] = target(ours["over_floor"], LIMITS[name])
        if name in LIMITS_MS and on_device:
            found[f"{name}_ms"] = target(ours["wall_ms"], LIMITS_MS[name])
        if "wall_ms" in new:
            found[f"{name}_new_gradients_single_ms_more"] = target(
                new["single_ms"] - ours["single_ms"], MORE_MS_WITH_NEW_GRADIENTS
            )
        if name in LIMITS and "wall_ms" in new:  # of a small model the time to put gradients in place would be counted as ours
            found[f"{name}_new_gradients_wall_ms_more"] = target(new["wall_ms"] - ours["wall_ms"], MORE_MS_WITH_NEW_GRADIENTS)
        for label in ("usual loop", "our loop"):
            if label in arena.get("times_faster", {}):
                key = f"{name}_times_faster_than_{label.replace(' ', '_')}"
                found[key] = target(arena["times_faster"][label], FASTER_ON_CPU, at_least=True)
    return found


def run_checks(models: Sequence[Shapes], device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for shapes in models:
        problem = Problem(shapes, device)
        for family in FAMILIES:
            name = f"{shapes.name}_{family}"
            found[name] = {}
            for check, row in Checks(problem, family, device).rows():
                found[name][check] = row
                print(f"{name:20} {check:28} {row}", flush=True)
    return found


def models_on(device: str) -> list[Shapes]:
    return [BERT_LARGE, RESNET50] if device == "cuda" else [BERT_FOUR_LAYERS, RESNET50]


def arenas_on(device: str) -> list[str]:
    return [f"{shapes.name}_{family}" for shapes in models_on(device) for family in FAMILIES]


def unknown_part(only: Sequence[str], device: str) -> str | None:
    """A sentence about the first entry of --only that is in no name."""
    names = [*arenas_on(device), "checks"]
    for part in only:
        if not any(part in name for name in names):
            where = "a GPU" if device == "cuda" else "a CPU"
            return f"--only {part!r} is part of no name; on {where} there are {', '.join(names)}."
    return None


def flags_of(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="on the CPU, also where there is a GPU (default: off)")
    parser.add_argument(
        "--seconds", type=float, default=None, help="for all arenas together (default: 70 on a GPU, 240 on a CPU)"
    )
    parser.add_argument(
        "--threads", type=int, default=None, help="of torch on the CPU; fewer are steadier on a busy machine (default: torch's)"
    )
    large, small = (", ".join(arenas_on(device)) for device in ("cuda", "cpu"))
    only = f"names of arenas or parts of them, or `checks`; nothing is kept (default: all). GPU: {large}. CPU: {small}."
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=only)
    args = parser.parse_args(arguments)
    device = torch.device("cpu" if args.cpu or not torch.cuda.is_available() else "cuda")
    if refusal := unknown_part(args.only, device.type):
        parser.error(refusal)
    return args, device


def main(arguments: Sequence[str] | None = None) -> int:
    args, device = flags_of(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    on_device = device.type == "cuda"
    wanted: Callable[[str], bool] = lambda name: not args.only or any(part in name for part in args.only)  # noqa: E731
    arenas = [(s, f) for s in models_on(device.type) for f in FAMILIES if wanted(f"{s.name}_{f}")]
    begin = time.perf_counter()
    checks = run_checks([RESNET50, BERT_ONE_LAYER] if on_device else [RESNET50], device) if wanted("checks") else {}
    timed: dict[str, Any] = {}
    end = time.perf_counter() + (args.seconds or SECONDS[device.type])
    for i, (shapes, family) in enumerate(arenas):
        name = f"{shapes.name}_{family}"
        share = WEIGHTS[shapes.name] / sum(WEIGHTS[s.name] for s, _ in arenas[i:])
        timed[name] = run(shapes, family, device, seconds=share * (end - time.perf_counter()))
        print_table(name, timed[name])
        gc.collect()  # an optimizer and its hooks hold each other, and with them gigabytes
        if on_device:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    failed = [f"{a}: {c}" for a, rows in checks.items() for c, row in rows.items() if row["ok"] is False]
    failed += [f"{a}: {label}" for a, figures in timed.items() for label, row in figures["rows"].items() if "failed" in row]
    figures = {
        **timed,
        "threads": torch.get_num_threads(),
        "enough_blocks": all(arena["blocks"] >= ENOUGH_BLOCKS for arena in timed.values()),
        "targets": targets(timed, on_device=on_device),
        "checks": checks,
        "failed": failed,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    title = "optimizer_step" if on_device else "optimizer_step_cpu"
    for name, row in figures["targets"].items():
        print(f"{name:52} {row}")
    if args.only:
        print(json.dumps({"bench": title, **surroundings(), **figures}))
    else:
        publish(title, figures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
