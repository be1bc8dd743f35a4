"""How far is what `auto` chooses from the best plan there is? Needs root.

    python -m bench.auto_regret.run                     3 nets x links of 100 and 1000 Mbit/s x memory without and with a limit
    python -m bench.auto_regret.run --models mlp --rates 100
    python -m bench.auto_regret.run --smoke             two local processes and a tiny net, without root; nothing is kept
    python -m bench.auto_regret.run --table             docs/auto_regret.md, from what was published

Two hosts, one rank with one thread on each. For each net and link every legal plan of a fixed grid (bench/auto_regret/grid.py)
is measured in two turns, then `auto` is asked, and its choice looked up (bench/auto_regret/summary.py). Each figure is a line in
--out as soon as it is there; a net and link that came to the end is not measured again, until --out is emptied.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from bench.auto_regret.grid import Counts
from bench.auto_regret.models import NETS, net_of
from bench.auto_regret.page import page
from bench.auto_regret.summary import RISKS, finished, summary
from bench.auto_regret.worker import main as work
from bench.lib.cluster import run_on_hosts
from bench.lib.link_speed import transfer_seconds
from bench.lib.netns import cluster, why_not
from bench.lib.results import FOLDER, ROOT, publish, published, surroundings, write_page
from bench.lib.table_flags import Parser, refuse_seconds
from bench.localsgd_table.accuracy import free_port, local_rank
from bench.localsgd_table.summary import told
from fleetx.errors import ConfigError, FleetError, LaunchError

NAME = "auto_regret"
WORKER = Path(__file__).with_name("worker.py")
PAGE = ROOT / "docs" / "auto_regret.md"
RATES, BUDGETS, ASKED_RISKS = (100.0, 1000.0), ("none", "tight"), ("schedule",)
CELL_SECONDS, TIMEOUT_SECONDS, PROBE_SECONDS = 240.0, 1200.0, 0.5
"""What a net on a link takes, about, and at most."""
SMOKE = Counts(fewest=2, most=2, fewest_periods=1)
FACTS = ("device", "torch", "commit")


def lines_in(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    try:
        return [json.loads(line) for line in file.read_text().splitlines()]
    except ValueError as error:
        raise ConfigError(f"{file} holds a line that is not JSON: {error}. Remove that line, or the file.") from error


def job_of(flags: argparse.Namespace, model: str, rate: float, out: Path, **facts: Any) -> dict[str, Any]:
    common = {"run": time.time_ns(), "model": model, "rate_mbit": rate, "out": str(out.resolve())}
    here = {key: surroundings()[key] for key in FACTS}
    return {
        **common,
        "budgets": flags.budgets,
        "risks": flags.risks,
        "counts": asdict(SMOKE if flags.smoke else Counts()),
        "facts": {**here, **facts},
    }


def wanted_cells(flags: argparse.Namespace, out: Path) -> Iterator[tuple[str, float]]:
    """Those not measured yet, as long as there is time."""
    done, longest = finished(lines_in(out)), CELL_SECONDS
    deadline = time.monotonic() + flags.seconds
    for rate in flags.rates:
        for model in flags.models:
            if (model, rate) in done:
                print(f"{model} at {rate:g} Mbit/s was measured before", flush=True)
                continue
            if time.monotonic() + longest > deadline:
                print(f"{model} at {rate:g} Mbit/s is left out for want of time; call again to go on", flush=True)
                continue
            begun = time.monotonic()
            yield model, rate
            longest = max(longest, time.monotonic() - begun)


def measure(flags: argparse.Namespace, model: str, rate: float, out: Path) -> None:
    with cluster(hosts=2, rate_mbit=rate) as hosts:
        payload_bytes = int(rate * 1e6 / 8 * PROBE_SECONDS)
        goodput = payload_bytes * 8 / 1e6 / transfer_seconds(hosts[0], hosts[1], payload_bytes)
        print(f"{model}, {rate:g} Mbit/s: one TCP connection carries {goodput:.1f}", flush=True)
        job = job_of(flags, model, rate, out, goodput_mbit=round(goodput, 1))
        one_thread = {"OMP_NUM_THREADS": "1", "FLEETX_DEVICE": "cpu"}
        ended = run_on_hosts(hosts, WORKER, [json.dumps(job)], env=one_thread, timeout=TIMEOUT_SECONDS, shows=True)
        if ended.worst:
            raise LaunchError(f"a host ended with {ended.worst}; lines measured before are kept.\n{ended.consoles[0][-3000:]}")


def smoke_rank(index: int, port: int, job: dict[str, Any]) -> None:
    os.environ |= {"FLEETX_DEVICE": "cpu"}
    torch.set_num_threads(1)  # torch is imported by now: a variable would come too late
    local_rank(index, 2, port)
    work(job)


def smoke(flags: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.jsonl"
        flags.risks = flags.risks[:1]
        mp.spawn(smoke_rank, args=(free_port(), job_of(flags, "tiny", 0.0, out, goodput_mbit=0.0)), nprocs=2)
        figures = summary(lines_in(out))
    show(figures)
    page({**surroundings(), **figures})
    print(json.dumps(figures["totals"]))


def show(figures: dict[str, Any]) -> None:
    for cell in figures["cells"]:
        memory = "no limit" if cell["budget"] is None else f"{cell['budget'] / 1e6:.1f} MB"
        print(
            f"{cell['model']}, {cell['rate_mbit']:g} Mbit/s, {memory}, risk {cell['risk']}: {cell['chosen']} "
            f"({cell['chosen_us']:.0f} us a sample), best {cell['best']} ({cell['best_us']:.0f}); regret {cell['regret']:.1%}, "
            f"spread {cell['spread']:.1%} of {cell['legal']} plans"
        )
    for one in figures["verdicts"].values():
        print(told(one))


def bench(flags: argparse.Namespace) -> None:
    reason = why_not()
    if reason is not None:
        raise LaunchError(reason)
    flags.out.mkdir(parents=True, exist_ok=True)
    out = flags.out / "lines.jsonl"
    for model, rate in wanted_cells(flags, out):
        measure(flags, model, rate, out)
    figures = summary(lines_in(out))
    show(figures)
    publish(NAME, figures)


def flags_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.several("--models", tuple(NETS), "nets", str, "NET")
    parser.several("--rates", RATES, "of the links, in Mbit/s", float, "MBIT")
    parser.several("--budgets", BUDGETS, "of memory: none, or tight, which needs recompute", str, "BUDGET")
    parser.several("--risks", ASKED_RISKS, "that auto is allowed", str, "RISK")
    parser.value("--seconds", math.inf, "no net and link begins that would end later", shown="no limit", type=float)
    parser.value("--out", Path(tempfile.gettempdir()) / NAME, "folder of the measured lines", type=Path, metavar="FOLDER")
    parser.switch("smoke", "two local processes and a tiny net; nothing is kept")
    table = FOLDER / f"{NAME}.json"
    meaning = "makes the page of these published figures, and measures nothing"
    parser.value("--table", None, meaning, shown="none", type=Path, metavar="FILE", nargs="?", const=table)
    parser.value("--page", PAGE, "where --table writes the page", type=Path, metavar="FILE")
    flags = parser.parse_args(argv)
    refuse(flags)
    return flags


def refuse(flags: argparse.Namespace) -> None:
    refuse_seconds(flags.seconds)
    for name in flags.models:
        net_of(name)
    for flag, given, known in (("--budgets", flags.budgets, BUDGETS), ("--risks", flags.risks, RISKS)):
        for one in given:
            if one not in known:
                raise ConfigError(f"{flag} names {one!r}; there are {', '.join(known)}.")
    for rate in flags.rates:
        if not 0 < rate < math.inf:
            raise ConfigError(f"--rates names {rate}; a rate is a number of Mbit/s above 0.")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        flags = flags_of(argv)
        if flags.table is not None:
            bert = FOLDER / "auto_bert.json"
            write_page(flags.page, page(published(flags.table, NAME), published(bert, "auto_bert") if bert.exists() else None))
        elif flags.smoke:
            smoke(flags)
        else:
            bench(flags)
    except FleetError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
