"""Flat gradient buckets that `param.grad` views, filled by autograd hooks, reduced while backward goes on.

    hook of each parameter:  gradient arrives -> count down its bucket
    bucket complete:         gradients copied into the flat buffer (one call), `param.grad` becomes a view of it
    when armed:              multiply by the factor that makes true gradients, start REDUCE, in index order
    close:                   complete what is left, start it, wait for all

The layout is fixed for the run: reversed registration order, which is about the order of backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from .comm import Comm, Pending
from .errors import ConfigError, FleetError
from .tail import Tail

SMALLEST_BUCKET_BYTES = 2**20
"""Below this a collective is all latency."""
BUCKETS_WANTED = 4
"""A small model is cut into about this many buckets all the same: one alone could not overlap with backward."""

Start = Callable[["Bucket"], Pending]


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
        self.filled = [False] * len(self.params)
        """Which views hold gradients of the present window."""
        self.awaited = len(self.params)
        """Gradients still to come in the present backward."""
        self.complete = False

    def collect(self) -> None:
        """Move gradients that autograd or the user put elsewhere into the flat buffer."""
        fresh_views: list[Tensor] = []
        fresh: list[Tensor] = []
        added_views: list[Tensor] = []
        added: list[Tensor] = []
        for i, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            grad = param.grad
            if grad is None:
                continue
            if grad is not view:
                # After model.zero_grad() in mid-window the view still holds this window's sum: add to it.
                (added if self.filled[i] else fresh).append(grad)
                (added_views if self.filled[i] else fresh_views).append(view)
                param.grad = view
            self.filled[i] = True
        if fresh:
            torch._foreach_copy_(fresh_views, fresh)
        if added:
            torch._foreach_add_(added_views, added)


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
        self.stale = False
        """`param.grad` still shows the last update's gradients."""
        self.arrived = False
        """A gradient came since the last micro-step ended."""
        self.reduced = False
        """The window's gradients are already the mean over ranks."""
        self._hook_parameters()

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def flats(self) -> list[Tensor]:
        return [bucket.flat for bucket in self._buckets]

    def _hook_parameters(self) -> None:
        # Weak: hooks outlive a discarded optimizer, and must then do nothing.
        myself = weakref.ref(self)

        def make_hook(bucket: Bucket, i: int) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                buckets = myself()
                if buckets is not None:
                    buckets._on_gradient(bucket, i)

            return hook

        self._handles = [
            param.register_post_accumulate_grad_hook(make_hook(bucket, i))
            for bucket in self._buckets
            for i, param in enumerate(bucket.params)
        ]

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", []):
            handle.remove()

    def _on_gradient(self, bucket: Bucket, i: int) -> None:
        self.arrived, self.stale = True, False
        if self.reduced or bucket.complete:
            raise FleetError(self._late_gradient(bucket.names[i]))
        if bucket.params[i].grad is bucket.views[i] and not bucket.filled[i]:
            raise FleetError(
                f"the gradient of `{bucket.names[i]}` was added to that of the last update, which is still there. "
                "Call optimizer.zero_grad() after optimizer.step()."
            )
        bucket.awaited -= 1
        if bucket.awaited == 0:
            bucket.collect()
            bucket.awaited = len(bucket.params)
            if self._start is not None:
                bucket.complete = True
                self._launch_ready()

    def _late_gradient(self, name: str) -> str:
        if self.reduced:
            return (
                f"`{name}` got a gradient after optimizer.backward had already reduced this window. Add the losses and call "
                "optimizer.backward(loss) once, or call optimizer.step() first."
            )
        return (
            f"`{name}` got two gradients in one backward. Re-entrant checkpointing does that: "
            "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        )

    def arm(self, start: Start, *, factor: float) -> None:
        """From now on a complete bucket is multiplied by `factor` and reduced at once."""
        self._start, self._factor = start, factor
        self._launched = 0
        self._pending = []
        for bucket in self._buckets:
            bucket.awaited, bucket.complete = len(bucket.params), False

    def disarm(self) -> None:
        """A backward failed half-way: nothing more may start."""
        self._start = None

    def _launch_ready(self) -> None:
        # Launch in index order. If rank 0 sends bucket 1 while rank 1 sends bucket 2, both wait for ever.
        while self._launched < len(self._buckets) and self._buckets[self._launched].complete:
            self._launch(self._buckets[self._launched])
            self._launched += 1

    def _launch(self, bucket: Bucket) -> None:
        assert self._start is not None
        if self._factor != 1.0:
            bucket.flat.mul_(self._factor)  # before REDUCE: a residual kept in scaled units is wrong once the scale moves
        if self.tail is not None and bucket is self._buckets[-1]:
            self.tail.pack(self._tail_tensor, missing=len(self.missing()), used=self._used())
            if not self._tail_joins:
                self._pending.append(self.comm.all_reduce(self._tail_tensor))
        self._pending.append(self._start(bucket))

    def _used(self) -> list[bool] | None:
        if self.tail is None or not self.tail.flags:
            return None
        return [filled for bucket in self._buckets for filled in bucket.filled]

    def missing(self) -> list[str]:
        """Parameters without a gradient in this window, on this rank."""
        return [name for b in self._buckets for name, filled in zip(b.names, b.filled, strict=True) if not filled]

    def close(self) -> None:
        """Start what backward left over, wait for everything; every view then holds the mean over ranks."""
        for bucket in self._buckets:
            if not bucket.complete:
                bucket.collect()
                for view, filled in zip(bucket.views, bucket.filled, strict=True):
                    if not filled:
                        view.zero_()  # it still holds an earlier window; unused here means zero
                bucket.complete = True
        self._launch_ready()
        for pending in self._pending:
            pending.wait()
        self._start, self._pending, self.reduced = None, [], True
        if self.tail is not None:
            self.tail.unpack(self.tail_sums())

    def tail_sums(self) -> Tensor:
        """What the tail holds after `close`: sums over ranks."""
        return self._tail_tensor

    def expose(self, used: Sequence[bool] | None) -> None:
        """Let `param.grad` be the reduced gradient, or None where no rank used the parameter."""
        i = 0
        for bucket in self._buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                param.grad = view if used is None or used[i] else None
                i += 1

    def adopt_replaced(self) -> None:
        """The user put other tensors in place of reduced gradients: take their values, so that clipping sees them."""
        for bucket in self._buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param.grad is None:
                    view.zero_()
                elif param.grad is not view:
                    view.copy_(param.grad)
                    param.grad = view

    def finish_window(self) -> None:
        """The update is done; the gradients may still be looked at, until the next backward or zero()."""
        self.reduced = self.arrived = False
        self.stale = True
        for bucket in self._buckets:
            bucket.filled = [False] * len(bucket.params)
            bucket.awaited, bucket.complete = len(bucket.params), False

    def zero(self, *, set_to_none: bool = True) -> None:
        self.stale = False
        for bucket in self._buckets:
            if not set_to_none:
                bucket.flat.zero_()
            for i, param in enumerate(bucket.params):
                param.grad = None if set_to_none else bucket.views[i]
                bucket.filled[i] = not set_to_none


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
