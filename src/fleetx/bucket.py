"""One flat buffer that the gradients of some parameters live in, and the hooks by which they get there.

A gradient comes in one of three ways, told apart by where `param.grad` points when its hook runs:
    in place    autograd added it to the view (CPU, small): nothing is left to do
    on its own  autograd made a tensor of its own (GPU, or large): it is moved into the view, and `param.grad` becomes the view
    a stranger  no backward of ours is under way: it stays where it is until step() asks for it, or it is thrown away
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .errors import ConfigError, FleetError

LARGE_BYTES = 2**20
"""On a CPU a smaller gradient is added to zeros in place; a larger one is copied when it comes: half the memory traffic."""

CHANGED_IN_WINDOW = (
    "gradients were changed, zeroed or replaced inside a merge window; they are sums of unfinished micro-batches there. "
    "Change gradients when optimizer.due, and zero them with optimizer.zero_grad(), which knows about windows."
)

Hook = Callable[[Tensor], None]


class Owner(Protocol):
    """Who is told of a complete bucket."""

    def on_complete(self, bucket: Bucket) -> None: ...
    def late_gradient(self, name: str) -> FleetError: ...


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """In which what is kept of gradients or weights is added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor's memory as one row."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def view_like(piece: Tensor, param: Tensor) -> Tensor:
    """A view with the parameter's own strides (channels_last stays so), or contiguous where those leave gaps."""
    if torch.ops.aten.is_non_overlapping_and_dense(param):
        strided: Tensor = torch.as_strided(piece, param.shape, param.stride(), int(piece.storage_offset()))
        return strided
    return piece.view(param.shape)


@final
class Bucket:
    """One flat buffer and the parameters whose gradients live in it."""

    def __init__(self, index: int, named: Sequence[tuple[str, nn.Parameter]], *, tail_numel: int, whole: bool = False) -> None:
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
        self.views = [view_like(piece, p) for piece, p in zip(pieces, self.params, strict=True)]
        self.whole = whole
        """`param.grad` is of the whole window when backward ends, whoever wrote it: DDP has reduced in place, or in a buffer."""
        self._renewed = False
        """`whole`: a gradient came that was not added to what the window has."""
        self._shown: list[Tensor | None] = list(self.views)
        """`whole`: where the window's sums were before the backward; DDP may have moved them into buffers of its own."""
        on_cpu = first.device.type == "cpu" and not whole
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
        self.factor = 1.0
        """What makes true gradients of the sums in the views."""
        self._true_already: set[int] = set()
        self._version = 0
        """Of the flat buffer at the end of the last micro-step: whoever writes to it in between changes the count."""
        self.polluted: int | None = None
        """A parameter whose gradient was added to the last update's; harmless unless it is used."""
        self.touched = False
        """A gradient came that is not of a backward of ours, since the last micro-step ended."""
        self.closed = False
        """Handed to the reducer: nothing may be added."""

    def aim(self, factor: float) -> None:
        """The window closes with what is to come. What an earlier backward made true, it did by another factor."""
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
        if self.expecting and not self.elsewhere:
            return  # autograd added every one of them in place
        fresh: list[tuple[Tensor, Tensor]] = []
        added: list[tuple[Tensor, Tensor]] = []
        self.require_unpolluted()
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
        self.restart(zeroed=True)
        self.sure = all(self.in_place)

    def show_window(self) -> None:
        """`whole`: what is to come is added to the window's sums, also where somebody has zeroed gradients in between."""
        for param, view, filled in zip(self.params, self.views, self.filled, strict=True):
            if filled and param.grad is None:
                param.grad = view
        self._shown = [param.grad for param in self.params]

    def zero_small(self) -> None:
        if self._small_views:
            torch._foreach_zero_(self._small_views)
        self._small_are_zero = True

    def zero_missing(self) -> None:
        """Unused here means zero; the view still holds an earlier window."""
        for view, filled in zip(self.views, self.filled, strict=True):
            if not filled:
                view.zero_()

    def restart(self, *, zeroed: bool) -> None:
        """A new window. What `param.grad` shows is the last update's, or None; or zeros, that may be added to."""
        self.filled[:] = [False] * len(self.params)
        self.zeroed = zeroed
        self.keeps = self.touched = self.closed = self.expecting = self.sure = self._renewed = False
        self.polluted = None

    def expect(self, *, reduces: bool) -> None:
        """A backward of ours begins."""
        self.expecting, self.awaited, self.elsewhere, self.closed = True, len(self.params), self.touched, False
        self._small_are_zero = False
        if not reduces:
            self.factor = 1.0
        if self.keeps:
            strays = [p.grad for p, view in zip(self.params, self.views, strict=True) if p.grad is not view]
            changed = self.flat._version != self._version and not self.touched
            if changed or any(grad is not None for grad in strays):
                raise FleetError(CHANGED_IN_WINDOW)
            self.sure = not strays and not self.touched
        if self.sure and not reduces and all(self.filled):
            self.rest_hooks()

    def end_micro_step(self) -> None:
        """Inside a window: the gradients are safe in the flat buffer."""
        self.wake_hooks()
        self.keeps, self.touched, self.expecting = True, False, False
        self._shown = list(self.views)
        self._version = self.flat._version

    def gradients(self) -> dict[str, Tensor]:
        """What finished micro-steps of this window have left, by parameter."""
        return {name: view for name, view, filled in zip(self.names, self.views, self.filled, strict=True) if filled}

    def resume(self, gradients: Mapping[str, Tensor]) -> None:
        """Be as after the micro-step that left these. An unused small view is zero and waits to be added to, as then."""
        self.make_room()
        for i, (name, param, view) in enumerate(zip(self.names, self.params, self.views, strict=True)):
            if name in gradients:
                view.copy_(gradients[name])
                param.grad, self.filled[i] = view, True
        self._small_are_zero = False
        self.end_micro_step()

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

    def add_hooks(self, owner: Callable[[], Owner | None]) -> list[RemovableHandle]:
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
        self._renewed |= self.whole and self.keeps and self.filled[i] and self.params[i].grad is not self._shown[i]
        if not self.filled[i] and self.params[i].grad is self.views[i]:
            if self.zeroed:
                self.filled[i] = True
            elif self.polluted is None:
                self.polluted = i

    def _require_strided(self, i: int, grad: Tensor) -> None:
        if grad.layout is not torch.strided:
            raise ConfigError(f"the gradient of `{self.names[i]}` is sparse. Build its embedding with sparse=False.")


def _make_hook(owner: Callable[[], Owner | None], bucket: Bucket, i: int) -> Hook:
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
            found = owner()
            if found is not None:
                found.on_complete(bucket)
            return
        found = owner()
        if found is None:
            return
        if bucket.closed:
            raise found.late_gradient(bucket.names[i])
        bucket.on_unexpected(i)

    return hook
