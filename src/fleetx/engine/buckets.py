"""All buckets of one model: filled by autograd hooks, reduced while backward goes on.

    hook of each parameter:  gradient arrives -> count down its bucket
    bucket complete:         its gradients are in the flat buffer, `param.grad` is a view of it
    when armed:              multiply by the factor that makes true gradients, start REDUCE, in index order
    close:                   complete what is left, start it, wait for all

The layout is fixed for the run: reversed registration order, which is about the order of backward.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from ..dist.comm import Comm, Pending, is_initialized
from ..errors import ConfigError, PeerError
from .bucket import Bucket, Hook
from .gradient_share import close_shares, open_shares, refuse_added
from .layout import bucket_runs
from .sidecar import ALARMS, NO_ALARMS, Alarms, Tail
from .user_loop.model_pairs import owner_of
from .user_loop.optimizer_hooks import may_change_gradients

if TYPE_CHECKING:
    from .slots import Shard

Start = Callable[[Bucket], Pending]


def note_local(bucket: Bucket, i: int) -> bool:
    """Leave a gradient as this rank's own."""
    bucket.note_local(i)
    return False


@final
class Buckets:
    """All buckets of one model, with the hooks that fill them."""

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        *,
        bucket_bytes: int,
        tail: Tail | None,
        carries_tail: bool,
        comm: Comm,
        whole: bool = False,
        shard: Shard | None = None,
    ) -> None:
        """Lay out the buckets. `shard`: divides them between the ranks; None: each rank has all of them."""
        self.comm = comm
        self.shard = shard
        self.tail = tail
        runs = bucket_runs(list(params.items())[::-1], bucket_bytes=bucket_bytes)
        joins = tail is not None and carries_tail and runs[-1][0][1].dtype == tail.dtype
        tail_numels = [0] * (len(runs) - 1) + [tail.numel if tail is not None and joins else 0]
        pieces = enumerate(zip(runs, tail_numels, strict=True))
        divided: dict[str, Any] = {}
        if shard is not None and not shard.holds_weights:
            own = shard.rank if shard.scatters else None
            divided = {"shares": shard.shares, "dress": shard.dress, "own": own, "frees": shard.frees}
        self._buckets = [Bucket(i, run, tail_numel=n, whole=whole, **divided) for i, (run, n) in pieces]
        last = self._buckets[-1]
        self._tail_tensor = last.tail
        if tail is not None and not joins:
            self._tail_tensor = torch.zeros(tail.numel, dtype=tail.dtype, device=last.flat.device)
        self._tail_joins = joins
        self.overlaps = True
        """Complete buckets are reduced while backward goes on."""
        self._start: Start | None = None
        self.alone = False
        """The window is not reduced: the tail stays here too, and what it would carry is this rank's own."""
        self._alarms = Alarms()
        self._sends_tail = True
        self.filled_before: list[bool] | None = None
        """Which parameters had a gradient in earlier micro-steps of the window whose sums are no longer here; None: all are."""
        self._launched = 0
        self._pending: list[Pending] = []
        self.when_unexpected: Callable[[Bucket, int], bool] = note_local
        """What to do with a gradient that no backward of ours awaits."""
        # Weak: hooks outlive a discarded optimizer, and must then do nothing.
        self._myself: Callable[[], Buckets | None] = weakref.ref(self)
        self._handles = [handle for bucket in self._buckets for handle in bucket.add_hooks(self._myself)]
        self._early_hooks: list[tuple[dict[int, Hook], int, Hook]] = []
        self._marks: list[tuple[int, list[bool]]] = []
        """The `edit_mark` of each bucket when a bare backward had reduced the window."""
        self._before_more: Callable[[], None] | None = None

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        if getattr(self, "_handles", None) and self.comm.size > 1:
            _refuse_when_used([param for bucket in self._buckets for param in bucket.params])
        self.give_up()

    def give_up(self) -> None:
        """Stop taking gradients."""
        for handle in getattr(self, "_handles", []):
            handle.remove()
        self._handles = []
        if any(bucket.divided for bucket in getattr(self, "_buckets", [])):
            self.release()  # shares of gradients: no backward may add to them, and model.cpu() could not move them

    def release(self) -> None:
        """Let go of gradients that lie in these buffers."""
        for bucket in self._buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param.grad is view:
                    param.grad = None

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def flats(self) -> list[Tensor]:
        """The whole buffers; of those that are divided and freed there may be no memory."""
        return [bucket.flat for bucket in self._buckets]

    @property
    def reduced(self) -> list[Tensor]:
        """Where the reduced gradients are: the whole buffers, or this rank's shares."""
        return [bucket.reduced for bucket in self._buckets]

    def set_aside(self) -> list[Tensor]:
        """Return what was reduced, and let the buffers be zero, so that more gradients may come."""
        kept = [reduced.clone() for reduced in self.reduced]
        for bucket in self._buckets:
            bucket.allocate()
            open_shares(bucket.views)
        torch._foreach_zero_([*self.flats, *(bucket.reduced for bucket in self._buckets if bucket.frees)])  # else part of them
        return kept

    def close_again(self) -> None:
        """Show what was reduced as before `set_aside`, to which nothing was added."""
        for bucket in self._buckets if self.shard is not None else ():
            close_shares(bucket.views)
            bucket.free()

    def ready_for_more(self) -> None:
        """Have memory where a backward is about to add to gradients that the last update has left, though none may be applied:
        another pair's loss may do so, and zero_grad() follows."""
        for bucket in self._buckets:
            if bucket.is_freed() and any(p.grad is view for p, view in zip(bucket.params, bucket.views, strict=True)):
                bucket.allocate()
                bucket.flat.zero_()

    # --- one backward -----------------------------------------------------------------------------------------

    def touched(self) -> bool:
        """Return whether gradients of this rank alone came since the last micro-step ended."""
        return any(bucket.touched for bucket in self._buckets)

    def has_new(self) -> bool:
        """Return whether gradients came so, or were put in place by the user."""
        for bucket in self._buckets:
            if bucket.touched:
                return True
            for param, view in zip(bucket.params, bucket.views, strict=True):
                grad = param.grad
                if grad is not None and grad is not view:
                    return True
        return False

    def begin(self) -> None:
        """Make ready for a backward of ours: the last update's gradients go, those of a bare backward or of this window stay."""
        self.require_unchanged_type()
        if self._buckets[0].keeps:
            self.show_window()
            return
        if self.has_new():
            for bucket in self._buckets:
                bucket.sure, bucket.touched = False, True
            return
        for bucket in self._buckets:
            bucket.make_room()

    def begin_bare(self, task: int, *, reduces: bool, reopened: bool) -> None:
        """Begin a bare backward: its first gradient is there."""
        self.admit(reopened=reopened)
        for bucket in self._buckets:
            bucket.expect_bare(task, reduces=reduces)

    def admit(self, *, reopened: bool) -> None:
        """Be ready for gradients that are added to what `param.grad` holds now."""
        for bucket in self._buckets:
            bucket.elsewhere = bucket.touched
            bucket.admit(reopened=reopened)

    def count_shown(self) -> None:
        """Count what `param.grad` shows as part of this window: left by the last update, or zeros of zero_grad."""
        for bucket in self._buckets:
            bucket.count_shown()

    def reopen(self) -> None:
        """Open what was reduced: it may be added to, and is then reduced again."""
        for bucket in self._buckets:
            bucket.closed = False

    def before_more(self, action: Callable[[], None]) -> None:
        """Call `action` once, before the next gradient is added to what `param.grad` holds.

        By a hook on each parameter that autograd calls before it adds; taken out and put back without being registered again."""
        if not self._early_hooks:
            hook = _make_early_hook(self._myself)
            params = [param for bucket in self._buckets for param in bucket.params if param.requires_grad]
            handles = [param.register_hook(hook) for param in params]
            self._handles += handles
            self._early_hooks = [(handle.hooks_dict_ref(), handle.id, hook) for handle in handles]
        self._before_more = action
        for hooks, key, hook in self._early_hooks:
            hooks[key] = hook

    def on_more(self) -> None:
        action, self._before_more = self._before_more, None
        for hooks, key, _ in self._early_hooks:
            hooks.pop(key, None)
        if action is not None:
            action()

    def require_unchanged_type(self) -> None:
        for bucket in self._buckets:
            bucket.require_unchanged_type()

    def hide(self) -> None:
        for bucket in self._buckets:
            bucket.hide()

    def show_window(self) -> None:
        """Show the sums of the whole window in `param.grad`, where DDP reduces them."""
        for bucket in self._buckets:
            if bucket.whole and bucket.keeps:
                bucket.show_window()

    def arm(
        self, start: Start, *, factor: float, alarms: Alarms = NO_ALARMS, alone: bool = False, sends_tail: bool = True
    ) -> None:
        """Begin to reduce: from now on a complete bucket is multiplied by `factor` and sent at once; `alarms` travel with the
        last. `sends_tail`: whether these and the tail travel at all."""
        self._start, self._alarms, self.alone, self._sends_tail = start, alarms, alone, sends_tail
        self._launched = 0
        for bucket in self._buckets:
            bucket.aim(factor)
        self._pending = []

    @property
    def is_armed(self) -> bool:
        return self._start is not None

    def expect(self, *, reduces: bool) -> None:
        """Prepare all buckets for a backward of ours."""
        for bucket in self._buckets:
            bucket.expect(reduces=reduces)

    def keep(self) -> None:
        """End a micro-step inside a window: its gradients are safe in the flat buffers."""
        for bucket in self._buckets:
            bucket.collect()
            bucket.end_micro_step()

    def abandon(self) -> int:
        """Give up a backward that failed: wait for what was started, start nothing more. Return how many buckets were sent."""
        sent = 0 if self._start is None or self.alone else self._launched
        pending, self._start, self._pending = self._pending, None, []
        for work in pending:
            with contextlib.suppress(RuntimeError, PeerError):  # an error of this backward, or of the next call
                work.wait()
        for bucket in self._buckets:
            bucket.wake_hooks()
            bucket.expecting = False
        return sent

    def close(self) -> None:
        """Start what backward left over, wait for everything; every view then holds the mean over ranks."""
        for bucket in self._buckets:
            if not bucket.closed:
                bucket.collect()
                bucket.zero_missing()
                bucket.closed, bucket.expecting = True, False
        self._launch_ready()
        for pending in self._pending:
            pending.wait()
        self._start, self._pending = None, []
        for bucket in self._buckets:
            bucket.touched = False
        if self.tail is not None and not self.alone and self._sends_tail:
            self.tail.unpack(self._tail_tensor)

    def on_complete(self, bucket: Bucket) -> None:
        """Collect the bucket whose last gradient came, and send it if it is its turn."""
        bucket.collect()
        if self._start is not None:
            bucket.closed, bucket.expecting = True, False
            if self.overlaps:
                self._launch_ready()

    def on_unexpected(self, bucket: Bucket, i: int) -> bool:
        return self.when_unexpected(bucket, i)

    def _launch_ready(self) -> None:
        # Launch in index order. If rank 0 sends bucket 1 while rank 1 sends bucket 2, both wait for ever.
        while self._launched < len(self._buckets) and self._buckets[self._launched].closed:
            self._launch(self._buckets[self._launched])
            self._launched += 1

    def _launch(self, bucket: Bucket) -> None:
        assert self._start is not None
        bucket.make_true()
        if self.tail is not None and not self.alone and self._sends_tail and bucket is self._buckets[-1]:
            used = self.filled() if self.tail.flags else None
            self.tail.pack(self._tail_tensor, alarms=self.own_alarms(), used=used)
            if not self._tail_joins:
                self._pending.append(self.comm.all_reduce(self._tail_tensor))
        self._pending.append(self._start(bucket))

    # --- a reduced window -------------------------------------------------------------------------------------

    def filled(self) -> list[bool]:
        """Return which parameters have a gradient in this window, on this rank, in bucket order."""
        here = [filled for bucket in self._buckets for filled in bucket.filled]
        return here if self.filled_before is None else [a or b for a, b in zip(here, self.filled_before, strict=True)]

    def missing(self) -> list[str]:
        """List parameters without a gradient in this window, on this rank; not those that were frozen since."""
        filled = self.filled()
        if all(filled):  # as a rule: names are looked for only elsewhere
            return []
        rows = (row for bucket in self._buckets for row in zip(bucket.names, bucket.params, strict=True))
        return [name for (name, param), has in zip(rows, filled, strict=True) if not has and param.requires_grad]

    def own_alarms(self) -> Alarms:
        return self._alarms._replace(missing=len(self.missing()))

    def alarm_sums(self) -> Tensor | None:
        """Return the alarms after `close`, summed over ranks; None where there is no other rank to sum with."""
        return None if self.tail is None or self.alone else self._tail_tensor[:ALARMS]

    def not_finite(self) -> list[str]:
        """Return the names of the reduced gradients that hold a NaN or an infinity."""
        if self.shard is not None and self.shard.scatters:
            return self.shard.not_finite()
        named = (pair for bucket in self._buckets for pair in zip(bucket.names, bucket.views, strict=True))
        return [name for name, view in named if not bool(view.isfinite().all())]

    def use_counts(self) -> list[float]:
        """Return on how many ranks each parameter was used, in bucket order."""
        if self.tail is None or self.alone:
            return [float(filled) for filled in self.filled()]
        counts: list[float] = self._tail_tensor[ALARMS : ALARMS + self.tail.flags].tolist()
        return counts

    def expose(self, used: Sequence[bool] | None) -> None:
        """Let `param.grad` be the reduced gradient, or None where no rank used the parameter."""
        wanted = iter(used) if used is not None else itertools.repeat(True)
        for bucket in self._buckets if self.shard is not None else ():
            close_shares(bucket.views)
        for bucket in self._buckets:
            if used is None and not (bucket.elsewhere or bucket.hidden) and all(bucket.filled):
                continue
            bucket.hidden = False
            for param, view, filled in zip(bucket.params, bucket.views, bucket.filled, strict=True):
                param.grad = view if next(wanted) and (filled or param.requires_grad) else None

    def mark_reduced(self) -> None:
        """Remember that `param.grad` shows what was reduced."""
        self._marks = [bucket.edit_mark() for bucket in self._buckets]

    def were_edited(self) -> bool:
        """Return whether the user has written to gradients since `mark_reduced`, or put others or None in their place."""
        return [bucket.edit_mark() for bucket in self._buckets] != self._marks

    def adopt_replaced(self) -> None:
        """Take the values of tensors that the user put in place of reduced gradients, so that clipping sees them."""
        for bucket in self._buckets:
            for i, (param, view) in enumerate(zip(bucket.params, bucket.views, strict=True)):
                grad = param.grad
                if grad is None:
                    bucket.zero_view(i)
                elif grad is not view:
                    bucket.write_view(i, grad)
                    param.grad = view

    def refuse_added_to_last(self) -> None:
        """Raise if gradients were added, under sharding, to what the last update has left. Every rank is here, before an
        update: another pair's loss may do so, and zero_grad() follows."""
        for bucket in self._buckets:
            for i in sorted(bucket.added_to_last):
                refuse_added(bucket.names[i])

    def restart(self) -> None:
        """Begin a new window; what came since the last one was reduced is part of it."""
        for bucket in self._buckets:
            touched = bucket.touched
            bucket.restart()
            bucket.touched = touched

    def finish_window(self, *, recycle: bool, zeroes: bool = True) -> None:
        """End the update; unless recycled, the gradients may be looked at until the next backward or zero(). `zeroes`: what the
        buffers hold is not looked at either."""
        if recycle:
            return self.zero(at_once=zeroes)
        self.adopt_replaced()  # or a replaced gradient would look like a new one
        for bucket in self._buckets:
            bucket.restart()

    def zero(self, *, set_to_none: bool = True, at_once: bool = True) -> None:
        """Zero gradients as torch does: None, or zeros where there was one. `at_once`: else the buffers are when the next
        backward begins."""
        for bucket in self._buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param.grad is not None:
                    param.grad = None if set_to_none else view
            bucket.restart()
            if not set_to_none:
                bucket.allocate()
                open_shares(bucket.views)  # zeros are zeros on all ranks
                bucket.flat.zero_()
            elif at_once:
                bucket.zero_small()  # here, while the update has left them in the cache
                bucket.free()


def _refuse_when_used(params: Sequence[nn.Parameter]) -> None:
    """Raise when parameters of a pair are used that was collected as garbage, and not ended: their gradients would be this rank's
    alone.

    An error, since other ranks may not have collected theirs yet: they would wait for this one."""

    def hook(param: Tensor) -> None:
        if is_initialized() and owner_of(param) is None:
            raise ConfigError(
                "the pair that fleet.distribute(...) made of these parameters was discarded, since neither the model (nor a "
                "module of it) nor the optimizer was kept: gradients would be this rank's own. Keep one of them as long as the "
                "parameters train, or call fleet.distribute(...) with what trains them now."
            )

    for param in params:
        if param.requires_grad:  # not one that was frozen since
            param.register_post_accumulate_grad_hook(hook)


def _make_early_hook(owner: Callable[[], Buckets | None]) -> Hook:
    def hook(_: Tensor) -> None:
        found = owner()
        if found is not None:
            found.on_more()

    return hook


# Norms of the reduced gradients: one number for guards, clipping and the report; one for each tensor where the update asks.
# LARS needs each gradient's norm. Where a norm of all gradients is taken anyway, taking it tensor by tensor costs no further
# pass, and the update is saved one of its own. It asks by `wants_gradient_norms = True`, and is given them by
# `take_gradient_norms(params, norms)` right before its step; not where anybody has touched the gradients since.


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Euclidean norm of each, without a device synchronisation; 16-bit tensors are summed in float32."""
    narrow = [tensor.dtype.itemsize < 4 for tensor in tensors]
    if all(narrow) or not any(narrow):
        return list(torch._foreach_norm(list(tensors), 2, torch.float32 if any(narrow) else None))
    return [norms_of([tensor])[0] for tensor in tensors]  # 16 bits beside float64: a rare model


def joined(norms: Sequence[Tensor]) -> Tensor:
    """Compute the norm of all tensors together, from the norm of each."""
    if len(norms) == 1:
        return norms[0]
    wide = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(wide) for norm in norms]))
    return total


def global_norm(flats: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all buckets."""
    return joined(norms_of(flats))


@final
class GradientNorms:
    def __init__(self, buckets: Buckets, update: Optimizer, shard: Shard | None = None) -> None:
        self._buckets, self._update = buckets, update
        self._shard = shard if shard is not None and shard.scatters else None
        self._by_bucket: list[list[Tensor]] | None = None
        self._versions: list[int] = []

    def measure(self) -> Tensor:
        """Measure the global norm of what the buckets hold now. Every rank is here: under sharding each knows a share alone."""
        self._by_bucket = None
        if self._shard is not None:
            return self._shard.measure_norms()
        if not getattr(self._update, "wants_gradient_norms", False):
            return global_norm(self._buckets.flats)
        self._by_bucket = [norms_of(bucket.views) for bucket in self._buckets]
        self._versions = [bucket.version() for bucket in self._buckets]
        return joined([norm for norms in self._by_bucket for norm in norms])

    def measure_again(self) -> Tensor:
        """Return the norm after what the script has done to the gradients. No rank is asked: another may not look again."""
        return self.measure() if self._shard is None else self._shard.current_norm()

    def hold(self) -> bool:
        """Return whether the norms of each tensor are known, and the gradients are what they were: not written to, not
        replaced."""
        if self._by_bucket is None or [bucket.version() for bucket in self._buckets] != self._versions:
            return False
        hooks = (self._update._optimizer_step_pre_hooks, optimizer_module._global_optimizer_pre_hooks)
        if any(map(may_change_gradients, hooks)):
            return False  # they run inside step(), and may change gradients
        pairs = (pair for bucket in self._buckets for pair in zip(bucket.params, bucket.views, strict=True))
        return all(param.grad is None or param.grad is view for param, view in pairs)

    def hand_over(self, *, factor: Tensor | None) -> None:
        """Give them to the update. `factor`: what clipping has multiplied the gradients by."""
        assert self._by_bucket is not None
        params: list[Tensor] = []
        given: list[Tensor] = []
        for bucket, norms in zip(self._buckets, self._by_bucket, strict=True):
            if factor is not None:
                rounded = factor.to(bucket.flat.dtype)  # as the gradients were: clipping rounds its factor to their type
                norms = list(torch._foreach_mul(norms, rounded.to(norms[0].dtype)))
            used = [(param, norm) for param, norm in zip(bucket.params, norms, strict=True) if param.grad is not None]
            params += [param for param, _ in used]
            given += [norm for _, norm in used]
        self._update.take_gradient_norms(params, given)  # type: ignore[attr-defined]
        self._by_bucket = None
