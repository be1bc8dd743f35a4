"""How this node stands in the job: what its launcher tells the others of itself, requests to stop among it."""

from __future__ import annotations

import signal

from fleetx.launch.agreement import Cause, Job, NodeState, Phase
from fleetx.launch.control import Chair, Member
from fleetx.launch.signals import Signals


class Standing:
    def __init__(self, signals: Signals) -> None:
        self.party: Chair | Member  # set once, before anything is agreed on
        self.attempt = 0
        self.phase = Phase.READY
        self.cause: Cause | None = None
        self.all_wait = False
        self.stop_signal: signal.Signals | None = None
        self.is_killed = False
        """Asked to stop a second time."""
        self._signals = signals

    @property
    def node(self) -> int:
        return self.party.node or 0

    def agree(self) -> Job:
        """Tell how we stand, and learn how the job does. Never waits."""
        # Slurm signals launcher and ranks alike: a rank that has died of it is no failure.
        for signum in self._signals.take_stops(at_once=self.phase is Phase.FAILED):
            self.is_killed = self.stop_signal is not None
            self.stop_signal = self.stop_signal or signum
        return self.party.exchange(self._state())

    def wants_stacks(self) -> bool:
        return self._signals.take_stacks()

    def agree_ready(self) -> Job:
        """As long as the next attempt is waited for."""
        self.phase, self.cause, self.all_wait = Phase.READY, None, False
        job = self.agree()
        self.attempt = job.attempt
        return job

    def leave(self, *, limit_seconds: float) -> None:
        self.phase = Phase.LEFT
        self.party.close(self._state(), limit_seconds=limit_seconds)

    def _state(self) -> NodeState:
        return NodeState(self.attempt, self.phase, self.cause, self.stop_signal, self.all_wait)
