"""One rank of bench/compression_speed: the contestants that it is told, in turns. Rank 0 prints one line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from bench.compression_speed.contestants import contestant
from bench.lib.mlp import Contestant, Size
from bench.lib.turns import Block, in_turns, warm
from fleetx import fleet


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def told(one: Contestant, blocks: Sequence[Block]) -> dict[str, Any]:
    """Bytes of a step: as the report counts them, or what a torch row must send; and what went over the link."""
    counted = [sent for block in blocks for sent in block.counted_bytes]
    link = [block.link_bytes for block in blocks if block.link_bytes is not None]
    return {
        "seconds": [block.seconds for block in blocks],
        "bytes_per_step": round(mean(counted)) if counted else one.wire_bytes,
        "link_bytes_per_step": round(mean(link)) if link else None,
        "steps": one.block_steps * len(blocks),
    }


def measure(names: Sequence[str], rounds: int, size: Size) -> dict[str, dict[str, Any]]:
    rows = [contestant(name, size) for name in names]
    warm(rows)
    blocks = in_turns(rows, rounds)
    return {one.name: told(one, blocks[one.name]) for one in rows}


def main(plan: dict[str, Any]) -> None:
    fleet.init()
    found = measure(plan["names"], plan["rounds"], Size(**plan["size"]))
    if fleet.is_first_worker():
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
