"""Flat gradient buckets that `param.grad` views, filled by autograd hooks, reduced while backward goes on.

    hook of each parameter:  gradient arrives -> count down its bucket
    bucket complete:         gradients copied into the flat buffer (one call), `param.grad` becomes a view of it
    when armed:              multiply by the factor that makes true gradients, start REDUCE, in index order
    close:                   complete what is left, start it, wait for all

The layout is fixed for the run: reversed registration order, which is about the order of backward.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .comm import Comm, Pending
from .errors import ConfigError, FleetError
from .tail import Tail

SMALLEST_BUCKET_BYTES = 2**20
"""Below this a collective is all latency."""
BUCKETS_WANTED = 2
"""A small model is cut in two all the same: one bucket could not overlap with backward, and more cost more than they hide."""
LARGE_BYTES = 2**20
"""On a CPU a smaller gradient is added to zeros in place; a larger one is copied when it comes: half the memory traffic."""

ADDED_OR_REPLACED = (
    "gradients were added or replaced outside optimizer.backward, inside a merge window that began with it. "
    "Use optimizer.backward(loss) for every loss of the window; change gradients when optimizer.due."
)

Start = Callable[["Bucket"], Pending]
Hook = Callable[[Tensor], None]


def bucket_lengths(sizes: Sequence[int], *, cap: int) -> list[int]:
    """Cut a row of byte sizes into runs of at most `cap` bytes (a larger tensor stands alone); the runs' lengths."""
    lengths: list[int] = []
    room = 0
    for size in sizes:
        if lengths and size <= room:
            lengths[-1] += 1
            room -= size
        else:
            lengths.append(1)
            room = cap - size
    return lengths


def global_norm(flats: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all buckets, without a device synchronisation; 16-bit buckets are summed in float32."""
    wide: list[Tensor] = [torch.linalg.vector_norm(f, dtype=None if f.dtype.itemsize >= 4 else torch.float32) for f in flats]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([w.to(wide[0].dtype) for w in wide]))
    return norm if len(wide) > 1 else wide[0]


def _view_like(piece: Tensor, param: Tensor) -> Tensor:
    """A view with the parameter's own strides (channels_last stays so), or contiguous where those leave gaps."""
    if torch.ops.aten.is_non_overlapping_and_dense(param):
        strided: Tensor = torch.as_strided(piece, param.shape, param.stride(), int(piece.storage_offset()))
        return strided
    return piece.view(param.shape)


@final
class Bucket:
    """One flat buffer and the parameters whose gradients live in it."""

    def __init__(self, index: int, named: Sequence[tuple[str, nn.Parameter]], *, tail_numel: int) -> None:
        self.index = index
        self.names = [name for name, _ in named]
        self.params = [param for _, param in named]
        numel = sum(p.numel() for p in self.params)
        first = self.params[0]
        self.wire = torch.zeros(numel + tail_numel, dtype=first.dtype, device=first.device)
        """The gradients and, in the last bucket, the tail: one collective moves both."""
        self.flat = self.wire[:numel]
        self.tail = self.wire[numel:]
        pieces = self.flat.split([p.numel() for p in self.params])
        self.views = [_view_like(piece, p) for piece, p in zip(pieces, self.params, strict=True)]
        on_cpu = first.device.type == "cpu"
        self.in_place = [on_cpu and p.nbytes < LARGE_BYTES for p in self.params]
        """Autograd adds these gradients to zeros in their views. Others come as tensors of their own, and are moved.

        On a GPU all do: one kernel moves a whole bucket, which is fewer launches than an addition each."""
        self.copied_at_once = [on_cpu and not in_place for in_place in self.in_place]
        self._small_views = [view for view, in_place in zip(self.views, self.in_place, strict=True) if in_place]
        self._small_are_zero = True
        self.expecting = False
        """A backward of ours is under way, and this bucket is not complete."""
        self.awaited = 0
        """Gradients still to come in it."""
        self.elsewhere = False
        """Some of them came as tensors of their own, and must be moved in."""
        self.sure = False
        """Every gradient of this backward is added in place: hooks need not look."""
        self._resting = False
        self._hooks: list[tuple[dict[int, Hook], int, Hook]] = []
        self.filled = [False] * len(self.params)
        """Which views hold gradients of the present window."""
        self.keeps = False
        """The views hold finished micro-steps of this window: what comes from elsewhere is added to them."""
        self.zeroed = False
        """The views were set to zero, and may be added to."""
        self.shows_last = False
        """`param.grad` may still show the last update's gradients."""
        self.polluted: int | None = None
        """A parameter whose gradient was added to the last update's; harmless unless it is used."""
        self.touched = False
        """A gradient came from a backward that is not ours, since the last micro-step ended."""
        self.closed = False
        """Handed to the reducer: nothing may be added."""

    def take(self, i: int) -> None:
        """Copy a large gradient while it is warm, and let its memory go."""
        grad, view = self.params[i].grad, self.views[i]
        if grad is not None and grad is not view and not self.keeps:
            self._require_strided(i, grad)
            view.copy_(grad)
            self.params[i].grad = view
            self.filled[i] = True
        else:
            self.elsewhere = True

    def collect(self) -> None:
        """Move gradients that autograd or the user put elsewhere into the flat buffer, in one call."""
        if self.expecting and not self.elsewhere:
            return  # autograd added every one of them in place
        fresh: list[tuple[Tensor, Tensor]] = []
        added: list[tuple[Tensor, Tensor]] = []
        self.require_unpolluted()
        for i, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            grad = param.grad
            if grad is None:
                # Thrown away by model.zero_grad(); but the sum of finished micro-steps is not the user's to lose that way.
                self.filled[i] = self.filled[i] and self.keeps
            elif grad is not view:
                self._require_strided(i, grad)
                (added if self.keeps and self.filled[i] else fresh).append((view, grad))
                param.grad = view
                self.filled[i] = True
        if fresh:
            torch._foreach_copy_([view for view, _ in fresh], [grad for _, grad in fresh])
        if added:
            torch._foreach_add_([view for view, _ in added], [grad for _, grad in added])

    def require_unpolluted(self) -> None:
        i = self.polluted
        if i is not None and self.params[i].grad is self.views[i]:
            raise FleetError(
                f"the gradient of `{self.names[i]}` was added to that of the last update, which is still there. "
                "Call optimizer.zero_grad() after optimizer.step()."
            )

    def make_room(self) -> None:
        """Ready for new gradients."""
        if not self._small_are_zero:
            self.zero_small()
        for param, view, in_place in zip(self.params, self.views, self.in_place, strict=True):
            param.grad = view if in_place else None
        self.restart(shows_last=False, zeroed=True)
        self.sure = all(self.in_place)

    def zero_small(self) -> None:
        if self._small_views:
            torch._foreach_zero_(self._small_views)
        self._small_are_zero = True

    def zero_missing(self) -> None:
        """Unused here means zero; the view still holds an earlier window."""
        for view, filled in zip(self.views, self.filled, strict=True):
            if not filled:
                view.zero_()

    def restart(self, *, shows_last: bool, zeroed: bool = False) -> None:
        """A new window. What `param.grad` shows is the last update's, or None, or zeros."""
        self.filled[:] = [False] * len(self.params)
        self.shows_last, self.zeroed = shows_last, zeroed
        self.keeps = self.touched = self.closed = self.expecting = self.sure = False
        self.polluted = None

    def expect(self, *, reduces: bool) -> None:
        """A backward of ours begins."""
        self.expecting, self.awaited, self.elsewhere, self.closed = True, len(self.params), False, False
        self._small_are_zero = False
        if self.keeps:
            strays = [p.grad for p, view in zip(self.params, self.views, strict=True) if p.grad is not view]
            if any(grad is not None for grad in strays):
                raise FleetError(ADDED_OR_REPLACED)
            self.sure = not strays
        if self.sure and not reduces and all(self.filled):
            self.rest_hooks()

    def rest_hooks(self) -> None:
        """Every gradient is added in place and nothing is to be noted: for this backward no hook need be called."""
        self._resting = True
        for hooks, key, _ in self._hooks:
            del hooks[key]

    def wake_hooks(self) -> None:
        if self._resting:
            self._resting = False
            for hooks, key, hook in self._hooks:
                hooks[key] = hook

    def add_hooks(self, owner: weakref.ref[Buckets]) -> list[RemovableHandle]:
        """A hook on each parameter; they can rest without being registered anew, which costs ten times as much."""
        handles = []
        for i, param in enumerate(self.params):
            hook = _make_hook(owner, self, i)
            handle = param.register_post_accumulate_grad_hook(hook)
            self._hooks.append((handle.hooks_dict_ref(), handle.id, hook))
            handles.append(handle)
        return handles

    def on_unexpected(self, i: int) -> None:
        """A gradient of a backward that is not ours: it stays where it is until step() asks for it, or it is thrown away."""
        self.touched, self._small_are_zero = True, False
        if not self.filled[i] and self.params[i].grad is self.views[i]:
            if self.zeroed:
                self.filled[i] = True
            elif self.polluted is None:
                self.polluted = i

    def _require_strided(self, i: int, grad: Tensor) -> None:
        if grad.layout is not torch.strided:
            raise ConfigError(f"the gradient of `{self.names[i]}` is sparse. Build its embedding with sparse=False.")


@final
class Buckets:
    """All buckets of one model, with the hooks that fill them."""

    def __init__(
        self, params: Mapping[str, nn.Parameter], *, bucket_bytes: int, tail: Tail | None, carries_tail: bool, comm: Comm
    ) -> None:
        self.comm = comm
        self.tail = tail
        runs = bucket_runs(list(params.items())[::-1], bucket_bytes=bucket_bytes)
        joins = tail is not None and carries_tail and runs[-1][0][1].dtype == tail.dtype
        tail_numels = [0] * (len(runs) - 1) + [tail.numel if tail is not None and joins else 0]
        self._buckets = [Bucket(i, run, tail_numel=n) for i, (run, n) in enumerate(zip(runs, tail_numels, strict=True))]
        last = self._buckets[-1]
        self._tail_tensor = last.tail
        if tail is not None and not joins:
            self._tail_tensor = torch.zeros(tail.numel, dtype=tail.dtype, device=last.flat.device)
        self._tail_joins = joins
        self._start: Start | None = None
        self._factor = 1.0
        self._launched = 0
        self._pending: list[Pending] = []
        self._reduced = False
        myself = weakref.ref(self)  # weak: hooks outlive a discarded optimizer, and must then do nothing
        self._handles = [handle for bucket in self._buckets for handle in bucket.add_hooks(myself)]

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", []):
            handle.remove()

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def flats(self) -> list[Tensor]:
        return [bucket.flat for bucket in self._buckets]

    # --- one backward -----------------------------------------------------------------------------------------

    def touched(self) -> bool:
        """Gradients of a backward that is not ours came since the last micro-step ended."""
        return any(bucket.touched for bucket in self._buckets)

    def has_new(self) -> bool:
        """Gradients came so, or were put in place by the user."""
        for bucket in self._buckets:
            if bucket.touched:
                return True
            for param, view in zip(bucket.params, bucket.views, strict=True):
                grad = param.grad
                if grad is not None and grad is not view:
                    return True
        return False

    def begin(self) -> bool:
        """Before a backward of ours: the last update's gradients go, those of a bare backward or of this window stay.

        Whether the buckets are empty is returned.
        """
        for bucket in self._buckets:
            bucket.require_unpolluted()
        if self._buckets[0].keeps:
            return False
        if self.has_new():
            for bucket in self._buckets:
                bucket.sure = False
            return False
        for bucket in self._buckets:
            bucket.make_room()
        return True

    def arm(self, start: Start, *, factor: float) -> None:
        """From now on a complete bucket is multiplied by `factor` and reduced at once."""
        self._start, self._factor = start, factor
        self._launched = 0
        self._pending = []

    def expect(self, *, reduces: bool) -> None:
        """A backward of ours begins."""
        for bucket in self._buckets:
            bucket.expect(reduces=reduces)

    def keep(self) -> None:
        """A micro-step inside a window is over: its gradients are safe in the flat buffers."""
        for bucket in self._buckets:
            bucket.collect()
            bucket.wake_hooks()
            bucket.keeps, bucket.touched, bucket.expecting = True, False, False

    def abandon(self) -> None:
        """A backward failed half-way: wait for what was started, start nothing more."""
        for pending in self._pending:
            pending.wait()
        self._start, self._pending = None, []
        for bucket in self._buckets:
            bucket.wake_hooks()
            bucket.expecting = False

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
        self._start, self._pending, self._reduced = None, [], True
        if self.tail is not None:
            self.tail.unpack(self._tail_tensor)

    def on_complete(self, bucket: Bucket) -> None:
        """The last gradient of a bucket came."""
        bucket.collect()
        if self._start is not None:
            bucket.closed, bucket.expecting = True, False
            self._launch_ready()

    def late_gradient(self, name: str) -> FleetError:
        if self._reduced:
            return FleetError(
                f"`{name}` got a gradient after optimizer.backward had already reduced this window. Add the losses and call "
                "optimizer.backward(loss) once, or call optimizer.step() first."
            )
        return FleetError(
            f"`{name}` got two gradients in one backward. Re-entrant checkpointing does that: "
            "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        )

    def _launch_ready(self) -> None:
        # Launch in index order. If rank 0 sends bucket 1 while rank 1 sends bucket 2, both wait for ever.
        while self._launched < len(self._buckets) and self._buckets[self._launched].closed:
            self._launch(self._buckets[self._launched])
            self._launched += 1

    def _launch(self, bucket: Bucket) -> None:
        assert self._start is not None
        if self._factor != 1.0:
            bucket.flat.mul_(self._factor)  # before REDUCE: a residual kept in scaled units is wrong once the scale moves
        if self.tail is not None and bucket is self._buckets[-1]:
            used = self.filled() if self.tail.flags else None
            self.tail.pack(self._tail_tensor, missing=len(self.missing()), used=used)
            if not self._tail_joins:
                self._pending.append(self.comm.all_reduce(self._tail_tensor))
        self._pending.append(self._start(bucket))

    # --- a reduced window -------------------------------------------------------------------------------------

    def filled(self) -> list[bool]:
        """Which parameters have a gradient in this window, on this rank, in bucket order."""
        return [filled for bucket in self._buckets for filled in bucket.filled]

    def missing(self) -> list[str]:
        """Parameters without a gradient in this window, on this rank."""
        return [name for b in self._buckets for name, filled in zip(b.names, b.filled, strict=True) if not filled]

    def tail_sums(self) -> Tensor:
        """What the tail holds after `close`: sums over ranks."""
        return self._tail_tensor

    def expose(self, used: Sequence[bool] | None) -> None:
        """Let `param.grad` be the reduced gradient, or None where no rank used the parameter."""
        wanted = iter(used) if used is not None else itertools.repeat(True)
        for bucket in self._buckets:
            if used is None and not bucket.elsewhere and all(bucket.filled):
                continue
            for param, view in zip(bucket.params, bucket.views, strict=True):
                param.grad = view if next(wanted) else None

    def adopt_replaced(self) -> None:
        """The user put other tensors in place of reduced gradients: take their values, so that clipping sees them."""
        for bucket in self._buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                grad = param.grad
                if grad is None:
                    view.zero_()
                elif grad is not view:
                    view.copy_(grad)
                    param.grad = view

    def finish_window(self, *, recycle: bool) -> None:
        """The update is done; unless recycled, the gradients may be looked at until the next backward or zero()."""
        if recycle:
            return self.zero()
        self.adopt_replaced()  # or a replaced gradient would look like a new one
        self._reduced = False
        for bucket in self._buckets:
            bucket.restart(shows_last=True)

    def zero(self, *, set_to_none: bool = True) -> None:
        """As torch: None, or zeros where there was a gradient."""
        self._reduced = False
        for bucket in self._buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param.grad is not None:
                    param.grad = None if set_to_none else view
            bucket.restart(shows_last=False, zeroed=not set_to_none)
            if set_to_none:
                bucket.zero_small()  # here, while the update has left them in the cache
            else:
                bucket.flat.zero_()


def _make_hook(owner: weakref.ref[Buckets], bucket: Bucket, i: int) -> Hook:
    """What runs for each gradient, hundreds of times a step: as few Python operations as it can do with."""
    param, view, filled, copied_at_once = bucket.params[i], bucket.views[i], bucket.filled, bucket.copied_at_once[i]

    def hook(_: Tensor) -> None:
        if bucket.expecting:
            if bucket.sure or param.grad is view:
                filled[i] = True
            elif copied_at_once:
                bucket.take(i)
            else:
                bucket.elsewhere = True
            bucket.awaited -= 1
            if bucket.awaited:
                return
            buckets = owner()
            if buckets is not None:
                buckets.on_complete(bucket)
            return
        buckets = owner()
        if buckets is None:
            return
        if bucket.closed:
            raise buckets.late_gradient(bucket.names[i])
        bucket.on_unexpected(i)

    return hook


def bucket_runs(named: Sequence[tuple[str, nn.Parameter]], *, bucket_bytes: int) -> list[list[tuple[str, nn.Parameter]]]:
    """The parameters of each bucket: in the order given, one type to a bucket."""
    total = sum(p.nbytes for _, p in named)
    cap = min(bucket_bytes, max(SMALLEST_BUCKET_BYTES, total // BUCKETS_WANTED))
    runs: list[list[tuple[str, nn.Parameter]]] = []
    for dtype in dict.fromkeys(p.dtype for _, p in named):
        same = [(name, p) for name, p in named if p.dtype == dtype]
        start = 0
        for length in bucket_lengths([p.nbytes for _, p in same], cap=cap):
            runs.append(same[start : start + length])
            start += length
    return runs


def require_dense(name: str, module: nn.Module) -> None:
    """Sparse gradients have no place in a flat buffer."""
    if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        raise ConfigError(f"`{name or 'the model'}` makes sparse gradients. Build it with sparse=False.")
