"""The life of a step. Every rank passes every line, so every collective is met by all.

backward   seed the loss; when due, arm the buckets first, so that REDUCE starts inside backward
           a bare loss.backward() does the same, from its first gradient on (bare_backward.py)
step       when due: CLIP, UPDATE, settle the loss scale, AVERAGE; else nothing
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..dist import heartbeat, stop_signal
from ..dist.comm import Comm, Pending
from ..dist.heartbeat import Phase
from ..errors import ConfigError, FleetError
from . import dry_steps
from .bucket import Bucket
from .buckets import Buckets, GradientNorms
from .checks.checks import Checks, Place
from .local_shard import whose
from .noise_scale import NoiseScaleMeter
from .on_device.conditional_step import ConditionalStep
from .on_device.undecided import Outcomes, Undecided
from .rank_status import Row
from .report import Report, ReportBuilder, mean_loss
from .sidecar import Verdict
from .slots import News, Stages, Step
from .user_loop import model_pairs, no_sync
from .user_loop.bare_backward import BareBackward
from .user_loop.other_steps import refuse_inside_backward
from .user_loop.user_grad_scaler import GradScaling, refuse_unfit, refuse_unjudged, scaling_of
from .window import Weighing, Window, require_loss

OUT_OF_MEMORY = (
    "This backward ran out of memory. Smaller micro-batches with gradient_merge, recompute and amp need less; "
    "fleet.find_batch(...) finds what fits."
)


@final
class Pipeline:
    def __init__(self, stages: Stages, buckets: Buckets, comm: Comm, checks: Checks, meter: NoiseScaleMeter) -> None:
        self.stages, self.buckets, self.comm = stages, buckets, comm
        self.checks, self.meter = checks, meter
        needs_loss = stages.backward.needs_loss or (stages.average is not None and stages.average.needs_loss)
        in_backward = stages.in_backward is not None
        self.weighing = Weighing(stages.merge, stages.backward, comm, needs_loss=needs_loss, mean_in_backward=in_backward)
        self._norms = GradientNorms(buckets, stages.update, stages.shard)
        self.window = Window()
        self._verdict = Verdict(True)
        """Whether to update by the window just reduced."""
        self._conditional = ConditionalStep(stages.update)
        self._has_grown = False
        """The last update, made before its answer was known, has made state that was not there."""
        self.outcomes = Outcomes(checks, stages.backward)
        self.index = 0
        """Updates due so far, skipped ones too; the same on every rank."""
        self.dropped = 0
        """Windows that were reduced with the other ranks, and dropped by zero_grad() instead of applied."""
        self._is_unapplied = False
        """No step() has followed the last reduce."""
        self._grad_norm: Tensor | None = None
        self._bad_losses: float | Tensor = 0.0
        """0 where all losses of the window that is being reduced are finite on this rank; else a number of them, or NaN."""
        self.param_ids = {id(whose(p)) for bucket in buckets for p in bucket.params}
        self.bare = BareBackward(self)
        if not in_backward:
            buckets.when_unexpected = self.bare.on_gradient
        self.when_ended: Callable[[str], None] | None = None
        """Ends the pair for its model and optimizer too; None while it is being built."""
        self.layout_is_stale: Callable[[], bool] = lambda: False
        """Whether parameters have joined the optimizer since the buckets were laid out."""
        self.when_stale: Callable[[], None] = lambda: None
        """Makes a new pipeline, which reduces the gradients that are there."""
        self.is_own_step: Callable[[Optimizer], bool] = lambda optimizer: False
        """Whether a step of this optimizer is made by the pair, or refused elsewhere."""
        self.is_own_optimizer: Callable[[Optimizer], bool] = lambda optimizer: False
        """Whether calls of this optimizer are the pair's: it was given to fleet.distribute(...), or returned by it."""
        self.refuse_past_parts: Callable[[Optimizer], None] = lambda optimizer: None
        """Raises where a step of an optimizer that is not the pair's would leave out a part of the strategy."""
        self.look_for_unreduced: Callable[[Optimizer], None] = lambda optimizer: None
        """Raises where such an optimizer steps parameters of the model that no pair trains."""
        self.advise_on_memory: Callable[[], str] = lambda: ""
        """Returns what would need less memory in this model."""
        self.warn_of_unowned: Callable[[], None] = lambda: None
        """Used at the first update, and at those after which ranks are compared: gradients of trainable parameters of the model
        that no optimizer holds are of one rank."""
        self.compares_ranks = True
        """Whether ranks are compared after updates; False during one that is measured and undone."""
        self.report_builder = ReportBuilder(stages, buckets, comm)
        if stages.average is not None:
            stages.average.attach(update=stages.update, on_round=self._read_round)
        model_pairs.enlist(self)
        stop_signal.travels_with_updates()

    @property
    def due(self) -> bool:
        """Whether the coming micro-step closes the window, or the one just done has."""
        if self.window.entered:
            self.window.asked_due = True
            return self.window.closed
        return self.window.micro_steps + 1 >= self.stages.merge.micro_steps

    @property
    def skipped(self) -> int:
        """Of `index`, updates not made because their gradients were not finite."""
        return self.outcomes.skipped

    @property
    def is_last_micro_step(self) -> bool:
        """Whether the micro-step under way fills the window."""
        return self.window.micro_steps >= self.stages.merge.micro_steps

    def backward(self, loss: Tensor, weight: float | None = None, *, retain_graph: bool = False) -> None:
        """Run one micro-step. When due it ends with true gradients: reduced, unscaled, averaged."""
        self._check_call(loss, weight)
        if not self.window.closed:
            self._hear_outcome()
        if self.window.closed:
            return self._add_to_reduced(loss, retain_graph=retain_graph)
        due = self.window.micro_steps + 1 >= self.stages.merge.micro_steps
        by_wrapper = self.stages.in_backward is not None  # it writes `param.grad`: taken when backward ends, as local ones are
        at_end = (
            by_wrapper or model_pairs.reentrant_was_used
        )  # a gradient may come twice: a bucket cannot tell when it is complete
        self.buckets.begin()
        self.window.enter(loss, weight)
        self.record(Phase.BACKWARD)
        try:
            if self.merges_shares and not due:
                self.arm_inner()
            if due and not by_wrapper:
                self.arm()  # before backward in every case: its collectives must not change places with those of a part
            if not at_end:
                self.buckets.expect(reduces=due or self.merges_shares)
            with no_sync.leave_local() if at_end else contextlib.nullcontext():
                self.run_backward(loss, self.weighing.seed(weight), retain_graph=retain_graph)
        except BaseException as error:
            self.window.broken = True
            self.abandon_backward()
            if isinstance(error, torch.OutOfMemoryError):
                error.add_note(f"{OUT_OF_MEMORY}{self.advise_on_memory()}")
            raise
        if at_end or not due:
            self._keep()
        if due and by_wrapper:
            self.reduce_now()
        elif due:
            self.close()
        self.record(Phase.SCRIPT)

    def run_backward(self, loss: Tensor, seed: float, *, retain_graph: bool) -> None:
        """Run autograd on the loss times `seed`."""
        gradient = None if seed == 1.0 else torch.full_like(loss, seed)
        if len(model_pairs.alive) == 1:
            loss.backward(gradient, retain_graph=retain_graph)
        else:
            model_pairs.backward_of_one(self, loss, gradient, retain_graph=retain_graph)

    def record(self, phase: Phase) -> None:
        """Record where this rank is: for errors, and for a launcher or a monitor where one reads it."""
        heartbeat.record.step, heartbeat.record.reduce = self.index + 1, None
        if heartbeat.record.is_read:
            heartbeat.enter(phase)

    def _hear_outcome(self) -> None:
        """Hear what became of the last update, where that was not known when it was made (undecided.py). Every rank is here."""
        if self.outcomes.open is not None or self.outcomes.refused is not None or self.checks.alarms.unread is not None:
            self.outcomes.settle()

    def _add_to_reduced(self, loss: Tensor, *, retain_graph: bool) -> None:
        """Add to what a bare backward has reduced already, as another one would; the loss is part of the report."""
        self.window.losses.append(loss.detach().clone())
        self.run_backward(loss, 1.0, retain_graph=retain_graph)

    def step(
        self, *, recycle: bool = False, scaling: GradScaling | None = None, closure: Callable[[], Any] | None = None
    ) -> Report:
        """End a micro-step; a no-op inside a window. `recycle`: the gradients are not looked at afterwards.

        `scaling`: of a GradScaler. `closure`: for an optimizer that runs it inside its step."""
        if scaling is not None and self.stages.in_backward is None and self._has_local():
            refuse_unjudged()
        self._reduce_what_came()
        if self.window.closed:
            return self.update(recycle=recycle, scaling=scaling, closure=closure)
        if not self.window.entered:
            raise FleetError(
                "optimizer.step() found no new gradients: no backward has reached this optimizer's parameters since its last "
                "step(). Call loss.backward() or optimizer.backward(loss) first. Where the loss leaves this model out on some "
                "ranks (a condition on the batch, say), add 0 * model(x).sum() to it there." + self.checks.unused.hint()
            )
        self.window.entered = self.window.asked_due = False
        self.stages.update._opt_called = True  # type: ignore[attr-defined]  # a scheduler may follow every step()
        return self._report(due=False)

    def _reduce_what_came(self) -> None:
        """Take gradients that are this rank's own into the window, before they are applied."""
        self.refuse_inside_averaged()
        self._settle_backward()
        self.window.refuse_broken()
        if self.window.applied and self.buckets.touched():
            self.leave_applied()
        if self._has_local():
            self._take_local_gradients()

    def _has_local(self) -> bool:
        """Return whether there are gradients of this rank alone: left by fleet.no_sync(), or put in place by the user."""
        return self.buckets.touched() if self.window.entered else self.buckets.has_new()

    def reduce_before_scaler(self, optimizer: Optimizer) -> None:
        """Reduce before a GradScaler looks at the gradients. Every rank is here, as in step(): none has seen yet whether they are
        finite."""
        if dry_steps.is_on():
            return
        if self.stages.in_backward is not None:
            return refuse_unfit(self.stages) if self.stages.shard is not None else None
        if no_sync.is_on() and not self.is_own_optimizer(optimizer):
            return  # its step leaves them local too (before_other_step)
        if self._has_local():
            refuse_unfit(self.stages)
            self._reduce_what_came()

    def flush(self) -> Report:
        """Close a window early. Every rank must call it, at the same place."""
        self.reduce_early()
        applies = self.window.closed and not self.window.shared
        return self.update(recycle=True) if applies else self._report(due=False)

    def reduce_early(self) -> None:
        """Reduce the micro-steps so far, half of a flush: the gradients can be looked at before step() applies them."""
        self.refuse_inside_averaged()
        self.settle()
        self.window.refuse_broken()
        if not self.window.closed:
            self._hear_outcome()
        if not self.window.closed and self.buckets.has_new():
            self._take_local_gradients()
        self.checks.agree_to_flush(self.window)
        if self.window.micro_steps and not self.window.closed:
            self.reduce_now()

    def forget_gradients(self, *, set_to_none: bool = True) -> None:
        """Zero the gradients: a no-op inside a window; a reduced window that is not applied still counts as one update boundary.

        Not after a backward that was meant for another pair: a GAN's generator loss leaves gradients in the discriminator."""
        self.settle()
        self.refuse_unclaimed()
        if self.window.closed and self.window.shared:
            self.window = Window()
        if self.window.closed:
            self.index += 1
            self.dropped += not self.buckets.alone
            self.checks.alarms.forget()
            self._settle_buffers()
        dropped = self._news() if self.window.closed and self.buckets.alone else None
        if self.window.closed or self.window.broken:
            self.window = Window()
        if self.window.micro_steps == 0:
            self.buckets.zero(set_to_none=set_to_none, at_once=self.outcomes.open is None)
        if dropped is not None:  # others may have kept theirs, and wait for this rank if a round is due
            self._average(dropped)

    def settle(self) -> None:
        """Drop a backward that failed, put back what was set aside for one that brought nothing, leave what was applied."""
        self._settle_backward()
        self.leave_applied()

    def _settle_backward(self) -> None:
        if self.bare.task is not None:
            self.bare.abandon()
        if self.window.set_aside is not None and not self.buckets.touched():
            self.bare.add_set_aside()

    def refuse_unclaimed(self) -> None:
        """Raise inside a merge window that holds a backward of another pair's loss, which counts as a micro-step unless this
        pair's step() follows it."""
        if self.window.shared and self.window.entered and self.stages.merge.micro_steps > 1:
            raise ConfigError(
                "a backward of another pair's loss has reached this model inside a merge window, and is part of its sums. Write "
                "optimizer.backward(loss), of the pair that is to step, for that loss: it leaves other pairs alone."
            )

    def require_applicable(self) -> None:
        """Raise if the gradients may not be applied, before a method of the optimizer's own does."""
        self._settle_backward()
        if self.window.closed:
            self.checks.hear()
            self.checks.before_update()
            if not self._verdict.is_finite() and not self._is_finite_now() and self.checks.must_stop(self.stages.backward):
                self.checks.stop(self.index + 1, self.window.losses, alone=self.buckets.alone)

    # --- a step of another optimizer over these parameters -------------------------------------------------------

    def before_other_step(self, optimizer: Optimizer) -> None:
        """Do what step() does before the update, which this optimizer makes. Every rank is here, as in step()."""
        if self.is_own_step(optimizer) or no_sync.is_on() or dry_steps.is_on():
            return
        if model_pairs.current_task() >= 0:
            return refuse_inside_backward(optimizer) if self.comm.size > 1 else None
        self.refuse_past_parts(optimizer)
        self.refuse_unreduced(optimizer)
        self._reduce_what_came()
        if not self.window.closed or self.window.applied:
            return  # the second optimizer that steps after one backward: or one that has nothing to apply
        if scaling_of(optimizer) is None:
            self.require_applicable()
        else:
            self.checks.before_update()  # the GradScaler judges what is finite
        self.buckets.adopt_replaced()
        self.window.applied, self._is_unapplied = True, False
        if self.index == 0 or self.checks.compares_after(self.index + 1):
            self.warn_of_unowned()
        if self.index and not self.buckets.alone:
            self.checks.after_update(self.index)  # of the update before, after which buffers are equal only now

    def refuse_unreduced(self, optimizer: Optimizer) -> None:
        if self.comm.size > 1 and not self.is_own_step(optimizer):
            self.look_for_unreduced(optimizer)

    def leave_applied(self) -> None:
        """Count an update that another optimizer has made. Not at once: the pair's own step() may still follow it."""
        if self.window.applied:
            self.index += 1
            self.weighing.learn(self.window, alone=self.buckets.alone)
            self.window = Window()
            self.buckets.restart()
            self.record(Phase.SCRIPT)

    def take_local_gradients(self) -> None:
        """Reduce the gradients that lie in `param.grad` now; every rank is here."""
        if self.buckets.has_new():
            self._take_local_gradients()

    def hint_at_missing(self, hint: Callable[[], str]) -> None:
        """Add a sentence to the errors of missing gradients."""
        self.checks.unused.hint = hint

    @property
    def merges_shares(self) -> bool:
        """Whether a micro-step inside a window is reduced too, so that this rank keeps its shares alone."""
        return self.stages.shard is not None and self.stages.shard.merges_shares and self.stages.merge.micro_steps > 1

    def arm_inner(self) -> None:
        """Make ready to reduce a micro-step inside a window, as it is: factors, flags and buffers wait for its end."""
        self.buckets.arm(self._start_inner, factor=1.0, sends_tail=False)

    def _start_inner(self, bucket: Bucket) -> Pending:
        return self.stages.reduce.start(bucket, self._step(self.index + 1))

    @torch.no_grad()
    def _keep_shares(self) -> None:
        """Reduce a micro-step inside a window, and add this rank's shares to those of the window. Every rank is here."""
        if not self.buckets.is_armed:
            self.arm_inner()
        window, self.buckets.filled_before = self.window, self.window.filled
        with without_autocast(self.buckets.flats[0].device):
            self.buckets.close()
        window.filled = self.buckets.filled()
        if window.sums is None:
            window.sums = [reduced.clone() for reduced in self.buckets.reduced]
        else:
            torch._foreach_add_(window.sums, self.buckets.reduced)
        self.buckets.restart()

    @torch.no_grad()
    def _add_shares(self) -> None:
        """Add the shares of earlier micro-steps to those of the last, which are true gradients already."""
        if self.window.sums is not None:
            factor = next(iter(self.buckets)).factor
            torch._foreach_add_(self.buckets.reduced, self.window.sums, alpha=factor)
            self.window.sums = None

    def _keep(self) -> None:
        """End the backward of a micro-step inside a window."""
        if self.merges_shares and not self.is_last_micro_step:
            return self._keep_shares()
        self.buckets.keep()
        if self.stages.in_backward is not None:
            self.stages.in_backward.after_backward()
        if self.meter.measures(self.index + 1):
            self.meter.after_micro_step(self.buckets, self.window, self.weighing)

    # --- a bare backward --------------------------------------------------------------------------------------

    def keep_hidden(self) -> None:
        self._keep()
        self.buckets.hide()

    def end_bare(self, *, shared: bool) -> None:
        self.bare.end(shared=shared)

    def abandon_bare(self) -> None:
        self.bare.abandon()

    def abandon_backward(self) -> None:
        """Wait for what a backward that failed has sent; the next one may have to be refused."""
        sent = self.buckets.abandon()
        if sent:
            self.checks.half_sent.note(self.report_builder.pair, place=self.checks.place, sent=sent, total=len(self.buckets))

    def _take_local_gradients(self) -> None:
        """Reduce what is this rank's own, without overlap: left by fleet.no_sync(), or put in place by the user."""
        self.weighing.refuse_bare(self.window)
        reopened = self.window.closed
        if reopened and self.holds_weight_shards and self.stages.merge.micro_steps > 1:
            raise FleetError(
                "a backward has added to gradients that this merge window has reduced already, a mean of another scale. "
                "Call optimizer.step() after the backward that closes a window."
            )
        if reopened:
            self.bare.enter(self)
        elif not self.window.entered:
            self.window.enter(None, None)
            self.buckets.count_shown()
        if self.is_last_micro_step:
            if self.stages.in_backward is not None:
                self._keep()
            self.reduce_now(bare=True, again=reopened)
        else:
            self.keep_hidden()

    # --- when due ---------------------------------------------------------------------------------------------

    def arm(self, *, again: bool = False) -> None:
        """Make ready to reduce: inside the coming backward, or at once. `again`: what was reduced before is added to."""
        if self._is_unapplied and self.checks.finite.may_be_left_out and not self._verdict.is_finite():
            self.checks.finite.refuse_left_out()
        if not again:
            self._hear_outcome()
        # Noted first: where ranks have come here in backwards of different models, the collectives of before_reduce may be those
        # that never end, and the error names this place.
        place = Place(self.index + 1, self.window.reduces + 1, self.dropped, self.report_builder.pair)
        heartbeat.record.reduce = place
        self.checks.before_reduce(self.window, again=again)
        self.window.reduces += 1
        if self.meter.every:
            self.meter.begin_reduce()
        alarms = self.checks.alarms_of(self.window, place)
        self._bad_losses = alarms.bad_losses
        factor = self.weighing.factor(self.window, alone=self.stages.reduce.is_local())
        self.buckets.filled_before = self.window.filled
        self.buckets.arm(self._start, factor=factor, alarms=alarms, alone=self.trains_alone)

    def _start(self, bucket: Bucket) -> Pending:
        if self._measures_noise:
            self.meter.before_reduce(bucket)
        step = self._step(self.index + 1, share=self.weighing.share(self.window), bad_losses=self._bad_losses)
        return self.stages.reduce.start(bucket, step)

    @property
    def _measures_noise(self) -> bool:
        """In the first reduce of a window: a rank's own gradients are no longer there in a second one."""
        return self.meter.every > 0 and self.window.reduces == 1 and self.meter.measures(self.index + 1)

    def close(self, *, bare: bool = False) -> None:
        """Wait for the reduce, and judge it. `bare`: another backward may follow; missing gradients are reported in step()."""
        with without_autocast(self.buckets.flats[0].device):
            self.buckets.close()
        self._add_shares()
        if self.window.set_aside is not None:
            self.bare.add_set_aside()
        self.window.closed = True
        if self.stages.in_backward is not None:
            self.stages.in_backward.compare(self.buckets)
        used = self.stages.reduce.used(self.checks.unused.after_reduce())
        # Before the user's own clipping can touch it: being finite is a property of what was reduced.
        looks, measures = self.checks.looks_at_norm(self.stages.backward), self._measures_noise
        is_divided = self.stages.shard is not None and self.stages.shard.scatters
        self._grad_norm = self._norms.measure() if looks or measures or is_divided else None
        nonfinite = self.stages.reduce.nonfinite()
        if nonfinite is not None and self._grad_norm is not None:
            self._grad_norm = torch.where(nonfinite, math.nan, self._grad_norm)
        norm = self._grad_norm if looks else None
        if self.buckets.alone:
            self._verdict = self.checks.judge_alone(norm, defer=bare)
        else:
            self._verdict = self.checks.judge(norm, first=self.index == 0, defer=bare)
        if measures and self._grad_norm is not None:
            self.meter.after_reduce(self._grad_norm, self.buckets, self.window, self.weighing, verdict=self._verdict)
        self.buckets.expose(used)
        if bare and not self._verdict.is_known:
            self.buckets.mark_reduced()
        if self._is_unapplied and not self.buckets.alone and self.compares_ranks:
            self.checks.ranks.after_unapplied(self.checks.place)
        self._is_unapplied = True
        if self.stages.merge.micro_steps > 1 or not self.stages.reduce.is_linear:
            self.buckets.before_more(self.bare.set_aside)

    def reduce_now(self, *, bare: bool = False, again: bool = False) -> None:
        """Reduce without overlap: local gradients, several pairs, or a window that is flushed."""
        if self.stages.in_backward is not None:
            self.stages.in_backward.require_done(self.buckets.missing())
        self.arm(again=again)
        self.close(bare=bare)

    def update(self, *, recycle: bool, scaling: GradScaling | None = None, closure: Callable[[], Any] | None = None) -> Report:
        """CLIP, UPDATE, AVERAGE. Every rank is here: a window closes on all of them or on none, reduced or not."""
        stays_on_device = scaling is None and closure is None and self._can_stay_on_device()
        if not stays_on_device:
            self.checks.hear()
        self.checks.before_update()
        if self.stages.shard is not None:
            self.buckets.refuse_added_to_last()
        if self.checks.flips.versions is not None:
            self.checks.flips.look()
        self._is_unapplied = False
        if self.compares_ranks and (self.index == 0 or self.checks.compares_after(self.index + 1)):
            self.warn_of_unowned()
        if scaling is not None:
            self._verdict = Verdict(scaling.unscale(self.buckets))
        elif not stays_on_device and not self._verdict.is_finite() and self.window.bare:
            self._verdict = Verdict(self._is_finite_now())
        if self.stages.clip is not None and not (recycle and self._grad_norm is not None):
            self.buckets.adopt_replaced()
            self._grad_norm = self._norms.measure_again()
        self.record(Phase.UPDATE)
        if stays_on_device:
            scale = self.stages.backward.scale()
            self._update_undecided(recycle=recycle)
        else:
            scale = self.stages.backward.scale() if scaling is None else scaling.scale
            self._update_decided(recycle=recycle, by_scaler=scaling is not None, closure=closure)
        return self._end_update(scale, recycle=recycle)

    def _can_stay_on_device(self) -> bool:
        """Return whether the update can be made before the host knows if it should be. What the user has edited after a bare
        backward is looked at again, and agreed on."""
        if self.stages.shard is not None or self._verdict.is_known or (self.window.bare and self.buckets.were_edited()):
            return False
        return self._conditional.can_be_made()

    def _update_decided(self, *, recycle: bool, by_scaler: bool, closure: Callable[[], Any] | None) -> None:
        finite = self._verdict.is_finite()
        if not finite and not by_scaler and self.checks.must_stop(self.stages.backward):
            self.checks.stop(self.index + 1, self.window.losses, alone=self.buckets.alone)
        self.index += 1
        if finite:
            self._clip(recycle=recycle)
            self._make_update(closure)
            if self.checks.alarms.reads_late:
                self._conditional.make_room()
        else:
            # A scheduler that follows `due` would warn that it came before the optimizer, were the first update skipped.
            self.stages.update._opt_called = True  # type: ignore[attr-defined]
        self._settle_buffers()
        if not finite:
            self.outcomes.leave_out(self.index, alone=self.buckets.alone)
        self.stages.backward.settle(finite=finite)

    def _make_update(self, closure: Callable[[], Any] | None) -> None:
        if self.stages.shard is not None:
            if self.compares_ranks and not self.stages.shard.holds_weights:
                self.checks.before_sharded(self.index)
            self.buckets.adopt_replaced()
            self.stages.shard.step(closure)
        elif closure is None:
            self.stages.update.step()
        else:
            self.stages.update.step(closure)

    def _update_undecided(self, *, recycle: bool) -> None:
        """Make the update by the device's answer. What follows from it on the host comes when that is heard
        (on_device/undecided.py)."""
        self.index += 1
        self._clip(recycle=recycle, found=self._verdict.found)
        self._has_grown, put_back = self._conditional.step(self._verdict.found)
        self.outcomes.wait_for(
            Undecided(self.index, self._verdict, self.window.losses, put_back=put_back, alone=self.buckets.alone)
        )
        self._settle_buffers()

    def _settle_buffers(self) -> None:
        alone = self.buckets.alone
        if not self.checks.finite.owners:
            return
        if self._verdict.is_known:
            self.checks.finite.settle_buffers(finite=self._verdict.is_finite(), alone=alone)
        else:
            self.checks.finite.settle_buffers_on_device(self._verdict.found, alone=alone)

    def _end_update(self, scale: float, *, recycle: bool) -> Report:
        try:
            if self.outcomes.open is not None and self._needs_answer_now():
                self._hear_outcome()
            averaged = self.stages.average is not None and self._average(self._news())
        except BaseException:  # the update is made: a caller that catches this and goes on must not make it twice
            self.window = Window()
            self.buckets.finish_window(recycle=recycle)
            raise
        report = self._report(due=True, verdict=self._verdict, loss_scale=scale, averaged=averaged)
        self.weighing.learn(self.window, alone=self.buckets.alone)
        self.window = Window()
        # What is not finite is named from the gradients, which stay where they are until then.
        self.buckets.finish_window(recycle=recycle, zeroes=self.outcomes.open is None)
        self.record(Phase.SCRIPT)
        if not self.buckets.alone and self.compares_ranks:
            self.checks.after_update(self.index)
        if self.trains_alone and self.compares_ranks:
            self.checks.flips.take(are_equal=averaged and self._keeps_ranks_equal())
        return report

    def _keeps_ranks_equal(self) -> bool:
        return self.stages.average is not None and self.stages.average.keeps_ranks_equal

    def _needs_answer_now(self) -> bool:
        """State that was made for an update that was not must go before a step finds it; and ranks that average must know how
        they are. All ranks have the same state, and average after the same update."""
        return self._has_grown or (self.stages.average is not None and self.stages.average.meets(self.index))

    def _is_finite_now(self) -> bool:
        """Judge again what a bare backward has reduced: the user may have replaced what was not finite (nan_to_num_).

        All ranks agree, or the update is made on none. Not under a compressor, which leaves zeros where it has seen something
        that is not finite."""
        if not self.stages.reduce.is_linear:
            return False
        self.buckets.adopt_replaced()
        self._grad_norm = self._norms.measure()
        return self.checks.agree_on_edited(
            float(self._grad_norm), self.index + 1, alone=self.buckets.alone, backward=self.stages.backward
        )

    def _average(self, news: News) -> bool:
        """AVERAGE, where there is such a stage. Whether the weights are a new average over all ranks."""
        stage = self.stages.average
        if stage is None or not stage(self._step(self.index), news):
            return False
        self.checks.after_round(self.index, equal=stage.keeps_ranks_equal)
        return True

    def _news(self) -> News:
        window, deferred_errors, stage = self.window, self.checks.deferred_errors, self.stages.average
        return News(
            loss=mean_loss(window.losses, window.weights) if stage is not None and stage.needs_loss else None,
            weight=math.fsum(window.weights) if window.weights else None,
            scale=self.stages.backward.scale(),
            stops=int(stop_signal.requested),
            failed_at=deferred_errors.failed_at,
            missing=len(deferred_errors.missing),
            flips=self.checks.flips.news,
        )

    def _read_round(self, rows: list[Row]) -> None:
        self.checks.read_round(rows)
        self.stages.backward.adopt_scale(min(row.scale for row in rows))

    @property
    def holds_weight_shards(self) -> bool:
        """Whether this rank has its share of the weights alone (fully_shard)."""
        return self.stages.shard is not None and self.stages.shard.holds_weights

    @property
    def trains_alone(self) -> bool:
        return self.comm.size > 1 and self.stages.reduce.is_local()

    @property
    def averages(self) -> bool:
        """Now, or after its dense updates."""
        return self.comm.size > 1 and self.stages.average is not None

    def average_now(self) -> None:
        """Average between windows, on every rank: gradients of a window half filled are of the weights, and the scale, before."""
        self.settle()
        if self.stages.average is not None:
            self._hear_outcome()
        if self.window.micro_steps and not (self.window.closed and self.window.shared):
            raise FleetError(
                "optimizer.average() inside a merge window. Call optimizer.flush() first, or wait until it is closed."
            )
        if self.stages.average is not None:
            self.stages.average.average_now(self._step(self.index), self._news())
            self.checks.finite.remember()

    def refuse_inside_averaged(self) -> None:
        if self.stages.average is not None:
            self.stages.average.refuse_inside()

    def mean_shown(self) -> AbstractContextManager[None]:
        """Hold the mean of all ranks' weights inside; under a per-step reducer they are equal anyway."""
        stage = self.stages.average
        if stage is not None and not self.window.closed:
            self._hear_outcome()
        return contextlib.nullcontext() if stage is None else stage.mean_shown(self.index)

    def _clip(self, *, recycle: bool, found: Tensor | None = None) -> None:
        """CLIP; and an update that would take each gradient's norm is given it, where it is known."""
        # After optimizer.backward(loss) the user may have changed a gradient by ways that leave no trace (`.data`).
        known = (recycle or self.stages.clip is not None) and self._norms.hold()
        factor = None
        if self.stages.clip is not None and self._grad_norm is not None:
            # By a norm of 0, which clips nothing, where the update is not made: as if it were left out.
            norm = self._grad_norm if found is None else torch.where(found == 0.0, self._grad_norm, 0.0)
            factor = self.stages.clip(self.buckets.reduced, norm)
            if self.stages.shard is not None and self.stages.shard.scatters:
                self.stages.shard.note_factor(factor)
        if known:
            self._norms.hand_over(factor=factor)

    def _step(self, index: int, *, share: float = 1.0, bad_losses: float | Tensor = 0.0) -> Step:
        return Step(index=index, lr=self.stages.update.param_groups[0].get("lr"), share=share, bad_losses=bad_losses)

    def _report(
        self, *, due: bool, verdict: Verdict | None = None, loss_scale: float | None = None, averaged: bool = False
    ) -> Report:
        return self.report_builder.report(
            self._step(self.index if due else self.index + 1),
            self.window,
            due=due,
            verdict=verdict,
            loss_scale=loss_scale,
            averaged=averaged,
            grad_norm=self._grad_norm if due else None,
            noise=self.meter.means if due else None,
        )

    def _check_call(self, loss: Any, weight: float | None) -> None:
        require_loss(loss)
        self.refuse_inside_averaged()
        if no_sync.is_on():
            raise ConfigError(
                "optimizer.backward(loss) or minimize(loss) inside fleet.no_sync(), which is for a bare loss.backward(). With "
                "these calls write strategy.gradient_merge = True: it reduces once in k_steps micro-batches."
            )
        self.settle()
        self.window.refuse_broken()
        self.window.refuse_closed()
        self.weighing.require(weight, self.window)

    def end(self, why: str) -> None:
        if self.when_ended is None:
            self.give_up()
        else:
            self.when_ended(why)

    def give_up(self) -> None:
        """End the pair: its parameters are free for another."""
        model_pairs.dismiss(self)
        self.buckets.give_up()
        if self.stages.shard is not None:
            self.stages.shard.let_go()
        if self.stages.in_backward is not None:
            self.stages.in_backward.give_up()
        if self.checks.first_look is not None:
            self.checks.first_look.give_up()


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Leave the user's autocast: a backward inside `with torch.autocast(...)` would compress gradients in 16 bits."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
