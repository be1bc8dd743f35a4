"""Which of a model's buffers travel with every update, which once they have changed, and which belong to each rank.

floats, integers   buffers of norm layers, whatever their size, and all others up to LARGE_NUMEL elements: with every update
tables             larger ones outside norm layers (positions, masks, memory banks), and complex ones: once one has changed
local              those that `strategy.local_buffers` names: equal at the start, each rank's own from then on
"""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ...errors import ConfigError, did_you_mean
from ..setup.placement import plain_name

# Whether a tensor was written to or replaced since: asked of its version counter, at no cost for the device.


class Mark(NamedTuple):
    tensor: weakref.ref[Tensor]
    """The tensor, not its id: a new tensor may get the id of one that is gone."""
    version: int


def mark_of(tensor: Tensor) -> Mark:
    return Mark(weakref.ref(tensor), _version(tensor))


def is_unchanged(mark: Mark, tensor: Tensor) -> bool:
    return mark.tensor() is tensor and mark.version == _version(tensor)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # those of inference mode cannot be written to elsewhere


# ----------------------------------------------------------------------------------------------------------------------

LARGE_NUMEL = 16384
"""Most buffers above are constants. They do not travel before they are seen to change."""

Owner: TypeAlias = tuple[nn.Module, str]
"""A module and the name of its buffer: looked up each time, since a module may put a new tensor in its place."""


def buffer_of(owner: Owner) -> Tensor:
    buffer = owner[0]._buffers[owner[1]]
    assert buffer is not None
    return buffer


_reported: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


class SortedBuffers(NamedTuple):
    floats: dict[str, Owner]
    integers: dict[str, Owner]
    tables: dict[str, Owner]
    local: dict[str, Owner]
    statistics: set[str]
    """Names of norm layers' statistics: the ranks change them differently, and users expect that they are averaged."""
    reported: set[str]
    """Named in a warning, since ranks changed them differently. One set for each model, and the same on all ranks."""

    def outside_norm_layers(self) -> dict[str, Owner]:
        """Return the buffers that travel with every update and are not of a norm layer."""
        return {name: owner for name, owner in (self.floats | self.integers).items() if name not in self.statistics}


def sort_buffers(model: nn.Module, local: Collection[str] = ()) -> SortedBuffers:
    """Sort the model's buffers by how they are kept equal. `local`: names or patterns of those that belong to each rank."""
    found = SortedBuffers({}, {}, {}, {}, set(), _reported.setdefault(model, set()))
    own = {id(buffer_of(owner)) for name, owner in _named_owners(model) if _is_named(name, local)}
    for name, owner in _named_owners(model):
        buffer, is_norm = buffer_of(owner), is_norm_layer(owner[0])
        if id(buffer) in own:  # by the tensor: two modules may share it under two names
            kind = found.local
        elif (buffer.numel() > LARGE_NUMEL and not is_norm) or buffer.is_complex():
            kind = found.tables
        else:
            kind = found.floats if buffer.is_floating_point() else found.integers
        kind[name] = owner
        if is_norm:
            found.statistics.add(name)
    return found


def is_norm_layer(module: nn.Module) -> bool:
    """Return whether the module has running statistics."""
    return "num_batches_tracked" in module._buffers or "running_mean" in module._buffers


def _named_owners(model: nn.Module) -> Iterator[tuple[str, Owner]]:
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{prefix}.{key}".lstrip("."), (module, key)


def _is_named(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(plain_name(name), pattern) for pattern in patterns)


def refuse_unknown_buffers(model: nn.Module, patterns: Sequence[str]) -> None:
    """Raise for a name or pattern of `strategy.local_buffers` that fits no buffer of the model."""
    names = [plain_name(name) for name, _ in _named_owners(model)]
    for pattern in patterns:
        if not any(_is_named(name, [pattern]) for name in names):
            some = f"It has: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}." if names else "It has none."
            raise ConfigError(
                f"strategy.local_buffers names `{pattern}`; no buffer of the model has that name.{did_you_mean(pattern, names)} "
                + some
            )


def reshaped(name: str, now: Sequence[int], before: Sequence[int]) -> ConfigError:
    return ConfigError(
        f"buffer `{name}` has the shape {tuple(now)}, and had {tuple(before)} in fleet.distribute(...): buffers travel with "
        "gradients and weights, at a fixed place. Keep its shape, make it a plain attribute of its module, or leave it to each "
        f'rank: strategy.local_buffers = ["{plain_name(name)}"].'
    )


def average_of_change(now: Tensor, last: Tensor, size: int) -> Tensor:
    """Compute this rank's share of the mean change since the last update.

    The change, not the value: a constant then stays the same to the bit. The mean of three equal floats need not be that float.
    From an infinity or a NaN there is no change to speak of: there the value itself is averaged.
    """
    return torch.where(last.isfinite(), now - last, now).div_(size)


def apply_change(last: Tensor, change: Tensor) -> Tensor:
    """Compute the common value after an update; the inverse of `average_of_change`, summed over ranks."""
    return torch.where(last.isfinite(), last + change, change)
