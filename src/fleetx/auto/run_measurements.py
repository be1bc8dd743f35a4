"""Measure for `auto`, in order, and leave out what can be spared when time runs short or something does not work."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from ..engine import dry_steps
from ..engine.dry_run import Rehearsal
from ..engine.modules.compiling import cannot_compile, compiled_by
from ..engine.modules.patching import patched
from ..engine.noise_scale import noise_scale_of
from ..engine.slots import PlanContext, Slot
from ..errors import FleetError, first_line
from ..recompute.memory_probe import memory_probe_for
from ..recompute.replay import Replay
from ..strategies import catalogue
from . import candidate
from .candidate import RISKS, allows
from .clock import clocked, typical
from .cost import Gradients, Reducer, wire
from .link import LinkProfile, measured_link
from .measurements import Measured, Reduced
from .probe import TIMED, TIMED_S, PrecisionProbe, lasting_bytes, precisions, timed_update
from .request import Asked
from .subject import Subject, agreed, raise_if_alone

MEASURING_S = 35.0
"""Seconds after which nothing more is measured that can be left out."""
COMPILED_ON = ("cuda",)
"""Types of devices on which compiled blocks are measured: for a CPU compiling takes minutes, and wins little."""
FAR_SLOWER = 1.5
"""A precision whose step takes so many times as long as the fastest one's is not measured in full."""


@final
class Measuring:
    """Measure. Every method is collective, and its results are the same on all ranks."""

    def __init__(self, subject: Subject, asked: Asked) -> None:
        self._subject, self._asked, self._auto, self._fixed = subject, asked, asked.auto, subject.fixed
        self._batches = asked.batches(subject.rows)
        self._missing: dict[str, str] = {}
        self.notes: list[str] = []
        self.rules: dict[str, float | str] = {}
        """Seconds of an update by the rules of other parts, by name; or why that cannot be."""
        self.kept_bytes = 0
        """Bytes that the optimizer keeps once it has made an update."""
        self.compiling_s = 0.0
        """Seconds that measuring with compiled blocks took."""

    def run(self) -> Measured:
        subject, memory = self._subject, self._asked.memory
        subject.comm.barrier()
        subject.tell("measuring the link between the ranks" if subject.comm.size > 1 else "measuring a step")
        link = measured_link(subject.comm, subject.device)
        trained = {id(p): p for group in subject.optimizer.param_groups for p in group["params"]}
        gradients = gradients_of(trained.values())
        probes = self._probes(memory)
        units, update_s = probes[0].units, probes[0].update_s
        self.kept_bytes = probes[0].state_bytes
        lacks_memory = memory is not None and not any(probe.fits_plainly(batch) for probe in probes for batch, _ in self._batches)
        reduced: list[Reduced] = []
        plain_bytes = 0
        for reducer in self._reducers(gradients, lacks_memory=lacks_memory):
            subject.tell(f"measuring the exchange of {reducer.kind}" if subject.comm.size > 1 else "measuring an update")
            known = {"link": link, "gradients": gradients, "units": units, "kept_bytes": self.kept_bytes}
            found = self._reduced(reducer, reduced, plain_bytes=plain_bytes, **known)
            if found is not None:
                reduced.append(found[0])
                plain_bytes = plain_bytes or found[1]
        limits = [] if memory is None else sorted({memory - one.lasting_bytes for one in reduced}, reverse=True)
        passes = [probe.pass_of(batch, limits) for probe in probes for batch in dict.fromkeys(b for b, _ in self._batches)]
        scale = None
        is_quick = bool(reduced) and reduced[0].reducer.is_hidden and reduced[0].seconds < 1
        if subject.comm.size > 1 and is_quick and subject.elapsed_s() < MEASURING_S:
            scale = self._noise_scale(units)
        name = torch.cuda.get_device_name(subject.device) if subject.device.type == "cuda" else "CPU"
        subject.tell("timing the rules of other optimizers")
        self._time_rules()
        seconds = subject.elapsed_s()
        return Measured(
            name,
            link,
            gradients,
            update_s,
            tuple(passes),
            tuple(reduced),
            1.0,
            scale,
            seconds,
            dict(self._missing),
            state_bytes=self.kept_bytes,
            lacks_memory=lacks_memory,
        )

    def _probes(self, memory: int | None) -> list[PrecisionProbe]:
        """Measure each precision. The first must work, float32 or the user's own; another that does not is left out, with its
        error. One far slower than the fastest is measured no more than it must be: other batches would not make it the best."""
        grows, batches = self._asked.share is not None, [batch for batch, _ in self._batches]
        names = self._precisions()
        probes = {name: PrecisionProbe(self._subject, name, memory=memory, grows=grows) for name in names}
        looks = {name: self._look(probe, is_first=name == names[0], name=name) for name, probe in probes.items()}
        fastest, best = min(((seconds, name) for name, seconds in looks.items() if seconds), default=(0.0, ""))
        found: list[PrecisionProbe] = []
        for name, probe in probes.items():
            is_slow = looks[name] > FAR_SLOWER * fastest > 0
            if found and is_slow and found[0].fits_somehow(min(batches)):
                reason = f"a step takes {looks[name] / fastest:.1f} times as long as in {best} here"
                self._missing.setdefault(name, reason)
            if name in self._missing:
                continue
            if found and self._subject.elapsed_s() > MEASURING_S:
                self._missing[name] = "was not measured, for want of time"
                continue
            self._subject.tell(f"measuring steps in {name}: memory of the blocks, and time")
            try:
                probe.run([] if is_slow else batches, is_first=not found)
                found.append(probe)
            except FleetError as error:
                raise_if_alone(error)
                if not found:
                    raise
                self._missing[name] = f"does not run here ({first_line(error)})"
        fast = best if any(probe.precision == best for probe in found) else found[0].precision
        return [*found, *self._compiled_probe(fast, batches, memory=memory, grows=grows)]

    def _compiled_probe(self, precision: str, batches: list[int], *, memory: int | None, grows: bool) -> list[PrecisionProbe]:
        """Measure compiled blocks in the fastest precision; nothing where they cannot be, or the user has said how."""
        why_not = self._why_not_compiled()
        if why_not is not None:
            self._missing["compile"] = why_not
            return []
        began = self._subject.elapsed_s()
        probe = PrecisionProbe(self._subject, precision, memory=memory, grows=grows, is_compiled=True)
        self._look(probe, is_first=False, name="compile")
        if "compile" not in self._missing:
            try:
                probe.run(batches, is_first=False)
            except FleetError as error:
                raise_if_alone(error)
                self._missing["compile"] = f"does not run here ({first_line(error)})"
        self.compiling_s = self._subject.elapsed_s() - began
        return [] if "compile" in self._missing else [probe]

    def _why_not_compiled(self) -> str | None:
        """Say why compiled blocks are not measured, the same on all ranks; None where they are. Collective."""
        subject = self._subject
        if "compile" in self._fixed.names:
            return "is as you set it"
        if not allows(self._auto.risk, RISKS[1]):
            return "changes results by rounding"
        if subject.device.type not in COMPILED_ON:
            return f"is not tried on a {subject.device.type.upper()}, for which compiling takes long and wins little"
        if any(compiled_by(module) == "user" for module in subject.model.modules()):
            return "the model is compiled already"
        missing = [why for why in subject.comm.gather_json(cannot_compile(subject.device)) if why is not None]
        if missing:
            return f"cannot be: {missing[0]}"
        return "was not measured, for want of time" if subject.elapsed_s() > MEASURING_S else None

    def _precisions(self) -> list[str]:
        if self._fixed.precision is not None:
            return [self._fixed.precision]
        return precisions(self._subject.device) if allows(self._auto.risk, RISKS[1]) else ["float32"]

    def _look(self, probe: PrecisionProbe, *, is_first: bool, name: str) -> float:
        self._subject.tell(f"a first step in {name}")
        try:
            return probe.look()
        except Exception as error:  # `everywhere` has raised on all ranks, each what it knows
            if isinstance(error, FleetError):
                raise_if_alone(error)
            if is_first:
                raise
            self._missing[name] = f"does not run here ({type(error).__name__}: {first_line(error)})"
            return 0.0

    def _noise_scale(self, units: Mapping[str, nn.Module]) -> float | None:
        try:
            return noise_scale(self._subject, units)
        except FleetError as error:
            raise_if_alone(error)
            self.notes.append(f"the gradient noise scale could not be measured: {first_line(error)}")
            return None

    def _time_rules(self) -> None:
        """Time the rules that could take this optimizer's place. They are reported, never chosen."""
        for name, part in catalogue().items():
            if Slot.UPDATE not in part().claims() or type(self._subject.optimizer) not in part.inner:
                continue
            if name in self._fixed.names:
                continue
            if self._fixed.refusal(name) is not None or self._subject.elapsed_s() > MEASURING_S:
                continue
            try:
                self.rules[name] = rule_seconds(self._subject, name)
            except FleetError as error:
                raise_if_alone(error)
                self.rules[name] = first_line(error)

    def _reducers(self, gradients: Gradients, *, lacks_memory: bool) -> list[Reducer]:
        """List what is measured: Local SGD once, with an averaging in every update; what a longer period costs follows."""
        if self._fixed.reducer is not None:
            return [self._fixed.reducer.every_update()]
        if self._subject.comm.size == 1:
            return [candidate.DENSE]
        context = PlanContext(self._subject.comm.size, self._subject.device.type, gradients.shapes, lacks_memory)
        allowed = [one for one in candidate.offered(context) if allows(self._auto.risk, one.risk)]
        beside = [one for one in allowed if one == candidate.DENSE or self._fixed.refusal(one.kind) is None]
        return list(dict.fromkeys(one.every_update() for one in beside))

    def _reduced(self, reducer: Reducer, before: Sequence[Reduced], **known: Any) -> tuple[Reduced, int] | None:
        if before and self._subject.elapsed_s() > MEASURING_S:
            self._missing[reducer.kind] = "was not measured, for want of time"
            return None
        try:
            return reduced_by(self._subject, reducer, **known)
        except FleetError as error:
            raise_if_alone(error)
            if not before:
                raise
            self._missing[reducer.kind] = f"refused: {first_line(error)}"
            return None


# What comes after backward is measured with nothing beside it: reducers, optimizers' rules, and the gradient noise scale.
# Numbers are the slowest rank's, or the largest. Few rows of the sample are enough: gradients are as large.

MOST_KEPT_BYTES = 12
"""Most bytes that a reducer keeps of one number of the gradients, what it gathers included."""


def gradients_of(params: Iterable[Tensor]) -> Gradients:
    """Take the shapes of tensors, dimensions in the order that they have in memory (channels_last differs)."""
    return Gradients(tuple(_shape_in_memory(param) for param in params))


def _shape_in_memory(param: Tensor) -> tuple[int, ...]:
    shape = tuple(param.shape)
    if not torch.ops.aten.is_non_overlapping_and_dense(param):
        return shape
    order = sorted(range(len(shape)), key=lambda d: (shape[d] > 1, param.stride(d), -d), reverse=True)
    return tuple(shape[d] for d in order)


def reduced_by(
    subject: Subject,
    reducer: Reducer,
    *,
    link: LinkProfile,
    gradients: Gradients,
    units: Mapping[str, nn.Module],
    plain_bytes: int,
    kept_bytes: int,
) -> tuple[Reduced, int]:
    """Measure what comes after backward, with nothing beside it; also return the bytes that last. Units are computed again:
    gradients are the same, and a step that stores all may not fit. `plain_bytes`: bytes that last in plain training; 0 if this
    is it. `kept_bytes`: bytes that the optimizer will keep."""
    settings = reducer.steady().settings()
    expected = wire(reducer, gradients, link.link()).seconds
    with subject.bound(settings, rows=subject.few_rows()) as rehearsal, rehearsal.leaving_no_trace():
        pipeline, probe = rehearsal.optimizer.pipeline, memory_probe_for(rehearsal.device, rehearsal.lasting)
        begun = time.perf_counter()
        # An update that ran out of memory would do so in the middle of its collectives. So see first that there is enough.
        agreed(rehearsal, lambda: _take(kept_bytes + MOST_KEPT_BYTES * gradients.numel, rehearsal.device))
        with probe.watching():
            _gather_gradients(rehearsal, units)
            probe.peak()
            rehearsal.update()  # what it keeps is made here, and so is what the optimizer keeps
            peak = probe.peak()
        sent = pipeline.comm.bytes_sent
        seconds = []
        took = max(expected, *rehearsal.comm.gather_json(time.perf_counter() - begun))
        repeats = min(TIMED, max(1, int(TIMED_S / took)))
        for _ in range(repeats):
            _gather_gradients(rehearsal, units)
            seconds.append(clocked(rehearsal, rehearsal.update))
        sent = (pipeline.comm.bytes_sent - sent) / repeats
        lasting = lasting_bytes(rehearsal)
        ranks = rehearsal.comm.gather_json([typical(seconds), peak, lasting])
        slowest, most, lasts = (max(rank[i] for rank in ranks) for i in range(3))
        extra = int(lasts) - plain_bytes if plain_bytes else 0
        extra = extra if reducer.saves_memory else max(0, extra)
        return Reduced(reducer, float(slowest), float(sent), extra, int(most)), int(lasts)


def _gather_gradients(rehearsal: Rehearsal, units: Mapping[str, nn.Module]) -> None:
    """Compute the gradients of an update, with all units computed again."""
    with patched((module, Replay(name, module, rehearsal.device)) for name, module in units.items()):
        agreed(rehearsal, lambda: dry_steps.backward(rehearsal.optimizer.pipeline, rehearsal.forward(), keeps=True))


def _take(count: int, device: torch.device) -> None:
    """Allocate so many bytes for a moment."""
    if device.type == "cuda":
        torch.empty(count, dtype=torch.uint8, device=device)


def noise_scale(subject: Subject, units: Mapping[str, nn.Module], *, updates: int = 2) -> float | None:
    """Measure it in samples, from some updates; None where it says nothing, as where all ranks have the same sample."""
    rows = subject.few_rows() or subject.rows
    with subject.bound({"noise_scale_steps": 1}, rows=rows or None) as rehearsal, rehearsal.leaving_no_trace():
        pipeline = rehearsal.optimizer.pipeline
        for _ in range(updates):
            _gather_gradients(rehearsal, units)
            rehearsal.update()
        found = None if pipeline.meter.means is None else noise_scale_of(pipeline.meter.means)
    agreed_scale = subject.comm.gather_json(found)[0]
    return None if agreed_scale is None else float(agreed_scale) * rows


def rule_seconds(subject: Subject, name: str) -> float:
    """Time an update by a part's rule in place of the user's own optimizer. Collective."""
    with subject.bound({name: True}, rows=subject.few_rows()) as rehearsal, rehearsal.leaving_no_trace():
        return timed_update(rehearsal)
