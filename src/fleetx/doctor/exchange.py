"""Script of the trial's ranks: all-reduces of several sizes, with checked sums and measured times.

Started as `fleetrun -m fleetx.doctor.exchange OUT BACKENDS SIZES`; ranks of an existing launcher call `measured` instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from .. import fleet
from ..auto.link import timed
from ..dist import world
from ..dist.comm import Comm
from .finding import Row, Table, bus_rate

LONGEST_SECONDS = 4.0
"""Time limit for all sizes of one backend: on a slow link the largest sizes are left out."""
PATTERN = 251
"""A prime below 2**8: sums of such numbers are exact in float32, and a shift by a power of two changes the pattern."""
Say = Callable[[str], None]


def is_sum_right(comm: Comm, device: torch.device, size_bytes: int) -> bool:
    """Check an all-reduce on all ranks. Sums differ between elements, so that a misplaced part is detected. A collective."""
    pattern = (torch.arange(size_bytes // 4, device=device) % PATTERN).float()
    mine = pattern + comm.rank
    comm.all_reduce(mine).wait()
    wanted = comm.size * pattern + comm.size * (comm.size - 1) // 2
    return all(comm.gather_json(bool(torch.equal(mine, wanted))))


def measured(backends: Sequence[str], sizes: Sequence[int], say: Say = lambda line: None) -> tuple[Table, ...]:
    """Measure every backend in the open world; a collective. `say` is called before each step, to see where it hangs."""
    here = world.current()
    by_rank = here.comm.gather_json(list(backends))  # a node with fewer GPUs would skip NCCL while the others wait for it
    backends = [backend for backend in backends if all(backend in others for others in by_rank)]
    devices = {"gloo": torch.device("cpu"), "nccl": here.device}
    return tuple(_table(here.comm, backend, devices[backend], sizes, say) for backend in backends)


def _table(comm: Comm, backend: str, device: torch.device, sizes: Sequence[int], say: Say) -> Table:
    say(f"{backend}: {comm.size} ranks, {device.type}: all-reduces of up to {max(sizes):,} bytes")
    points = timed(comm, device, sizes, LONGEST_SECONDS, lambda tensor: comm.all_reduce(tensor).wait())
    rows = []
    for size, seconds in points:
        say(f"{backend}: the sum of {size:,.0f} bytes")
        right = is_sum_right(comm, device, int(size))
        rows.append(Row(int(size), seconds, bus_rate(size, seconds, comm.size), right))
    return Table(backend, comm.size, tuple(rows))


def main(out: str, backends: str, sizes: str) -> None:
    print("joining the other ranks", flush=True)
    fleet.init()
    tables = measured(backends.split(","), [int(size) for size in sizes.split(",")], print)
    if fleet.is_first_worker():
        Path(out).write_text(json.dumps([asdict(table) for table in tables]))


if __name__ == "__main__":
    main(*sys.argv[1:])
