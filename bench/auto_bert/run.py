"""What does `auto` choose for BERT-large on a card of 32 GB, for an update of 1,024 sentences? With fixed settings beside it.

    python -m bench.auto_bert.run               on a GPU: all rows, each in a process of its own, some minutes
    python -m bench.auto_bert.run --rows plan   some of them; they join those in --out
    python -m bench.auto_bert.run --small       a tiny model on the CPU, to see that it runs; nothing is kept

Rows: `plan` is fleet.distribute(..., DistributedStrategy(auto=True)) with the global batch and the card's memory; `ours-...` are
fixed settings a user of this library might write (KIND-ROWS: micro-batches of so many sentences); `hf-...` is transformers' model
in the usual loop with gradient accumulation, "checkpoint everything" or the largest batch that fits. 512 tokens, as in
bench/bert_memory, whose cap it shares. An update is timed by its micro-steps: (k - 1) x the median of those inside, and the
last one with the optimizer's step. The last line is one JSON object, kept in bench/results/auto_bert.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.auto_bert.page import STEP_WITHIN
from bench.bert_memory.card import LIMIT, Card, CountedCard, CudaCard
from bench.bert_memory.contestants import LARGE, SMALL, Recipe, Size, adam, our_model, our_step, strategy_of, their_model
from bench.bert_memory.run import ALLOCATOR, last_error
from bench.lib.results import ROOT, publish, surroundings
from fleetx import fleet
from fleetx.auto.candidate import Candidate
from fleetx.auto.measurements import forecast
from fleetx.errors import FleetError, first_line

NAME = "auto_bert"
GLOBAL_BATCH, SMALL_BATCH = 1024, 8
ROWS = (
    "plan",
    "ours-bf16-64",
    "ours-bf16_recompute-512",
    "ours-bf16_recompute-128",
    "ours-fp32-32",
    "ours-fp32_recompute-256",
    "hf-bf16-32",
    "hf-bf16-36",
    "hf-bf16_recompute-128",
)
SMALL_ROWS = ("plan", "ours-bf16-4", "hf-bf16_recompute-4")
INNER = {"bf16": 6, "fp32": 1}
"""Micro-steps inside a window that are timed, at the most: float32's take ten times as long."""
UPDATES, WARM_S = 2, 3.0
"""Updates that are timed, after so many seconds of others: a micro-step of 8 sentences waits for the host, and in one process
took 76 ms at first, 56 ms some seconds later."""
FEW = 2
"""Rows of the step that loads kernels, before the cap is set."""
WANTED = {"checkpoint everything": 230.0, "largest batch that fits": 269.0}
MARGIN, WITHIN = 1.15, 0.10
LONGEST_MICRO_S = 2.5
"""Plans whose micro-steps take longer are not run to see how well they were predicted."""
PEAK_WITHIN = 0.05

Micro = Callable[[bool], object]
"""One micro-step; whether it is the last of an update."""


def ours(model: Any, optimizer: Any, batch: Any) -> Micro:
    def micro(is_last: bool) -> None:
        report = optimizer.minimize(model.loss(batch))
        assert report.due is is_last

    return micro


def theirs(recipe: Recipe, size: Size, batch: Any, steps: int, device: torch.device) -> Micro:
    model = their_model(recipe, size, device)
    optimizer = adam(model)

    def micro(is_last: bool) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.amp):
            loss = model(**batch).loss / steps
        loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    return micro


def seconds_of(card: Card, micro: Micro, steps: int, inner_steps: int) -> float:
    """Of an update of so many micro-steps, of which some are run; after others, while the host is not up to speed."""
    timed, inner, last = min(steps - 1, inner_steps), [], []

    def update() -> tuple[list[float], float]:
        return [card.seconds(lambda: micro(False), 1)[0] for _ in range(timed)], card.seconds(lambda: micro(True), 1)[0]

    begun = time.perf_counter()
    update()
    while time.perf_counter() - begun < WARM_S:
        update()
    for _ in range(UPDATES):
        found, closing = update()
        inner += found
        last.append(closing)
    return (steps - 1) * (median(inner) if inner else 0.0) + median(last)


def prepare(card: Card, size: Size) -> None:
    """Load the kernels, so that what lies outside of torch's allocator is there when the cap is set."""
    step: Any = our_step(Recipe("ours", amp=True, recompute=True), size, card.device)
    batch = size.batch("ours", FEW, card.device)
    with card.watched():
        card.seconds(lambda: step(batch), 2)
    step = None
    card.clear()
    card.settle()


def planned(size: Size, card: Card, whole: int, *, small: bool) -> dict[str, Any]:
    model, begun = our_model(size, card.device), time.perf_counter()
    memory = {} if small else {"memory": card.capacity}
    strategy = fleet.DistributedStrategy(auto=True, auto_configs={"global_batch": whole, **memory})
    printed = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("ignore")
        model, optimizer = fleet.distribute(
            model, adam(model), strategy, sample=lambda rows: size.batch("ours", rows, card.device)
        )
    plan, planning_s = optimizer.plan, time.perf_counter() - begun
    row = plan.row(plan.chosen)
    inner = INNER["fp32" if plan.chosen.startswith("fp32") else "bf16"]
    shorten(optimizer, min(plan.merge_steps, 1 + inner))
    micro = ours(model, optimizer, size.batch("ours", plan.micro_batch, card.device))
    with card.watched():
        seconds = seconds_of(card, micro, plan.merge_steps, inner)
    facts = card.facts()
    del model, optimizer, micro
    card.clear()
    return {
        "batch": plan.micro_batch, "steps": plan.merge_steps, "update_s": seconds, "samples_per_s": whole / seconds,
        "chosen": plan.chosen, "predicted_s": row.predicted_s, "off": row.predicted_s / seconds - 1,
        "predicted_bytes": row.predicted_bytes, "planning_s": round(planning_s, 1), "told": str(plan).splitlines(),
        "passes": [[p.precision, p.batch, p.forward_s, p.backward_s, p.is_predicted] for p in plan.measured.passes],
        "unseen": unseen(plan, size, card, whole), **facts,
    }  # fmt: skip


def unseen(plan: Any, size: Size, card: Card, whole: int) -> list[dict[str, Any]]:
    """Run the plans that `auto` has predicted and not run. One that fails is reported, and the others follow."""
    ran, found = {row.name for row in plan.rows}, []
    for one in plan.measured.passes:
        told = forecast(plan.measured, Candidate(one.precision, one.batch, whole // one.batch), memory=plan.memory)
        if isinstance(told, str) or told.candidate.name in ran or told.cost.seconds * one.batch / whole > LONGEST_MICRO_S:
            continue
        try:
            seconds = run_once(told.candidate, plan.memory, size, card)
        except (torch.OutOfMemoryError, FleetError) as error:
            found.append({"name": told.candidate.name, "error": first_line(error)})
        else:
            peak = card.facts()["peak"]
            found.append(
                {
                    "name": told.candidate.name, "is_timed": not one.is_predicted, "predicted_s": told.cost.seconds,
                    "measured_s": seconds, "off": told.cost.seconds / seconds - 1, "predicted_bytes": told.peak_bytes,
                    "peak_bytes": peak, "peak_off": told.peak_bytes / peak - 1,
                }
            )  # fmt: skip
        card.clear()
    return found


def run_once(candidate: Candidate, memory: int | None, size: Size, card: Card) -> float:
    """Seconds of an update."""
    inner = INNER["fp32" if candidate.precision == "float32" else "bf16"]
    short = replace(candidate, merge_steps=min(candidate.merge_steps, 1 + inner))
    batch = size.batch("ours", candidate.batch, card.device)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        model = our_model(size, card.device)
        given = {} if short.recomputed or not short.recomputes else {"sample": batch}
        model, optimizer = fleet.distribute(model, adam(model), short.strategy(memory), **given)
    with card.watched():
        return seconds_of(card, ours(model, optimizer, batch), candidate.merge_steps, inner)


def shorten(optimizer: Any, steps: int) -> None:
    """Windows of as many micro-steps as are timed: the others would be like them."""
    stages = optimizer.pipeline.stages
    optimizer.pipeline.stages = replace(stages, merge=replace(stages.merge, micro_steps=steps))


def fixed(side: str, kind: str, rows: int, size: Size, card: Card, whole: int) -> dict[str, Any]:
    recipe, steps = Recipe.named(side, kind), max(1, round(whole / rows))
    batch, inner = size.batch(side, rows, card.device), INNER[kind.split("_")[0]]
    if side == "hf":
        micro = theirs(recipe, size, batch, steps, card.device)
    else:
        strategy = strategy_of(recipe)
        if steps > 1:
            strategy.gradient_merge = True
            strategy.gradient_merge_configs = {"k_steps": min(steps, 1 + inner)}
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            model = our_model(size, card.device)
            model, optimizer = fleet.distribute(model, adam(model), strategy)
        micro = ours(model, optimizer, batch)
    with card.watched():
        seconds = seconds_of(card, micro, steps, inner)
    return {"batch": rows, "steps": steps, "update_s": seconds, "samples_per_s": rows * steps / seconds, **card.facts()}


def one_row(name: str, *, small: bool) -> dict[str, Any]:
    size, whole = (SMALL, SMALL_BATCH) if small else (LARGE, GLOBAL_BATCH)
    card: Card = CountedCard(2**62) if small else CudaCard(LIMIT)
    torch.manual_seed(0)
    prepare(card, size)
    if name == "plan":
        return planned(size, card, whole, small=small)
    side, kind, rows = name.split("-")
    return fixed(side, kind, int(rows), size, card, whole)


def run_row(name: str, *, small: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.auto_bert.run", "--one", name, *(["--small"] if small else [])]
    environment = os.environ | {"PYTORCH_ALLOC_CONF": ALLOCATOR}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=ROOT)
    if done.returncode:
        return {"error": last_error(done.stderr)}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def verdicts(rows: dict[str, Any]) -> dict[str, Any]:
    plan = rows.get("plan", {})
    if "samples_per_s" not in plan:
        return {}
    speed = plan["samples_per_s"]
    others = {name: row["samples_per_s"] for name, row in rows.items() if name != "plan" and "samples_per_s" in row}
    their = {name: found for name, found in others.items() if name.startswith("hf")}
    own = max((found for name, found in others.items() if name.startswith("ours")), default=0.0)
    found = {
        f"at least {MARGIN} x {what}'s published {least:g}": {"measured": speed / least, "holds": speed >= MARGIN * least}
        for what, least in WANTED.items()
    }
    if their:
        best = max(their.values())
        found[f"at least {MARGIN} x transformers in this run"] = {"measured": speed / best, "holds": speed >= MARGIN * best}
    if own:
        found["not slower than any fixed setting of ours, to 1 %"] = {"measured": speed / own, "holds": speed >= 0.99 * own}
    failed = [one["name"] for one in plan.get("unseen", []) if "error" in one]
    if "unseen" in plan:
        found["plans foretold to fit that did not run"] = {"measured": len(failed), "holds": not failed}
    for what, key, limit in (("step time", "off", STEP_WITHIN), ("peak memory", "peak_off", PEAK_WITHIN)):
        errors = [abs(one[key]) for one in plan.get("unseen", []) if key in one]
        if errors:
            wanted = f"{what} of {len(errors)} plans not run, foretold within {100 * limit:g} %: the worst"
            found[wanted] = {"measured": max(errors), "holds": max(errors) <= limit}
    found[f"foretold within {100 * WITHIN:g} %"] = {"measured": plan["off"], "holds": abs(plan["off"]) <= WITHIN}
    return found


def rows_kept(file: Path) -> dict[str, Any]:
    """Of earlier runs, each with the commit that it is of."""
    record = json.loads(file.read_text())
    return {name: {"commit": record["commit"], **row} for name, row in record["rows"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=None, metavar="ROW", help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--one", default=None, metavar="ROW", help="one row in this process (default: none)")
    parser.add_argument("--out", type=Path, default=None, metavar="FOLDER", help="figures after each row (default: none)")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU; nothing is kept (default: off)")
    flags = parser.parse_args()
    if not flags.small and not torch.cuda.is_available():
        parser.error("there is no GPU here; --small runs a tiny model on the CPU.")
    if flags.one:
        print(json.dumps(one_row(flags.one, small=flags.small)))
        return
    kept = flags.out / f"{NAME}.json" if flags.out else None
    rows = rows_kept(kept) if kept and kept.exists() else {}
    for name in flags.rows or (SMALL_ROWS if flags.small else ROWS):
        rows[name] = {**run_row(name, small=flags.small), "commit": surroundings()["commit"]}  # others may be older
        print(f"{name:26} {rows[name].get('samples_per_s', rows[name].get('error'))}", flush=True)
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            record = {"bench": NAME, **surroundings(), "rows": rows, "verdicts": verdicts(rows)}
            kept.write_text(json.dumps(record, indent=2) + "\n")
    figures = {"global_batch": SMALL_BATCH if flags.small else GLOBAL_BATCH, "limit_bytes": LIMIT, "rows": rows}
    figures["verdicts"] = verdicts(rows)
    for wanted, found in figures["verdicts"].items():
        print(f"{'yes' if found['holds'] else 'NO'}: {wanted}: {found['measured']:.3f}")
    if flags.small:
        print(json.dumps(figures))
    else:
        publish(NAME, figures)


if __name__ == "__main__":
    main()
