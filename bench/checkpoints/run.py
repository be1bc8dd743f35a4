"""What a verified checkpoint costs beside torch.save, and what each of them notices.

cost      save and load of a model with Adam's moments, one process: torch.save with fsync, ours, and how long ours holds the
          loop up when it writes in the background
damage    the same random one-bit flips in a small checkpoint of each: loaded as it was, refused, or silently something else
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.lib.results import publish
from fleetx import fleet


def train(width: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 4))
    with contextlib.redirect_stdout(None):
        model, optimizer = fleet.distribute(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    optimizer.minimize(model(torch.randn(8, width)).square().mean())
    return model, optimizer


def torch_save(path: Path, model: nn.Module, optimizer: Any) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def torch_load(path: Path, model: nn.Module, optimizer: Any) -> None:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])


def median_seconds(action: Callable[[int], None], repeats: int) -> float:
    times = []
    for number in range(repeats):
        start = time.perf_counter()
        action(number)
        times.append(time.perf_counter() - start)
    return round(statistics.median(times), 4)


def cost(folder: Path, width: int, repeats: int) -> dict[str, Any]:
    model, optimizer = train(width)
    objects = {"model": model, "optimizer": optimizer}
    ours, theirs = folder / "ours", folder / "theirs.pt"

    def in_background(number: int) -> None:
        fleet.save_checkpoint(ours, step=1000 + number, keep=1, async_save=True, **objects)

    stalls = []
    figures: dict[str, Any] = {
        "torch_save_seconds": median_seconds(lambda n: torch_save(theirs, model, optimizer), repeats),
        "our_save_seconds": median_seconds(lambda n: [fleet.save_checkpoint(ours, step=n, keep=1, **objects)][:0], repeats),
        "torch_load_seconds": median_seconds(lambda n: torch_load(theirs, model, optimizer), repeats),
        "our_load_seconds": median_seconds(lambda n: [fleet.load_checkpoint(ours, **objects)][:0], repeats),
    }
    for number in range(repeats):
        start = time.perf_counter()
        in_background(number)
        stalls.append(time.perf_counter() - start)
        assert fleet.load_checkpoint(ours, **objects) is not None  # waits for it
    figures["our_async_stall_seconds"] = round(statistics.median(stalls), 4)
    figures["megabytes"] = round(theirs.stat().st_size / 1e6, 1)
    return figures


def outcome(load: Callable[[], None], model: nn.Module, optimizer: Any, expected: list[bytes]) -> str:
    with torch.no_grad():
        for tensor in tensors(model, optimizer):
            tensor.zero_()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # falling back to an older one is a refusal of this one
            load()
    except Exception:
        return "refused"
    found = [tensor.detach().numpy().tobytes() for tensor in tensors(model, optimizer)]
    return "as it was" if found == expected else "silently wrong"


def tensors(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    return [*model.state_dict().values(), *(t for s in optimizer.state_dict()["state"].values() for t in s.values())]


def damage(folder: Path, flips: int, chance: random.Random) -> dict[str, Any]:
    model, optimizer = train(16)
    expected = [tensor.detach().numpy().tobytes() for tensor in tensors(model, optimizer)]
    theirs, ours = folder / "small.pt", folder / "small"
    torch_save(theirs, model, optimizer)
    fleet.save_checkpoint(ours, step=1, model=model, optimizer=optimizer)
    files = sorted(path for path in (ours / "step-0000000001").iterdir())

    def trial(paths: list[Path], load: Callable[[], None]) -> str:
        path = chance.choices(paths, weights=[p.stat().st_size for p in paths])[0]
        whole = path.read_bytes()
        place = chance.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << chance.randrange(8))]) + whole[place + 1 :])
        try:
            return outcome(load, model, optimizer, expected)
        finally:
            path.write_bytes(whole)

    def load_ours() -> None:
        assert fleet.load_checkpoint(ours, model=model, optimizer=optimizer) is not None

    figures = {}
    for name, paths, load in (
        ("torch_load", [theirs], lambda: torch_load(theirs, model, optimizer)),
        ("ours", files, load_ours),
    ):
        seen = [trial(paths, load) for _ in range(flips)]
        figures[name] = {what.replace(" ", "_"): seen.count(what) for what in ("refused", "as it was", "silently wrong")}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=3000, help="of the model: about 12 bytes times its square in a checkpoint")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="checkpoints")
    args = parser.parse_args()
    os.environ["FLEETX_DEVICE"] = "cpu"
    fleet.init()
    with tempfile.TemporaryDirectory() as name:
        figures = {
            "cost": cost(Path(name), args.width, args.repeats),
            "damage": damage(Path(name), args.flips, random.Random(args.seed)),
        }
    publish(args.name, figures)


if __name__ == "__main__":
    main()
