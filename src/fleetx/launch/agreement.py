"""Agreement of several nodes on one job: each reports its state, node 0 decides, all follow. Pure functions.

state of a node   READY -> RUNNING -> DONE, or FAILED with a cause; LEFT when its launcher ends. Each for one attempt.
the job           attempt n, and the port of its store once all nodes are READY for n; at last, how it ended.

The number of the attempt is the number of restarts so far, equal on all nodes however many ranks failed at once. A state that
belongs to an earlier attempt is ignored.
"""

from __future__ import annotations

import enum
import json
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .budget import Limits, Tries, after_failure
from .console import escape

SETTLE_SECONDS = 0.3
"""How long to wait for other nodes' failures: a killed rank makes ranks on other nodes fail, which may be reported first."""
ALL_HANG_SECONDS = 5.0
"""How long to wait when ranks hang on all nodes, so that each node reports its own."""
AWAY_SECONDS = 7.0
"""How long to wait before ranks that lost a connection end the job while a node is away: it may turn out to be the cause."""
TEXT_LETTERS = 2000


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Phase(enum.StrEnum):
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    LEFT = "left"


class End(enum.StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Cause:
    """Why an attempt failed on a node."""

    here: str  # "rank 1 was killed by SIGKILL at step 812"
    elsewhere: str  # the same, as shown on other nodes
    exit_code: int
    time_ns: int
    is_crash: bool
    is_retryable: bool
    is_consequence: bool = False  # a connection to other ranks broke: the cause may be elsewhere


@dataclass(frozen=True)
class NodeState:
    attempt: int
    phase: Phase
    cause: Cause | None = None
    stop_signal: int | None = None  # received by this node
    all_wait: bool = False  # every rank here has waited for another node for the hang timeout
    step: int = 0  # the last one that a rank here has reached in this attempt; 0: unknown


@dataclass(frozen=True)
class Job:
    process_counts: tuple[int, ...] = ()  # of each node; empty until all have joined
    run_id: str = ""
    attempt: int = 0
    port: int | None = None  # of this attempt's store on node 0; None until all nodes are ready
    nonce: str = ""
    reason: str = ""  # of the last restart
    tries: Tries = field(default_factory=Tries)
    began_seconds: float | None = None  # when this attempt's store was opened; this and the next two on node 0's clock
    not_before_seconds: float = 0.0  # when this attempt may begin
    failing_since_seconds: float | None = None
    stop_signal: int | None = None
    stop_node: int = 0
    all_hang: bool = False  # every rank of every node waits, or has ended
    end: End | None = None
    blamed_node: int = 0
    sentence: str = ""
    exit_code: int = 0


def first_rank(process_counts: tuple[int, ...], node: int) -> int:
    """Return the first rank of a node; ranks are numbered node by node."""
    return sum(process_counts[:node])


def all_ready(job: Job, states: Mapping[int, NodeState], *, now_seconds: float = 0.0) -> bool:
    """Return whether to open this attempt's store. Earlier, a worker of the last attempt could still connect to it."""
    if job.end is not None or job.port is not None or not job.process_counts or len(states) < len(job.process_counts):
        return False
    if now_seconds < job.not_before_seconds:
        return False
    return all(state.attempt == job.attempt and state.phase is Phase.READY for state in states.values())


def decide(
    job: Job, states: Mapping[int, NodeState], *, limits: Limits, now_seconds: float, away: Mapping[int, str] | None = None
) -> Job:
    """Return the job that follows from the states of the nodes. `away`: a sentence for each node that is not heard of."""
    if job.end is not None:
        return job
    job = _note_stop(job, states)
    current = {node: state for node, state in states.items() if state.attempt == job.attempt}
    causes = {node: state.cause for node, state in current.items() if state.cause is not None}
    if job.stop_signal is not None and _has_stopped(job, states, causes):
        return replace(job, end=End.STOPPED, blamed_node=job.stop_node)
    if causes:
        step = max(state.step for state in current.values())
        return _after_failure(job, causes, step=step, limits=limits, now_seconds=now_seconds, away=away or {})
    gone = [node for node, state in states.items() if state.phase is Phase.LEFT]
    if gone:
        return fail(job, gone[0], f"node {gone[0]} has left the job.")
    if job.process_counts and len(current) == len(job.process_counts):
        if all(state.phase is Phase.DONE for state in current.values()):
            return replace(job, end=End.SUCCEEDED)
        if all(state.phase is Phase.DONE or (state.all_wait and state.phase is Phase.RUNNING) for state in current.values()):
            return replace(job, all_hang=True)
    return job


def fail(job: Job, node: int, sentence: str, exit_code: int = 1) -> Job:
    if job.end is not None:
        return job
    if job.stop_signal is not None:
        return replace(job, end=End.STOPPED)
    return replace(job, end=End.FAILED, blamed_node=node, sentence=sentence, exit_code=exit_code)


def _note_stop(job: Job, states: Mapping[int, NodeState]) -> Job:
    asked = [(node, state.stop_signal) for node, state in states.items() if state.stop_signal is not None]
    if job.stop_signal is not None or not asked:
        return job
    return replace(job, stop_node=asked[0][0], stop_signal=asked[0][1])


def _has_stopped(job: Job, states: Mapping[int, NodeState], causes: Mapping[int, Cause]) -> bool:
    """Return whether the job has stopped: no new attempt starts, and the current one ends by itself or at the first failure."""
    if job.port is None or causes or any(state.phase is Phase.LEFT for state in states.values()):
        return True
    return all(state.phase is Phase.DONE for state in states.values())


def _after_failure(
    job: Job, causes: Mapping[int, Cause], *, step: int, limits: Limits, now_seconds: float, away: Mapping[int, str]
) -> Job:
    since = now_seconds if job.failing_since_seconds is None else job.failing_since_seconds
    node, cause = min(causes.items(), key=lambda item: (not item[1].is_crash, item[1].is_consequence, item[1].time_ns))
    ran_seconds = 0.0 if job.began_seconds is None else now_seconds - job.began_seconds
    retry = after_failure(job.tries, limits, ran_seconds=ran_seconds, step=step) if cause.is_retryable else None
    is_away = cause.is_consequence and bool(away)
    has_crash = any(cause.is_crash for cause in causes.values())
    settle_seconds = ALL_HANG_SECONDS if job.all_hang else 0.0 if has_crash else SETTLE_SECONDS
    if retry is None and is_away:
        settle_seconds = max(settle_seconds, AWAY_SECONDS)
    if len(causes) < len(job.process_counts) and now_seconds - since < settle_seconds:
        return replace(job, failing_since_seconds=since)
    if retry is None:
        return fail(job, node, cause.elsewhere, cause.exit_code)
    reason = cause.here if len(job.process_counts) == 1 else cause.elsewhere
    return Job(
        process_counts=job.process_counts,
        run_id=job.run_id,
        attempt=job.attempt + 1,
        reason=next(iter(away.values())) if is_away else reason,
        tries=retry.tries,
        not_before_seconds=now_seconds + retry.pause_seconds,
    )


# --- as text ------------------------------------------------------------------------------------------------------------
# Every field is checked and every text cut and escaped on arrival: a node that says nonsense is not believed in part.


def to_text(record: NodeState | Job) -> bytes:
    return json.dumps(asdict(record)).encode()


def state_from_text(text: bytes) -> NodeState:
    """Parse a state. Raises ValueError if a field is missing, of another type or out of range."""
    fields = _fields(text)
    cause = fields.pop("cause", None)
    try:
        state = NodeState(**{**fields, "phase": Phase(fields["phase"]), "cause": _cause(cause) if cause is not None else None})
    except (TypeError, KeyError) as error:
        raise ValueError("not a state") from error
    _require_counts(state.attempt, state.step)
    _require_bools(state.all_wait)
    if state.stop_signal is not None and state.stop_signal not in STOP_SIGNALS:
        raise ValueError("not a signal to stop")
    return state


def job_from_text(text: bytes) -> Job:
    """Parse a job. Raises ValueError if a field is missing, of another type or out of range."""
    fields = _fields(text)
    try:
        counts, tries, end = tuple(fields["process_counts"]), Tries(**fields["tries"]), fields["end"]
        texts = {name: _text(fields[name]) for name in ("run_id", "nonce", "reason", "sentence")}
        job = Job(**{**fields, **texts, "process_counts": counts, "tries": tries, "end": End(end) if end is not None else None})
    except (TypeError, KeyError) as error:
        raise ValueError("not a job") from error
    _require_counts(*counts, job.attempt, job.stop_node, job.blamed_node, tries.spent, tries.in_a_row, tries.best_step)
    _require_bools(job.all_hang)
    if job.port is not None and not (_is_whole(job.port) and 0 < job.port < 65536):
        raise ValueError("not a port")
    if job.stop_signal is not None and job.stop_signal not in STOP_SIGNALS:
        raise ValueError("not a signal to stop")
    if not _is_whole(job.exit_code) or abs(job.exit_code) > 255:
        raise ValueError("not an exit code")
    return job


def _cause(fields: Any) -> Cause:
    cause = Cause(**{**fields, "here": _text(fields["here"]), "elsewhere": _text(fields["elsewhere"])})
    _require_bools(cause.is_crash, cause.is_retryable, cause.is_consequence)
    if not (_is_whole(cause.exit_code) and abs(cause.exit_code) <= 255 and _is_whole(cause.time_ns)):
        raise ValueError("not a cause")
    return cause


def _fields(text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(fields, dict):
        raise ValueError("not a record")
    return fields


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return escape(value[:TEXT_LETTERS])


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_counts(*values: Any) -> None:
    if not all(_is_whole(value) and 0 <= value < 2**62 for value in values):
        raise ValueError("not a count")


def _require_bools(*values: Any) -> None:
    if not all(isinstance(value, bool) for value in values):
        raise ValueError("neither true nor false")
