"""The state of all objects at one instant, and which of it is the same on every rank.

What is equal everywhere is written once, by rank 0; the rest by each rank. Nobody declares which is which: fingerprints tell.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm import Comm
from ..digest import fingerprint
from ..errors import CheckpointError
from .encode import Encoder, Json, Tensors
from .objects import kind_of
from .rng import random_states

RANDOM = "(random numbers)"
"""The generators' entry among the objects; not a name that a keyword can have."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    objects: dict[str, Json]
    """By object: its kind, and its state with tensors replaced by their keys."""
    tensors: Tensors
    """Live ones: whoever writes later than now must copy them first."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank writes: objects and tensors for `common` (rank 0 alone), and its own."""

    common: Snapshot | None
    own: Snapshot | None

    def nbytes(self) -> int:
        parts = [part for part in (self.common, self.own) if part is not None]
        return sum(len(json.dumps(part.objects)) + sum(t.nbytes + 200 for t in part.tensors.values()) for part in parts)

    def copied(self) -> Share:
        """On the CPU and independent of what training does next."""
        return Share(*(part and Snapshot(part.objects, copy_tensors(part.tensors)) for part in (self.common, self.own)))


def take(objects: Mapping[str, Any], device: torch.device) -> Snapshot:
    encoder, encoded = Encoder(), {}
    for name, value in objects.items():
        kind = kind_of(value)
        encoded[name] = {"kind": kind.name, "state": encoder.encode(kind.take(value), name)}
    encoded[RANDOM] = {"kind": "random", "state": encoder.encode(random_states(device), RANDOM)}
    return Snapshot(encoded, encoder.tensors)


def agree(comm: Comm, snapshot: Snapshot | None, error: str | None) -> Share:
    """Split by what is equal on all ranks. A rank that could not take its snapshot is heard here, so that all raise."""
    marks = {} if snapshot is None else {"objects": _object_marks(snapshot.objects), "tensors": _tensor_marks(snapshot.tensors)}
    ranks = comm.gather_json([error, marks])
    failed = [f"rank {rank}: {told}" if comm.size > 1 else told for rank, (told, _) in enumerate(ranks) if told is not None]
    if failed:
        raise CheckpointError("; ".join(failed))
    assert snapshot is not None
    return split(snapshot, [mark for _, mark in ranks], rank=comm.rank)


def split(snapshot: Snapshot, marks: Sequence[Mapping[str, Mapping[str, Any]]], *, rank: int) -> Share:
    def equal(part: str, key: str) -> bool:
        return all(mark[part].get(key) == marks[0][part].get(key) for mark in marks)

    common = _chosen(snapshot, equal)
    own = _chosen(snapshot, lambda part, key: not equal(part, key))
    return Share(common if rank == 0 else None, own if own.objects or own.tensors else None)


def _chosen(snapshot: Snapshot, wanted: Callable[[str, str], bool]) -> Snapshot:
    return Snapshot(
        {name: value for name, value in snapshot.objects.items() if wanted("objects", name)},
        {key: value for key, value in snapshot.tensors.items() if wanted("tensors", key)},
    )


def _object_marks(objects: Mapping[str, Json]) -> dict[str, str]:
    return {name: hashlib.sha256(json.dumps(state).encode()).hexdigest()[:24] for name, state in objects.items()}


def _tensor_marks(tensors: Tensors) -> dict[str, str]:
    prints = [fingerprint([t]) for t in tensors.values()]  # all started before the first is fetched
    return {key: f"{int(mark):x} {t.dtype} {list(t.shape)}" for (key, t), mark in zip(tensors.items(), prints, strict=True)}


def copy_tensors(tensors: Tensors) -> Tensors:
    return {key: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for key, t in tensors.items()}


def as_written(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
