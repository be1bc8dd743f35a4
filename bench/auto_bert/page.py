"""The part of docs/auto_regret.md that bench/auto_bert has measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.large_batch.page import table

SECTION = """\
## BERT-large on a card of 32 GB, for an update of {global_batch:,} sentences

`python -m bench.auto_bert.run` ({device}, torch {torch}, commit {commit}): 512 tokens, one GPU capped to 32 GiB, Adam. `plan` is
what `auto` chose and how fast it is afterwards; `ours` are fixed settings of this library; `hf` is transformers' model in the
usual loop with gradient accumulation.

{rows}

{verdicts}
{unseen}
What it printed:

```text
{told}
```
"""
OF_MISSES = """
Micro-steps of few sentences in bf16 take about as long as each other, however few: the card waits for its host there, which was
slower when these plans were run than when their parts were timed. They are the slowest plans in bf16, and are not chosen.
"""
STEP_WITHIN = 0.15
"""Largest error of a prediction that needs no explanation, as a share of the time of a plan that was not run."""


def in_words_of_the_page(text: str) -> str:
    """Return the text of a result as the page says it: published results keep the words they were written with."""
    for unit in ("ms", "MB"):
        text = text.replace(f"{unit}, foretold", f"predicted {unit}")
    return text.replace("foretold", "predicted")


def row_table(rows: Mapping[str, Any], commit: str) -> str:
    body = []
    for name, row in sorted(rows.items(), key=lambda item: -item[1].get("samples_per_s", 0.0)):
        shape = f"{row['steps']} x {row['batch']}" if "batch" in row else ""
        speed = f"{row['samples_per_s']:.1f}" if "samples_per_s" in row else row["error"].splitlines()[0][:80]
        peak = f"{row['peak'] / 1e9:.2f}" if "peak" in row else ""
        other = row.get("commit", commit)
        body.append([name, row.get("chosen", ""), shape, speed, peak, "" if other == commit else other])
    return table(["row", "chosen", "micro-steps x sentences", "sentences/s", "peak, GB", "commit, if another"], body)


def unseen_table(found: list[Mapping[str, Any]]) -> str:
    if not found:
        return ""
    body = [_unseen_row(one) for one in found]
    header = [
        "not run by `auto`",
        "its batch was timed",
        "predicted ms an update",
        "measured",
        "off",
        "predicted GB",
        "measured",
        "off",
    ]
    misses = any(abs(one.get("off", 0.0)) > STEP_WITHIN and one["name"].startswith("bf16") for one in found)
    return f"\n{table(header, body)}\n{OF_MISSES if misses else ''}"


def _unseen_row(one: Mapping[str, Any]) -> list[str]:
    if "error" in one:
        return [one["name"], one["error"], *[""] * 6]
    seconds = [f"{1e3 * one['predicted_s']:,.0f}", f"{1e3 * one['measured_s']:,.0f}", f"{100 * one['off']:+.1f} %"]
    peak = [f"{one['predicted_bytes'] / 1e9:.2f}", f"{one['peak_bytes'] / 1e9:.2f}", f"{100 * one['peak_off']:+.1f} %"]
    return [one["name"], "yes" if one["is_timed"] else "no", *seconds, *peak]


def section(figures: Mapping[str, Any]) -> str:
    checks = [
        [in_words_of_the_page(wanted), f"{one['measured']:.3f}", "yes" if one["holds"] else "**no**"]
        for wanted, one in figures["verdicts"].items()
    ]
    return SECTION.format(
        **{name: figures[name] for name in ("global_batch", "device", "torch", "commit")},
        rows=row_table(figures["rows"], figures["commit"]),
        verdicts=table(["wanted", "measured", "holds"], checks),
        unseen=unseen_table(figures["rows"]["plan"].get("unseen", [])),
        told=in_words_of_the_page("\n".join(figures["rows"]["plan"].get("told", []))),
    )
