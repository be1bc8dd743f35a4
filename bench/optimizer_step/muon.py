"""What one step of Muon costs, over the matrices of a model: beside torch's, with AdamW for the rest, and shared over two ranks.

    python -m bench.optimizer_step.muon            on a GPU: BERT-large, two gloo ranks that share it
    python -m bench.optimizer_step.muon --cpu      on a CPU: a BERT of four small layers
    python -m bench.optimizer_step.muon --smoke    a CPU, one block of each; nothing is kept

Rows: the median seconds of a step, from blocks in turns (bench/lib/step_clock.py).
    torch        torch.optim.Muon over the matrices: one after the other
    ours         fleetx.optim.Muon over the same matrices: equal shapes in one product
    ours, all    with AdamW for embeddings, norms and biases as well
    adamw        torch.optim.AdamW(foreach) over all tensors, for scale
    alone, two   one rank of two that makes all of it; and both ranks, each its share, with the gathers
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.lib.results import publish, surroundings
from bench.lib.step_clock import Contestant, compete, synchronize, warm_up
from bench.overhead.run import join, start
from fleetx.applications import Bert_base, Bert_large
from fleetx.dist import world
from fleetx.optim import Muon

RATE, GRADIENT_SCALE = 0.01, 1e-3
SECONDS = {"cuda": 60.0, "cpu": 60.0}
BLOCK_SECONDS, MOST_BLOCKS = 0.1, 25
FASTER, SHARED = 3.0, 0.6
"""Promised on a GPU: so many times as fast as torch's; and of one rank's time where two share the work."""


def make_model(device: torch.device) -> nn.Module:
    if device.type == "cuda":
        return Bert_large().to(device)
    return Bert_base(layers=4, hidden=256, heads=4, feed_forward=1024, vocab_size=1000)


def with_gradients(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = make_model(device)
    for param in model.parameters():
        param.grad = torch.randn_like(param).mul_(GRADIENT_SCALE)
    return model


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that our rule gives to Muon."""
    chosen = Muon(model.named_parameters(), model=model).flags_by_name()
    return [param for name, param in model.named_parameters() if chosen[name]["use_muon"]]


def contestants(device: torch.device) -> list[Contestant]:
    model = with_gradients(device)
    found = [
        Contestant("ours", Muon(matrices_of(model), lr=RATE).step, ours=True),
        Contestant("ours, all", Muon(model.named_parameters(), lr=RATE, model=model).step, ours=True),
        Contestant("adamw", torch.optim.AdamW(model.parameters(), lr=RATE, foreach=True).step),
    ]
    if hasattr(torch.optim, "Muon"):
        found.append(Contestant("torch", torch.optim.Muon(matrices_of(model), lr=RATE).step))
    return found


def timed(rows: list[Contestant], device: torch.device, seconds: float) -> dict[str, float]:
    for row in rows:
        warm_up(row, device, BLOCK_SECONDS)
    compete(rows, device, most_rounds=MOST_BLOCKS, until=time.perf_counter() + seconds)
    return {row.label: round(row.median("wall"), 6) for row in rows}


def shared(rank: int, size: int, port: int, args: argparse.Namespace) -> None:
    """Be one of two ranks: first one of them makes all the work while the other waits, then both share it."""
    device, _ = join(rank, size, port, args)
    model = with_gradients(device)
    alone, both = Muon(matrices_of(model), lr=RATE), Muon(matrices_of(model), lr=RATE)
    both.share_over(world.current().comm)
    samples: dict[str, list[float]] = {"alone": [], "two": []}
    for number in range(args.blocks + 1):  # every rank makes the same steps, since those of `two` meet
        for label, optimizer in (("alone", alone), ("two", both)):
            dist.barrier()
            begin = time.perf_counter()
            if label == "two" or rank == 0:
                optimizer.step()
            synchronize(device)
            if number:
                samples[label].append(time.perf_counter() - begin)
    if rank == 0:
        medians = {label: round(sorted(seconds)[len(seconds) // 2], 6) for label, seconds in samples.items()}
        args.out.put(medians)


def shared_by_two(args: argparse.Namespace) -> dict[str, float]:
    args.out = torch.multiprocessing.get_context("spawn").SimpleQueue()
    start(shared, args)
    found: dict[str, float] = args.out.get()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="on a CPU, where there is a GPU too")
    parser.add_argument("--smoke", action="store_true", help="a CPU, one block of each; nothing is kept")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu and not args.smoke else "cpu")
    args.device, args.nccl, args.blocks = device.type, False, 1 if args.smoke else 10
    rows = timed(contestants(device), device, 0.0 if args.smoke else SECONDS[device.type])
    rows |= shared_by_two(args)
    figures: dict[str, Any] = {"seconds": rows, "shared": round(rows["two"] / rows["alone"], 3)}
    if "torch" in rows:
        figures["times_as_fast_as_torch"] = round(rows["torch"] / rows["ours"], 3)
    if device.type == "cuda":
        figures["targets"] = {
            "times_as_fast_as_torch": figures.get("times_as_fast_as_torch", 0.0) >= FASTER,
            "shared": figures["shared"] <= SHARED,
        }
    if args.smoke:
        print(json.dumps({"bench": "muon_step", **surroundings(), **figures}))
    else:
        publish("muon_step" if device.type == "cuda" else "muon_step_cpu", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
