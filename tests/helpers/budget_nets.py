"""Memory of a step by torch's own profiler, nets that are large enough for it to tell, and nets made by a die."""

from __future__ import annotations

import functools
import gc
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# --- bytes, by the profiler ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Used:
    peak: int
    """The most bytes that torch's CPU allocator had handed out at any time, beyond those from before."""
    left: int
    """What of them was not given back."""
    with_workspaces: int
    """The peak, with what kernels made and gave back while they ran."""


def allocated_in(work: Callable[[], Any]) -> Used:
    """By the allocator's own events. Memory from before the work is not seen to end.

    A kernel's workspace, made and given back while it runs, is left out: it is never a tensor of anybody's."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    found: list[tuple[int, Any, Any]] = []
    for root in profiled.profiler.kineto_results.experimental_event_tree():
        found += allocations(root, None)
    found.sort(key=lambda one: one[0])
    without = list(itertools.accumulate(without_workspaces(found), initial=0))
    every = itertools.accumulate((allocation.alloc_size for _, allocation, _ in found), initial=0)
    return Used(max(without), without[-1], max(every))


def allocations(event: Any, kernel: Any) -> Iterator[tuple[int, Any, Any]]:
    """When, what, and the event of the kernel that it happened in."""
    if event.tag.name == "Allocation":
        yield event.start_time_ns, event.extra_fields, kernel
    inside = event if kernel is None and is_kernel(event.name) else kernel
    for child in event.children:
        yield from allocations(child, inside)


def without_workspaces(found: list[tuple[int, Any, Any]]) -> list[int]:
    """Sizes in order, negative where memory is given back; 0 for what was made in the same kernel."""
    sizes: list[int] = []
    made: dict[int, tuple[int, Any]] = {}
    for _, allocation, kernel in found:
        sizes.append(allocation.alloc_size)
        if allocation.alloc_size > 0:
            made[allocation.ptr] = len(sizes) - 1, kernel
            continue
        index, maker = made.pop(allocation.ptr, (None, None))
        if index is not None and kernel is not None and maker is kernel:
            sizes[index] = sizes[-1] = 0
    return sizes


@functools.cache
def is_kernel(name: str) -> bool:
    """An operation that is not written in terms of others: what it does inside cannot be seen from above."""
    overloads = [one for one in torch._C._dispatch_get_all_op_names() if one.split(".")[0] == name]
    by_others = (torch._C._dispatch_has_kernel_for_dispatch_key(one, "CompositeImplicitAutograd") for one in overloads)
    return bool(overloads) and not any(by_others)


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def lasting_bytes(model: nn.Module, optimizer: Any, batch: Iterable[Tensor]) -> int:
    """In use between two steps: weights, gradients that are kept, buffers, all that the optimizer holds, the batch."""
    parameters = list(model.parameters())
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    flats = list(optimizer.pipeline.buckets.flats)
    return bytes_of([*parameters, *(p.grad for p in parameters), *model.buffers(), *held, *flats, *batch])


# --- nets ---------------------------------------------------------------------------------------------------------------------


class Reshaped(nn.Module):
    """Views of views, a view changed in place, and operations in place on fresh tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        joint = self.enter(x).view(len(x), -1, 3, 32)
        joint[:, :, 0].mul_(2)
        query, key, value = joint.permute(2, 0, 1, 3)
        mixed = (query @ key.transpose(1, 2)).mul_(0.1).softmax(-1) @ value
        return self.leave(mixed.relu_()).sigmoid_()


class Checkpointed(nn.Module):
    def __init__(self, *units: nn.Module) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = checkpoint(unit, x, use_reentrant=False)
        return x


def conv_layers(channels: int, *, inplace: bool) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=inplace),
        nn.Conv2d(channels, channels, 3, padding=1, groups=4),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=inplace),
        nn.MaxPool2d(2),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(channels * 64, 10),
    )


def feed_forward(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))


# --- nets made by a die -------------------------------------------------------------------------------------------------------

ROW = 12


class RandomBlock(nn.Module):
    """Some layers of drawn widths; with a residual, or with a second input, or with norm and dropout."""

    def __init__(self, draw: random.Random, inputs: int, outputs: int, second: int | None) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = inputs + (second or 0)
        for _ in range(draw.randint(1, 3)):
            wider = draw.choice([8, 16, 24, 48])
            layers += [nn.Linear(width, wider)]
            layers += draw.choice([[], [nn.BatchNorm1d(wider)], [nn.LayerNorm(wider)], [nn.Dropout(0.2)]])
            layers += [draw.choice([nn.ReLU(), nn.ReLU(inplace=True), nn.GELU(), nn.Tanh()])]
            width = wider
        self.layers = nn.Sequential(*layers, nn.Linear(width, outputs))
        self.residual = inputs == outputs and draw.random() < 0.5

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        y = self.layers(x if skip is None else torch.cat([x, skip], dim=1))
        return x + y if self.residual else y


class RandomNet(nn.Module):
    """Blocks in a row, some with a skip from any earlier one, some called twice, some on a branch that is added."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.blocks = nn.ModuleList()
        self.skips: list[int | None] = []
        self.twice: list[bool] = []
        widths = [ROW]
        for i in range(draw.randint(2, 7)):
            width = widths[-1] if draw.random() < 0.4 else draw.choice([8, 16, 32])
            skip = draw.randrange(i) if i and draw.random() < 0.35 else None
            self.blocks.append(RandomBlock(draw, widths[-1], width, None if skip is None else widths[skip]))
            self.skips.append(skip)
            self.twice.append(width == widths[-1] and draw.random() < 0.3)
            widths.append(width)
        self.branch = nn.Linear(widths[1], widths[-1]) if draw.random() < 0.4 else None
        self.head = nn.Linear(widths[-1], 4)

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for block, skip, twice in zip(self.blocks, self.skips, self.twice, strict=True):
            other = None if skip is None else made[skip]
            x = block(x, other)
            made.append(block(x, other) if twice else x)
            x = made[-1]
        return self.head(x if self.branch is None else x + torch.sin(self.branch(made[1])))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])
