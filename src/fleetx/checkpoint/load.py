"""Load: the newest checkpoint whose every byte is right, the same one on all ranks.

Rank 0 says which folders there are. For each, newest first, every rank verifies what it would read, and all hear the result:
one damaged file on one rank, and all go on to the one before. Nothing is put into an object before everything has been checked.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ..comm import Comm
from ..errors import CheckpointError, FleetError, FleetWarning
from ..sampler import FleetSampler
from . import folder
from .encode import Json, decode
from .manifest import Damaged, Manifest, read_manifest, verify
from .objects import VALUE, check_all, put_all
from .rng import restore_random_states, seed_anew
from .save import share_name
from .snapshot import RANDOM

NOT_SEEN = "(not seen)"


class Loaded(NamedTuple):
    """What load_checkpoint found."""

    step: int
    values: dict[str, Any]
    """The values among the saved objects, by name."""


def find(directory: Path, comm: Comm) -> str | None:
    """The newest folder that verifies, or None where there is none at all. Every rank calls it, and gets the same."""
    names = comm.gather_json(folder.newest_first(directory) if comm.rank == 0 else [])[0]
    damage: list[str] = []
    for name in names:
        problems = comm.gather_json(_problem(directory / name, comm.rank))
        _refuse_unshared(directory / name, problems)
        found = list(dict.fromkeys(problem for problem in problems if problem is not None))
        if not found:
            if damage and comm.rank == 0:
                warnings.warn(f"{'; '.join(damage)}. Using {directory / name} instead.", FleetWarning, stacklevel=4)
            return str(name)
        damage.append(f"{directory / name}: {', '.join(found)}")
    if damage:
        raise CheckpointError(f"no checkpoint in {directory} is whole. {'; '.join(damage)}.")
    return None


def files_for(manifest: Manifest, rank: int) -> list[str]:
    """What this rank reads. Of another number of ranks, what rank 0 left tells what cannot be shared out anew."""
    stems = [share_name(None), share_name(rank if rank < manifest.world_size else 0)]
    return [name for name in manifest.files if name.split(".")[0] in stems]


def _problem(path: Path, rank: int) -> str | None:
    if not path.is_dir():
        return NOT_SEEN
    try:
        manifest = read_manifest(path)
        for name in files_for(manifest, rank):
            verify(path, manifest, name)
    except Damaged as damage:
        return str(damage)
    return None


def _refuse_unshared(path: Path, problems: list[str | None]) -> None:
    blind = [rank for rank, problem in enumerate(problems) if problem == NOT_SEEN]
    if blind and len(blind) < len(problems):
        raise CheckpointError(
            f"ranks {blind} do not see {path}, which rank 0 sees. Checkpoints must lie on storage that all nodes share."
        )


class Reader:
    """A verified checkpoint, as one rank reads it."""

    def __init__(self, path: Path, rank: int) -> None:
        self.manifest = read_manifest(path)
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        self.objects: dict[str, Json] = {}
        self.own: list[str] = []
        """What differs from rank to rank: objects, and keys of tensors."""
        for name in sorted(files_for(self.manifest, rank)):  # common first: a rank's own goes before it
            if name.endswith(".json"):
                self._read_words(path / name, is_own=name != f"{share_name(None)}.json")
            else:
                opened = self._stack.enter_context(safe_open(path / name, framework="pt"))
                self._where |= dict.fromkeys(opened.keys(), opened)

    def _read_words(self, path: Path, *, is_own: bool) -> None:
        words = json.loads(path.read_text(encoding="utf-8"))
        self.objects |= words["objects"]
        if is_own:
            self.own += [*words["objects"], *words["tensors"]]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def state(self, name: str) -> tuple[str, Any]:
        entry = self.objects[name]
        return entry["kind"], decode(entry["state"], self._fetch)

    def _fetch(self, key: str) -> Tensor:
        tensor: Tensor = self._where[key].get_tensor(key)
        return tensor.clone()  # in memory of its own: the file may vanish while the run goes on


def load_into(path: Path, objects: Mapping[str, Any], comm: Comm, device: torch.device, *, new_world_size: bool) -> Loaded:
    """Every rank calls it. All raise, with nothing changed, or all continue from there."""
    with Reader(path, comm.rank) as reader:
        error = None
        try:
            refuse_other_world(reader, comm, allowed=new_world_size)
            saved = {name: reader.state(name) for name in reader.objects if name != RANDOM}
            check_all(objects, saved)
        except FleetError as problem:
            error = str(problem)
        errors = [told for told in comm.gather_json(error) if told is not None]
        if errors:
            raise CheckpointError(f"{path} cannot be loaded: {'; '.join(dict.fromkeys(errors))}")
        put_all(objects, saved)
        _warn_of_unused(path, objects, saved, comm)
        _restore_random(reader, objects, comm, device)
        return Loaded(reader.manifest.step, {name: state for name, (kind, state) in saved.items() if kind == VALUE.name})


def refuse_other_world(reader: Reader, comm: Comm, *, allowed: bool) -> None:
    """What is equal on all ranks loads on any number of them; what each rank has of its own does not."""
    size = reader.manifest.world_size
    if size == comm.size or not reader.own:
        return
    lost = sorted({entry.split("/")[0] for entry in reader.own} - {RANDOM})
    if lost:
        raise CheckpointError(
            f"it was saved by {size} ranks, and this run has {comm.size}. These differ from rank to rank and cannot be shared "
            f"out anew: {', '.join(lost)} ({', '.join(entry for entry in sorted(reader.own) if RANDOM not in entry)[:300]}). "
            f"Resume on {size} ranks; or save when no merge window is open (after optimizer.flush())."
        )
    if not allowed:
        raise CheckpointError(
            f"it was saved by {size} ranks, and this run has {comm.size}: each rank's random numbers (dropout, augmentation) "
            f"would go on differently. Resume on {size} ranks, or allow it: load_checkpoint(..., new_world_size=True)."
        )


def _warn_of_unused(path: Path, objects: Mapping[str, Any], saved: Mapping[str, tuple[str, Any]], comm: Comm) -> None:
    unused = [name for name, (kind, _) in saved.items() if name not in objects and kind != VALUE.name]
    if unused and comm.rank == 0:
        warnings.warn(
            f"{path} also holds {', '.join(unused)}, which load_checkpoint was not given: not loaded.", FleetWarning, stacklevel=4
        )


def _restore_random(reader: Reader, objects: Mapping[str, Any], comm: Comm, device: torch.device) -> None:
    """Last, so that nothing done while loading has moved them; and once more when a half-read epoch goes on."""
    manifest = reader.manifest
    differs = any(entry.split("/")[0] == RANDOM for entry in reader.own)
    if comm.rank >= manifest.world_size and differs:
        return seed_anew(manifest.step, comm.rank)
    _, states = reader.state(RANDOM)
    restore_random_states(states, device)
    for value in objects.values():
        if isinstance(value, FleetSampler):
            value.when_resumed(lambda: restore_random_states(states, device))
    return None
