"""What travels with the gradients so that ranks stay equal: buffers, and a few flags, in the tail of the last bucket.

Layout, in floats: [alarms][one flag per parameter, if asked][floating buffers][integer buffers, a byte each].
Alarms are counts that all ranks must act on together: see `Alarms`.
Floating buffers (BatchNorm statistics) are averaged; integers come from rank 0, since all others send zeros.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn

from .errors import ConfigError, FleetWarning

LARGE_NUMEL = 16384
"""A larger buffer outside a norm layer is a table (positions, masks), and so is a complex one: sent once, then watched."""


class Alarms(NamedTuple):
    """On one rank what it has to tell; summed over ranks, what all of them know."""

    missing: float | Tensor = 0.0
    """Parameters without a gradient in this window."""
    bad_losses: float | Tensor = 0.0
    """0 where all losses of this window are finite; else a number of them, or NaN."""
    stops: float | Tensor = 0.0
    """Requests to stop at an update boundary."""
    place: float | Tensor = 0.0
    """A number of the update and the backward under way; with the sum of squares it tells whether all ranks have the same."""
    place_squared: float | Tensor = 0.0


ALARMS = len(Alarms._fields)
NO_ALARMS = Alarms()


def average_of_change(now: Tensor, last: Tensor, size: int) -> Tensor:
    """This rank's share of the mean change since the last update.

    The change, not the value: a constant then stays the same to the bit. The mean of three equal floats need not be that float.
    From an infinity or a NaN there is no change to speak of: there the value itself is averaged.
    """
    return torch.where(last.isfinite(), now - last, now).div_(size)


def apply_change(last: Tensor, change: Tensor) -> Tensor:
    """The common value after an update; the inverse of `average_of_change`, summed over ranks."""
    return torch.where(last.isfinite(), last + change, change)


Owner: TypeAlias = tuple[nn.Module, str]
"""A module and the name of its buffer: looked up each time, since a module may put a new tensor in its place."""


def buffer_of(owner: Owner) -> Tensor:
    buffer = owner[0]._buffers[owner[1]]
    assert buffer is not None
    return buffer


def reshaped(name: str, now: Sequence[int], before: Sequence[int]) -> ConfigError:
    return ConfigError(
        f"buffer `{name}` has the shape {tuple(now)}, and had {tuple(before)} in fleet.distribute(...): buffers travel with "
        "gradients and weights, at a fixed place. Keep its shape, or make it a plain attribute of its module."
    )


class SortedBuffers(NamedTuple):
    floats: dict[str, Owner]
    integers: dict[str, Owner]
    tables: dict[str, Owner]


def sort_buffers(model: nn.Module) -> SortedBuffers:
    found = SortedBuffers({}, {}, {})
    for prefix, module in model.named_modules():
        is_norm = "num_batches_tracked" in module._buffers
        for key, buffer in module._buffers.items():
            if buffer is None:
                continue
            is_table = (buffer.numel() > LARGE_NUMEL and not is_norm) or buffer.is_complex()
            kind = found.tables if is_table else found.floats if buffer.is_floating_point() else found.integers
            kind[f"{prefix}.{key}".lstrip(".")] = (module, key)
    return found


@final
class Tail:
    def __init__(self, model: nn.Module, *, rank: int, size: int, flags: int) -> None:
        self.rank, self.size, self.flags = rank, size, flags
        buffers = sort_buffers(model)
        self._names, self._owners = list(buffers.floats), list(buffers.floats.values())
        self._integers = list(buffers.integers.values())
        self._watched = {name: (*owner, _mark(buffer_of(owner))) for name, owner in buffers.tables.items()}
        floats = [buffer_of(o) for o in self._owners]
        self.dtype = torch.float64 if any(b.dtype == torch.float64 for b in floats) else torch.float32
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._last, self._last_views = _flat_views(floats, self.dtype, device)
        self._now, self._now_views = _flat_views(floats, self.dtype, device)
        self._bytes, self._byte_views = _byte_views([buffer_of(o) for o in self._integers], device)
        if floats:
            torch._foreach_copy_(self._last_views, floats)
        self.numel = ALARMS + flags + self._last.numel() + self._bytes.numel()

    @torch.no_grad()
    def pack(self, out: Tensor, *, alarms: Alarms, used: list[bool] | None) -> None:
        """Write this rank's share; `out` is then summed over ranks."""
        self.warn_of_changed_tables()
        _write_alarms(out, alarms)
        start = ALARMS + self.flags
        if used is not None:
            out[ALARMS:start] = torch.tensor(used, dtype=out.dtype)
        if self._owners:
            self._collect_floats()
            out[start : start + self._now.numel()] = average_of_change(self._now, self._last, self.size)
        if self._integers:
            integers = out[start + self._now.numel() :]
            if self.rank == 0:
                torch._foreach_copy_(self._byte_views, [buffer_of(o) for o in self._integers])
                integers.copy_(self._bytes)
            else:
                integers.zero_()

    def _collect_floats(self) -> None:
        buffers = [buffer_of(o) for o in self._owners]
        try:
            torch._foreach_copy_(self._now_views, buffers)
        except RuntimeError:
            for name, buffer, view in zip(self._names, buffers, self._now_views, strict=True):
                if buffer.shape != view.shape:
                    raise reshaped(name, buffer.shape, view.shape) from None
            raise

    @torch.no_grad()
    def unpack(self, out: Tensor) -> None:
        """Give every rank the same buffers; `out` is the sum over ranks."""
        start = ALARMS + self.flags
        if self._owners:
            buffers = [buffer_of(o) for o in self._owners]
            self._last.copy_(apply_change(self._last, out[start : start + self._last.numel()]))
            torch._foreach_copy_(buffers, self._last_views)
            if any(b.dtype != self.dtype for b in buffers):
                torch._foreach_copy_(self._last_views, buffers)  # a 16-bit buffer rounds: remember what it really holds
        if self._integers:
            self._bytes.copy_(out[start + self._now.numel() :])
            torch._foreach_copy_([buffer_of(o) for o in self._integers], self._byte_views)

    def watched(self) -> set[str]:
        """Buffers that may differ between ranks."""
        return set(self._watched)

    def common(self) -> dict[str, Tensor]:
        """The floating buffers as they were, on every rank, after the last update."""
        return dict(zip(self._names, self._last_views, strict=True))

    @torch.no_grad()
    def resume(self, common: Mapping[str, Tensor] | None) -> None:
        """Continue from these; None: from what the buffers hold now."""
        for name, view, owner in zip(self._names, self._last_views, self._owners, strict=True):
            view.copy_(buffer_of(owner) if common is None else common[name])
        for name, (module, key, _) in self._watched.items():  # loading a checkpoint is no change by the training
            self._watched[name] = (module, key, _mark(buffer_of((module, key))))

    def warn_of_changed_tables(self) -> None:
        for name, (module, key, seen) in list(self._watched.items()):
            buffer = module._buffers[key]
            if buffer is not None and _mark(buffer) != seen:
                del self._watched[name]
                warnings.warn(
                    f"buffer `{name}` ({buffer.numel()} elements, {buffer.dtype}) changed during training. Complex buffers, "
                    f"and those above {LARGE_NUMEL} elements outside norm layers, are made equal once, in distribute(); this one "
                    "may now differ between ranks. Split it, or make it equal yourself with fleet.util.all_reduce.",
                    FleetWarning,
                    stacklevel=2,
                )


def _mark(buffer: Tensor) -> tuple[int, int]:
    """Changes when the buffer is written to or replaced."""
    return id(buffer), buffer._version


def _write_alarms(out: Tensor, alarms: Alarms) -> None:
    if out.device.type == "cpu":
        out[:ALARMS] = torch.tensor([float(alarm) for alarm in alarms], dtype=out.dtype)
        return
    out[:ALARMS].zero_()
    for place, alarm in enumerate(alarms):
        if isinstance(alarm, Tensor) or alarm:  # each write is a kernel, and most have nothing to tell
            out[place] = alarm


def _flat_views(like: list[Tensor], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    flat = torch.zeros(sum(t.numel() for t in like), dtype=dtype, device=device)
    views = [piece.view(t.shape) for piece, t in zip(flat.split([t.numel() for t in like]), like, strict=True)] if like else []
    return flat, views


def _byte_views(like: list[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """One flat byte buffer, and a view of each tensor's own type into it."""
    lengths = [-(-t.nbytes // 8) * 8 for t in like]  # 8-byte steps: a view as int64 must be aligned
    flat = torch.zeros(sum(lengths), dtype=torch.uint8, device=device)
    views, start = [], 0
    for t, length in zip(like, lengths, strict=True):
        views.append(flat[start : start + t.nbytes].view(t.dtype).view(t.shape))
        start += length
    return flat, views
