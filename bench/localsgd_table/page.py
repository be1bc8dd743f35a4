"""docs/localsgd.md, made from what bench/localsgd_table published: nothing in it is written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bench.large_batch.page import table
from bench.lib.bar_chart import Bar, bar_chart, folded
from bench.localsgd_table.methods import SYNCHRONOUS, Settings, label
from bench.localsgd_table.summary import Record, samples_per_s, training_ms

MISSING = "not measured"
PAGE = """\
# Local SGD: how fast, and how accurate

<!-- Made by `python -m bench.localsgd_table.run --table bench/results/localsgd_table.json`; do not edit. -->

{result}

{chart}

Ranks that average their weights every k updates, instead of their gradients in every one, send k times less. This page shows
what that gains on slow links, what it costs in accuracy, and how a period that follows the training (ADACOMM) does. Paddle
Fleet's own table, of ResNet-50 on ImageNet with 4 x 8 V100, has k = 16 at +14 % images a second and -1.5 points, and ADACOMM at
+8 % and -0.24 points.

## Accuracy, and the throughput of whole trainings

{accuracy}

## Throughput between hosts

{throughput}

## How it was measured

{explanation}

{verdicts}

## Settings

{settings}

## Every training

{runs}
"""

THROUGHPUT = """\
- **Links** ({device}, torch {torch}, commit {commit}): each host is a network namespace with a link of the given rate to one
  switch (`bench/cluster`), one rank with one thread on each. All methods of a table ran in the same processes, in turns:
  in each turn every method made a block of whole periods. Network, batch and SGD with momentum are the same for all.
- **A step** is the share of a whole period, which ends with its exchange: the median over all periods. Of ADACOMM, whose
  periods vary, it is the mean over a training in miniature, with a learning rate that falls in a line; of post-local SGD the
  mean of its two parts, each measured. "Of no communication" compares with the same training without any exchange.
- **Bytes** are those that the link of one rank has sent in a step, less headers."""

ACCURACY = """\
- **Trainings** ({device}, torch {torch}, commit {commit}): ResNet-9 of width {width} on CIFAR-10 as JPEG files (lossy: under the
  accuracies of the original pixels), {ranks} gloo ranks sharing one device, {local_batch} images each in an update, {epochs}
  epochs, {updates} updates. SGD with Nesterov momentum {momentum:g}, kept by each rank for itself; weight decay
  {weight_decay:g} (none of norms and biases); label smoothing {label_smoothing:g}; random crops and flips{hole}.
  The learning rate rises in a line over the first {warmup:g} % of the updates and then falls to 0 ({decay}).
- Runs of one seed see the same images in the same order on the same ranks, whatever the method. Accuracy is that of the average
  of all ranks (`optimizer.averaged()`) on the 10,000 test images, which took no part in any choice. {tuning}
- **Whole trainings**: an update costs t and an averaging r; the two are fitted to the measured k = 1 ... 16 of each link. With
  the synchronous updates, local updates and averagings that a training made, they give its mean step and its samples a second."""


def number(value: float | None, digits: int = 1) -> str:
    return MISSING if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, base: float | None) -> str:
    """How much more than the base."""
    return MISSING if value is None or base is None else f"{(value / base - 1) * 100:+.0f} %"


def verdict_rows(verdicts: Mapping[str, Record]) -> str:
    answers = {True: "yes", False: "**no**", None: MISSING}
    body = []
    for one in verdicts.values():
        numbers = ", ".join(f"{name}: {number(value, 2)}" for name, value in one["numbers"].items())
        body.append([one["wanted"], numbers, answers[one["holds"]]])
    return table(["wanted", "measured", "holds"], body)


def accuracy_rows(rows: Mapping[str, Record], tables: Mapping[str, Record]) -> str:
    if not rows:
        return f"The trainings were {MISSING}."
    base = rows.get(SYNCHRONOUS)
    header = [
        "method",
        "test accuracy, %",
        "spread",
        "seeds",
        "against synchronous",
        "averagings",
        "mean period",
        "GB sent a rank",
    ]
    body = []
    for row in rows.values():
        against = MISSING if base is None else f"{row['mean'] - base['mean']:+.2f}"
        period = "" if row["mean_period"] is None else f"{row['mean_period']:.2f}"
        told = [row["label"], f"{row['mean']:.2f}", f"{row['spread']:.2f}", str(len(row["test"])), against]
        line = [*told, f"{row['rounds']:g}", period, f"{row['bytes_sent'] / 1e9:.2f}"]
        for one in tables.values():
            rate = samples_per_s(training_ms(row, one), one)
            usual = None if base is None else samples_per_s(training_ms(base, one), one)
            line.append(MISSING if rate is None else f"{number(rate)} ({percent(rate, usual)})")
        body.append(line)
    links = [f"samples/s, whole training ({link})" for link in tables]
    return table([*header, *links], body)


def throughput_table(link: str, one: Record) -> str:
    base = one["rows"].get(SYNCHRONOUS, {}).get("step_ms")
    header = ["method", "step, ms", "samples/s", "against synchronous", "of no communication", "MB a step", "periods timed"]
    alone = one["alone_ms"]
    body = [] if alone is None else [["no communication", number(alone), number(samples_per_s(alone, one)), "", "", "", ""]]
    for method, row in one["rows"].items():
        name = label(method, Settings(**row["settings"]))
        if "why_not" in row:
            body.append([name, f"not run: {row['why_not']}", *[""] * 5])
            continue
        sent = row["link_bytes_per_step"]
        rate = row["samples_per_s"]
        share = "" if alone is None else f"{alone / row['step_ms']:.2f}"
        gain = percent(rate, samples_per_s(base, one) if base else None)
        periods = ", ".join(map(str, row["periods"])) if "periods" in row else f"{row['steps']} updates"
        body.append(
            [name, number(row["step_ms"]), number(rate), gain, share, "" if sent is None else f"{sent / 1e6:.2f}", periods]
        )
    return f"### {link}, batch {one['batch']} a rank\n\n{table(header, body)}\n{fit_told(one)}"


def fit_told(one: Record) -> str:
    if one["fit_ms"] is None:
        return ""
    t, r = one["fit_ms"]
    return f"\nFitted: an update {t:.1f} ms, an averaging {r:.1f} ms; at most {one['fit_error'] * 100:.1f} % off a measured k.\n"


def explanation(figures: Record) -> str:
    parts = []
    if figures["throughput"]:
        parts.append(THROUGHPUT.format(**figures["facts"]["throughput"]))
    if figures["accuracy"]:
        training = next(iter(figures["accuracy"].values()))
        shared = figures["training"]
        hole = f", a hole of {shared['hole']} pixels" if shared["hole"] else ""
        tuned = [run for run in figures["runs"] if run["phase"] == "tune"]
        tuning = (
            f"Learning rates were chosen by {len(tuned)} runs of one seed, judged on 5,000 training images that were held out."
            if tuned
            else "Learning rates were given, the same for all but DiLoCo; none was tuned."
        )
        parts.append(
            ACCURACY.format(
                **figures["facts"]["accuracy"],
                **{**shared, "hole": hole},
                updates=training["updates"],
                warmup=100 * shared["warmup_share"],
                tuning=tuning,
            )
        )
    if figures.get("note"):
        parts.append(f"- {figures['note']}")
    return "\n".join(parts)


def settings_rows(rows: Mapping[str, Record]) -> str:
    """ADACOMM's periods are those of the first seed."""
    header = ["method", "highest lr", "strategy", "synchronous updates", "periods x how often, first seed"]
    body = []
    for row in rows.values():
        periods = ", ".join(f"{length} x {count}" for length, count in row["periods"])
        body.append([row["label"], f"{row['lr']:g}", f"`{json.dumps(row['strategy'])}`", str(row["dense_updates"]), periods])
    return table(header, body) if body else f"The trainings were {MISSING}."


def run_rows(records: Sequence[Record]) -> str:
    header = [
        "phase",
        "method",
        "seed",
        "lr",
        "accuracy, %",
        "averagings",
        "mean period",
        "train loss",
        "seconds",
        "stopped since",
    ]
    body = []
    for record in records:
        period = "" if record["mean_period"] is None else f"{record['mean_period']:.2f}"
        loss = "NaN" if record["train_loss"] is None else f"{record['train_loss']:.3f}"
        head = [record["phase"], record["label"], str(record["seed"]), f"{record['lr']:g}", f"{record['accuracy']:.2f}"]
        tail = [str(record["rounds"]), period, loss, f"{record['seconds']:.1f}", record["stopped"] or ""]
        body.append([*head, *tail])
    return table(header, body) if body else f"The trainings were {MISSING}."


SHOWN = ("ddp", "synchronous", "k4", "k16", "adacomm")
RESULT = (
    "**Averaging every 16 updates trains {times:.1f} times as fast as synchronous training ({link}), and ResNet-9 on CIFAR-10 "
    "ends {points:+.2f} points from it.**"
)


def result(figures: Record) -> str:
    """Say in one sentence what k = 16 gains on the link where it gains most, and costs in accuracy."""
    gains = {
        link: one["rows"]["synchronous"]["step_ms"] / one["rows"]["k16"]["step_ms"]
        for link, one in figures["throughput"].items()
        if all("step_ms" in one["rows"].get(name, {}) for name in ("synchronous", "k16"))
    }
    trained = figures["accuracy"]
    if not gains or not {SYNCHRONOUS, "k16"} <= set(trained):
        return f"The gain of k = 16 was {MISSING}."
    link = max(gains, key=lambda name: gains[name])
    return RESULT.format(times=gains[link], link=link, points=trained["k16"]["mean"] - trained[SYNCHRONOUS]["mean"])


def chart(tables: Mapping[str, Record]) -> str:
    charts = []
    for link, one in tables.items():
        found = [(name, one["rows"][name]) for name in SHOWN if "samples_per_s" in one["rows"].get(name, {})]
        bars = [
            Bar(
                label(name, Settings(**row["settings"])).replace("`", ""),
                row["samples_per_s"],
                number(row["samples_per_s"], 0),
                i > 0,
            )
            for i, (name, row) in enumerate(found)
        ]
        charts += [bar_chart(f"Samples a second: {link}", bars)] if bars else []
    return "\n\n".join(charts)


def page(figures: Mapping[str, Any]) -> str:
    tables = figures["throughput"]
    shown = "\n\n".join(throughput_table(link, one).rstrip() for link, one in tables.items())
    return PAGE.format(
        result=result(figures),
        chart=chart(tables),
        verdicts=folded("What was wanted of these figures, and whether it holds", verdict_rows(figures["verdicts"])),
        accuracy=accuracy_rows(figures["accuracy"], tables),
        throughput=shown or f"The steps were {MISSING}.",
        explanation=explanation(figures),
        settings=settings_rows(figures["accuracy"]),
        runs=folded("All runs", run_rows(figures["runs"])),
    )
