"""Write what lies beside this file: checkpoints, strategies as files, texts of --help. Run it by hand, in the repository's root.

    python -m tests.golden.write checkpoints NAME...     these ones; without names: those that are missing
    python -m tests.golden.write values                  a checkpoint of everything that is no model or optimizer
    python -m tests.golden.write strategies              default.json, default.yaml, and of each switch
    python -m tests.golden.write help                    help/*.txt

A checkpoint that is here was written by an earlier version of FleetX, and must go on loading: add new ones (`CASES` of
golden_runs.py), and write one again only where it was decided that old ones are no longer read. `checkpoints` needs nothing but a
CPU; each comes from two gloo ranks, with what it has become after some more updates (expected.json, expected.safetensors).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from tests.helpers.golden_runs import (
    CASES,
    FOLDER,
    SIZE,
    VALUES,
    resumed,
    save_values,
    stopped,
    strategy_for,
    undisturbed,
    write_expected,
)
from tests.helpers.golden_texts import COMMANDS, HELP, STRATEGIES, help_of, strategy_of, switches
from tests.helpers.harness import run_ranks


def write_checkpoint(name: str) -> None:
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    (FOLDER / name).mkdir(parents=True)
    strategy_for(name).save(FOLDER / name / "strategy.yaml")
    whole = run_ranks(undisturbed, SIZE, name)
    run_ranks(stopped, SIZE, name, str(FOLDER / name))
    ranks = run_ranks(resumed, SIZE, name)
    for rank, (theirs, of) in enumerate(zip(whole, ranks, strict=True)):
        wrong = [what for what in theirs if theirs[what] != of["continued"][what]]
        assert not wrong, f"{name}, rank {rank}: a run that was stopped has other {', '.join(wrong)} than one that was not"
    write_expected(name, ranks)


def write_strategies() -> None:
    STRATEGIES.mkdir(exist_ok=True)
    for name in ("default", *switches()):
        for ending in ("json", "yaml"):
            strategy_of(name).save(STRATEGIES / f"{name}.{ending}")


def write_help() -> None:
    HELP.mkdir(exist_ok=True)
    for command in COMMANDS:
        (HELP / f"{command}.txt").write_text(help_of(command), encoding="utf-8")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write what tests compare with, on purpose.")
    parser.add_argument("what", choices=["checkpoints", "values", "strategies", "help"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of checkpoints; those that are missing, if none is given")
    options = parser.parse_args()
    if options.what == "strategies":
        write_strategies()
    elif options.what == "values":
        shutil.rmtree(VALUES, ignore_errors=True)
        run_ranks(save_values, SIZE, str(VALUES))
    elif options.what == "help":
        write_help()
    else:
        for name in options.names or [name for name in CASES if not (FOLDER / name / "expected.json").exists()]:
            write_checkpoint(name)
            print(f"{name}: {size_of(FOLDER / name):,} bytes")
    print(f"in all {size_of(Path(__file__).parent):,} bytes")


if __name__ == "__main__":
    main()
