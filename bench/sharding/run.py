"""What does strategy.sharding cost on two ranks, and what does it save?

    python -m bench.sharding.run             two gloo ranks on the CPU; figures go to bench/results/sharding.json
    python -m bench.sharding.run --rounds 3
    python -m bench.sharding.run --smoke     a small network and one round; nothing is kept
    python -m bench.sharding.run --weights   stage 3 and torch's fully_shard alone; figures go to results/sharding_weights.json

An MLP of 10.5 million parameters with AdamW. All contestants live in the same two processes and go in turns, block by block
(bench/lib/turns.py); torch's row is DDP with ZeroRedundancyOptimizer.
    of_dense          time of a step in that of plain training by ours: the median of the rounds' ratios
    bytes_of_dense    bytes that a rank sends in a step, in those of plain training
    state_bytes       of the optimizer's tensors that each rank keeps
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch.multiprocessing as mp

from bench.lib.mlp import USUAL, Size
from bench.localsgd_table.accuracy import free_port, local_rank
from bench.sharding.worker import work
from fleetx.errors import ConfigError, FleetError

NAME, NAME_OF_WEIGHTS = "sharding", "sharding_weights"
RANKS = 2
SMOKE = Size(width=128, layers=3, batch=8)
ROUNDS = 9


def rank(index: int, port: int, plan: dict[str, Any]) -> None:
    os.environ |= {"FLEETX_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    local_rank(index, RANKS, port)
    work(plan)


def flags_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of every contestant (default: {ROUNDS})")
    parser.add_argument("--smoke", action="store_true", help="a small network and one round; nothing is kept")
    parser.add_argument("--weights", action="store_true", help="stage 3 beside torch's fully_shard, in place of stage 1")
    flags = parser.parse_args(argv)
    if flags.rounds < 1:
        raise ConfigError(f"--rounds is {flags.rounds}; write at least 1.")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    try:
        flags = flags_of(argv)
        rounds, size = (1, SMOKE) if flags.smoke else (flags.rounds, USUAL)
        name = NAME_OF_WEIGHTS if flags.weights else NAME
        plan = {"name": None if flags.smoke else name, "rounds": rounds, "size": asdict(size), "weights": flags.weights}
        mp.spawn(rank, args=(free_port(), plan), nprocs=RANKS)
    except FleetError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
