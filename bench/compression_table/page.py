"""docs/compression.md, made from what bench/compression_table and compression_speed published; nothing is added by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from bench.compression_speed import traffic
from bench.compression_table.verdicts import behind
from bench.large_batch.page import table
from bench.lib.bar_chart import Bar, bar_chart, folded
from bench.localsgd_table.methods import SYNCHRONOUS
from bench.localsgd_table.page import MISSING, verdict_rows
from bench.localsgd_table.summary import Record

RANKS = (2, 8, 64, 256, 1024)
PAGE = """\
# Gradient compression: how fast, and how accurate

<!-- Made from measured figures by `python -m bench.compression_table.run --table`; do not edit. -->

{result}

{chart}

On a slow link a training waits for its gradients. Compression sends less of them in every update. This page shows how much faster
that is between two hosts, what it costs in accuracy, and when it does not pay.

## The methods, in plain words

- **`bf16_allreduce`** sends each number in 16 bits in place of 32: half the bytes, and nothing is kept for later.
- **`dgc`** (deep gradient compression) sends only the largest entries: at `sparsity` 0.999 one in a thousand, each with its
  place. What is not sent is kept and added to the next gradient, so that every entry arrives in the end, some updates late.
  Momentum is applied before sending, so that a late entry brings the momentum it would have had. It is dense for
  `rampup_begin_step` updates, and then goes through the list of sparsities in `rampup_step` updates. Needs SGD.
- **`powersgd`** sends two thin matrices of `rank` columns whose product is near the gradient. What the product misses is kept and
  added to the next gradient. It is dense for `begin_step` updates. Works with any optimizer.

In all of them every rank applies the same update, small tensors (biases, norms) travel dense, and an update that overflowed
changes nothing that is kept.

## Speed between two hosts

{speed}

## Accuracy

{accuracy}

## When it pays

{rules}

## How it was measured

{explanation}

{verdicts}

## Every training

{runs}
"""

RULES = """\
- **The link must be what you wait for.** Compare bytes/rate with the time of a step without communication. Where gradients travel
  while backward still computes, only what is left over costs time; a compressor works after backward, and hides nothing.
- **DGC's traffic grows with the ranks.** Each rank must hear of the entries of all others: (N-1) x density x 8 bytes for each
  parameter, where a dense all-reduce has 2(N-1)/N x 4. The ratio is 1/(N x density). At 0.999 it is 500 for 2 ranks, 10 for
  100, and **nothing is left at N = 1/density = 1,000 ranks**; beyond, DGC sends more than dense. With `two_level` N is the number
  of nodes.
- **PowerSGD's traffic does not**: its factors are all-reduced. An n x m matrix shrinks by nm / (rank x (n + m)) whatever N is:
  by 128 for 1024 x 1024 at rank 4. Its price is computation, which does not shrink with the link.
- **`bf16_allreduce` gains at most 2**, and costs next to nothing: the first to try.
- On fast links (NVLink, 100 Gbit/s) the compressing itself may take longer than the bytes it saves: measure both.

MB that a rank sends in one update of the MLP above, by number of ranks:

{traffic}"""

EXPLANATION_SPEED = """\
- **Speed** ({device}, torch {torch}, commit {commit}): an MLP of {numel:,} parameters, batch {batch}, SGD with momentum. Each
  host is a network namespace with a link of the given rate to one switch, one rank with one thread on each. All rows of a table
  live in the same processes and go in turns, in blocks that end with nothing under way; medians over {rounds} turns. "No
  communication" is the same training in which the ranks never meet. The limit is that step and the time the bytes need on the
  link, one after the other; a row that sends during backward may be below it. Every update that was timed was compressed."""

EXPLANATION_ACCURACY = """\
- **Accuracy** ({device}, torch {torch}, commit {commit}): ResNet-9 of width {width} on CIFAR-10 as JPEG files (lossy: under the
  accuracies of the original pixels), {ranks} gloo ranks sharing one device, {local_batch} images each in an update, {epochs}
  epochs, {updates} updates. SGD with Nesterov momentum {momentum:g}; weight decay {weight_decay:g} (none of norms and biases);
  label smoothing {label_smoothing:g}; random crops and flips. The learning rate rises in a line to {lr:g} over the first
  {warmup:g} % of the updates and then falls to 0 ({decay}), the same for all methods; compression begins where it is highest.
  Runs of one seed see the same images in the same order on the same ranks. Accuracy is that on the 10,000 test images; the
  spread is the highest minus the lowest over the seeds."""


RESULT = (
    "**Between two hosts at {rate:g} Mbit/s, `dgc` trains {dgc:.1f} times as fast as torch's DDP, `powersgd` {powersgd:.1f} "
    "times, and `bf16_allreduce` {bf16:.1f} times{points}.**"
)
SHOWN = ("torch DDP", "bf16_allreduce", "powersgd, rank 4", "dgc, 99.9 % kept back")


def result(trained: Record | None, speed: Record | None) -> str:
    """Say in one sentence what the slowest link gained, and what the methods cost in accuracy."""
    if speed is None:
        return f"The steps were {MISSING}."
    link = min(speed["links"].values(), key=lambda one: float(one["rate_mbit"]))
    if any(name not in link["rows"] or "raised" in link["rows"][name] for name in SHOWN):
        return f"Not all methods were measured at {link['rate_mbit']:g} Mbit/s."
    _, bf16, powersgd, dgc = (link["rows"][name]["times_ddp"] for name in SHOWN)
    points = ""
    if trained is not None and trained["accuracy"].get(SYNCHRONOUS):
        base = trained["accuracy"][SYNCHRONOUS]
        lost = [found[0] for row in trained["accuracy"].values() if (found := behind(row, base)) is not None]
        points = f"; ResNet-9 on CIFAR-10 loses at most {max(lost):.2f} points of accuracy" if lost else ""
    return RESULT.format(rate=link["rate_mbit"], dgc=dgc, powersgd=powersgd, bf16=bf16, points=points)


def chart(speed: Record | None) -> str:
    charts = []
    for link in () if speed is None else speed["links"].values():
        found = [(name, link["rows"][name]) for name in SHOWN if "times_ddp" in link["rows"].get(name, {})]
        bars = [Bar(name, row["times_ddp"], f"{row['times_ddp']:.2f}", name != SHOWN[0]) for name, row in found]
        charts += [bar_chart(f"Times DDP's throughput at {link['rate_mbit']:g} Mbit/s", bars)] if bars else []
    return "\n\n".join(charts)


def speed_table(link: Record) -> str:
    header = ["training", "ms a step", "times DDP's throughput", "of no communication", "MB a step", "limit, ms a step"]
    body = []
    for name, row in link["rows"].items():
        if "raised" in row:
            body.append([name, f"does not run: {row['raised']}", "", "", "", ""])
            continue
        ratios = [f"{row['times_ddp']:.2f}", f"{row['of_alone']:.2f}"]
        body.append([name, f"{row['step_ms']:,.1f}", *ratios, f"{row['bytes_per_step'] / 1e6:.3f}", f"{row['limit_ms']:,.1f}"])
    title = f"### {link['rate_mbit']:g} Mbit/s (one TCP connection carries {link['goodput_mbit']:g})"
    return f"{title}\n\n{table(header, body)}"


def accuracy_table(rows: Mapping[str, Record]) -> str:
    header = ["method", "test accuracy, %", "spread", "seeds", "against synchronous", "GB sent a rank", "strategy"]
    base = rows.get(SYNCHRONOUS)
    body = []
    for row in rows.values():
        less = f" ({base['bytes_sent'] / row['bytes_sent']:.1f} times less)" if base and row is not base else ""
        sent = f"{row['bytes_sent'] / 1e9:.2f}{less}"
        points = behind(row, base)
        against = MISSING if points is None else f"{0.0 - points[0]:+.2f}"
        head = [row["label"], f"{row['mean']:.2f}", f"{row['spread']:.2f}", str(len(row["test"])), against]
        body.append([*head, sent, f"`{json.dumps(row['strategy'])}`"])
    return table(header, body)


def traffic_table() -> str:
    header = ["ranks", "dense", "`bf16_allreduce`", "`dgc`, 99.9 %", "`powersgd`, rank 4"]
    body = []
    for ranks in RANKS:
        sent = (
            traffic.dense_bytes(ranks),
            traffic.dense_bytes(ranks, 2),
            traffic.dgc_bytes(ranks),
            traffic.powersgd_bytes(ranks),
        )
        body.append([str(ranks), *(f"{one / 1e6:.2f}" for one in sent)])
    return table(header, body)


def run_rows(records: Sequence[Record]) -> str:
    header = ["phase", "method", "seed", "lr", "accuracy, %", "train loss", "GB sent", "seconds", "stopped since"]
    body = []
    for record in records:
        loss = "NaN" if record["train_loss"] is None else f"{record['train_loss']:.3f}"
        head = [record["phase"], record["label"], str(record["seed"]), f"{record['lr']:g}", f"{record['accuracy']:.2f}", loss]
        body.append([*head, f"{record['bytes_sent'] / 1e9:.2f}", f"{record['seconds']:.1f}", record["stopped"] or ""])
    return table(header, body)


def explanation(trained: Record | None, speed: Record | None) -> str:
    parts = []
    if speed is not None:
        parts.append(EXPLANATION_SPEED.format(**speed))
    if trained is not None:
        shared = trained["training"]
        updates = next(iter(trained["accuracy"].values()))["updates"]
        warmup = 100 * shared["warmup_share"]
        parts.append(EXPLANATION_ACCURACY.format(**trained["facts"], **shared, updates=updates, warmup=warmup))
        if trained.get("note"):
            parts.append(f"- {trained['note']}")
    return "\n".join(parts)


def page(trained: Record | None, speed: Record | None) -> str:
    """Either may be missing."""
    found = [one["verdicts"] for one in (speed, trained) if one is not None]
    verdicts = {name: verdict for part in found for name, verdict in part.items()}
    return PAGE.format(
        result=result(trained, speed),
        chart=chart(speed),
        verdicts=folded("What was wanted of these figures, and whether it holds", verdict_rows(verdicts)),
        speed=f"The steps were {MISSING}." if speed is None else "\n\n".join(map(speed_table, speed["links"].values())),
        accuracy=f"The trainings were {MISSING}." if trained is None else accuracy_table(trained["accuracy"]),
        rules=RULES.format(traffic=traffic_table()),
        explanation=explanation(trained, speed),
        runs=f"The trainings were {MISSING}." if trained is None else folded("All runs", run_rows(trained["runs"])),
    )
