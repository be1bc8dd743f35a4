"""Whether ranks are tried at all, over which backends, and what the outcome means. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from .facts import Facts
from .finding import Finding, Table, note, ok, problem
from .trial import Trial
from .variables import BY_LAUNCHER, is_launched

TOPIC = "all-reduce"
SLOW_BYTES_PER_SECOND = 100e6
"""Between two ranks of one machine; a laptop's loopback makes several times that."""


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """What to try, and what is to be said of what is not tried."""

    backends: tuple[str, ...] = ()
    is_in_place: bool = False
    """Among the ranks that a launcher has started, of which this process is one."""
    findings: tuple[Finding, ...] = ()


def ranks_of(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 1


def choose(facts: Facts, *, ranks: int, backend: str | None, is_wanted: bool) -> Choice:
    if not is_wanted:
        return Choice(findings=(note(TOPIC, "not tried: --no-bandwidth"),))
    if facts.software.torch_error:
        return Choice(findings=(note(TOPIC, "not tried: torch cannot be imported"),))
    if not is_launched(facts.variables):
        return _backends(facts, ranks, backend)
    started = ranks_of(facts.variables, "WORLD_SIZE")
    if started > 1 and any(name in facts.variables for name in BY_LAUNCHER):
        told = note(TOPIC, f"started under a launcher, so no ranks of its own: measured between its {started} ranks")
        choice = _backends(facts, ranks_of(facts.variables, "LOCAL_WORLD_SIZE"), backend)
        return Choice(choice.backends, is_in_place=True, findings=(told, *choice.findings))
    told = note(
        TOPIC,
        f"no ranks were started: RANK or WORLD_SIZE is set, as by a launcher of {started}",
        "unset RANK WORLD_SIZE, or start `fleetx doctor` without a launcher",
    )
    return Choice(findings=(told,))


def _backends(facts: Facts, local_ranks: int, backend: str | None) -> Choice:
    """Gloo everywhere; NCCL as well where there is a GPU for each rank of this machine."""
    gpus = len(facts.devices.gpus) if facts.variables.get("FLEETX_DEVICE") != "cpu" else 0
    can_nccl = facts.backends.nccl is not None and gpus >= local_ranks
    if can_nccl:
        return Choice(("gloo", "nccl") if backend is None else (backend,))
    why = f"it needs a GPU for each rank: {local_ranks} rank{'s' * (local_ranks != 1)}, {gpus} GPU{'s' * (gpus != 1)}"
    if backend == "nccl":
        return Choice(findings=(problem(TOPIC, f"NCCL not tried: {why}", "write --backend gloo, or start fewer ranks"),))
    return Choice(("gloo",), findings=(note(TOPIC, f"NCCL not tried: {why}"),) if gpus and backend is None else ())


def check_trial(trial: Trial) -> Iterable[Finding]:
    """Of ranks that did not come to an end, or failed."""
    if not trial.error:
        return
    what = "hangs" if trial.is_late else "failed"
    tail = " | ".join(trial.log_tail) or "nothing"
    told = f"{trial.ranks} ranks over {' and '.join(trial.backends)}: {what}: {trial.error}. Their logs end with: {tail}"
    if trial.is_late:
        fix = "try again with --limit 300, on a machine that does less; if it stays, mend what is told above, the network first"
    else:
        fix = "mend what is told above; then `fleetrun -m fleetx.cli doctor` shows each rank's own log"
    yield problem(TOPIC, told, fix)


def check_tables(tables: Sequence[Table], sizes: Sequence[int]) -> Iterable[Finding]:
    for table in tables:
        name = f"{table.backend}, {table.ranks} ranks"
        wrong = [row.size_bytes for row in table.rows if not row.is_sum_right]
        if wrong:
            told = f"{name}: wrong sums of {', '.join(f'{size:,}' for size in wrong)} bytes"
            yield problem(TOPIC, told, "do not train here: look for broken memory, a broken GPU or a broken driver")
        if len(table.rows) < len(sizes):
            yield note(TOPIC, f"{name}: only the {len(table.rows)} smallest sizes, since the link is slow")
        best = max((row.bus_bytes_per_second for row in table.rows if row.size_bytes >= 1e6), default=None)
        if best is not None and best < SLOW_BYTES_PER_SECOND:
            told = f"{name}: {best / 1e6:.0f} MB/s at most"
            yield note(TOPIC, told, "bf16_allreduce, gradient_merge, localsgd, powersgd or dgc save what the link lacks")
        if not wrong:
            yield ok(TOPIC, f"{name}: sums are right, {1e6 * table.rows[0].seconds:,.0f} us at least")
