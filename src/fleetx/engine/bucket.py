"""One flat buffer that the gradients of some parameters live in, and the hooks by which they get there.

A gradient comes in one of three ways, distinguished by where `param.grad` points when its hook runs:
    in place    autograd added it to the view (CPU, small): nothing is left to do
    on its own  autograd made a tensor of its own (GPU, or large): it is moved into the view, and `param.grad` becomes the view
    unexpected  the first gradient of a bare `loss.backward()`, which then becomes a backward of ours (bare_backward.py); or one
                that stays local (`fleet.no_sync()`): it lies where autograd put it until it is reduced or thrown away
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import ConfigError, FleetError
from .gradient_share import forget_norm, is_closed, open_shares, write_whole
from .user_loop.model_pairs import current_task

LARGE_BYTES = 2**20
"""On a CPU a smaller gradient is added to zeros in place; a larger one is copied when it comes: half the memory traffic."""

CHANGED_IN_WINDOW = (
    "gradients were changed, zeroed or replaced inside a merge window; they are sums of unfinished micro-batches there. "
    "Change gradients when optimizer.due, and zero them with optimizer.zero_grad(), which knows about windows."
)

Hook = Callable[[Tensor], None]


class Owner(Protocol):
    """Receives complete buckets."""

    def on_complete(self, bucket: Bucket) -> None: ...
    def on_unexpected(self, bucket: Bucket, i: int) -> bool:
        """Handle a gradient that no backward of ours awaits. Whether its bucket counts gradients from now on."""


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which what is kept of gradients or weights is added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_memory_order(tensor: Tensor) -> Tensor:
    """View a dense tensor's memory as one row."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def view_like(piece: Tensor, param: Tensor) -> Tensor:
    """View the memory with the parameter's own strides (channels_last stays so), or contiguous where those leave gaps.

    No view in autograd's sense, which refuses `param.grad.detach_()`: a way to zero gradients that older scripts have."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(param)
    stride = param.stride() if dense else torch.empty(param.shape, device="meta").stride()
    shared: Tensor = torch.empty(0, dtype=piece.dtype, device=piece.device)
    return shared.set_(piece.untyped_storage(), int(piece.storage_offset()), param.shape, stride)


SHARE_MULTIPLE = 64
"""Elements by which shares are measured: a vector unit then finds the same elements side by side in a share as in the whole."""


def share_of(numel: int, shares: int) -> int:
    """Return the elements of one of so many equal shares, the last of which may reach past the end."""
    return numel if shares == 1 else -(-max(1, numel) // (shares * SHARE_MULTIPLE)) * SHARE_MULTIPLE


@final
class Bucket:
    """One flat buffer and the parameters whose gradients live in it."""

    def __init__(
        self,
        index: int,
        named: Sequence[tuple[str, nn.Parameter]],
        *,
        tail_numel: int,
        whole: bool = False,
        shares: int = 1,
        dress: Callable[[Tensor], Tensor] = lambda view: view,
        own: int | None = None,
        frees: bool = False,
    ) -> None:
        """Lay out the parameters. `own`: the share that this rank keeps of a buffer that is divided into `shares`; `frees`: keeps
        that alone, and has memory for the whole only from the first gradient to the end of the reduce."""
        self.index = index
        self.names = [name for name, _ in named]
        self.params = [param for _, param in named]
        numel = sum(p.numel() for p in self.params)
        first = self.params[0]
        self.share_numel = share_of(numel, shares)
        """Elements of each of the equal parts into which the buffer is divided, with zeros at its end."""
        self.wire = torch.zeros(self.share_numel * shares + tail_numel, dtype=first.dtype, device=first.device)
        """The gradients and, in the last bucket, the tail: one collective moves both."""
        self.flat = self.wire[:numel]
        self.tail = self.wire[self.share_numel * shares :]
        self.frees, self._own, self.divided = frees, own, own is not None
        self.reduced = self.flat
        """Where the reduced gradients are: the whole buffer, or this rank's share of it."""
        if own is not None:
            share = self.wire[own * self.share_numel :][: self.share_numel]
            self.reduced = torch.zeros_like(share) if frees else share
        pieces = self.flat.split([p.numel() for p in self.params])
        self.views = [dress(view_like(piece, p)) for piece, p in zip(pieces, self.params, strict=True)]
        self.whole = whole
        """`param.grad` is of the whole window when backward ends, whether DDP reduced it in place or in a buffer of its own."""
        self._renewed = False
        """`whole`: a gradient came that was not added to what the window has."""
        self._shown: list[Tensor | None] = list(self.views)
        """`whole`: where the window's sums were before the backward; DDP may have moved them into buffers of its own."""
        on_cpu = first.device.type == "cpu" and not whole and not frees
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
        self.hidden = False
        """`param.grad` is None where a view holds a sum of this window."""
        self.keeps = False
        """The views hold finished micro-steps of this window: what comes from elsewhere is added to them."""
        self.factor = 1.0
        """Factor that makes true gradients of the sums in the views."""
        self._true_already: set[int] = set()
        self._version = 0
        """How often the buffer was written to when the last micro-step ended: a write in between changes the count."""
        self.touched = False
        """A gradient came that is local to this rank, since the last micro-step ended."""
        self.task: int | None = None
        """The bare backward that is awaited, by autograd's number; None: ours, which cannot be mistaken for another."""
        self.closed = False
        """Handed to the reducer: nothing may be added."""
        self.added_to_last: set[int] = set()
        """Under sharding, gradients that were added to a share which the last update had left: no update may be made of them."""
        self.free()

    def allocate(self) -> None:
        """Have memory for the whole buffer; what it held is gone where it was freed."""
        if self.is_freed():
            self.wire.untyped_storage().resize_(self.wire.nbytes)
            self.wire[self.flat.numel() :].zero_()

    def free(self) -> None:
        """Give the memory of the whole buffer back; views of it must not be read or written until `allocate`."""
        if self.frees:
            self.wire.untyped_storage().resize_(0)

    def give_back(self) -> None:
        """Hide the gradients once they are sent, and give their memory back. A second gradient of the same backward then comes
        as a tensor of its own, and is named, instead of being added to memory that is not there."""
        if self.frees:
            self.hide()
            self.free()

    def is_freed(self) -> bool:
        """Return whether there is memory for this rank's share alone."""
        return self.frees and not self.wire.untyped_storage().nbytes()

    def aim(self, factor: float) -> None:
        """Set the factor of the micro-step that closes the window. What an earlier backward made true, it did by another
        factor."""
        self.factor = factor
        self._true_already.clear()

    def take(self, i: int) -> None:
        """Copy a large gradient while it is warm, and let its memory go."""
        grad, view = self.params[i].grad, self.views[i]
        if grad is not None and grad is not view and not self.keeps:
            self._require_strided(i, grad)
            torch.mul(grad, self.factor, out=view)  # true already, without a pass of its own
            self._true_already.add(i)
            self.params[i].grad = view
            self.filled[i] = True
        else:
            self.elsewhere = True

    def collect(self) -> None:
        """Move gradients that autograd or the user put elsewhere into the flat buffer, in one call."""
        self.allocate()
        if self.expecting and not self.elsewhere:
            return  # autograd added every one of them in place
        fresh: list[tuple[Tensor, Tensor]] = []
        added: list[tuple[Tensor, Tensor]] = []
        for i, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            grad = param.grad
            if self.whole and self.keeps and self.filled[i] and (grad is None or self._renewed):
                raise FleetError(CHANGED_IN_WINDOW)
            if grad is None:
                # Thrown away by model.zero_grad(); but the sum of finished micro-steps is not the user's to lose that way.
                self.filled[i] = self.filled[i] and self.keeps
            elif grad is not view:
                self._require_strided(i, grad)
                (added if self.keeps and self.filled[i] and not self.whole else fresh).append((view, grad))
                param.grad = view
                self.filled[i] = True
            elif self.whole:
                self.filled[i] = True  # unused here, it has no hook to say so, but DDP has written what others had
        if fresh or added:
            self._small_are_zero = False
        if fresh:
            torch._foreach_copy_([view for view, _ in fresh], [grad for _, grad in fresh])
        if added:
            torch._foreach_add_([view for view, _ in added], [grad for _, grad in added])

    def make_true(self) -> None:
        """Undo loss scale, weights and sums. Before REDUCE: a residual kept in scaled units is wrong once the scale moves."""
        if self.factor == 1.0:
            return
        rest = [view for i, view in enumerate(self.views) if i not in self._true_already]
        if len(rest) == len(self.views):
            self.flat.mul_(self.factor)
        elif rest:
            torch._foreach_mul_(rest, self.factor)

    def require_unchanged_type(self) -> None:
        """Refuse a model that was converted or moved after fleet.distribute: its gradients would not fit the buffer."""
        param, flat = self.params[0], self.flat
        if param.dtype != flat.dtype or param.device != flat.device:
            raise ConfigError(
                f"`{self.names[0]}` was {flat.dtype} on {flat.device} in fleet.distribute(...) and is {param.dtype} on "
                f"{param.device} now. Convert or move the model before fleet.distribute(...), or call it again after "
                "model.double(), model.half() or model.to(...)."
            )

    def make_room(self) -> None:
        """Ready for new gradients."""
        if self.divided:
            open_shares(self.views)
        if not self._small_are_zero:
            self.zero_small()
        for param, view, in_place in zip(self.params, self.views, self.in_place, strict=True):
            param.grad = view if in_place else None
        self.restart()
        self.sure = all(self.in_place)

    def admit(self, *, reopened: bool) -> None:
        """Be ready for gradients that are added to what `param.grad` holds now, as in torch.

        A bare backward has begun, and one gradient is there already. `reopened`: the window was reduced before."""
        self.keep_hooks_last()
        # One more write than at the end of the last micro-step: the gradient that is there already.
        if self.keeps and not (self.hidden or reopened) and self.version() > self._version + 1:
            raise FleetError(CHANGED_IN_WINDOW)
        stale: list[Tensor] = []
        for i, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            grad = param.grad
            if grad is view:
                if self.divided:
                    self._note_added(i, reopened=reopened)
                self.filled[i] |= not reopened  # left there by zero_grad(set_to_none=False), or from the last update
            elif grad is not None:
                self.elsewhere = True
                self.added_to_last.discard(i)
            elif self.keeps and self.filled[i]:
                param.grad = view  # hidden since the last micro-step
            else:
                self.filled[i] = False
                self.added_to_last.discard(i)
                if self.in_place[i]:
                    stale.append(view)
                    param.grad = view
        self.hidden = False
        if self.divided:
            open_shares(self.views)
        if stale and not self._small_are_zero:
            torch._foreach_zero_(stale)
        self._small_are_zero = False

    def _note_added(self, i: int, *, reopened: bool) -> None:
        """Note whether a gradient was added to what the last update has left."""
        if not is_closed(self.views[i]):
            self.added_to_last.discard(i)
        elif not reopened:
            self.added_to_last.add(i)

    def count_shown(self) -> None:
        """Count what `param.grad` shows of the views as gradients of this window, as torch does."""
        for i, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            self.filled[i] |= param.grad is view

    def hide(self) -> None:
        """Let `param.grad` be None inside a merge window: what clips, logs or zeroes gradients there finds none.

        The sums of unfinished micro-steps are no gradients yet; they wait in the views."""
        self.hidden = True
        for param in self.params:
            param.grad = None

    def show_window(self) -> None:
        """Show the window's sums in `param.grad`, also where the user has zeroed gradients in between; what comes is added to
        them."""
        for param, view, filled in zip(self.params, self.views, self.filled, strict=True):
            if filled and param.grad is None:
                param.grad = view
        self._shown = [param.grad for param in self.params]

    def zero_small(self) -> None:
        if self._small_views:
            torch._foreach_zero_(self._small_views)
        self._small_are_zero = True

    def zero_view(self, i: int) -> None:
        """Zero a gradient of a reduced window, where it is."""
        if self.is_freed():
            for begin, end in self.owned(i):
                self.reduced[begin:end].zero_()
        else:
            self.views[i].zero_()

    def write_view(self, i: int, values: Tensor) -> None:
        """Write what a script has put in place of a gradient of a reduced window, of which it has the whole."""
        if not self.is_freed():
            return write_whole(self.views[i], values)
        forget_norm(self.views[i])
        first = self._begin(i)
        laid_out = in_memory_order(torch.empty_like(self.params[i]).copy_(values))
        for begin, end in self.owned(i):
            self.reduced[begin:end].copy_(laid_out[begin - first : end - first])

    def owned(self, i: int) -> list[tuple[int, int]]:
        """Return where in `reduced` this rank's part of a parameter's gradient lies, if it has any."""
        begin = self._begin(i)
        start, stop = max(begin, 0), min(begin + self.params[i].numel(), self.reduced.numel())
        return [(start, stop)] if stop > start else []

    def _begin(self, i: int) -> int:
        """Return where in `reduced` the gradient would begin: before it, for one that an earlier rank shares."""
        return sum(param.numel() for param in self.params[:i]) - (0 if self._own is None else self._own * self.share_numel)

    def zero_missing(self) -> None:
        """Unused here means zero; the view still holds an earlier window."""
        for view, filled in zip(self.views, self.filled, strict=True):
            if not filled:
                view.zero_()

    def restart(self) -> None:
        """Begin a new window. What `param.grad` shows is the last update's, or zeros, or None."""
        self.filled[:] = [False] * len(self.params)
        self.keeps = self.touched = self.closed = self.expecting = self.sure = self.hidden = self._renewed = False
        self.added_to_last.clear()

    def expect(self, *, reduces: bool) -> None:
        """Prepare for a backward of ours."""
        self.expecting, self.awaited, self.elsewhere, self.closed = True, len(self.params), self.touched, False
        self._small_are_zero, self.task = False, None
        self.keep_hooks_last()
        if not reduces:
            self.factor = 1.0
        if self.keeps:
            strays = [p.grad for p, view in zip(self.params, self.views, strict=True) if p.grad is not view]
            changed = self.version() != self._version and not self.touched
            if changed or any(grad is not None for grad in strays):
                raise FleetError(CHANGED_IN_WINDOW)
            self.sure = not strays and not self.touched
        if self.sure and not reduces and all(self.filled):
            self.rest_hooks()

    def expect_bare(self, task: int, *, reduces: bool) -> None:
        """Prepare for a bare backward that has begun, after `admit` has made this bucket ready."""
        self.expecting, self.awaited, self.closed, self.task = True, len(self.params), False, task
        self.sure = False
        if not reduces:
            self.factor = 1.0
            if self.keeps and all(self.filled):
                # All but the gradient whose hook is running are added in place. It is left alone: its hooks are being gone
                # through, and should this backward fail, it is the one to notice the next.
                self.rest_hooks(but=[i for i, param in enumerate(self.params) if param.grad is not self.views[i]])

    def end_micro_step(self) -> None:
        """End a micro-step inside a window: the gradients are safe in the flat buffer."""
        self.wake_hooks()
        self.keeps, self.touched, self.expecting = True, False, False
        self._shown = list(self.views)
        self._version = self.version()

    def version(self) -> int:
        """Return how often the buffer was written to, as a whole or through `param.grad`: each counts for itself."""
        return int(self.flat._version) + sum(view._version for view in self.views)

    def edit_mark(self) -> tuple[int, list[bool]]:
        """Return what changes when the script writes to a gradient, replaces it or takes it away."""
        return self.version(), [param.grad is view for param, view in zip(self.params, self.views, strict=True)]

    def gradients(self) -> dict[str, Tensor]:
        """Return what finished micro-steps of this window have left, by parameter."""
        return {name: view for name, view, filled in zip(self.names, self.views, self.filled, strict=True) if filled}

    def resume(self, gradients: Mapping[str, Tensor]) -> None:
        """Be as after the micro-step that left these. An unused small view is zero and waits to be added to, as then."""
        self.allocate()
        self.make_room()
        for i, (name, param, view) in enumerate(zip(self.names, self.params, self.views, strict=True)):
            if name in gradients:
                view.copy_(gradients[name])
                param.grad, self.filled[i] = view, True
        self._small_are_zero = False
        self.end_micro_step()

    def rest_hooks(self, but: Sequence[int] = ()) -> None:
        """Rest the hooks for this backward: every gradient is added in place and nothing is to be noted."""
        self._resting = True
        for i, (hooks, key, _) in enumerate(self._hooks):
            if i not in but:
                del hooks[key]

    def wake_hooks(self) -> None:
        if self._resting:
            self._resting = False
            for hooks, key, hook in self._hooks:
                hooks[key] = hook

    def keep_hooks_last(self) -> None:
        """Move our hooks behind those that the user registered later, which may change a gradient: ours may send it."""
        if self._resting:
            return
        for hooks, key, hook in self._hooks:
            if next(reversed(hooks), key) != key:
                del hooks[key]
                hooks[key] = hook

    def has_last_hook(self, i: int) -> bool:
        """Return whether no hook comes after ours for this parameter."""
        hooks, key, _ = self._hooks[i]
        return next(reversed(hooks), key) == key

    def add_hooks(self, owner: Callable[[], Owner | None]) -> list[RemovableHandle]:
        """Register a hook on each parameter; they can rest without being registered again, which costs ten times as much."""
        handles = []
        for i, param in enumerate(self.params):
            hook = _make_hook(owner, self, i)
            handle = param.register_post_accumulate_grad_hook(hook)
            self._hooks.append((handle.hooks_dict_ref(), handle.id, hook))
            handles.append(handle)
        return handles

    def note_local(self, i: int) -> None:
        """Note a gradient of this rank alone: it stays where it is until it is reduced, or thrown away."""
        self.touched = True
        self._renewed |= self.whole and self.keeps and self.filled[i] and self.params[i].grad is not self._shown[i]
        self.note_arrival(i)

    def note_arrival(self, i: int) -> None:
        """Note a gradient of a backward in which nothing is counted."""
        self._small_are_zero = False
        if self.params[i].grad is self.views[i]:
            self.filled[i] = True

    def _require_strided(self, i: int, grad: Tensor) -> None:
        if grad.layout is not torch.strided:
            raise ConfigError(f"the gradient of `{self.names[i]}` is sparse. Build its embedding with sparse=False.")


def _make_hook(owner: Callable[[], Owner | None], bucket: Bucket, i: int) -> Hook:
    """Make the hook that runs for each gradient, hundreds of times a step: with as few Python operations as possible."""
    task_here = torch._C._current_graph_task_id
    param, view, filled, copied_at_once = bucket.params[i], bucket.views[i], bucket.filled, bucket.copied_at_once[i]

    def hook(_: Tensor) -> None:
        # A backward that failed half-way leaves `expecting` behind: the next one has another number.
        if not bucket.expecting or (bucket.task is not None and bucket.task != task_here() and bucket.task != current_task()):
            found = owner()
            if found is None or not found.on_unexpected(bucket, i):
                return
        if bucket.sure or param.grad is view:
            filled[i] = True
        elif copied_at_once:
            bucket.take(i)
        else:
            bucket.elsewhere = True
        bucket.awaited -= 1
        if bucket.awaited:
            return
        found = owner()
        if found is not None:
            found.on_complete(bucket)

    return hook
