"""One cell of bench/bert_memory in a process of its own: its last line is a JSON object.

python -m bench.bert_memory.cell ours-bf16_recompute                 the largest batch, and the speed at it
python -m bench.bert_memory.cell equal-bf16 --batch 60               recompute against storing, at one batch
python -m bench.bert_memory.cell partial --batch 64                  a plan within a budget against storing on the whole card
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch

from bench.bert_memory.card import LIMIT, Card, CountedCard, CudaCard, largest_that_fits, line_through, predicted
from bench.bert_memory.contestants import LARGE, SMALL, Batch, Recipe, Size, Step, our_step, their_step
from fleetx.engine.dry_run import is_out_of_memory

BUDGET = 31 * 2**30
"""Of the partial plan, which bounds what the allocator reserves; the context has the rest."""
SMALL_LIMIT, SMALL_ROWS = 2**21, 10
PROBES = {"fp32": (6, 12), "fp32_recompute": (24, 48), "bf16": (12, 24), "bf16_recompute": (32, 64)}
"""The first two batches whose peaks predict the largest."""
SLACK = 0.985
"""Of the allocator's memory, how much is expected to be usable."""
TIMED_SECONDS, LEAST_TIMED, MOST_TIMED = 12.0, 3, 7
NEAR = (31 / 32, 15 / 16)
"""Of the largest batch, others that are timed: products of some sizes leave a part of the card idle, which the largest may do."""


class Runner:
    """A contestant on a card, made again after each batch that did not fit."""

    def __init__(self, recipe: Recipe, size: Size, card: Card) -> None:
        self.recipe, self.size, self.card = recipe, size, card
        self._step: Step | None = None
        self.make()

    def make(self) -> None:
        maker = their_step if self.recipe.side == "hf" else our_step
        self._step = maker(self.recipe, self.size, self.card.device)

    def steps(self, rows: int, count: int) -> None:
        batch = self.size.batch(self.recipe.side, rows, self.card.device)
        with self.card.watched():
            self.card.seconds(lambda: self._made()(batch), count)

    def _made(self) -> Step:
        assert self._step is not None
        return self._step

    def drop(self) -> None:
        self._step = None
        self.card.clear()

    def fits(self, rows: int) -> bool:
        try:
            self.steps(rows, 2)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not is_out_of_memory(error):
                raise
        else:
            return self.card.is_within()
        # Only here: until the handler has ended, the error holds what was on its way.
        self.drop()
        self.make()
        return False

    def peak(self, rows: int) -> int | None:
        return int(self.card.facts()["peak"]) if self.fits(rows) else None

    def speed(self, rows: int, *, in_steps: int | None = None) -> dict[str, Any]:
        """One step for the clock to warm up and to see how many can be afforded; then sentences a second, by the median."""
        batch = self.size.batch(self.recipe.side, rows, self.card.device)
        return speed_of(self._made(), batch, rows, self.card, in_steps=in_steps)


def speed_of(step: Step, batch: Batch, rows: int, card: Card, *, in_steps: int | None = None) -> dict[str, Any]:
    with card.watched():
        first = card.seconds(lambda: step(batch), 1)[0]
        steps = in_steps or max(LEAST_TIMED, min(MOST_TIMED, int(TIMED_SECONDS / max(first, 1e-9))))
        taken = card.seconds(lambda: step(batch), steps)
    median = statistics.median(taken)
    found = {"sentences_per_s": round(rows / median, 3), "step_s": round(median, 5), "steps_timed": steps}
    return found | {"fastest_s": round(min(taken), 5), "slowest_s": round(max(taken), 5), "within": card.is_within()}


def largest_and_speed(recipe: Recipe, kind: str, size: Size, card: Card, *, small: bool) -> dict[str, Any]:
    """The search uses TF32 products, which need the same memory in a fraction of the time; speeds are of full float32."""
    torch.set_float32_matmul_precision("high")
    runner = Runner(recipe, size, card)
    probes = (2, 4) if small else PROBES[kind]
    runner.steps(probes[0], 2)
    card.settle()
    guess, points = predicted(runner.peak, probes, SLACK * card.capacity)
    intercept, slope = line_through(*points[-2:])
    step = max(1, guess // 100)
    found = largest_that_fits(runner.fits, guess, step=step, most=4 * guess)
    say(f"largest {found.largest}, tried {found.trials}")
    torch.set_float32_matmul_precision("highest")
    rows, speed = found.largest, None
    while rows > 0 and speed is None:
        try:
            speed = runner.speed(rows, in_steps=2 if small else None)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if speed is None or not speed["within"]:  # only the timed steps, in full float32, prove that it fits
            speed = None
            runner.drop()
            runner.make()
            rows -= step
    near = [] if speed is None else speeds_near(runner, rows, speed, small=small)
    return {
        "max_batch": rows, "near": near, "too_large": found.too_large, "resolution": step, "guess": guess, **(speed or {}),
        "bytes_per_sentence": round(slope), "bytes_of_no_sentence": round(intercept), **card.facts(),
        "peaks": points, "trials": found.trials,
    }  # fmt: skip


def speeds_near(runner: Runner, largest: int, speed: dict[str, Any], *, small: bool) -> list[dict[str, Any]]:
    """Of somewhat smaller batches, where their steps are short enough to be tried."""
    if LEAST_TIMED * speed["step_s"] > TIMED_SECONDS / 2:
        return []
    batches = sorted({max(1, int(share * largest)) for share in NEAR} - {largest}, reverse=True)
    steps = 1 if small else LEAST_TIMED
    return [{"batch": rows, "sentences_per_s": runner.speed(rows, in_steps=steps)["sentences_per_s"]} for rows in batches]


def recompute_over_stored(kind: str, rows: int, size: Size, card: Card, *, small: bool) -> dict[str, Any]:
    """Storing, recomputing, storing again, so that a clock that sinks with heat falls on both."""
    card.lift()
    speeds = []
    for recompute in (False, True, False):
        runner = Runner(Recipe("ours", amp=kind == "bf16", recompute=recompute), size, card)
        speeds.append(runner.speed(rows, in_steps=2 if small else 5)["sentences_per_s"])
        runner.drop()
    ratio = 2 * speeds[1] / (speeds[0] + speeds[2])
    return {"batch": rows, "stored": [speeds[0], speeds[2]], "recomputed": speeds[1], "ratio": round(ratio, 4)}


def partial_plan(rows: int, size: Size, card: Card, *, small: bool) -> dict[str, Any]:
    rows = min(rows, SMALL_ROWS) if small else rows
    stored = Recipe("ours", amp=True)
    runner = Runner(stored, size, card)
    runner.steps(2 if small else 8, 2)
    card.settle()
    runner.drop()
    recipe = Recipe("ours", amp=True, budget=card.capacity if small else min(BUDGET, card.capacity))
    batch, printed = size.batch("ours", rows, card.device), []
    step: Step | None = our_step(recipe, size, card.device, sample=batch, told=printed.append)
    assert step is not None
    planned = speed_of(step, batch, rows, card, in_steps=2 if small else 5) | card.facts()
    step = None
    card.clear()
    card.lift()
    whole = Runner(stored, size, card).speed(rows, in_steps=2 if small else 5)
    ratio = planned["sentences_per_s"] / whole["sentences_per_s"]
    told = "".join(printed).strip().splitlines()[-40:]
    return {
        "batch": rows, "budget": recipe.budget, "planned": planned, "stored_on_whole_card": whole, "ratio": round(ratio, 4),
        "told": told,
    }  # fmt: skip


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cell", help="SIDE-KIND with ours or hf, and fp32, fp32_recompute, bf16 or bf16_recompute; equal-KIND; partial"
    )
    parser.add_argument("--batch", type=int, default=None, help="of equal-KIND and partial (default: none)")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU (default: off)")
    args = parser.parse_args()
    if not args.small and not torch.cuda.is_available():
        parser.error("there is no GPU here; --small runs a tiny model on the CPU")
    if args.small:
        torch.set_num_threads(1)
    size = SMALL if args.small else LARGE
    card: Card = CountedCard(SMALL_LIMIT) if args.small else CudaCard(LIMIT)
    start = time.perf_counter()
    side, _, kind = args.cell.partition("-")
    torch.manual_seed(0)
    if side == "equal":
        figures = recompute_over_stored(kind, args.batch, size, card, small=args.small)
    elif side == "partial":
        figures = partial_plan(args.batch, size, card, small=args.small)
    else:
        figures = largest_and_speed(Recipe.named(side, kind), kind, size, card, small=args.small)
    if side == "hf":
        import transformers

        figures["transformers"] = transformers.__version__
    print(json.dumps(figures | {"seconds": round(time.perf_counter() - start, 1)}))


if __name__ == "__main__":
    main()
