"""Run folders as fleet.Monitor leaves them, made up from formulas, so that a test knows every number in them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Line = dict[str, Any]
PARAMETERS = 272_474
DENSE = 2 * (4 - 1) / 4 * 4 * PARAMETERS
"""Bytes that a rank of four sends in a dense all-reduce of float32 gradients."""
LAYERS = [f"layer{block}.{unit}.conv{conv}.weight" for block in (1, 2, 3) for unit in (0, 1, 2) for conv in (1, 2)] + [
    "fc.weight",
    "fc.bias",
]


def line(step: int, *, start: int = 1, seconds: float | None = None, **more: Any) -> Line:
    """One update of four ranks: 50 ms, 256 samples, the loss 2/sqrt(step)."""
    took = {"data": 0.004, "forward": 0.011, "backward": 0.02, "communication": 0.009, "update": 0.005, "other": 0.001}
    given: Line = {
        "start": start,
        "step": step,
        "seconds": 0.05 * step if seconds is None else seconds,
        "loss": 2 / math.sqrt(step),
        "lr": 0.1,
        "updated": True,
        "skipped": False,
        "loss_scale": 1.0,
        "grad_norm": None,
        "bytes_sent": int(DENSE),
        "bytes_dense": int(DENSE),
        "period": None,
        "averaged": False,
        "micro_steps": 1,
        "samples": 256,
        "memory_bytes": 1_200_000_000,
        "noise_scale": None,
        "density": None,
        "split": took,
        "pair": 1,
        "values": {},
    }
    return given | more


def start(number: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "start": number,
        "time": f"2026-11-16T0{6 + number}:00:00+00:00",
        "fleetx": "0.1.0",
        "torch": "2.13.0+cpu",
        "python": "3.11.2",
        "platform": "Linux-6.1-x86_64",
        "device": "cpu",
        "backend": "gloo",
        "ranks": 4,
        "nodes": 1,
        "hosts": ["a"],
        "command": ["train.py", "--lr", "0.1"],
        "total_steps": 1000,
        "pairs": [{"model": "Resnet20", "parameters": PARAMETERS, "optimizer": "SGD"}],
    } | more


def summary(lines: Iterable[Line], **more: Any) -> dict[str, Any]:
    every = list(lines)
    seconds = every[-1]["seconds"]
    samples = sum(one["samples"] for one in every)
    return {
        "state": "finished",
        "start": 1,
        "error": None,
        "steps": every[-1]["step"],
        "skipped": sum(one["skipped"] for one in every),
        "seconds": seconds,
        "loss": every[-1]["loss"],
        "values": every[-1]["values"],
        "samples": samples,
        "samples_per_second": samples / seconds,
        "steps_per_second": len(every) / seconds,
        "bytes_sent": sum(one["bytes_sent"] for one in every),
        "bytes_dense": sum(one["bytes_dense"] for one in every),
        "memory_bytes": max(one["memory_bytes"] for one in every),
        "split": {part: sum(one["split"][part] for one in every) for part in every[0]["split"]},
        "ranks": {},
    } | more


def write_run(
    folder: Path,
    lines: Iterable[Line],
    *,
    starts: Iterable[Mapping[str, Any]] = (start(),),
    summary: Mapping[str, Any] | None = None,
    strategy: str = "lars: false\nfuse_grad_size_in_MB: 32\n",
    memory: Mapping[str, Any] | None = None,
    logs: Mapping[int, str] | None = None,
    tail: str = "",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (folder / "metrics.jsonl").write_text(text + tail, encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps({"starts": list(starts)}), encoding="utf-8")
    (folder / "strategy.yaml").write_text(strategy, encoding="utf-8")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    if memory is not None:
        (folder / "memory.json").write_text(json.dumps(memory), encoding="utf-8")
    for rank, log in (logs or {}).items():
        (folder / f"workerlog.{rank}").write_text(log, encoding="utf-8")
    return folder


# --- kinds of runs ----------------------------------------------------------------------------------------------------------


def noisy(steps: int, seed: int = 0, fall: float = 0.004, floor: float = 0.05) -> Callable[[int], float]:
    """A loss that falls, shakes and has a spike at two thirds."""
    chance = random.Random(seed)
    shaken = [chance.gauss(0, 0.05) for _ in range(steps + 1)]
    spike = steps * 2 // 3
    return lambda step: (
        (floor + 2.3 * math.exp(-fall * 1000 / steps * step)) * math.exp(shaken[step]) * (4 if step == spike else 1)
    )


def finished(folder: Path, steps: int = 100) -> Path:
    """Nothing but what every run has."""
    lines = [line(step, values={"acc": 1 - 1 / step}) for step in range(1, steps + 1)]
    return write_run(folder, lines, summary=summary(lines), starts=[start(total_steps=steps)])


def resumed(folder: Path) -> Path:
    """Stopped at 60, where 50 was saved: steps 51 to 60 are done twice, with another loss the second time."""
    first = [line(step) for step in range(1, 61)]
    second = [line(step, start=2, seconds=0.05 * (step - 50), loss=1.0) for step in range(51, 101)]
    return write_run(folder, first + second, starts=[start(1), start(2)], summary=summary(second, seconds=5.5, start=2))


def killed(folder: Path) -> Path:
    """No summary, and half a line at the end."""
    lines = [line(step) for step in range(1, 41)]
    return write_run(folder, lines, tail=json.dumps(line(41))[:57], logs={0: "step 40\n"})


def failed(folder: Path) -> Path:
    lines = [line(step, loss=None if step > 25 else 1 / step) for step in range(1, 31)]
    trace = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n'
    trace += "ValueError: the loss is <script>alert(1)</script>\n"
    told = summary(lines, state="failed", error="ValueError: the loss is <script>alert(1)</script>", loss=None)
    return write_run(folder, lines, summary=told, logs={0: "epoch 1\n\x1b[31mred\x1b[0m words\n", 1: "epoch 1\n" + trace})


def localsgd(folder: Path, steps: int = 400, seed: int = 3) -> Path:
    """Averages every period; the period grows; nothing is sent in between."""
    loss = noisy(steps, seed, fall=0.0038)
    lines = []
    for step in range(1, steps + 1):
        period = 2 if step < steps // 4 else 4 if step < steps // 2 else 8
        averaged = step % period == 0
        took = {
            "data": 0.003,
            "forward": 0.011,
            "backward": 0.019,
            "communication": 0.016 if averaged else 0.0003,
            "update": 0.004,
            "other": 0.001,
        }
        lines.append(
            line(
                step,
                seconds=0.0405 * step,
                loss=loss(step),
                lr=0.1 * (1 + math.cos(math.pi * step / steps)) / 2,
                period=period,
                averaged=averaged,
                bytes_sent=int(DENSE) if averaged else 0,
                split=took,
                memory_bytes=1_310_000_000,
                values={"acc": 0.95 * (1 - math.exp(-4 * step / steps))} if step % 20 == 0 else {},
            )
        )
    told = summary(lines, values={"acc": 0.933})
    settings = (
        "localsgd: true\nlocalsgd_configs:\n  k_steps: 2\n  begin_step: 1\nfuse_grad_size_in_MB: 32\nnoise_scale_steps: 0\n"
    )
    return write_run(folder, lines, summary=told, starts=[start(total_steps=steps)], strategy=settings)


def lars(folder: Path, steps: int = 400, seed: int = 1) -> Path:
    """Trust ratios, gradient norms, a loss scale that moves, memory over a step, four ranks of which one is slow."""
    loss, chance = noisy(steps, seed), random.Random(seed)
    lines = []
    for step in range(1, steps + 1):
        slow = 0.012 + 0.004 * math.sin(step / 40)
        took = {
            "data": 0.004,
            "forward": 0.011,
            "backward": 0.021,
            "communication": 0.008 + slow,
            "update": 0.006,
            "other": 0.001,
        }
        more: Line = {}
        skipped = step in (5, 9, steps // 2)
        scale = 2.0 ** (16 - (step > 5) - (step > 9) - (step > steps // 2) + (step > steps * 3 // 4))
        if step % 10 == 0:
            more["trust_ratios"] = {
                name: 0.004 * (1 + place) * math.exp(1.2 * math.sin(step / steps * 3 + place))
                for place, name in enumerate(LAYERS)
            }
            more["ranks"] = {
                str(rank): {
                    "seconds": (0.051 + slow) * 10,
                    "compute": (0.038 + (slow if rank == 2 else 0)) * 10,
                    "communication": (0.009 + (0 if rank == 2 else slow)) * 10,
                    "data": 0.004 * 10,
                }
                for rank in range(4)
            }
        lines.append(
            line(
                step,
                seconds=0.055 * step + 0.004 * chance.random(),
                loss=loss(step),
                lr=min(step / (steps / 10), 1.0) * 0.8,
                split=took,
                skipped=skipped,
                updated=not skipped,
                loss_scale=scale,
                grad_norm=None if skipped else 3 * loss(step),
                noise_scale=400 + 2.5 * step if step % 5 == 0 else None,
                memory_bytes=1_240_000_000 + 1_000_000 * min(step, 20),
                values={"acc": 0.97 * (1 - math.exp(-5 * step / steps))} if step % 20 == 0 else {},
                **more,
            )
        )
    times = [0.0005 * place for place in range(110)]
    curve = [int(4e8 + 8e8 * (t / 0.016 if t < 0.016 else max(0.0, 1 - (t - 0.016) / 0.024)) + 5e7 * (t > 0.045)) for t in times]
    memory = {
        "kind": "resident",
        "curves": [
            {
                "start": 1,
                "step": 3,
                "seconds": times,
                "bytes": curve,
                "marks": [["forward", 0.004], ["backward", 0.016], ["update", 0.045]],
            },
        ],
    }
    settings = (
        "lars: true\nlars_configs:\n  lars_coeff: 0.001\n  lars_weight_decay: 0.0005\n"
        "  exclude_from_weight_decay:\n  - norm\n  - bias\n"
        "amp: true\namp_configs:\n  dtype: float16\nfuse_grad_size_in_MB: 32\nnoise_scale_steps: 5\n"
    )
    told = summary(lines, values={"acc": 0.963})
    pairs = [{"model": "Resnet20", "parameters": PARAMETERS, "optimizer": "Lars"}]
    return write_run(
        folder, lines, summary=told, starts=[start(total_steps=steps, pairs=pairs)], strategy=settings, memory=memory
    )


def several_pairs(folder: Path, steps: int = 120) -> Path:
    """A generator and a discriminator, each with its own lines and strategy."""
    lines = []
    for step in range(1, steps + 1):
        lines.append(line(step, seconds=0.1 * step - 0.05, pair=1, loss=0.7 + 1 / step))
        lines.append(line(step, seconds=0.1 * step, pair=2, loss=1.4 - 0.5 / step))
    pairs = [
        {"model": "Generator", "parameters": 10, "optimizer": "Adam"},
        {"model": "Critic", "parameters": 20, "optimizer": "Adam"},
    ]
    write_run(folder, lines, starts=[start(pairs=pairs, total_steps=steps)], summary=summary(lines))
    (folder / "strategy.2.yaml").write_text("lars: true\nfuse_grad_size_in_MB: 32\n", encoding="utf-8")
    return folder


def long(folder: Path, steps: int = 20_000, seed: int = 0) -> Path:
    """Every field of every line, and one spike of the loss."""
    loss, chance = noisy(steps, seed), random.Random(seed)
    lines = [
        line(
            step,
            seconds=0.05 * step,
            loss=loss(step),
            grad_norm=1 + chance.random(),
            noise_scale=100 + chance.random(),
            density=0.01,
            period=1 + step // 5000,
            values={"acc": step / steps, "val/loss": 2 * loss(step), "tokens": float(step)},
        )
        for step in range(1, steps + 1)
    ]
    return write_run(folder, lines, summary=summary(lines), starts=[start(total_steps=steps)])
