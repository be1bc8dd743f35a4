"""What was promised of bench/bert_memory, whether it holds, and the page with the table beside Fleet's documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.lib.bar_chart import Bar, bar_chart, folded

KINDS = ("fp32", "fp32_recompute", "bf16", "bf16_recompute")
TITLES = {"fp32": "fp32", "fp32_recompute": "fp32, recompute", "bf16": "bf16", "bf16_recompute": "bf16, recompute"}
WANTED_BATCH = {"fp32": 33, "fp32_recompute": 280, "bf16": 50, "bf16_recompute": 400}
WANTED_SPEED = {"fp32": 44.0, "fp32_recompute": 34.0, "bf16": 315.0, "bf16_recompute": 262.0}
WANTED_RATIO = {"equal-fp32": 0.76, "equal-bf16": 0.76, "partial-64": 0.90}
FLEET = {"fp32": (14, 18.2), "fp32_recompute": (53, 12.88), "bf16_recompute": (87, 19.14)}
"""Of Fleet's documentation, on another card and with another kind of 16 bits: its ratios are comparable, its speeds are not."""

Cells = Mapping[str, Mapping[str, Any] | None]


def verdict(value: float | None, wanted: float) -> dict[str, Any]:
    return {"found": value, "wanted": wanted, "holds": None if value is None else value >= wanted}


def of(cells: Cells, cell: str, name: str) -> Any:
    return (cells.get(cell) or {}).get(name)


def verdicts(cells: Cells) -> dict[str, dict[str, Any]]:
    """One for each promise; a cell that was not measured, or failed, has None."""
    found = {}
    for kind in KINDS:
        found[f"{kind} batch"] = verdict(of(cells, f"ours-{kind}", "max_batch"), WANTED_BATCH[kind])
        found[f"{kind} sentences/s"] = verdict(of(cells, f"ours-{kind}", "sentences_per_s"), WANTED_SPEED[kind])
        found[f"{kind} sentences/s near it"] = verdict(fastest(cells.get(f"ours-{kind}"), WANTED_BATCH[kind]), WANTED_SPEED[kind])
    for cell, wanted in WANTED_RATIO.items():
        found[f"{cell} ratio"] = verdict(of(cells, cell, "ratio"), wanted)
    return found


def fastest(cell: Mapping[str, Any] | None, at_least: int) -> float | None:
    """The highest speed of the largest batch and those timed near it, if they are as large as was promised."""
    if cell is None:
        return None
    tried = [{"batch": cell["max_batch"], "sentences_per_s": cell["sentences_per_s"]}, *cell.get("near", [])]
    return max((one["sentences_per_s"] for one in tried if one["batch"] >= at_least), default=None)


def told(name: str, one: Mapping[str, Any]) -> str:
    word = {True: "yes", False: "NO ", None: "not measured"}[one["holds"]]
    return f"{word}  {name}: {one['found']}, wanted at least {one['wanted']}"


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}"


def row(cells: Cells, kind: str) -> list[str]:
    shown = [TITLES[kind]]
    for name, digits in (("max_batch", 0), ("sentences_per_s", 1)):
        theirs, ours = of(cells, f"hf-{kind}", name), of(cells, f"ours-{kind}", name)
        shown += [number(theirs, digits), number(ours, digits), ratio(ours, theirs)]
    return shown


def over_fp32(cells: Cells, side: str, kind: str) -> list[str]:
    """Batch and speed as multiples of those of plain fp32, which is how one card's table can be compared with another's."""
    if side == "fleet":
        values, base = FLEET.get(kind, (None, None)), FLEET["fp32"]
        return [ratio(one, other) for one, other in zip(values, base, strict=True)]
    names = ("max_batch", "sentences_per_s")
    return [ratio(of(cells, f"{side}-{kind}", name), of(cells, f"{side}-fp32", name)) for name in names]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table(cells: Cells) -> str:
    first = ["", "batch: transformers", "ours", "times", "sentences/s: transformers", "ours", "times"]
    second = ["over fp32 of the same row's side", "batch: Fleet's table", "transformers", "ours"]
    second += ["speed: Fleet's table", "transformers", "ours"]
    rows = []
    for kind in KINDS[1:]:
        pairs = [over_fp32(cells, side, kind) for side in ("fleet", "hf", "ours")]
        rows.append([TITLES[kind], *(batch for batch, _ in pairs), *(speed for _, speed in pairs)])
    fleet = "; ".join(f"{TITLES[kind]} {batch} at {speed:g}" for kind, (batch, speed) in FLEET.items())
    note = f"Fleet's table (its 16 bits are fp16), batch at sentences/s: {fleet}."
    return "\n\n".join([markdown(first, [row(cells, kind) for kind in KINDS]), markdown(second, rows), note, ratios(cells)])


INTRO = """# A bigger batch on the same card

<!-- Made from measured figures by `python -m bench.bert_memory.run --table`; do not edit. -->

How many sentences of 512 tokens a training step of BERT-large takes on a card that is capped to {limit:.0f} GiB, and how many
it trains a second then: fp32 (TF32 off) and bf16 (`amp`), with everything stored and with every layer computed again
(`recompute`). Beside it transformers' model with its own gradient checkpointing, in the same kind of process: Adam (fused),
dropout 0.1, torch's attention, `{allocator}`. One {device}, torch {torch}.
"""
MEANING = """## What makes the difference

- **Head on masked tokens alone.** The logits of all words exist for one token in seven, in chunks, and never whole.
- **A lean layer** (`applications/bert_lean.py`): a 16-bit residual stream under amp, a GELU that is computed twice.
- **Recompute leaves the last product out.** A layer that is computed again hands its norm to the next one; nothing in it then
  needs the second wide product, a third of its work: about 0.81 of the speed of storing, where computing all again has 0.75.
- **A plan between the two.** With `recompute_configs["budget"]` only as many layers are computed again as the budget asks for.
- **The largest batch is not the fastest**: `fleet.find_batch` looks for both.
"""


def page(figures: Mapping[str, Any]) -> str:
    cells = figures["cells"]
    facts = {"limit": figures["limit_bytes"] / 2**30, "allocator": figures["allocator"]}
    intro = INTRO.format(**facts, device=figures["device"], torch=figures["torch"])
    promised = [
        [name, f"{one['wanted']:g}", "-" if one["found"] is None else f"{one['found']:g}", VERDICT[one["holds"]]]
        for name, one in verdicts(cells).items()
    ]
    wanted = markdown(["", "wanted, at least", "measured", "holds"], promised)
    wanted = folded("What was wanted of these figures, and whether it holds", wanted)
    title, rest = intro.split("\n\n", 1)
    top = "\n\n".join(part for part in (title, result(cells), chart(cells), rest) if part)
    return "\n".join([top, table(cells), "", near(cells), "", MEANING, runs(figures.get("made", {})), "", wanted, ""])


def result(cells: Cells) -> str:
    """Say in one sentence how many sentences fit, and how fast they are, beside transformers' model."""
    kind = "bf16_recompute"
    (theirs, ours), (slow, fast) = (
        (of(cells, f"hf-{kind}", name), of(cells, f"ours-{kind}", name)) for name in ("max_batch", "sentences_per_s")
    )
    if not all((theirs, ours, slow, fast)):
        return ""
    return (
        f"**On 32 GiB, BERT-large trains {ours} sentences at once with bf16 and recompute, where transformers' model takes "
        f"{theirs}, and {fast / slow:.2f} times as many a second.**"
    )


def chart(cells: Cells) -> str:
    charts = []
    for name, title in (("max_batch", "Largest batch, sentences"), ("sentences_per_s", "Sentences a second at that batch")):
        pairs = [(kind, side, of(cells, f"{side}-{kind}", name)) for kind in KINDS for side in ("hf", "ours")]
        sides = {"hf": "transformers", "ours": "ours"}
        bars = [
            Bar(f"{TITLES[kind]}: {sides[side]}", value, f"{value:,.0f}", side == "ours") for kind, side, value in pairs if value
        ]
        charts += [bar_chart(title, bars)] if bars else []
    return "\n\n".join(charts)


VERDICT = {True: "yes", False: "**no**", None: "not measured"}


def near(cells: Cells) -> str:
    """Batches somewhat below the largest."""
    lines = []
    for kind in KINDS:
        for side, who in (("ours", "ours"), ("hf", "transformers")):
            tried = of(cells, f"{side}-{kind}", "near") or []
            found = [f"{one['batch']} at {one['sentences_per_s']:.1f} sentences/s" for one in tried]
            lines += [f"- {TITLES[kind]}, {who}: {', '.join(found)}."] if found else []
    return "\n".join(["Batches a little smaller than the largest:", "", *lines]) if lines else ""


def runs(made: Mapping[str, Mapping[str, str]]) -> str:
    """Which cells were measured at which commit."""
    commits: dict[str, list[str]] = {}
    for cell, when in made.items():
        commits.setdefault(f"{when['commit']} ({when['date'][:10]})", []).append(cell)
    return "\n".join(f"Measured at {commit}: {', '.join(cells)}." for commit, cells in commits.items()) + "\n"


def ratios(cells: Cells) -> str:
    lines = []
    for cell, one in cells.items():
        if one is None or "ratio" not in one:
            continue
        side, _, kind = cell.partition("-")
        if side == "equal":
            line = f"{kind}, batch {one['batch']}: recompute runs at {one['ratio']:.2f} of the speed of storing."
        else:
            plan = f"a plan within {one['budget'] / 2**30:.0f} GiB"
            line = f"bf16, batch {one['batch']}, {plan}: {one['ratio']:.2f} of the speed of storing all on the whole card."
        lines.append("- " + line)
    return "\n".join(lines)
