"""Bits that flip in the weights of one rank under Local SGD: how many are noticed, how late, at what cost, and false alarms.

    python -m bench.bit_flips.run --flips 400 --averagings 10000

found    a random bit from 20 to 31 of a random float32 weight, on a random rank, at a random update of a period: between two
         updates, in the forward or in the backward. Noticed: all ranks raise within two averagings.
quiet    so many averagings in which nothing flips, and a script writes to weights by `.data` and in place. Every error counts.
time     processor time of the sums as a share of that of training, for models from 20 thousand to 25 million weights: other
         processes of the machine do not count in it. `free`: every interval between two updates is watched, whatever it costs.
         `kept`: as in a long run, where intervals are left out so that it takes at most 1 % of the time; flips in those that are
         left out are not noticed, so `intervals_watched` bounds the share that is.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

from bench.lib.results import publish
from fleetx import fleet
from fleetx.engine.checks.flips import SLACK_SECONDS
from fleetx.errors import FleetError

PERIOD = 4
FIRST_BIT, LAST_BIT = 20, 31
MOMENTS = ("between", "forward", "backward")


def conv_net(width: int = 16) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def wide_net(width: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def pair(model: nn.Module, period: int = PERIOD) -> tuple[nn.Module, Any]:
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": period})
    return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), strategy)


def images(rank: int, update: int, rows: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * update + rank)
    return torch.randn(rows, 3, 16, 16, generator=generator), torch.randint(10, (rows,), generator=generator)


def flip(weight: Tensor, place: int, bit: int) -> None:
    """As memory would: torch does not see it."""
    weight.detach().view(-1).view(torch.uint8).numpy()[4 * place + bit // 8] ^= 1 << bit % 8


def random_weight(model: nn.Module, chance: random.Random) -> tuple[nn.Module, Tensor, int]:
    """A module, its weight tensor and a place in it, every weight of the model being equally likely."""
    held = [(module, param) for module in model.modules() for param in module.parameters(recurse=False)]
    place = chance.randrange(sum(param.numel() for _, param in held))
    for module, param in held:
        if place < param.numel():
            return module, param, place
        place -= param.numel()
    raise FleetError("a place outside the model")


# --- one flip -------------------------------------------------------------------------------------------------------------


def one_flip(rank: int, size: int, seed: int) -> dict[str, Any]:
    """Train, flip, and see how many averagings pass until an error. All ranks draw the same."""
    chance = random.Random(seed)
    model, optimizer = pair(conv_net())
    module, weight, place = random_weight(model, chance)
    bit, struck = chance.randint(FIRST_BIT, LAST_BIT), chance.randrange(size)
    moment, at = chance.choice(MOMENTS), chance.randint(PERIOD + 2, 2 * PERIOD + 1)
    passed, told = 0, ""
    for update in range(1, 5 * PERIOD):
        x, y = images(rank, update)
        handles = []
        if rank == struck and update == at:
            strike = lambda *_: flip(weight, place, bit)  # noqa: E731  # a hook
            if moment == "between":
                strike()
            elif moment == "forward":
                handles = [module.register_forward_pre_hook(strike)]
            else:
                handles = [next(iter(model.modules())).register_full_backward_pre_hook(strike)]
        try:
            report = optimizer.minimize(F.cross_entropy(model(x), y))
        except FleetError as error:
            told = str(error)
            break
        finally:
            for handle in handles:
                handle.remove()
        passed += report.averaged and update >= at
        if passed > 2:
            break
    kind = "flip" if "by themselves" in told else "not finite" if "finite" in told else told[:80] or "nothing"
    return {"bit": bit, "moment": moment, "noticed": bool(told) and passed < 2, "averagings_before": passed, "told": kind}


def flips(rank: int, size: int, count: int) -> list[dict[str, Any]]:
    return [one_flip(rank, size, seed) for seed in range(count)]


# --- nothing flips --------------------------------------------------------------------------------------------------------


def quiet(rank: int, size: int, averagings: int) -> dict[str, Any]:
    """Train on, with the writes of a script between updates."""
    torch.manual_seed(2)
    model, optimizer = pair(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)), period=2)
    watch, errors, done, update = optimizer.pipeline.checks.flips, [], 0, 0
    watch.most_time = 1.0  # a model this small has no time to spare: here every interval is looked at
    while done < averagings:
        update += 1
        generator = torch.Generator().manual_seed(1000 * update + rank)
        x, y = torch.randn(16, 20, generator=generator), torch.randint(5, (16,), generator=generator)
        try:
            done += optimizer.minimize(F.cross_entropy(model(x), y)).averaged
        except FleetError as error:
            errors.append(str(error)[:200])
            break
        if update % 3 == 0:
            model[0].weight.data.clamp_(-0.3, 0.3)
        if update % 5 == 0:
            model[2].weight.data[update % 64].mul_(0.5)
        if update % 7 == 0:
            with torch.no_grad():
                model[4].weight.mul_(0.99)
    return {"averagings": done, "updates": update, "looks": watch.looks, "passed_over": watch.passed_over, "errors": errors}


# --- time ---------------------------------------------------------------------------------------------------------------


def cost(rank: int, size: int, updates: int) -> list[dict[str, Any]]:
    rows = []
    for name, model, shape in (
        ("conv, 16 wide", conv_net(), (32, 3, 16, 16)),
        ("conv, 64 wide", conv_net(64), (32, 3, 16, 16)),
        ("conv, 64 wide, larger images", conv_net(64), (32, 3, 32, 32)),
        ("linear, 1,024 wide", wide_net(1024), (512, 1024)),
        ("linear, 3,500 wide", wide_net(3500), (512, 3500)),
    ):
        model, optimizer = pair(model)
        watch, y = optimizer.pipeline.checks.flips, torch.randint(10, (shape[0],))
        x = torch.randn(shape)

        def timed(
            count: int, optimizer: Any = optimizer, model: nn.Module = model, x: Tensor = x, y: Tensor = y
        ) -> dict[str, Any]:
            watch = optimizer.pipeline.checks.flips
            spent, looks, start, used = watch.spent, watch.looks, time.perf_counter(), time.process_time()
            for _ in range(count):
                optimizer.minimize(F.cross_entropy(model(x), y))
            seconds, used, spent = time.perf_counter() - start, time.process_time() - used, watch.spent - spent
            return {
                "update_seconds": seconds / count,
                "update_processor_seconds": used / count,
                "share_of_processor_time": spent / used,
                "share_of_time": spent / seconds,
                "intervals_watched": (watch.looks - looks) / count,
            }

        timed(3)
        most, watch.most_time = watch.most_time, 1e9
        free = timed(updates)
        watch.most_time = most
        watch.spent = SLACK_SECONDS + most * (time.perf_counter() - watch._began)  # as late in a run
        rows.append({"model": name, "weights": sum(p.numel() for p in model.parameters()), "free": free, "kept": timed(updates)})
    return rows


# ----------------------------------------------------------------------------------------------------------------------


def _rank(rank: int, size: int, folder: str, flip_count: int, averagings: int, updates: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    fleet.init()
    figures = {"flips": flips(rank, size, flip_count), "quiet": quiet(rank, size, averagings), "cost": cost(rank, size, updates)}
    (Path(folder) / f"figures.{rank}").write_text(json.dumps(figures))
    fleet.barrier_worker()
    dist.destroy_process_group()


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    found = ranks[0]["flips"]
    noticed = sum(all(one["flips"][number]["noticed"] for one in ranks) for number in range(len(found)))
    by_bit = {bit: [one["noticed"] for one in found if one["bit"] == bit] for bit in range(FIRST_BIT, LAST_BIT + 1)}
    return {
        "ranks": len(ranks),
        "flips": len(found),
        "noticed_on_all_ranks": noticed,
        "share_noticed": noticed / max(len(found), 1),
        "noticed_by_bit": {bit: f"{sum(seen)} of {len(seen)}" for bit, seen in by_bit.items()},
        "noticed_by_moment": {
            moment: f"{sum(one['noticed'] for one in found if one['moment'] == moment)} of "
            f"{sum(one['moment'] == moment for one in found)}"
            for moment in MOMENTS
        },
        "told_by": dict(Counter(one["told"] for one in found)),
        "averagings_before": dict(Counter(one["averagings_before"] for one in found if one["noticed"])),
        "quiet": [one["quiet"] for one in ranks],
        "cost": ranks[0]["cost"],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--flips", type=int, default=400, help="bits that flip (default: 400)")
    parser.add_argument("--averagings", type=int, default=10_000, help="averagings in which nothing flips (default: 10,000)")
    parser.add_argument("--updates", type=int, default=24, help="updates of each model whose time is taken (default: 24)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, folder, options.flips, options.averagings, options.updates)
        mp.start_processes(_rank, args=arguments, nprocs=options.ranks, start_method="spawn")
        ranks = [json.loads((Path(folder) / f"figures.{rank}").read_text()) for rank in range(options.ranks)]
    publish("bit_flips", summary(ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
