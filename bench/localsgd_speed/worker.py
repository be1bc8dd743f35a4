"""One rank of bench/localsgd_speed: all contestants in turns, block by block. Rank 0 prints one line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from bench.lib.mlp import NEVER, Contestant, ddp
from bench.lib.turns import in_turns, warm
from bench.localsgd_speed.contestants import ours, torch_post_local
from fleetx import fleet

STEPS, LONG = 16, 30
"""In a block: four periods of 4, or one of 16; compressed: one of 30."""
SPARSE = {"top_k": 64, "value_bits": 2, "error_decay": 0.95}
COMPRESSED: dict[str, dict[str, Any]] = {
    "fp32 k=30": {},
    "int8 k=30": {"wire_dtype": "int8"},
    "int4 k=30": {"wire_dtype": "int4"},
    "64 of 4096 k=30": SPARSE,
    "int8 k=30 overlap=15": {"wire_dtype": "int8", "overlap_steps": 15},
    "int8 k=30 in 5 fragments overlap=6": {"wire_dtype": "int8", "fragments": 5, "overlap_steps": 6},
}


def compressed() -> list[Contestant]:
    alone = ours("no communication", {"k_steps": NEVER}, block_steps=LONG)
    return [alone, *(ours(name, {"k_steps": LONG, **form}, block_steps=LONG) for name, form in COMPRESSED.items())]


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


def main(rounds: int, is_compressed: bool) -> None:
    fleet.init()
    rows = compressed() if is_compressed else contestants()
    warm(rows)
    blocks = in_turns(rows, rounds)
    samples = {name: [one.seconds for one in made] for name, made in blocks.items()}
    facts: dict[str, Any] = {one.name: {"period": one.period, "wire_bytes": one.wire_bytes} for one in rows}
    for name, made in blocks.items():  # of a period; a block has whole ones
        facts[name]["counted"] = [sum(one.counted_bytes) for one in made]
        facts[name]["on_link"] = [one.link_bytes for one in made]
    for one in rows:
        facts[one.name]["periods_of_block"] = max(1, one.block_steps // one.period)
    if fleet.is_first_worker():
        print(json.dumps({"samples": samples, "facts": facts}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] == ["compressed"])
