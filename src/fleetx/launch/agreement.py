"""Agreement of several nodes on one job: each reports its state, node 0 decides, all follow. Pure functions.

state of a node   READY -> RUNNING -> DONE, or FAILED with a cause; LEFT when its launcher ends. Each for one attempt.
the job           attempt n, and the port of its store once all nodes are READY for n; at last, how it ended.

The number of the attempt is the number of restarts so far, equal on all nodes however many ranks failed at once. A state that
belongs to an earlier attempt is ignored.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

SETTLE_SECONDS = 0.3
"""How long to wait for other nodes' failures: a killed rank makes ranks on other nodes fail, which may be reported first."""
ALL_HANG_SECONDS = 5.0
"""How long to wait when ranks hang on all nodes, so that each node reports its own."""


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


@dataclass(frozen=True)
class Job:
    process_counts: tuple[int, ...] = ()  # of each node; empty until all have joined
    run_id: str = ""
    attempt: int = 0
    port: int | None = None  # of this attempt's store on node 0; None until all nodes are ready
    nonce: str = ""
    reason: str = ""  # of the last restart
    failing_since_seconds: float | None = None  # on node 0's clock
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


def all_ready(job: Job, states: Mapping[int, NodeState]) -> bool:
    """Return whether to open this attempt's store. Earlier, a worker of the last attempt could still connect to it."""
    if job.end is not None or job.port is not None or not job.process_counts or len(states) < len(job.process_counts):
        return False
    return all(state.attempt == job.attempt and state.phase is Phase.READY for state in states.values())


def decide(job: Job, states: Mapping[int, NodeState], *, max_restart: int, now_seconds: float) -> Job:
    """Return the job that follows from the states of the nodes."""
    if job.end is not None:
        return job
    job = _note_stop(job, states)
    current = {node: state for node, state in states.items() if state.attempt == job.attempt}
    causes = {node: state.cause for node, state in current.items() if state.cause is not None}
    if job.stop_signal is not None and _has_stopped(job, states, causes):
        return replace(job, end=End.STOPPED, blamed_node=job.stop_node)
    if causes:
        return _after_failure(job, causes, max_restart=max_restart, now_seconds=now_seconds)
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


def _after_failure(job: Job, causes: Mapping[int, Cause], *, max_restart: int, now_seconds: float) -> Job:
    since = now_seconds if job.failing_since_seconds is None else job.failing_since_seconds
    has_crash = any(cause.is_crash for cause in causes.values())
    settle_seconds = ALL_HANG_SECONDS if job.all_hang else 0.0 if has_crash else SETTLE_SECONDS
    if len(causes) < len(job.process_counts) and now_seconds - since < settle_seconds:
        return replace(job, failing_since_seconds=since)
    node, cause = min(causes.items(), key=lambda item: (not item[1].is_crash, item[1].is_consequence, item[1].time_ns))
    if job.attempt >= max_restart or not cause.is_retryable:
        return fail(job, node, cause.elsewhere, cause.exit_code)
    return Job(
        process_counts=job.process_counts,
        run_id=job.run_id,
        attempt=job.attempt + 1,
        reason=cause.here if len(job.process_counts) == 1 else cause.elsewhere,
    )


def to_line(record: NodeState | Job) -> bytes:
    return json.dumps(asdict(record)).encode() + b"\n"


def state_from_line(line: bytes) -> NodeState:
    fields: dict[str, Any] = json.loads(line)
    cause = fields.pop("cause")
    return NodeState(**{**fields, "phase": Phase(fields["phase"]), "cause": Cause(**cause) if cause else None})


def job_from_line(line: bytes) -> Job:
    fields: dict[str, Any] = json.loads(line)
    end = fields["end"]
    return Job(**{**fields, "process_counts": tuple(fields["process_counts"]), "end": End(end) if end else None})
