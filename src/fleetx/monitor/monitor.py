"""`fleet.Monitor`: logging of a run. All ranks open one and log to it; worker 0 shows the line and writes the run folder.

with fleet.Monitor("runs/first", total_steps=1000) as monitor:
    for x, y in loader:
        report = optimizer.minimize(criterion(model(x), y))
        monitor.log(report, samples=len(x))
    monitor.log(acc=accuracy)               # sum_of to the last update

It runs no collective, so that a rank which logs less, or not at all, does not block the others; and it never waits for a GPU.
With several pairs of model and optimizer, the line shows the pair that was logged first.
"""

from __future__ import annotations

import collections
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, final

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..config import log
from ..config.secret_texts import without_secrets
from ..dist import heartbeat, stop_signal, world
from ..dist.heartbeat import Phase
from ..engine import dry_steps
from ..engine.modules.flops import FlopCount
from ..engine.report import Report
from ..engine.setup import registry
from ..errors import ConfigError
from . import checked, forwards
from .async_values import AsyncValue
from .device_peak import peak_here
from .folder import Folder, OwnLog, start_of_run
from .line import RunState, last_line, line, screen
from .memory_curve import AT_UPDATE, MemoryCurve, memory_peak
from .ranks import ByRank, Ranks, slowest
from .record import Record, Tally, Window, total_of
from .sinks import Sink, Sinks, TensorBoard, has_tensorboard
from .split import Split, stopwatch, sum_of, zero_split

FULL_SECONDS = 2.0
"""Seconds between two records that hold the trust ratios, which are long."""
RANKS_SECONDS = 5.0
_open: Monitor | None = None


@final
class Monitor:
    """Show a run in one live line and record it in a folder; every rank opens one and logs to it.

    Examples:
        >>> model, optimizer = fleet.distribute(model, optimizer)
        >>> with fleet.Monitor("runs/first", total_steps=2, show=False) as monitor:
        ...     for _ in range(2):
        ...         report = optimizer.minimize(criterion(model(x), y))
        ...         monitor.log(report, samples=len(x))
        >>> (monitor.path / "metrics.jsonl").exists()
        True
    """

    path: Path
    """The run folder."""

    def __init__(
        self,
        dir: str | os.PathLike[str],
        total_steps: int | None = None,
        *,
        sinks: Iterable[Sink] = (),
        tensorboard: bool | None = None,
        show: bool = True,
    ) -> None:
        """Open a monitor on the run folder `dir`, which is created if missing; a resumed run continues in it.

        `total_steps`: number of updates, to show the time left; None: unknown. `tensorboard`: whether to write event files;
        None: if it is installed. `show=False` prints nothing."""
        global _open
        if _open is not None:
            raise ConfigError(f"a fleet.Monitor is open already, on {_open.path}. Close it first, or log to it.")
        self.path = checked.path_of(dir)
        self._sinks = Sinks(checked.sinks_of(sinks))
        self._state = RunState(total_steps=checked.total_of(total_steps))
        here = world.current()
        self._comm, self._device = here.comm, here.device
        self._folder = self._open_folder(tensorboard)
        self._own_log = OwnLog(self.path, self._comm.rank)
        self._screen = screen(rank=self._comm.rank if show and log.shows(logging.INFO) else -1)
        self._began = time.monotonic()
        self._split, self._ranks = zero_split(), Ranks(here)
        self._tallies: dict[int, Tally] = {}
        """Totals by number of the pair in this run; the line shows the first."""
        self._pending: collections.deque[Record] = collections.deque()
        self._held: dict[str, AsyncValue] = {}
        """Values logged inside a merge window, until its update."""
        self._next_full = self._next_ranks = 0.0
        self._pairs_seen = self._skipped = 0
        self._window = 1
        """Micro-steps of the last update of the pair that is shown."""
        self._places: dict[int, int] = {}
        """Number of each pair in this run, counted from 1, by its number in this process."""
        self._handles: list[RemovableHandle] = []
        self._curve: MemoryCurve | None = None
        self._flops: FlopCount | None = FlopCount()
        """Of the first update; None once that is over."""
        self._is_closed = self._is_wrapped = False
        self._watch_pairs()
        self._watch = stopwatch(Phase.SCRIPT, self._device)
        heartbeat.listen(self._phase_changed)
        _open = self

    # --- start --------------------------------------------------------------------------------------------

    def _open_folder(self, tensorboard: bool | None) -> Folder | None:
        if self._comm.rank != 0:
            return None
        try:
            folder = Folder(self.path)
            if tensorboard or (tensorboard is None and has_tensorboard()):
                self._sinks.add(TensorBoard(self.path))
        except ConfigError as error:
            self._comm.post_error(f"worker 0 has stopped: {error}")  # otherwise the others only see a broken connection
            raise
        return folder

    def _watch_pairs(self) -> None:
        """Watch the pairs distributed since the last call: usually all of them, before the first step."""
        pairs, self._pairs_seen = registry.pairs(), registry.count()
        for pair in pairs:
            model = pair.model()
            if pair.number in self._places or model is None:
                continue
            self._places[pair.number] = len(self._places) + 1
            self._handles += forwards.watch(model)
            self._is_wrapped |= pair.is_wrapped
            if self._folder is not None:
                self._folder.put_strategy(self._places[pair.number], pair.strategy)
        if self._folder is not None:
            self._note_start(self._folder)

    def _note_start(self, folder: Folder) -> None:
        total = self._state.total_steps
        folder.begin(start_of_run(folder.start, world.current(), registry.pairs(), total_steps=total))

    def _phase_changed(self, phase: Phase) -> None:
        self._watch.changed(phase)
        if self._flops is not None and not dry_steps.is_on():
            # The phase goes on to backward, so that a loss computed outside of the model is counted too.
            self._flops.begin() if phase is Phase.FORWARD else self._flops.end()
        if self._curve is not None:
            self._curve.changed(phase)

    # --- logging --------------------------------------------------------------------------------------------------

    def log(self, report: Report | None = None, *, samples: int | None = None, **values: float | Tensor) -> None:
        """Record a micro-step. `samples`: number in this rank's batch. Other numbers are recorded by name with the update;
        without a report they are sum_of to the last update."""
        if self._is_closed:
            raise ConfigError("this fleet.Monitor is closed. Log inside its `with` block.")
        checked.require_report(report)
        awaited = {name: checked.number_of(name, value) for name, value in values.items()}
        count = checked.samples_of(samples)
        if report is None:
            self._join_last(awaited)
        else:
            self._held |= awaited
            self._micro_step(report, count)
        self._write_ready()
        if self._screen.is_due and self._pending:
            self._refresh()

    def _join_last(self, awaited: Mapping[str, AsyncValue]) -> None:
        if not self._pending:
            raise ConfigError(f"{', '.join(awaited)} was logged before any update. Log a report of a due micro-step first.")
        self._pending[-1].add(awaited)

    def _micro_step(self, report: Report, samples: int) -> None:
        if registry.count() != self._pairs_seen:
            self._watch_pairs()
        tally = self._tallies.setdefault(self._places.get(report.pair, 1), Tally())
        tally.micro_step(report.bytes_sent, samples)
        if not report.due:
            return
        is_first = all(one.updates == 0 for one in self._tallies.values())
        if self._folder is not None and self._folder.start > 1 and is_first and report.step == 1:
            self._folder.start_over()
            self._note_start(self._folder)
        split = self._watch.take()
        window = tally.update(report, ranks=self._comm.size, ended_seconds=time.monotonic() - self._began)
        is_shown = tally is self._shown
        self._note_flops(tally, window)
        if is_shown:
            self._state.step, self._state.period, self._state.loss_scale = report.step, report.period, report.loss_scale
            self._window = report.micro_steps
        self._state.memory_bytes = memory_peak(self._device)
        is_full = self._folder is not None and time.monotonic() >= self._next_full
        if is_full:
            self._next_full = time.monotonic() + FULL_SECONDS
        record = Record(report, self._plain(report, window), split, is_full=is_full, is_shown=is_shown)
        record.add(self._held)
        self._held = {}
        self._pending.append(record)
        if self._folder is not None and is_shown:
            self._draw_curve(self._folder, report)

    def _note_flops(self, tally: Tally, window: Window) -> None:
        """Keep what was counted in the first update. Of several pairs it is not known whose forward it was."""
        if self._flops is None:
            return
        self._flops.end()
        if self._flops.total and not self._flops.unknown and len(self._places) == 1:
            tally.note_flops(self._flops.total, window, ranks=self._comm.size)
        self._flops = None

    @property
    def _shown(self) -> Tally:
        return next(iter(self._tallies.values()))

    def _plain(self, report: Report, window: Window) -> dict[str, Any]:
        """Return the entries of a record that need no device."""
        entries: dict[str, Any] = {"start": self._folder.start} if self._folder is not None else {}
        entries |= {"step": report.step, "seconds": round(window.ended_seconds, 6)}
        entries |= {"updated": None, "skipped": None, "loss_scale": report.loss_scale}  # the first two are known later
        entries |= {"bytes_sent": window.bytes_sent, "bytes_dense": window.bytes_dense}
        entries |= {"period": report.period, "averaged": report.averaged, "micro_steps": report.micro_steps}
        entries |= {"samples": window.samples} if window.samples else {}
        return entries | {"memory_bytes": self._state.memory_bytes, "pair": self._places.get(report.pair, 1)}

    def _draw_curve(self, folder: Folder, report: Report) -> None:
        """Record memory over one of the first steps."""
        if self._curve is not None:
            curve, self._curve = self._curve.take(), None
            kind = "allocated" if self._device.type == "cuda" else "resident"
            folder.put_json("memory.json", {"kind": kind, "curves": [{"start": folder.start, "step": report.step, **curve}]})
        elif self._shown.updates == AT_UPDATE - 1:
            self._curve = MemoryCurve(self._device, expected_seconds=self._shown.step_seconds() or 0.1)

    def _write_ready(self, *, is_last: bool = False) -> None:
        """Write the records that are ready, except the newest: values may still be sum_of to it."""
        while len(self._pending) > (0 if is_last else 1) and (is_last or self._pending[0].is_ready):
            self._write(self._pending.popleft())

    def _write(self, record: Record) -> None:
        split: Split = record.split.value()
        self._split = sum_of(self._split, split)
        self._skipped += record.skipped
        self._ranks.add(split)
        if self._folder is None:
            return
        self._state.set_values(record.loss.value() if record.is_shown else None, record.values())
        if self._comm.size > 1 and not self._is_wrapped and time.monotonic() >= self._next_ranks:
            self._note_ranks(record)
        entries = record.as_dict()
        self._folder.write(entries)
        self._sinks.write(entries)

    def _note_ranks(self, record: Record) -> None:
        self._next_ranks = time.monotonic() + RANKS_SECONDS
        taken = self._ranks.take()
        if taken is None:
            return
        record.note("ranks", _rounded(taken))
        waited_for, step_seconds = slowest(taken), self._shown.step_seconds()
        mean_seconds = sum(one["seconds"] for one in taken.values()) / len(taken)
        if waited_for is not None and step_seconds and mean_seconds > 0:
            self._state.slowest = waited_for[0], waited_for[1] / mean_seconds * step_seconds

    def _refresh(self) -> None:
        state, newest = self._state, self._pending[-1]
        if newest.is_ready:
            state.set_values(newest.loss.value() if newest.is_shown else None, newest.values())
        state.steps_per_second, state.samples_per_second = self._shown.steps_per_second(), self._shown.samples_per_second()
        state.flops_per_second = self._shown.flops_per_second()
        state.peak_share = self._share_of_peak(state.flops_per_second)
        state.bytes_sent, state.bytes_dense = self._shown.wire()
        self._screen.show(line(state))

    def _share_of_peak(self, flops_per_second: float | None) -> float | None:
        peak = peak_here(self._device)
        return None if flops_per_second is None or peak is None else flops_per_second / self._comm.size / peak

    # --- close --------------------------------------------------------------------------------------------------

    def close(self, *, state: str = "finished", error: str | None = None) -> None:
        """Write what is left and end the line. The `with` block calls it; calling it again does nothing."""
        global _open
        if self._is_closed:
            return
        self._is_closed, _open = True, None
        heartbeat.listen(None)
        forwards.unwatch(self._handles)
        if self._flops is not None:
            self._flops.end()
        if self._curve is not None:
            self._curve.take()
        ranks = None
        try:  # a failed device may raise here: the summary is written all the same
            self._write_ready(is_last=True)
            ranks = self._ranks.close(waits=state == "finished")
        finally:
            self._own_log.copy()
            if self._folder is not None:
                self._end(self._folder, state, error, None if self._is_wrapped else ranks)

    def _end(self, folder: Folder, state: str, error: str | None, ranks: ByRank | None) -> None:
        """Write the summary: sums and rates of this start, seconds and steps of the whole run."""
        known, seconds = self._state, time.monotonic() - self._began
        whole_seconds, tally = folder.seconds_before + seconds, total_of(self._tallies.values())
        flops = next((one.flops_of(one.updates, one.samples) for one in self._tallies.values()), None)
        flops_per_second = None if flops is None else flops / seconds
        summary = {
            "state": state,
            "error": None if error is None else without_secrets(error),
            "start": folder.start,
            "steps": known.step,
            "skipped": self._skipped,
            "seconds": round(whole_seconds, 3),
            "loss": known.loss,
            "values": known.values,
            "samples": tally.samples or None,
            "samples_per_second": tally.samples / seconds if tally.samples else None,
            "steps_per_second": self._shown.updates / seconds if self._tallies else 0.0,
            "flops_per_second": flops_per_second,
            "peak_share": self._share_of_peak(flops_per_second),
            "bytes_sent": tally.bytes_sent,
            "bytes_dense": tally.bytes_dense,
            "memory_bytes": known.memory_bytes,
            "split": self._split,
            "ranks": None if ranks is None else _rounded(ranks),
        }
        folder.put_json("summary.json", summary)
        folder.close()
        self._sinks.close(summary)
        waited_for = None if ranks is None else slowest(ranks)
        wire = (tally.bytes_sent, tally.bytes_dense)
        text = last_line(state, known, whole_seconds, self._split, wire, waited_for, str(self.path), is_wrapped=self._is_wrapped)
        self._screen.end(text)
        told = counted_micro_steps(known.total_steps, known.step, self._window) if state == "finished" else None
        if told is not None and log.shows(logging.INFO):
            log.say(told)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close(state="stopped" if stop_signal.requested else "finished")
        elif isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            self.close(state="stopped", error=type(error).__name__)
        else:
            self.close(state="failed", error=f"{type(error).__name__}: {error}")


def counted_micro_steps(total_steps: int | None, steps: int, window: int) -> str | None:
    """Return what to write where a total was given in micro-steps: it is a number of updates; None where it was not."""
    if total_steps is None or window < 2 or not total_steps - window < steps * window <= total_steps:
        return None
    return (
        f"fleetx: total_steps={total_steps:,} is a number of updates, and this run made {steps:,}, of {window} micro-steps each: "
        f"write total_steps={steps}, here and in schedules, so that the bar and the time left are right."
    )


def _rounded(ranks: ByRank) -> dict[str, dict[str, float]]:
    return {str(rank): {name: round(value, 6) for name, value in one.items()} for rank, one in ranks.items()}
