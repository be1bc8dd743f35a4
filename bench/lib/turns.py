"""Contestants in turns, block by block: a shared machine is not always equally fast, and so all of them see all its moods."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.lib.link_bytes import payload_bytes
from bench.lib.mlp import Contestant
from fleetx import fleet


@dataclass
class Block:
    """Steps of one contestant, made one after the other."""

    seconds: float
    """Of a step, on the slowest rank."""
    counted_bytes: list[int] = field(default_factory=list)
    """Of each step, by the contestant; empty where it does not count."""
    link_bytes: float | None = None
    """Of a step, by the link's own counter, less headers; None where no link is known."""


def warm(rows: Sequence[Contestant]) -> None:
    for one in rows:
        for _ in range(one.warm_steps):
            one.step()


def block(one: Contestant) -> Block:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    for _ in range(one.untimed_steps):
        one.step()
    fleet.barrier_worker()
    before = payload_bytes(interface) if interface else 0
    start = time.perf_counter()
    told = [one.step() for _ in range(one.block_steps)]
    seconds = (time.perf_counter() - start) / one.block_steps
    slowest = float(fleet.util.all_reduce(seconds, "max"))  # who has it has all that the others sent
    link = (payload_bytes(interface) - before) / one.block_steps if interface else None
    return Block(slowest, [sent for sent in told if sent is not None], link)


def in_turns(rows: Sequence[Contestant], rounds: int) -> dict[str, list[Block]]:
    """By name, a block for each round; every round begins with another contestant."""
    blocks: dict[str, list[Block]] = {one.name: [] for one in rows}
    for turn in range(rounds):
        first = turn % len(rows)
        for one in [*rows[first:], *rows[:first]]:
            blocks[one.name].append(block(one))
            if fleet.is_first_worker():
                print(f"{one.name:28} {blocks[one.name][-1].seconds * 1e3:8.1f} ms a step", flush=True)
    return blocks
