"""Load: the newest checkpoint whose every byte is right, the same one on all ranks.

Rank 0 says which folders there are. For each, newest first, every rank verifies what it would read, and all hear the result:
one damaged file on one rank, and all go on to the one before. Nothing is put into an object before everything has been checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ..config.text import listed
from ..data.sampler import FleetSampler
from ..dist.agree import run_and_share, run_on_all, sentence
from ..dist.comm import Comm
from ..errors import CheckpointError, warn_user
from . import folder
from .encode import Json, decode
from .manifest import NAME as MANIFEST
from .manifest import Damaged, Manifest, read_manifest, verify
from .objects import TRAINING, VALUE, check_all, put_all
from .save import share_name
from .snapshot import RANDOM, restore_random_states, seed_anew

NOT_SEEN = "(not seen)"


class Loaded(NamedTuple):
    """What load_checkpoint found."""

    step: int
    values: dict[str, Any]
    """The values among the saved objects, by name."""


class Found(NamedTuple):
    """The checkpoint to load."""

    path: Path
    passed_over: str
    """Why newer ones are not it; empty when it is the newest."""


def find(directory: Path, comm: Comm) -> Found | None:
    """The newest folder that verifies, or None where there is none at all. Every rank calls it, and gets the same."""
    damage: list[str] = []
    for name in _names(directory, comm):
        path = directory / name
        ranks = comm.gather_json(_inspect(path, comm))
        _refuse_unshared(path, ranks)
        problems = list(dict.fromkeys(problem for problem, _ in ranks if problem is not None))
        if not problems:
            return Found(path, f"{'; '.join(damage)}. Using {path} instead." if damage else "")
        damage.append(f"{path}: {', '.join(problems)}")
    if damage:
        raise CheckpointError(f"no checkpoint in {directory} is whole. {'; '.join(damage)}.")
    return None


def _names(directory: Path, comm: Comm) -> list[str]:
    """As rank 0 sees them. An empty folder on rank 0 alone is a missing mount, not a first start."""

    def report(error: Exception) -> str:
        return f"rank {comm.rank} cannot read {directory}: {getattr(error, 'strerror', None) or sentence(error)}"

    _, ranks = run_and_share(
        comm,
        lambda: folder.newest_first(directory),
        lambda names: names,
        report=report,
        fails=lambda failures: CheckpointError(failures.text),
    )
    seeing = [rank for rank, names in enumerate(ranks) if names]
    if seeing and not ranks[0]:
        raise CheckpointError(
            f"ranks {seeing} see checkpoints in {directory}, and rank 0 sees none. "
            "Checkpoints must lie on storage that all nodes share."
        )
    return [str(name) for name in ranks[0]]


def adds_up(entry: str) -> bool:
    """What a compressor has kept back: each rank's share of one sum, which another number of ranks can share as well."""
    return "/stages/reduce/shares/" in entry


def files_for(path: Path, manifest: Manifest, rank: int, size: int) -> list[str]:
    """What this one of `size` ranks reads: what is common, then its own, which counts more.

    Where another number of ranks saved it, in between the words of all of them, which tell what cannot be shared out anew, and
    their tensors where some add up."""
    common, own = share_name(None), share_name(rank if rank < manifest.world_size else 0)
    others = [share_name(r) for r in range(manifest.world_size)] if manifest.world_size != size else []
    found = [name for name in sorted(manifest.files) if name.split(".")[0] == common]
    for stem in [*(other for other in others if other != own), own]:
        words, tensors = f"{stem}.json", f"{stem}.safetensors"
        found += [words] if words in manifest.files else []
        if tensors in manifest.files and (stem == own or _some_add_up(path, manifest, words)):
            found.append(tensors)
    return found


def _some_add_up(path: Path, manifest: Manifest, words: str) -> bool:
    verify(path, manifest, words)
    return any(adds_up(key) for key in json.loads((path / words).read_text(encoding="utf-8"))["tensors"])


def _inspect(path: Path, comm: Comm) -> tuple[str | None, str]:
    """What is wrong with what this rank would read, and which manifest it saw."""
    try:
        if not path.is_dir():
            return NOT_SEEN, ""
        manifest = read_manifest(path)
        if manifest.step != folder.step_of(path.name):  # else an old one, renamed, would go before newer ones
            raise Damaged(f"{MANIFEST} is of step {manifest.step}, which is not that of its folder")
        for name in files_for(path, manifest, comm.rank, comm.size):
            verify(path, manifest, name)
    except Damaged as damage:
        return str(damage), ""
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}", ""
    return None, hashlib.sha256(manifest.to_text().encode()).hexdigest()


def _refuse_unshared(path: Path, ranks: list[tuple[str | None, str]]) -> None:
    blind = [rank for rank, (problem, _) in enumerate(ranks) if problem == NOT_SEEN]
    if blind and len(blind) < len(ranks):
        raise CheckpointError(
            f"ranks {blind} do not see {path}, which rank 0 sees. Checkpoints must lie on storage that all nodes share."
        )
    other = [rank for rank, (_, seen) in enumerate(ranks) if seen and ranks[0][1] and seen != ranks[0][1]]
    if other:
        raise CheckpointError(
            f"ranks {other} see another checkpoint at {path} than rank 0. Checkpoints must lie on storage that all nodes share."
        )


class Reader:
    """A verified checkpoint, as one rank reads it."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self.manifest = read_manifest(path)
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        self._shares: dict[str, list[Any]] = {}
        """Saved by other ranks than these: of what adds up over ranks, the files of all of them."""
        self.folds = size != self.manifest.world_size
        self.objects: dict[str, Json] = {}
        self.own: list[str] = []
        """What differs from rank to rank: objects, and keys of tensors."""
        for name in files_for(path, self.manifest, rank, size):
            if name.endswith(".json"):
                self._read_words(path / name, is_own=name != f"{share_name(None)}.json")
            else:
                opened = self._stack.enter_context(safe_open(path / name, framework="pt"))
                self._where |= dict.fromkeys(opened.keys(), opened)
                for key in filter(adds_up, opened.keys()):
                    self._shares.setdefault(key, []).append(opened)

    def _read_words(self, path: Path, *, is_own: bool) -> None:
        words = json.loads(path.read_text(encoding="utf-8"))
        self.objects |= words["objects"]
        if is_own:
            self.own += [*words["objects"], *words["tensors"]]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def state(self, name: str, *, wanted: bool = True) -> tuple[str, Any]:
        """Its kind and its state. Values are given back unasked; of what else nobody wants, no tensor is read."""
        kind, state = self.objects[name]["kind"], self.objects[name]["state"]
        found = decode(state, self._fetch) if wanted or kind == VALUE.name else None
        if self.folds and kind == TRAINING.name and found is not None and found["stages"]["reduce"].get("shares"):
            found["stages"]["reduce"]["summed_over"] = self.manifest.world_size
        return kind, found

    def _fetch(self, key: str) -> Tensor:
        if self.folds and key in self._shares:
            return self._sum_of_shares(key)
        tensor: Tensor = self._where[key].get_tensor(key)
        return tensor.clone()  # in memory of its own: the file may vanish while the run goes on

    def _sum_of_shares(self, key: str) -> Tensor:
        """Over all ranks that saved it. What was the same on all of them is stored once."""
        files, dtype = self._shares[key], self._where[key].get_tensor(key).dtype
        total: Tensor = sum(file.get_tensor(key).double() for file in files)  # one after the other: they may be large
        return (total * (self.manifest.world_size / len(files))).to(dtype)


def load_into(found: Found, objects: Mapping[str, Any], comm: Comm, device: torch.device, *, new_world_size: bool) -> Loaded:
    """Every rank calls it. All raise, with nothing changed, or all continue from there."""
    with ExitStack() as stack:

        def read() -> tuple[Reader, dict[str, tuple[str, Any]]]:
            reader = stack.enter_context(Reader(found.path, comm.rank, comm.size))
            refuse_other_world(reader, comm, allowed=new_world_size)
            saved = {name: reader.state(name, wanted=name in objects) for name in reader.objects if name != RANDOM}
            check_all(objects, saved)
            return reader, saved

        reader, saved = run_on_all(
            comm, read, fails=lambda failures: CheckpointError(f"{found.path} cannot be loaded: {failures.text}")
        )
        put_all(objects, saved)
        _restore_random(reader, objects, comm, device)
        if comm.rank == 0:
            _warn(found, objects, saved)  # last: where warnings are errors, rank 0 alone raises here
        return Loaded(reader.manifest.step, {name: state for name, (kind, state) in saved.items() if kind == VALUE.name})


def refuse_other_world(reader: Reader, comm: Comm, *, allowed: bool) -> None:
    """What is equal on all ranks loads on any number of them, and what adds up over ranks; what else each rank has does not."""
    size = reader.manifest.world_size
    if size == comm.size:
        return
    if not reader.own:
        return
    entries = sorted({entry for entry in reader.own if RANDOM not in entry and not adds_up(entry)})
    lost = sorted({entry.split("/")[0] for entry in entries})
    if lost:
        raise CheckpointError(
            f"it was saved by {size} ranks, and this run has {comm.size}. These differ from rank to rank and cannot be shared "
            f"out anew: {', '.join(lost)} ({listed(entries, 3)}). Resume on {size} ranks; or save when no merge window is open "
            "(after optimizer.flush()) and, under Local SGD, with average_state=True and right after optimizer.average()."
        )
    if not allowed:
        raise CheckpointError(
            f"it was saved by {size} ranks, and this run has {comm.size}: each rank's random numbers (dropout, augmentation) "
            f"would go on differently. Resume on {size} ranks, or allow it: load_checkpoint(..., new_world_size=True)."
        )


def _warn(found: Found, objects: Mapping[str, Any], saved: Mapping[str, tuple[str, Any]]) -> None:
    if found.passed_over:
        warn_user(found.passed_over)
    unused = [name for name, (kind, _) in saved.items() if name not in objects and kind != VALUE.name]
    if unused:
        told = f"{found.path} also holds {', '.join(unused)}, which load_checkpoint was not given: not loaded."
        warn_user(told)


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
