"""One rank of bench/localsgd_speed: all contestants in turns, block by block. Rank 0 prints one line of JSON."""

from __future__ import annotations

import json
import sys

from bench.lib.mlp import NEVER, Contestant, ddp
from bench.lib.turns import in_turns, warm
from bench.localsgd_speed.contestants import ours, torch_post_local
from fleetx import fleet

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


def main(rounds: int) -> None:
    fleet.init()
    rows = contestants()
    warm(rows)
    blocks = in_turns(rows, rounds)
    samples = {name: [one.seconds for one in made] for name, made in blocks.items()}
    facts = {one.name: {"period": one.period, "wire_bytes": one.wire_bytes} for one in rows}
    if fleet.is_first_worker():
        print(json.dumps({"samples": samples, "facts": facts}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
