"""Which faults in the core do the tests find? Mutants: copies of the checkout with one small fault each, on which the tests run.

    python -m bench.mutants.run --list                                        the mutants, without running them
    python -m bench.mutants.run --log mutants.jsonl                           all of them; hours
    python -m bench.mutants.run --resume mutants.jsonl                        go on after an interruption
    python -m bench.mutants.run --only engine-03 --stages 1                   one, with the first stage alone

A mutant is killed when a test fails, or does not end. Stage 1 runs the files that most likely find it, small ones first; stage 2
the rest of the suite. Both pass without a mutant before they count. A survivor is a gap in the tests, or a change without effect.
"""

from __future__ import annotations

import argparse
import json
import queue
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.lib.results import publish
from bench.mutants.edits import Edit, apply, draw, shown
from bench.mutants.runner import ROOT, Checkout, Ended, limit_seconds
from fleetx.errors import ConfigError, FleetError, LaunchError

SOURCE = "src/fleetx"


@dataclass(frozen=True)
class Area:
    """A part of the core."""

    sources: tuple[str, ...]
    """Below src/fleetx; a folder stands for all Python files in it."""
    tests: tuple[str, ...]
    """The files of stage 1, in the order in which they run."""


AREAS = {
    "engine": Area(
        (
            *(
                f"engine/{name}.py"
                for name in ("step", "window", "bucket", "buckets", "sidecar", "dense_reduce", "user_loop/user_grad_scaler")
            ),
            *(
                f"engine/{name}.py"
                for name in (
                    "checks/nonfinite",
                    "checks/desync",
                    "checks/checks",
                    "user_loop/bare_backward",
                    "user_loop/model_pairs",
                )
            ),
        ),
        (
            *(
                "tests/unit/test_buckets.py",
                "tests/unit/test_norms.py",
                "tests/unit/test_tail.py",
                "tests/unit/test_amp_scale.py",
            ),
            *("tests/conformance/test_gradient_merge.py", "tests/conformance/test_amp.py", "tests/conformance/test_ddp.py"),
            "tests/ranks/test_guards.py",
            *("tests/ranks/test_loop_spellings.py", "tests/ranks/test_learning_rates.py", "tests/ranks/test_model_copies.py"),
            *("tests/ranks/test_between_calls.py", "tests/ranks/test_gradients_by_hand.py", "tests/ranks/test_gan_loops.py"),
            *("tests/ranks/test_model_kinds.py", "tests/ranks/test_reports_and_state.py"),
        ),
    ),
    "reduce": Area(
        ("reduce",),
        (
            *("tests/unit/test_select.py", "tests/conformance/test_powersgd.py", "tests/conformance/test_dgc.py"),
            *("tests/ranks/test_compression_worlds.py", "tests/ranks/test_compression_resume.py"),
        ),
    ),
    "local_sgd": Area(
        ("local_sgd",),
        (
            *("tests/unit/test_averaging.py", "tests/conformance/test_localsgd.py", "tests/conformance/test_localsgd_state.py"),
            *("tests/conformance/test_localsgd_averaged.py", "tests/conformance/test_adaptive_localsgd.py"),
            "tests/ranks/test_localsgd_resume.py",
        ),
    ),
    "optim": Area(
        ("optim",),
        (
            *("tests/unit/test_layerwise.py", "tests/unit/test_param_groups.py", "tests/unit/test_schedules.py"),
            *("tests/unit/test_optim_cpu.py", "tests/conformance/test_lars_lamb.py"),
        ),
    ),
    "checkpoint": Area(
        ("checkpoint", "engine/state.py", "engine/setup/optimizer_state.py"),
        (
            *("tests/unit/test_encode.py", "tests/unit/test_random_states.py", "tests/unit/test_checkpoint_objects.py"),
            *("tests/unit/test_checkpoint_damage.py", "tests/ranks/test_checkpoint_ranks.py"),
        ),
    ),
}
LEFT_OUT = ("optim/kernels", "reduce/dgc_triton.py")
"""Triton kernels, which run on GPUs only."""


@dataclass(frozen=True)
class Mutant:
    """One fault: which, where, and what it makes of the line."""

    id: str
    area: str
    file: str
    """From the root of the repository."""
    function: str
    line: int
    operator: str
    before: str
    after: str
    edit: Edit = field(repr=False)

    def told(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "edit"}


# --- which mutants ------------------------------------------------------------------------------------------------------


def files_of(area: Area, left_out: Iterable[str] = LEFT_OUT, root: Path = ROOT) -> list[str]:
    """List the files of an area, from the root of the repository; refuse a path that is not there."""
    found: list[Path] = []
    base = root / SOURCE
    for name in (*area.sources, *left_out):
        if not (base / name).exists():
            raise ConfigError(f"bench/mutants names {SOURCE}/{name}, which is not there. Correct its tables AREAS and LEFT_OUT.")
    for name in area.sources:
        path = base / name
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    kept = (path for path in found if not any(path.is_relative_to(base / one) for one in left_out))
    return [str(path.relative_to(root)) for path in kept]


def shares(count: int, names: Sequence[str]) -> dict[str, int]:
    """Divide a count as evenly as may be; the first areas get what is left over."""
    return {name: count // len(names) + (place < count % len(names)) for place, name in enumerate(names)}


def draw_mutants(count: int, seed: int) -> list[Mutant]:
    """Draw the same for the same sources, count and seed; those of a smaller count are among those of a larger one."""
    drawn = []
    for area, share in shares(count, list(AREAS)).items():
        contents = [(name, (ROOT / name).read_bytes()) for name in files_of(AREAS[area])]
        for number, (name, function, edit) in enumerate(draw(contents, share, f"{seed} {area}"), 1):
            content = dict(contents)[name]
            line, (before, after) = content.count(b"\n", 0, edit.begin) + 1, shown(content, edit)
            drawn.append(Mutant(f"{area}-{number:02}", area, name, function.name, line, edit.operator, before, after, edit))
    return drawn


# --- running them -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What runs on each mutant."""

    stages: int
    suite: tuple[str, ...]
    """Words for pytest in stage 2."""
    targets: tuple[str, ...] = ()
    """Words for pytest instead of both stages."""

    def words(self, area: str) -> list[tuple[str, ...]]:
        """List the words for pytest of each stage. What has passed in the first is left out of the second."""
        if self.targets:
            return [self.targets]
        first = AREAS[area].tests
        return [first, (*self.suite, *(f"--ignore={name}" for name in first))][: self.stages]


class Journal:
    """What is known so far, kept in a file as it comes: rows of mutants, and stages that pass without a mutant."""

    def __init__(self, log: Path | None, resume: Path | None) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.clean_seconds: dict[str, float] = {}
        """Of a stage's words, how long it takes without a mutant."""
        self._log = log or resume
        self._lock = threading.Lock()
        if resume is not None:
            self._read(resume)

    def _read(self, path: Path) -> None:
        try:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--resume {path} cannot be read as lines of JSON: {error}. Give it what --log has written."
            ) from error
        for line in lines:
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        if "clean" in line:
            self.clean_seconds[line["clean"]] = line["seconds"]
        else:
            self.rows[line["id"]] = line

    def add(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._take(line)
            if self._log is not None:
                with self._log.open("a") as file:
                    file.write(json.dumps(line) + "\n")

    def require_same(self, mutants: Iterable[Mutant], plan: Plan) -> None:
        """Refuse rows of other sources, of another seed, or after other tests: they would be counted as of these."""
        for mutant in mutants:
            row = self.rows.get(mutant.id)
            if row is None:
                continue
            if {name: row.get(name) for name in mutant.told()} != mutant.told():
                raise ConfigError(
                    f"--resume has another {mutant.id}: the sources, --count or --seed have changed. Begin a new log."
                )
            if row["killed_by"] is None and row["passed"] != [shlex.join(words) for words in plan.words(mutant.area)]:
                raise ConfigError(f"--resume has {mutant.id} as a survivor of other tests. Begin a new log.")


class Campaign:
    """Runs mutants on checkouts, several at a time."""

    def __init__(self, plan: Plan, journal: Journal) -> None:
        self._plan, self._journal = plan, journal
        self._clean_lock = threading.Lock()

    def run(self, mutants: Sequence[Mutant], jobs: int) -> None:
        with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
            checkouts = [Checkout(Path(folder) / str(number)) for number in range(jobs)]
            free: queue.SimpleQueue[Checkout] = queue.SimpleQueue()
            for checkout in checkouts:
                free.put(checkout)
            with ThreadPoolExecutor(jobs) as pool:
                futures = [pool.submit(self._one, mutant, free) for mutant in mutants]
                try:
                    for future in as_completed(futures):
                        future.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    for checkout in checkouts:  # else the threads would wait for their tests
                        checkout.close()
                    raise

    def _one(self, mutant: Mutant, free: queue.SimpleQueue[Checkout]) -> None:
        checkout = free.get()
        try:
            row = self._judge(mutant, checkout)
        finally:
            free.put(checkout)
        self._journal.add(row)
        told = (
            f"survived {shown_place(row)}: {row['before']}  ->  {row['after']}" if row["killed_by"] is None else _told_kill(row)
        )
        print(f"{mutant.id:14} {told}", flush=True)

    def _judge(self, mutant: Mutant, checkout: Checkout) -> dict[str, Any]:
        """Make the mutant's row: the stages that it has passed, and the test that has killed it."""
        content = apply((checkout.tree / mutant.file).read_bytes(), mutant.edit)
        row: dict[str, Any] = {**mutant.told(), "passed": [], "seconds": []}
        for number, words in enumerate(self._plan.words(mutant.area), 1):
            limit = limit_seconds(self._clean_seconds(words, checkout))
            with checkout.changed(mutant.file, content):
                ended = checkout.run_tests(words, limit_seconds=limit)
            row["seconds"].append(ended.seconds)
            if ended.how != "passed":
                return {**row, "stage": number, **_killed(ended)}
            row["passed"].append(shlex.join(words))
        return {**row, "stage": None, "killed_by": None, "how": None, "why": ""}

    def _clean_seconds(self, words: Sequence[str], checkout: Checkout) -> float:
        """Measure, once, how long these tests take without a mutant; if they do not pass, no mutant can be judged by them."""
        key = shlex.join(words)
        with self._clean_lock:
            if key not in self._journal.clean_seconds:
                ended = checkout.run_tests(words, limit_seconds=float("inf"))
                if ended.how != "passed":
                    raise LaunchError(
                        f"without a mutant {ended.by} {ended.how}: {ended.why}. `pytest {key}` must pass before mutants are run."
                    )
                print(f"without a mutant {ended.seconds:.0f} s: pytest {key}", flush=True)
                self._journal.add({"clean": key, "seconds": ended.seconds})
        return self._journal.clean_seconds[key]


def _killed(ended: Ended) -> dict[str, Any]:
    return {"killed_by": ended.by, "how": ended.how, "why": ended.why}


def _told_kill(row: dict[str, Any]) -> str:
    return f"killed in stage {row['stage']} after {sum(row['seconds']):.0f} s by {row['killed_by']} ({row['how']})"


def shown_place(row: dict[str, Any]) -> str:
    return f"{row['file']}:{row['line']}"


# --- what came out ------------------------------------------------------------------------------------------------------


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count, give the share of killed mutants in each area and in all, and list the survivors."""
    areas = {area: [row for row in rows if row["area"] == area] for area in dict.fromkeys(row["area"] for row in rows)}
    kinds = ("file", "line", "function", "operator", "before", "after")
    return {
        "counts": {
            "mutants": len(rows),
            "killed": sum(row["killed_by"] is not None for row in rows),
            "survived": sum(row["killed_by"] is None for row in rows),
            "timed_out": sum(row["how"] == "timeout" for row in rows),
            "killed_in_stage_1": sum(row["stage"] == 1 for row in rows),
        },
        "kill_rate": {area: kill_rate(some) for area, some in areas.items()} | {"all": kill_rate(rows)},
        "survivors": [{"id": row["id"], **{name: row[name] for name in kinds}} for row in rows if row["killed_by"] is None],
    }


def kill_rate(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return None of no mutants."""
    return round(sum(row["killed_by"] is not None for row in rows) / len(rows), 3) if rows else None


def flags_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="mutants, spread evenly over the areas (default: 60)")
    parser.add_argument("--seed", type=int, default=22, help="of the draw (default: 22)")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument("--only", metavar="ID", help="run this one, such as engine-03")
    parser.add_argument("--stages", type=int, default=2, choices=[1, 2], help="1: without the rest of the suite (default: 2)")
    parser.add_argument("--suite", default="", metavar="WORDS", help="for pytest in stage 2 (default: none, as `make test`)")
    parser.add_argument("--targets", default="", metavar="WORDS", help="for pytest, instead of both stages (default: none)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, each in a copy of the checkout (default: 1)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="append a line of JSON for each mutant as it ends")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="leave out what this log has; it is the log as well")
    flags = parser.parse_args(argv)
    if flags.count < 1 or flags.jobs < 1:
        parser.error("--count and --jobs must be at least 1")
    return flags


def chosen(mutants: list[Mutant], only: str | None) -> list[Mutant]:
    found = [mutant for mutant in mutants if only in (None, mutant.id)]
    if not found:
        raise ConfigError(f"--only {only} is none of the mutants. --list shows their names, such as {mutants[0].id}.")
    return found


def measure(flags: argparse.Namespace) -> None:
    mutants = chosen(draw_mutants(flags.count, flags.seed), flags.only)
    if flags.list:
        for one in mutants:
            print(f"{one.id}  {one.operator}  {one.file}:{one.line}  {one.function}\n    - {one.before}\n    + {one.after}")
        return
    plan = Plan(flags.stages, tuple(shlex.split(flags.suite)), tuple(shlex.split(flags.targets)))
    journal = Journal(flags.log, flags.resume)
    journal.require_same(mutants, plan)
    Campaign(plan, journal).run([mutant for mutant in mutants if mutant.id not in journal.rows], flags.jobs)
    rows = [journal.rows[mutant.id] for mutant in mutants]
    tests = flags.targets or ("stage 1" if flags.stages == 1 else flags.suite or "as `make test`")
    figures = {"seed": flags.seed, "tests": tests, **summary(rows)}
    if flags.only is None and not flags.targets and flags.stages == 2:
        publish("mutants", {**figures, "mutants": rows})
    else:
        print(json.dumps(figures))


def main(argv: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its processes end with it
    try:
        measure(flags_of(argv))
    except FleetError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
