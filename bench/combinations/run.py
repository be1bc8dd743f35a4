"""Every set of up to three strategies: does it work, and if it is refused, why?

    python -m bench.combinations.run                  all sets, on two gloo ranks of this machine: about six minutes
    python -m bench.combinations.run --only amp dgc   sets with these strategies in them; nothing is kept
    python -m bench.combinations.run --table          makes docs/combinations.md of what was published; no run

What a legal set must do is in tests/helpers/combination_checks.py, and CI asks it of all pairs and of the sets that have a name.
An illegal one must be refused with a StrategyConflict that names every slot that two of its strategies claim.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.combinations.page import page
from bench.lib.results import FOLDER, ROOT, publish, published, write_page
from fleetx.errors import ConfigError, FleetError
from tests.helpers.combination_checks import Case, verdict
from tests.helpers.combination_sets import ADAPTIVE_WITH_ADAM, FLEETS_TEN, PARTS, all_sets, is_legal, refusal
from tests.helpers.harness import RankFailure, run_ranks

NAME = "combinations"
PAGE = ROOT / "docs" / "combinations.md"


def wrong_with(case: Case) -> list[str]:
    try:
        return verdict(case, run_ranks)
    except RankFailure as failure:
        return [str(failure).splitlines()[0]]


def run(only: Sequence[str]) -> dict[str, Any]:
    cases = [Case(names) for names in all_sets() if set(only) <= set(names)]
    cases += [Case(*ADAPTIVE_WITH_ADAM)] if set(only) <= set(ADAPTIVE_WITH_ADAM[0]) else []
    rows = []
    for case in cases:
        start = time.perf_counter()
        row: dict[str, Any] = {"names": list(case.names), "shown": str(case)}
        if is_legal(case.names):
            wrong = wrong_with(case)
            row |= {"state": "broken" if wrong else "green", "wrong": wrong}
        else:
            text, wrong = refusal(case.names)
            row |= {"state": "broken" if wrong else "refused", "wrong": wrong, "why": text}
        rows.append(row)
        if row["state"] != "refused":
            print(f"{row['state']:7} {time.perf_counter() - start:5.1f} s  {case}  {'; '.join(row['wrong'])}", flush=True)
    states = [row["state"] for row in rows]
    return {"counts": {state: states.count(state) for state in ("green", "refused", "broken")}, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="strategies that a set must have (default: any)")
    parser.add_argument("--table", action="store_true", help="makes the page of what was published; no run (default: off)")
    flags = parser.parse_args(arguments)
    unknown = [name for name in flags.only if name not in PARTS]
    if unknown:
        raise ConfigError(f"--only {unknown[0]} is no strategy; there are {', '.join(PARTS)}.")
    if flags.table:
        write_page(PAGE, page(published(FOLDER / f"{NAME}.json", NAME), FLEETS_TEN))
        return 0
    figures = run(flags.only)
    print(figures["counts"])
    if not flags.only:
        publish(NAME, figures)
    return 1 if figures["counts"]["broken"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FleetError as error:
        sys.exit(f"{type(error).__name__}: {error}")
