"""docs/large_batch.md, made from what bench/large_batch published: nothing in it is written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.large_batch.recipe import BATCHES, OPTIMIZERS
from bench.large_batch.summary import Record, cell_of, ordered, shown
from bench.lib.bar_chart import Bar, bar_chart, folded

Cells = Mapping[str, Mapping[str, Any]]
NAMES = {"sgd": "SGD (Nesterov)", "lars": "LARS", "lamb": "LAMB"}
NETWORKS = {"resnet9": "ResNet-9, the small residual network of the DAWNBench entries", "resnet20": "ResNet-20"}
ACTIVATIONS = {"relu": "ReLU", "celu": "CELU (alpha 0.075)", "gelu": "GELU"}
SETTINGS = ["lr", "lars_coeff", "momentum (beta1)", "beta2", "weight decay", "warm-up share", "decay"]
COLUMNS = ("lr", "lars_coeff", "momentum", "beta2", "weight_decay", "warmup_share")

PAGE = """\
# Large batches on CIFAR-10: SGD, LARS and LAMB

<!-- Made by `python -m bench.large_batch.run --table bench/results/large_batch.json`; do not edit. -->

{result}

{chart}

A larger batch means fewer updates over the same images, and with too few of them a network ends less accurate. This page shows
how far each optimizer carries. Every run has {epochs} epochs, so that a batch of 8192 makes 16 times fewer updates than one of
512. The spread is the highest accuracy minus the lowest over the seeds.

{accuracies}

## How it was measured

Measured on {day} on {device}, torch {torch}, commit {commit}.

{explanation}

{verdicts}

## The settings chosen

{chosen}

## Every trial of the tuning

Accuracy on the held-out images, of one seed; the choice of each cell in bold.

{tuning}

## Every final run

Accuracy on the test images. A run with other settings than those chosen above is shown, and counts nowhere.

{finals}
"""

EXPLANATION = """\
- **Images**: CIFAR-10 as JPEG files. JPEG is lossy: accuracies are under those published for the original pixels.
- **Network**: {network}, width {width}, in bfloat16 autocast on a GPU.{options}
- **Batch**: gradients of micro-batches of {micro} images are averaged before each update, which is what a job with {micro} images
  per worker computes. BatchNorm sees {micro} images whatever the batch.
- **Updates**: a batch may reach over the border of two epochs; only the rest at the very end of a run is left out.
- **The same care for all optimizers**: warm-up in a straight line, then decay to 0, update by update; label smoothing
  {smoothing:g}; no weight decay of norms and biases{norm_lr}; random crops (4 pixels of reflected padding) and
  {flips}{hole}.
  Evaluated is {weights}, with {norms}. Each image is shown once; the column
  "over two views" adds the answers to its mirror image, and decides nothing.
- **Tuning**: {budget} Settings were chosen by the accuracy on 5,000 of the training images, held out (every tenth), with one
  seed. A run whose loss became NaN, or was still that of guessing after 40 % of its updates, was stopped and counts as 10 %.
- **Final runs**: the chosen settings, trained on all 50,000 images from other seeds, and tested once each on the 10,000 test
  images, which took no part in any choice.
- Runs of one seed see the same images in the same order, whatever the optimizer. They are not reproducible to the bit: the
  fastest convolutions are chosen by timing, and some of them add up in changing order.{note}"""


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *body))


def accuracies(cells: Cells) -> str:
    def entry(cell: str) -> str:
        if cell not in cells or cells[cell]["mean"] is None:
            return "not measured"
        return f"{cells[cell]['mean']:.2f} (spread {cells[cell]['spread']:.2f}, {len(cells[cell]['test'])} seeds)"

    batches = sorted({*BATCHES, *(int(cell.split("@")[1]) for cell in cells)})
    header = ["test accuracy, %", *(f"batch {batch}" for batch in batches)]
    return table(header, ([NAMES[name], *(entry(f"{name}@{batch}") for batch in batches)] for name in OPTIMIZERS))


def verdict_rows(verdicts: Mapping[str, Mapping[str, Any]]) -> str:
    answers = {True: "yes", False: "**no**", None: "not measured"}
    body = ([one["wanted"], shown(one["number"]), answers[one["holds"]]] for one in verdicts.values())
    return table(["wanted", "measured", "holds"], body)


def settings(trial: Mapping[str, Any]) -> list[str]:
    return [*(f"{trial[name]:g}" if name in trial else "" for name in COLUMNS), str(trial["decay"])]


def chosen(cells: Cells) -> str:
    header = ["cell", "trials", "held-out, %", "test, %, seed by seed", *SETTINGS]
    body = []
    for cell, summary in cells.items():
        tests = ", ".join(f"{accuracy:.2f}" for accuracy in summary["test"])
        body.append([cell, str(summary["trials"]), shown(summary["held_out"]), tests, *settings(summary["chosen"])])
    return table(header, body)


def runs(records: Sequence[Record], phase: str, cells: Cells) -> str:
    """Every run of a phase, cell by cell."""
    header = [
        "cell",
        "seed",
        "accuracy, %",
        "of the last weights, %",
        "over two views, %",
        *SETTINGS,
        "updates",
        "train loss",
        "seconds",
        "stopped since",
    ]
    body = []
    for cell in ordered(cells):
        for record in records:
            if record["phase"] != phase or cell_of(record) != cell:
                continue
            accuracy = f"{record['accuracy']:.2f}"
            if phase == "tune" and record["trial"] == cells[cell]["chosen"]:
                accuracy = f"**{accuracy}**"
            others = [f"{record[name]:.2f}" for name in ("accuracy_last", "accuracy_two_views")]
            head = [cell, str(record["seed"]), accuracy, *others]
            loss = "NaN" if record["train_loss"] is None else f"{record['train_loss']:.3f}"
            tail = [str(record["updates"]), loss, f"{record['seconds']:.1f}", record["stopped"] or ""]
            body.append([*head, *settings(record["trial"]), *tail])
    return table(header, body)


def budget(cells: Cells) -> str:
    counts = {cell: summary["trials"] for cell, summary in cells.items()}
    if len(set(counts.values())) == 1:
        return f"every cell had the same budget, {next(iter(counts.values()))} trials."
    return "the cells had **unequal** budgets: " + ", ".join(f"{cell} {count}" for cell, count in counts.items()) + " trials."


def options(recipe: Mapping[str, Any]) -> list[str]:
    """A sentence for each thing in which the network differs from the plain one."""
    patch = recipe["whiten"]
    sentences = {
        f"Activations are {ACTIVATIONS[recipe['activation']]}.": recipe["activation"] != "relu",
        f"Its first layer whitens patches of {patch}x{patch} pixels, computed from the training images and never learnt.": patch,
        "Convolutions begin as the identity in their first outputs, if they have at least as many as inputs.": recipe["dirac"],
        "BatchNorm's scales stay 1.": recipe["frozen_scale"],
        "The last BatchNorm of a residual begins with scales of 0.": recipe["zero_init_last_gamma"],
    }
    return [sentence for sentence, holds in sentences.items() if holds]


def explanation(recipe: Mapping[str, Any], cells: Cells, note: str | None) -> str:
    average = f"a moving average of the weights that forgets over {recipe['ema_images']} images"
    renewed = f"BatchNorm's statistics recomputed from {recipe['bn_images']} training images"
    return EXPLANATION.format(
        network=NETWORKS[recipe["model"]],
        width=recipe["width"],
        micro=recipe["micro_batch"],
        options="".join(f"\n  {sentence}" for sentence in options(recipe)),
        smoothing=recipe["label_smoothing"],
        norm_lr="" if recipe["norm_lr"] == 1 else f", which learn at {recipe['norm_lr']:g} times the learning rate",
        flips="flips in every other epoch of each image" if recipe["alternate_flip"] else "flips",
        hole=f", and a hole of {recipe['hole']} pixels" if recipe["hole"] else "",
        weights=average if recipe["ema_images"] else "the network of the last update",
        norms=renewed if recipe["bn_images"] else "BatchNorm's running statistics",
        budget=budget(cells),
        note=f"\n- {note}" if note else "",
    )


def points_lost(cells: Cells, cell: str) -> float | None:
    """Return how far the accuracy of a cell is behind SGD at the smallest batch; None where one was not measured."""
    base, one = (cells.get(name, {}).get("mean") for name in (f"sgd@{BATCHES[0]}", cell))
    return None if base is None or one is None else base - one


def result(cells: Cells) -> str:
    """Say in one sentence what each optimizer loses at the largest batch."""
    largest, lost = BATCHES[-1], {name: points_lost(cells, f"{name}@{BATCHES[-1]}") for name in OPTIMIZERS}
    if any(points is None for points in lost.values()):
        return f"Not all optimizers were measured at batch {largest}."
    told = ", ".join(f"{NAMES[name]} {points:.2f}" for name, points in lost.items())
    times = largest // BATCHES[0]
    return f"**With a batch {times} times as large, {largest}, accuracy falls by this many points: {told}.**"


def chart(cells: Cells) -> str:
    charts = []
    for batch in BATCHES[1:]:
        found = [(name, points_lost(cells, f"{name}@{batch}")) for name in OPTIMIZERS]
        bars = [Bar(NAMES[name], max(lost, 0.0), f"{lost:.2f}", name != "sgd") for name, lost in found if lost is not None]
        charts += [bar_chart(f"Points of accuracy lost at batch {batch}, against SGD at {BATCHES[0]}", bars)] if bars else []
    return "\n\n".join(charts)


def page(figures: Mapping[str, Any]) -> str:
    cells, recipe, records = figures["cells"], figures["recipe"], figures["runs"]
    return PAGE.format(
        day=figures["date"][:10],
        device=figures["device"],
        torch=figures["torch"],
        commit=figures["commit"],
        epochs=recipe["epochs"],
        accuracies=accuracies(cells),
        result=result(cells),
        chart=chart(cells),
        verdicts=folded("What was wanted of these figures, and whether it holds", verdict_rows(figures["verdicts"])),
        explanation=explanation(recipe, cells, figures.get("note")),
        chosen=chosen(cells),
        tuning=folded("All trials", runs(records, "tune", cells)),
        finals=folded("All final runs", runs(records, "final", cells)),
    )
