"""What comes after backward, measured with nothing beside it: reducers, optimizers' rules, and the gradient noise scale.

Numbers are the slowest rank's, or the largest. Few rows of the sample do: gradients are as large.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..engine.dry_run import Rehearsal
from ..engine.noise_scale import noise_scale_of
from ..engine.patching import patched
from ..recompute.memory_probe import gauge_for
from ..recompute.replay import Replay
from ..reduce.powersgd import is_worth_it, matrix_shape
from .candidate import at_once, reducer_settings
from .clock import clocked, typical
from .cost import Gradients, Reducer, wire
from .link import LinkProfile
from .measurements import Reduced
from .probe import TIMED, TIMED_S, lasting_bytes, timed_update
from .subject import Subject, agreed

DGC_LARGE = 16384
MOST_KEPT_BYTES = 12
"""Of a parameter, by any reducer, what it gathers included."""


def gradients_of(
    params: Iterable[Tensor], *, large_from: int = DGC_LARGE, rank: int = 4, min_compression: float = 2.0
) -> Gradients:
    """`large_from`: elements from which DGC makes a tensor sparse; `rank` and `min_compression` are PowerSGD's."""
    found = list(params)
    matrices = [matrix_shape(p) for p in found if is_worth_it(p, rank=rank, min_compression=min_compression)]
    return Gradients(sum(p.numel() for p in found), sum(p.numel() for p in found if p.numel() >= large_from), tuple(matrices))


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
    """What comes after backward, run with nothing beside it; and the bytes that last. Units are computed again: gradients are
    the same, and a step that stores all may not fit. `plain_bytes`: what lasts under a dense reducer; 0 if this is it.
    `kept_bytes`: what the optimizer will keep."""
    settings = at_once(reducer_settings(reducer))
    expected = wire(reducer, gradients, link.link()).seconds
    with subject.bound(settings, rows=subject.few_rows()) as rehearsal, rehearsal.leaving_no_trace():
        pipeline, gauge = rehearsal.optimizer.pipeline, gauge_for(rehearsal.device, rehearsal.lasting)
        begun = time.perf_counter()
        # An update that ran out of memory would do so in the middle of its collectives. So see first that there is enough.
        agreed(rehearsal, lambda: _take(kept_bytes + MOST_KEPT_BYTES * gradients.numel, rehearsal.device))
        with gauge.watching():
            _gather_gradients(rehearsal, units)
            gauge.peak()
            rehearsal.update()  # what it keeps is made here, and so is what the optimizer keeps
            peak = gauge.peak()
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
        extra = max(0, int(lasts) - plain_bytes) if plain_bytes else 0
        return Reduced(reducer, float(slowest), float(sent), extra, int(most)), int(lasts)


def _gather_gradients(rehearsal: Rehearsal, units: Mapping[str, nn.Module]) -> None:
    """For an update, with all units computed again."""
    with patched((module, Replay(name, module, rehearsal.device)) for name, module in units.items()):
        agreed(rehearsal, lambda: rehearsal.optimizer.pipeline.rehearse(rehearsal.forward(), keeps=True))


def _take(count: int, device: torch.device) -> None:
    """Memory, for a moment."""
    if device.type == "cuda":
        torch.empty(count, dtype=torch.uint8, device=device)


def noise_scale(subject: Subject, units: Mapping[str, nn.Module], *, updates: int = 2) -> float | None:
    """In samples, from some updates of the sample; None where it says nothing, as where all ranks have the same one."""
    rows = subject.few_rows() or subject.rows
    with subject.bound({"noise_scale_steps": 1}, rows=rows or None) as rehearsal, rehearsal.leaving_no_trace():
        pipeline = rehearsal.optimizer.pipeline
        for _ in range(updates):
            _gather_gradients(rehearsal, units)
            rehearsal.update()
        found = None if pipeline.meter.means is None else noise_scale_of(pipeline.meter.means)
    told = subject.comm.gather_json(found)[0]
    return None if told is None else float(told) * rows


def rule_seconds(subject: Subject, name: str) -> float:
    """Of an update by LARS or LAMB in place of the user's own optimizer. Collective."""
    with subject.bound({name: True}, rows=subject.few_rows()) as rehearsal, rehearsal.leaving_no_trace():
        return timed_update(rehearsal)
