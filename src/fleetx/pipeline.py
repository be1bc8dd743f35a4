"""The life of a step. Every rank passes every line, so every collective is met by all.

backward   seed the loss; when due, arm the buckets first, so that REDUCE starts inside backward
step       when due: CLIP, UPDATE, settle the loss scale, AVERAGE; else nothing
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import progress, stopping
from .alarms import AlarmReader
from .bucket import Bucket
from .buckets import Buckets, global_norm
from .calls import require_loss, require_weight
from .comm import Comm, Pending
from .errors import ConfigError, FleetError
from .first_look import FirstLook
from .graph import leaves
from .guards import NonFiniteGuard, RankCheck
from .progress import Phase
from .report import Report
from .slots import Average, Backward, Clip, Merge, Reduce, Step
from .tail import Alarms
from .unused import UnusedCheck


@dataclass(slots=True)
class Window:
    """The micro-steps that make one update."""

    losses: list[Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    micro_steps: int = 0
    entered: bool = False
    """A micro-step began that optimizer.step() has not ended."""
    closed: bool = False
    """Its gradients are reduced; only the update is left."""
    broken: bool = False
    """A backward failed half-way."""


@dataclass(slots=True)
class Stages:
    """What fills the slots of a step."""

    merge: Merge
    backward: Backward
    reduce: Reduce
    clip: Clip | None
    update: Optimizer
    average: Average | None


@dataclass(slots=True)
class Checks:
    """What looks over a step's shoulder."""

    unused: UnusedCheck
    first_look: FirstLook | None
    """Once."""
    finite: NonFiniteGuard
    ranks: RankCheck


_alive: weakref.WeakSet[Pipeline] = weakref.WeakSet()


def owner_of(param: Tensor) -> Pipeline | None:
    """The pair that trains this parameter. A discarded pair owns nothing."""
    return next((pipeline for pipeline in _alive if id(param) in pipeline.param_ids), None)


@final
class Pipeline:
    def __init__(self, stages: Stages, buckets: Buckets, comm: Comm, checks: Checks) -> None:
        self.stages, self.buckets, self.comm = stages, buckets, comm
        self._checks = checks
        self._alarms = AlarmReader(buckets)
        self._finite = True
        """Of the window just reduced: whether to update."""
        self.index = 0
        """Updates due so far, skipped ones too; the same on every rank."""
        self.skipped = 0
        """Of those, updates not made because their gradients were not finite."""
        self.window = Window()
        self._weighted: bool | None = None
        self._usual_weight = self._last_total = 1.0
        self._grad_norm: Tensor | None = None
        self._reported_bytes = comm.bytes_sent
        self.param_ids = {id(p) for bucket in buckets for p in bucket.params}
        _alive.add(self)
        stopping.travels_with_updates()

    @property
    def due(self) -> bool:
        """Whether the coming micro-step closes the window, or the one just done has."""
        if self.window.entered:
            return self.window.closed
        return self.window.micro_steps + 1 >= self.stages.merge.micro_steps

    def backward(self, loss: Tensor, weight: float | None = None, *, retain_graph: bool = False) -> None:
        """One micro-step. When due it ends with true gradients: reduced, unscaled, averaged."""
        self._check_call(loss, weight)
        due = self.window.micro_steps + 1 >= self.stages.merge.micro_steps
        self.buckets.begin()
        self._enter(loss, weight)
        progress.at_step(self.index + 1, Phase.BACKWARD)
        try:
            if due:
                self._arm()
            self.buckets.expect(reduces=due)
            self._run_backward(loss, self._seed(weight), retain_graph=retain_graph)
        except BaseException:
            self.window.broken = True
            self.buckets.abandon()
            raise
        if due:
            self._close()
        else:
            self.buckets.keep()
        progress.at_step(self.index + 1)

    def step(self, *, recycle: bool = False) -> Report:
        """End a micro-step; a no-op inside a window. `recycle`: nobody will look at the gradients afterwards."""
        self._refuse_broken()
        if not self.window.closed and (self.buckets.touched() if self.window.entered else self.buckets.has_new()):
            self._take_bare_gradients()
        if self.window.closed:
            return self._update(recycle=recycle)
        if not self.window.entered:
            raise FleetError("optimizer.step() found no new gradients. Call optimizer.backward(loss) first.")
        self.window.entered = False
        return self._report(due=False, updated=False)

    def flush(self) -> Report:
        """Close a window early. Every rank must call it, at the same place."""
        self._refuse_broken()
        if not self.window.closed and self.buckets.has_new():
            self._take_bare_gradients()
        self._agree_to_flush()
        if self.window.micro_steps and not self.window.closed:
            self._reduce_now()
        return self._update(recycle=True) if self.window.closed else self._report(due=False, updated=False)

    def counters(self) -> dict[str, Any]:
        """What the pipeline itself remembers between two windows; equal on all ranks."""
        return {
            "index": self.index,
            "skipped": self.skipped,
            "usual_weight": self._usual_weight,
            "last_total": self._last_total,
        }

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        self._alarms.forget()
        self._checks.ranks.forget()
        self.index, self.skipped = int(counters["index"]), int(counters["skipped"])
        self._usual_weight, self._last_total = float(counters["usual_weight"]), float(counters["last_total"])

    def common_buffers(self) -> dict[str, Tensor] | None:
        """The floating buffers after the last update: from them the ranks' changes are averaged, to them a skip goes back."""
        tail = self.buckets.tail
        return self._checks.finite.good() if tail is None else tail.common()

    def load_common_buffers(self, common: Mapping[str, Tensor] | None) -> None:
        """None: they are what the buffers hold now."""
        if self.buckets.tail is not None:
            self.buckets.tail.resume(common)
        self._checks.finite.resume(common)

    def _agree_to_flush(self) -> None:
        """A rank whose window is empty would leave the others waiting in the reduce: asked here, where every rank is."""
        counts = self.comm.gather_json(self.window.micro_steps) if self.comm.size > 1 else []
        if any(counts) and not all(counts):
            raise FleetError(
                f"optimizer.flush() found {counts} micro-batches in the ranks' windows; one with none has nothing to reduce. "
                "Give every rank equally many batches: fleet.sampler(data) does."
            )

    def forget_gradients(self, *, set_to_none: bool = True) -> None:
        """zero_grad: a no-op inside a window; a reduced window that is not applied still counts as one update boundary."""
        if self.window.closed:
            self.index += 1
            self._checks.finite.settle_buffers(finite=self._finite)
        if self.window.closed or self.window.broken:
            self.window = Window()
        if self.window.micro_steps == 0:
            self.buckets.zero(set_to_none=set_to_none)

    def _update(self, *, recycle: bool) -> Report:
        """CLIP, UPDATE, AVERAGE. Every rank is here: a window closes on all of them or on none."""
        if self.stages.clip is not None and not (recycle and self._grad_norm is not None):
            self.buckets.adopt_replaced()
            self._grad_norm = global_norm(self.buckets.flats)
        finite = self._finite
        if not finite and self._must_stop():
            self._checks.finite.refuse(self.index + 1, self.window.losses)
        self.index += 1
        if finite:
            if self.stages.clip is not None and self._grad_norm is not None:
                self.stages.clip(self.buckets.flats, self._grad_norm)
            self.stages.update.step()
        else:
            self._skip()
        self._checks.finite.settle_buffers(finite=finite)
        scale = self.stages.backward.scale()
        self.stages.backward.settle(finite=finite)
        if self.stages.average is not None:
            self.stages.average(self._step(self.index), self._window_loss())
        report = self._report(due=True, updated=finite, loss_scale=scale)
        self._learn_usual_weight()
        self.window = Window()
        self.buckets.finish_window(recycle=recycle)
        progress.at_step(self.index + 1)
        if self.stages.average is None:
            self._checks.ranks.after_update(self.index)
        return report

    def _skip(self) -> None:
        self.skipped += 1
        self._checks.finite.note_skip(self.index)
        # A scheduler that follows `due` would warn that it came before the optimizer, were the first update skipped.
        self.stages.update._opt_called = True  # type: ignore[attr-defined]

    # --- the window -------------------------------------------------------------------------------------------

    def _enter(self, loss: Tensor | None, weight: float | None) -> None:
        self.window.micro_steps += 1
        self.window.entered = True
        if loss is not None:
            self.window.losses.append(loss.detach())
        if weight is not None:
            self.window.weights.append(weight)

    def _take_bare_gradients(self) -> None:
        """Gradients of a bare `loss.backward()`: one micro-step, reduced here without overlap."""
        if self.stages.backward.needs_loss:
            raise ConfigError(
                "this strategy needs to see the loss, but gradients came from loss.backward(). "
                "Write optimizer.backward(loss) instead, or optimizer.minimize(loss)."
            )
        if self.window.weights or self._weighted:
            raise ConfigError("this run passes weight=; a bare loss.backward() has none. Write optimizer.backward(loss, weight).")
        self._enter(None, None)
        self.buckets.keep()
        if self.window.micro_steps >= self.stages.merge.micro_steps:
            self._reduce_now()

    def _arm(self) -> None:
        """Make ready to reduce: inside the coming backward, or at once."""
        self._agree()
        alarms = Alarms(bad_losses=self._count_bad_losses(), stops=float(stopping.is_requested()))
        self.buckets.arm(self._start, factor=self._factor(), alarms=alarms)

    def _count_bad_losses(self) -> float | Tensor:
        """On a GPU a tensor, 0 or NaN: it is summed over ranks before anybody looks at it."""
        losses = self.window.losses
        if self._checks.finite.mode == "off" or not losses:
            return 0.0
        if losses[-1].device.type == "cpu":
            return float(sum(not math.isfinite(loss) for loss in losses))
        total = losses[0] if len(losses) == 1 else torch.stack([loss.float() for loss in losses]).sum()
        return total - total

    def _seed(self, weight: float | None) -> float:
        """The factor on the loss. No mean enters here: hooks of the user's see each rank's own gradients, as under DDP."""
        return self.stages.backward.scale() * (1.0 if weight is None else weight / self._usual_weight)

    def _factor(self) -> float:
        """What turns the sums in the buckets into true gradients, once they are summed over ranks."""
        divisor = float(self.comm.size * (self.window.micro_steps if self.stages.merge.mean else 1))
        if self.window.weights:
            self._last_total = self._total_weight()
            divisor = self._last_total / self._usual_weight
        # All weights 0 on all ranks: the gradients are 0 too, and must not become NaN.
        return 0.0 if divisor == 0.0 else 1.0 / (divisor * self.stages.backward.scale())

    def _total_weight(self) -> float:
        total = torch.tensor([math.fsum(self.window.weights)], dtype=torch.float64, device=self.comm.control_device)
        self.comm.all_reduce(total).wait()
        return float(total)

    def _learn_usual_weight(self) -> None:
        """Tokens by the thousand on top of a loss scale would overflow float16: weigh them by a number all ranks know.

        A power of two, so that dividing by it changes no bit."""
        if self.window.weights:
            mean = self._last_total / (self.comm.size * self.window.micro_steps)
            self._usual_weight = 2.0 ** round(math.log2(mean)) if mean > 0 else 1.0

    def _step(self, index: int) -> Step:
        return Step(index=index, lr=self.stages.update.param_groups[0].get("lr"))

    def _start(self, bucket: Bucket) -> Pending:
        return self.stages.reduce.start(bucket, self._step(self.index + 1))

    def _agree(self) -> None:
        """Act on alarms read late; and once, before the first reduce: all ranks weigh or none, and each has its own data."""
        late = self._alarms.sent_before()
        if late is not None:
            self._heed(late)
        if self._checks.first_look is not None:
            look, self._checks.first_look = self._checks.first_look, None
            loss = self.window.losses[0] if self.window.losses else None
            self._weighted = bool(self.window.weights)
            look.finish(self.comm, loss=loss, weighted=self._weighted)

    def _reduce_now(self) -> None:
        """Reduce without overlap: after a bare loss.backward(), or when a window is flushed."""
        self._arm()
        self._close()

    def _close(self) -> None:
        self.buckets.close()
        self.window.closed = True
        used = self._checks.unused.after_reduce()
        # Before the user's own clipping can touch it: being finite is a property of what was reduced.
        self._grad_norm = global_norm(self.buckets.flats) if self._looks_at_norm() else None
        self._finite = True
        if self._looks_at_norm() or self._alarms.is_free() or self.index == 0:
            alarms, norm = self._alarms.read(self._grad_norm)
            # The reduced gradients are equal on all ranks, and so is the answer.
            self._finite = norm is None or (math.isfinite(norm) and not self._losses_are_bad(alarms))
            self._heed(alarms)
        else:
            self._alarms.send()
        self.buckets.expose(used)

    def _heed(self, alarms: Alarms) -> None:
        """Every rank has the same sums, and does the same."""
        stopping.heed(agreed=bool(alarms.stops > 0))
        self._checks.unused.heed(alarms)

    def _losses_are_bad(self, alarms: Alarms) -> bool:
        return self._checks.finite.mode != "off" and not alarms.bad_losses == 0

    def _looks_at_norm(self) -> bool:
        return self.stages.backward.checks_finite or self._checks.finite.mode != "off"

    def _must_stop(self) -> bool:
        """An overflow is what a loss scale expects, while it can shrink; elsewhere it is an accident."""
        return self._checks.finite.mode == "stop" and not self.stages.backward.expects_overflow()

    def _window_loss(self) -> Tensor | None:
        return torch.stack(self.window.losses).mean() if self.window.losses else None

    def _report(self, *, due: bool, updated: bool, loss_scale: float | None = None) -> Report:
        sent, self._reported_bytes = self.comm.bytes_sent - self._reported_bytes, self.comm.bytes_sent
        return Report(
            due=due,
            updated=updated,
            skipped=due and not updated,
            bytes_sent=round(sent),
            loss_scale=self.stages.backward.scale() if loss_scale is None else loss_scale,
            _losses=tuple(self.window.losses),
            _weights=tuple(self.window.weights),
            _grad_norm=self._grad_norm if due else None,
        )

    # --- one backward -----------------------------------------------------------------------------------------

    def _run_backward(self, loss: Tensor, seed: float, *, retain_graph: bool) -> None:
        gradient = None if seed == 1.0 else torch.full_like(loss, seed)
        if len(_alive) == 1:
            loss.backward(gradient, retain_graph=retain_graph)
            return
        others = {i for pipeline in _alive if pipeline is not self for i in pipeline.param_ids}
        # A GAN's generator loss runs through the discriminator: that pair's gradients and window are not ours to touch.
        inputs = [leaf for leaf in leaves(loss) if id(leaf) not in others]
        if not inputs:
            raise ConfigError("this loss depends on no parameter of this optimizer's model, only on another pair's.")
        loss.backward(gradient, retain_graph=retain_graph, inputs=inputs)

    def _refuse_broken(self) -> None:
        if self.window.broken:
            raise FleetError(
                "a backward failed in this window, so its gradients are incomplete. Call optimizer.zero_grad() to drop them."
            )

    def _check_call(self, loss: Any, weight: float | None) -> None:
        require_loss(loss)
        self._refuse_broken()
        if self.window.closed:
            raise FleetError("this window is already reduced. Call optimizer.step() before the next backward.")
        require_weight(weight, mean=self.stages.merge.mean)
        weighted = bool(self.window.weights) if self.window.micro_steps else self._weighted
        if weighted is not None and weighted != (weight is not None):
            raise ConfigError("some calls of minimize/backward pass weight= and some do not; every call must, or none.")
