"""The text half of bench/data_loading: how much faster are batches made than BERT uses them up?

    python -m bench.data_loading.text [--smoke]      this half alone

A pass of the loader goes from asking for the first batch to the last one lying on the device as int64. The models train in
bfloat16 with a fused AdamW, on batches that lie there already: the fastest they could use them. `times_faster` is the rate of
the loader over that of the model; 20 or more is wanted on a GPU. On a CPU only the loader is measured.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.lib.results import publish
from fleetx import fleet
from fleetx.applications import Bert_base, Bert_large
from fleetx.data.loader import Loader
from fleetx.data.text.from_paths import text_source
from fleetx.data.text.text_source import TextSource

SHAPES = {"32x512": (32, 512), "256x128": (256, 128)}
TINY = {"layers": 1, "hidden": 16, "heads": 2, "feed_forward": 32}
MODELS = {"Bert_base": Bert_base, "Bert_large": Bert_large}
STEPS = 10


def text_figures(args: argparse.Namespace) -> dict[str, Any]:
    """One row for each shape of batch; the corpus is Python's own sources, prepared again."""
    figures: dict[str, Any] = {}
    budget = {"stdlib_bytes": 600_000} if args.smoke else {}
    with tempfile.TemporaryDirectory(prefix="text_loading_") as cache:
        for shape, (rows, length) in SHAPES.items():
            start = time.perf_counter()
            source = text_source("stdlib", max_seq_len=length, cache_dir=cache, **budget)
            opened = time.perf_counter() - start
            rows = min(rows, len(source) // 2)
            row = {"open_s": round(opened, 3), "workers": args.workers, "samples": len(source)}
            row |= loader_figures(source, rows, length, args)
            if args.smoke or args.device == "cuda":
                row |= model_figures(source, rows, row["loader_batches_per_s"], args)
            figures[f"text_{shape}"] = row
            print(f"text_{shape:8} {row}", flush=True)
    return figures


def loader_figures(source: TextSource, rows: int, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """One process making batches, and the loader with all its workers."""
    order = np.random.default_rng(0).permutation(len(source))
    groups = [order[start : start + rows] for start in range(0, len(order) - rows + 1, rows)]
    taken = []
    for group in groups[:100]:
        start = time.perf_counter()
        source.batch(0, group)
        taken.append(time.perf_counter() - start)
    loader = Loader(source, rows, shuffle=True, workers=args.workers)
    passes = [one_pass(loader) for _ in range(2 if args.smoke else 6)][1:]  # the first one starts the workers
    rate = len(groups) / statistics.median(passes)
    return {
        "one_process_ms": round(statistics.median(taken) * 1e3, 3),
        "loader_batches_per_s": round(rate, 1),
        "loader_tokens_per_s": round(rate * rows * length),
    }


def one_pass(loader: Loader) -> float:
    start = time.perf_counter()
    for _ in loader:
        pass
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def model_figures(source: TextSource, rows: int, loader_rate: float, args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    loader = Loader(source, rows, shuffle=True, workers=0)
    batches = list(itertools.islice(iter(loader), 2))
    steps_ms, times_faster = {}, {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make(**(TINY | {"vocab_size": source.vocab_size} if args.smoke else {})).to(device).train()
        seconds = step_seconds(model, batches, device)
        steps_ms[name], times_faster[name] = round(seconds * 1e3, 2), round(loader_rate * seconds, 1)
        del model
    return {"tiny_models": args.smoke, "model_step_ms": steps_ms, "times_faster": times_faster}


def step_seconds(model: nn.Module, batches: list[Any], device: torch.device) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    taken = []
    for number in range(STEPS + 3):
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model.loss(batches[number % len(batches)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[3:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    os.environ["FLEETX_DEVICE"] = args.device
    fleet.init()
    publish("text_loading" + ("_smoke" if args.smoke else "_cuda" if args.device == "cuda" else ""), text_figures(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
