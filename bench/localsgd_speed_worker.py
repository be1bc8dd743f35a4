"""One rank of bench/localsgd_speed.py: all contestants in turns, block by block. Rank 0 prints one line of JSON."""

from __future__ import annotations

import json
import sys
import time

from fleetx import fleet
from localsgd_contestants import NEVER, Contestant, ddp, ours, torch_post_local

STEPS = 16
"""In a block: four periods of 4, or one of 16."""


def contestants() -> list[Contestant]:
    found = [ours("no communication", {"k_steps": NEVER}, block_steps=STEPS)]
    for dtype, short in (("float32", "fp32"), ("bfloat16", "bf16")):
        for k in (4, 16):
            found.append(ours(f"ours {short} k={k}", {"k_steps": k, "wire_dtype": dtype}, block_steps=STEPS))
    for k, overlap in ((4, 2), (16, 4)):
        configs = {"k_steps": k, "wire_dtype": "bfloat16", "overlap_steps": overlap}
        found.append(ours(f"ours bf16 k={k} overlap={overlap}", configs, block_steps=STEPS))
    found += [torch_post_local(k, block_steps=STEPS) for k in (4, 16)]
    return [*found, ddp(block_steps=4)]


def block_seconds(one: Contestant) -> float:
    fleet.barrier_worker()
    start = time.perf_counter()
    for _ in range(one.block_steps):
        one.step()
    return (time.perf_counter() - start) / one.block_steps


def main(rounds: int) -> None:
    fleet.init()
    rows = contestants()
    for one in rows:
        for _ in range(one.warm_steps):
            one.step()
    samples: dict[str, list[float]] = {one.name: [] for one in rows}
    for turn in range(rounds):
        for one in rows[turn % len(rows) :] + rows[: turn % len(rows)]:
            slowest = fleet.util.all_reduce(block_seconds(one), "max")
            samples[one.name].append(float(slowest))
            if fleet.is_first_worker():
                print(f"{one.name:28} {samples[one.name][-1] * 1e3:8.1f} ms a step", flush=True)
    facts = {one.name: {"period": one.period, "wire_bytes": one.wire_bytes} for one in rows}
    if fleet.is_first_worker():
        print(json.dumps({"samples": samples, "facts": facts}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
