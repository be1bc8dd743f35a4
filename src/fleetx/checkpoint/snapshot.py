"""Take the state of all objects, and find which part of it is equal on every rank.

Equal state is written once, by rank 0; the rest by each rank. Fingerprints decide which is which, not a declaration.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..dist.agree import run_and_share
from ..dist.comm import Comm
from ..dist.fingerprint import fingerprint
from ..dist.fully_sharded import is_divided, is_fully_sharded, local_of, whole_tensors
from ..errors import CheckpointError, FleetError
from ..shard.fsdp import parts_of
from .encode import Encoder, Json, Tensors
from .objects import kind_of

# --- global random number generators: Python's, NumPy's, torch's on the CPU and on this rank's device -------------------


def random_states(device: torch.device) -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def check_random_states(states: Any, device: torch.device) -> None:
    """Raise if these are no states of the generators, found by trying them on others; nothing is changed."""
    try:
        random.Random().setstate(states["python"])
        np.random.RandomState().set_state(states["numpy"])
        torch.Generator().set_state(states["torch"])
        if device.type == "cuda" and "cuda" in states:
            torch.Generator(device).set_state(states["cuda"])
    except Exception as error:
        raise CheckpointError(
            f"it holds no state of the random number generators that they accept: {type(error).__name__}: {error}"
        ) from None


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def seed_added_rank(step: int, rank: int) -> None:
    """Seed a rank that did not exist when the checkpoint was saved, with a stream of its own that is equal in every attempt."""
    seed = int.from_bytes(hashlib.sha256(f"fleetx {step} {rank}".encode()).digest()[:4], "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# --- snapshots and each rank's share of them ----------------------------------------------------------------------------

RANDOM = "(random numbers)"
"""Entry of the generators among the objects; no keyword argument can have this name."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    objects: dict[str, Json]
    """Kind and state of each object, with tensors replaced by their keys."""
    tensors: Tensors
    """Tensors by key. They are live: copy them before training continues."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the state that one rank writes: of the common state (None if it writes nothing of it) and its own (None if
    empty)."""

    common: Snapshot | None
    own: Snapshot | None

    def nbytes(self) -> int:
        parts = [part for part in (self.common, self.own) if part is not None]
        return sum(len(json.dumps(part.objects)) + sum(t.nbytes + 200 for t in part.tensors.values()) for part in parts)

    def copied(self) -> Share:
        """Return a copy on the CPU that training does not change."""
        return Share(*(part and Snapshot(part.objects, copy_tensors(part.tensors)) for part in (self.common, self.own)))


def whole_weights(objects: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Gather the weights of models that fully_shard has divided, by the models' names and theirs. Every rank is here."""
    models = {name: value for name, value in objects.items() if isinstance(value, nn.Module) and is_fully_sharded(value)}
    return {name: whole_tensors(model.state_dict()) for name, model in models.items()}


def in_parts(value: Any) -> Any:
    """Describe a weight that fully_shard has divided by the parts of all ranks; any other value stays as it is."""
    return parts_of(value, local_of(value)) if is_divided(value) else value


def take(objects: Mapping[str, Any], device: torch.device) -> Snapshot:
    encoder, encoded = Encoder(), {}
    for name, value in objects.items():
        kind = kind_of(value)
        try:
            state = kind.take(value)
            if isinstance(value, nn.Module):
                state["state_dict"] = {key: in_parts(one) for key, one in state["state_dict"].items()}
            encoded[name] = {"kind": kind.name, "state": encoder.encode(state, name)}
        except FleetError:
            raise
        except Exception as problem:  # from the user's state_dict, or from a value that contains itself
            raise CheckpointError(f"`{name}` cannot be saved: {type(problem).__name__}: {problem}") from problem
    encoded[RANDOM] = {"kind": "random", "state": encoder.encode(random_states(device), RANDOM)}
    return Snapshot(encoded, encoder.tensors)


def take_share(objects: Mapping[str, Any], comm: Comm, device: torch.device, *, copies: bool) -> Share:
    """Take a snapshot and return the share that this rank writes. If a rank cannot take its snapshot, all raise."""
    nothing: dict[str, dict[str, str]] = {"objects": {}, "tensors": {}}
    snapshot, marks = run_and_share(
        comm,
        lambda: take(objects, device),
        lambda taken: _marks(taken) if comm.size > 1 else nothing,  # alone, nothing differs
        fails=lambda failures: CheckpointError(
            "; ".join(f"rank {rank}: {text}" if comm.size > 1 else text for rank, text in failures.by_rank.items())
        ),
    )
    share = split(snapshot, marks, rank=comm.rank)
    return share.copied() if copies else share


SHARD_BYTES = 2**26
"""Common state below this size is written by rank 0: more files would cost more than they save."""


def split(snapshot: Snapshot, marks: Sequence[Mapping[str, Mapping[str, Any]]], *, rank: int) -> Share:
    """Split a snapshot into common and own parts, by comparing the marks of all ranks; large common parts between the ranks."""

    def equal(part: str, key: str) -> bool:
        return all(mark[part].get(key) == marks[0][part].get(key) for mark in marks)

    common = _chosen(snapshot, equal)
    own = _chosen(snapshot, lambda part, key: not equal(part, key))
    mine = _part_of(common, rank=rank, size=len(marks))
    return Share(mine if rank == 0 or mine.tensors else None, own if own.objects or own.tensors else None)


def _part_of(common: Snapshot, *, rank: int, size: int) -> Snapshot:
    """Return what this rank writes of the common state: a run of tensors, and rank 0 the objects too.

    All ranks hold the same tensors, and divide them alike, in the order of their names."""
    total = sum(tensor.nbytes for tensor in common.tensors.values())
    writers = size if total >= SHARD_BYTES else 1
    mine, start = {}, 0
    for key, tensor in sorted(common.tensors.items()):
        if min(start * writers // max(total, 1), writers - 1) == rank:
            mine[key] = tensor
        start += tensor.nbytes
    return Snapshot(common.objects if rank == 0 else {}, mine)


def _chosen(snapshot: Snapshot, wanted: Callable[[str, str], bool]) -> Snapshot:
    return Snapshot(
        {name: value for name, value in snapshot.objects.items() if wanted("objects", name)},
        {key: value for key, value in snapshot.tensors.items() if wanted("tensors", key)},
    )


def _marks(snapshot: Snapshot) -> dict[str, dict[str, str]]:
    return {"objects": _object_marks(snapshot.objects), "tensors": _tensor_marks(snapshot.tensors)}


def _object_marks(objects: Mapping[str, Json]) -> dict[str, str]:
    return {name: hashlib.sha256(json.dumps(state).encode()).hexdigest()[:24] for name, state in objects.items()}


def _tensor_marks(tensors: Tensors) -> dict[str, str]:
    prints = [fingerprint([t]) for t in tensors.values()]  # start all before fetching the first
    return {key: f"{int(mark):x} {t.dtype} {list(t.shape)}" for (key, t), mark in zip(tensors.items(), prints, strict=True)}


def copy_tensors(tensors: Tensors) -> Tensors:
    return {key: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for key, t in tensors.items()}


def without_aliases(tensors: Tensors) -> Tensors:
    """Return contiguous CPU tensors of which no two share memory, as safetensors requires: views are cloned."""
    plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    end = 0
    for key, tensor in sorted(plain.items(), key=lambda item: item[1].data_ptr()):
        if tensor.nbytes and tensor.data_ptr() < end:
            plain[key] = tensor.clone()
        elif tensor.nbytes:
            end = tensor.data_ptr() + tensor.nbytes
    return plain
