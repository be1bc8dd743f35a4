"""A bare `loss.backward()`: reduced while it runs, with true gradients at its end, as under DDP.

first gradient   its hook finds that no backward of ours is under way: enter the window, arm the buckets, ask autograd for a call
                 at the end
the others       are counted bucket by bucket, and a complete bucket starts to travel, as in optimizer.backward
the end          reduce what is left, wait, judge; or, inside a merge window, keep the sums and hide them

What is reduced is what `param.grad` holds at the end: earlier backwards, gradients left local by fleet.no_sync(), and all that
the user did to them are in it. That is DDP's rule. Dividing the sum of all by the number of ranks is right for what was reduced
before as well, since that is the same on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, final

import torch

from ...dist import heartbeat
from ...dist.heartbeat import Phase
from ...errors import ConfigError, FleetError
from .. import dry_steps
from ..bucket import Bucket
from ..window import Window
from . import model_pairs, no_sync

if TYPE_CHECKING:
    from ..step import Pipeline


@final
class BareBackward:
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = weakref.ref(pipeline)
        self.task: int | None = None
        """Autograd's number of the one under way."""
        self._thread: int | None = None
        """The thread that trains, while autograd's own thread (of a GPU) says where this rank is."""
        self._counts = False
        """Buckets are reduced as they become complete; else all of them at the end."""
        self._armed = False
        """The reduce was made ready when backward began, and not at its end."""
        self._is_stale = False
        """Parameters were unfrozen or added: at the end a new layout takes this one's place, and reduces."""
        self.set_aside = _weak_method(self._set_aside)
        """Called before another backward adds to what was reduced (`Buckets.before_more`)."""

    @property
    def was_reached(self) -> bool:
        """Whether a backward is over whose gradients wait for a new layout."""
        return self._is_stale

    def on_gradient(self, bucket: Bucket, i: int) -> bool:
        """Handle a gradient that no backward of ours awaits. Whether its bucket counts gradients from now on."""
        pipeline = self._pipeline()
        if pipeline is None or no_sync.is_on() or dry_steps.is_on():
            bucket.note_local(i)
            return False
        task = model_pairs.current_task()
        if task == self.task:
            if bucket.closed:
                raise self._second_gradient(bucket.names[i])
            bucket.note_arrival(i)
            return False
        self._refuse_graph(bucket.names[i])
        # A hook that the user registered later than ours runs after this one, and may change the gradient: not counted, its
        # bucket waits for the end of this backward. For all others, and from now on, ours is the last (`admit`).
        is_final = bucket.has_last_hook(i)
        self._begin(pipeline, task)
        if self._counts and is_final:
            return True
        bucket.elsewhere = True
        bucket.note_arrival(i)
        return False

    def _begin(self, pipeline: Pipeline, task: int) -> None:
        """Begin a bare backward. Every rank is here: it reaches a model on all ranks or on none, as under DDP."""
        if model_pairs.is_inside_function() and not model_pairs.is_inside_segment():
            raise FleetError(
                "a backward inside another one (a custom autograd function calls it) has reached the model: when it ends, the "
                "outer one may still add gradients. Call optimizer.backward(loss), which knows where the outer one ends."
            )
        if self.task is not None:
            self.abandon()
        pipeline.leave_applied()
        window, reopened = pipeline.window, pipeline.window.closed
        pipeline.refuse_inside_averaged()
        window.refuse_broken()
        pipeline.weighing.refuse_bare(window)
        pipeline.buckets.require_unchanged_type()
        self._is_stale = pipeline.layout_is_stale()
        if not self._is_stale:
            self.enter(pipeline)
        elif reopened:
            raise ConfigError(
                "parameters were added, replaced or unfrozen between two backwards of one update. Call optimizer.step() "
                "first, or do it before the first of them."
            )
        # With several pairs, or gradients that come twice, nothing may start before the end: see model_pairs.finish_backward and
        # model_pairs.py. A rank may still count a discarded pair that another has collected already; with one pair reached, the
        # collectives come in the same order either way.
        self._armed = model_pairs.is_only_one() and not self._is_stale and pipeline.is_last_micro_step
        self._counts = model_pairs.is_only_one() and not self._is_stale and not model_pairs.reentrant_was_used
        self.task, self._thread = task, heartbeat.write_from_here()
        model_pairs.join_backward(pipeline, task)
        try:
            if self._armed:
                pipeline.arm(again=reopened)
            elif self._counts and pipeline.merges_shares:
                pipeline.arm_inner()
            if self._counts:
                pipeline.buckets.begin_bare(task, reduces=pipeline.is_last_micro_step, reopened=reopened)
            elif not self._is_stale:
                pipeline.buckets.admit(reopened=reopened)
        except BaseException:
            self.abandon()
            raise

    def enter(self, pipeline: Pipeline) -> None:
        """Begin a micro-step, or go on with it: all bare backwards before one step() are of one micro-step."""
        window = pipeline.window
        pipeline.refuse_unclaimed()
        if window.closed:
            pipeline.buckets.reopen()
        elif not window.entered:
            window.enter(None, None)
        elif window.asked_due:
            raise ConfigError(
                "optimizer.due was False after loss.backward(), and optimizer.step() was not called before the next one. Call "
                "step() after every micro-batch: inside a merge window it does nothing but count."
            )
        pipeline.record(Phase.BACKWARD)

    def end(self, *, shared: bool) -> None:
        """Reduce, where the window is full. `shared`: the backward has reached other pairs too."""
        pipeline = self._pipeline()
        assert pipeline is not None and self.task is not None
        if self._is_stale:
            self.task = None
            heartbeat.write_from(self._thread)
            return pipeline.when_stale()
        reopened, pipeline.window.shared = pipeline.window.closed, shared
        try:
            if not pipeline.is_last_micro_step:
                pipeline.keep_hidden()
            elif self._armed:
                pipeline.close(bare=True)
            else:
                pipeline.reduce_now(bare=True, again=reopened)
        except BaseException:
            self.abandon()
            raise
        self.task = None
        pipeline.record(Phase.SCRIPT)
        heartbeat.write_from(self._thread)

    def abandon(self) -> None:
        """Drop a backward that failed half-way. What it added to a merge window cannot be taken out again."""
        if self.task is not None:
            heartbeat.write_from(self._thread)
        self.task = None
        pipeline = self._pipeline()
        if pipeline is not None:
            pipeline.abandon_backward()
            self._break_window(pipeline)

    def _break_window(self, pipeline: Pipeline) -> None:
        """Mark the window of a backward that failed half-way. Without merging the user zeroes what it left, as in torch."""
        pipeline.checks.alarms.forget()
        if pipeline.stages.merge.micro_steps > 1:
            pipeline.window.broken = True
        else:
            pipeline.window = Window()

    # --- another backward before step(), which is reduced by itself ---------------------------------------------------

    @torch.no_grad()
    def _set_aside(self) -> None:
        """Let another backward begin from zero: a merged mean is of another scale than its gradients, and what was compressed
        must not be compressed again. What was reduced is added when that is reduced too."""
        pipeline = self._pipeline()
        if pipeline is None:
            return
        if not pipeline.window.closed:
            pipeline.buckets.ready_for_more()
        elif pipeline.window.set_aside is None:
            pipeline.stages.reduce.refuse_again()  # here, where no gradient was added yet: what was reduced may still be applied
            pipeline.buckets.adopt_replaced()
            pipeline.window.set_aside = pipeline.buckets.set_aside()
            # autograd.grad calls the same hooks, and adds nothing: then nothing will be reduced, and it is put back.
            model_pairs.queue_callback(_weak_method(self._put_back_unless_more))

    def _put_back_unless_more(self) -> None:
        pipeline = self._pipeline()
        if pipeline is None or pipeline.window.set_aside is None or self.task is not None or pipeline.buckets.touched():
            return
        self.add_set_aside()
        pipeline.buckets.close_again()
        pipeline.buckets.before_more(self.set_aside)

    @torch.no_grad()
    def add_set_aside(self) -> None:
        """Add what was set aside to what was reduced since."""
        pipeline = self._pipeline()
        if pipeline is not None and pipeline.window.set_aside is not None:
            torch._foreach_add_(pipeline.buckets.reduced, pipeline.window.set_aside)
            pipeline.window.set_aside = None

    def _refuse_graph(self, name: str) -> None:
        if torch.is_grad_enabled():  # in a backward only with create_graph=True
            raise ConfigError(
                f"the gradient of `{name}` has a graph of its own, from backward(create_graph=True); ranks can "
                "exchange its numbers, but not its graph. Write torch.autograd.grad(loss, parameters, create_graph=True) for "
                "the inner gradient and backward() for the whole loss, or stay local: with fleet.no_sync():"
            )

    def _second_gradient(self, name: str) -> FleetError:
        return FleetError(
            f"`{name}` got two gradients in one backward, and the first is reduced already. Does a custom autograd function run "
            "a backward inside its own? Let one backward give it one gradient."
        )


def _weak_method(method: Callable[[], None]) -> Callable[[], None]:
    """Call the method as long as its object lives: what holds this must not keep it alive."""
    held = weakref.WeakMethod(method)

    def call() -> None:
        found = held()
        if found is not None:
            found()

    return call
