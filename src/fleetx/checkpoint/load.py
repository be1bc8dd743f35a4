"""Load the newest checkpoint that verifies completely, the same one on all ranks.

Rank 0 lists the folders. For each, newest first, every rank verifies the files it would read and the results are gathered: after
one damaged file on one rank, all try the folder before. No object is changed before everything has been checked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ..config import log
from ..config.text import listed
from ..data.sampler import FleetSampler
from ..dist.agree import Failures, run_and_share, run_on_all, sentence
from ..dist.comm import Comm
from ..dist.machine import boot_name
from ..engine.optimizer import FleetOptimizer
from ..engine.setup.strategy_record import differences, told
from ..errors import CheckpointError, warn_user
from . import folder
from .encode import Json, decode, is_part
from .hashes import NAME as MANIFEST
from .hashes import Damaged, Manifest, check_size, is_common, read_manifest, verify
from .objects import TRAINING, VALUE, check_all, put_all
from .save import share_name
from .snapshot import RANDOM, check_random_states, restore_random_states, seed_added_rank

NOT_SEEN = "(not seen)"
LOOKS = 10
"""Times that a folder is looked through, while the run that writes there deletes what is being read."""


class Vanished(Exception):
    """The checkpoint was deleted while it was being read: raised on all ranks alike."""


class Loaded(NamedTuple):
    """Result of load_checkpoint."""

    step: int
    values: dict[str, Any]
    """Saved objects that are plain values, by name; other objects are loaded in place."""


class Found(NamedTuple):
    """A verified checkpoint folder."""

    path: Path
    passed_over: str
    """Warning text that says why newer folders were skipped; empty for the newest."""


def find(directory: Path, comm: Comm) -> Found | None:
    """Find the newest folder that verifies, or None if there are no folders. A collective with one result for all ranks.

    The run that writes may delete a folder while it is looked at: then those that are there by now are looked at."""
    mates = _mates(comm)
    for _ in range(LOOKS):
        damage: list[str] = []
        has_vanished = False
        for name in _names(directory, comm):
            path = directory / name
            ranks = comm.gather_json(_inspect(path, comm, mates))
            problems = list(dict.fromkeys(problem for problem, _ in ranks if problem is not None))
            if problems and not comm.gather_json(path.is_dir())[0]:  # rank 0 has just listed it
                has_vanished = True
                continue
            _refuse_unshared(path, ranks)
            if not problems:
                return Found(path, f"{'; '.join(damage)}. Using {path} instead." if damage else "")
            damage.append(f"{path}: {', '.join(problems)}")
        if damage:
            raise CheckpointError(f"no checkpoint in {directory} is whole. {'; '.join(damage)}.")
        if not has_vanished:
            return None
    raise CheckpointError(_too_fast(directory))


def _too_fast(directory: Path) -> str:
    return (
        f"each checkpoint in {directory} was deleted while it was being read: the run that writes there keeps too few for that. "
        "Let it keep more: save_checkpoint(..., keep=3)."
    )


def _mates(comm: Comm) -> tuple[int, int]:
    """Return this rank's place among the ranks of its node, and their number: they share what they have all to verify."""
    nodes = comm.gather_json(f"{boot_name()}/{os.environ.get('GROUP_RANK', '')}")
    mine = [rank for rank, node in enumerate(nodes) if node == nodes[comm.rank]]
    return mine.index(comm.rank), len(mine)


def _names(directory: Path, comm: Comm) -> list[str]:
    """List rank 0's folders, newest first. If only rank 0 sees none, a mount is missing there: raise instead of starting over."""

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
    """Return whether an entry is one rank's share of a sum (what it has not sent yet): any number of ranks can share it."""
    return "/stages/reduce/shares/" in entry or "/stages/average/shares/" in entry


def files_for(path: Path, manifest: Manifest, rank: int, size: int) -> list[str]:
    """List the files that one of `size` ranks reads: the common ones, then its own, which take precedence.

    If a different number of ranks saved the checkpoint, the JSON files of all ranks come in between, to find what cannot be
    redistributed, and their tensor files where some entries add up over ranks. Tensor files with parts of divided tensors are
    read by all."""
    own = share_name(rank if rank < manifest.world_size else 0)
    is_resized = manifest.world_size != size
    others = [share_name(r) for r in range(manifest.world_size)] if is_resized or _has_parts(path, manifest, own) else []
    names = common_files(manifest)
    for stem in [*(other for other in others if other != own), own]:
        tree, tensors = f"{stem}.json", f"{stem}.safetensors"
        names += [tree] if tree in manifest.files and (is_resized or stem == own) else []
        if tensors in manifest.files and (stem == own or _is_for_all(path, manifest, tree, is_resized=is_resized)):
            names.append(tensors)
    return names


def _has_parts(path: Path, manifest: Manifest, own: str) -> bool:
    """Return whether tensors were divided between the ranks, as the objects say that this rank reads."""
    trees = [name for name in (*common_files(manifest), f"{own}.json") if name.endswith(".json") and name in manifest.files]
    for name in trees:
        check_size(path, manifest, name)
    return any('"$parts"' in (path / name).read_text(encoding="utf-8", errors="replace") for name in trees)


def common_files(manifest: Manifest) -> list[str]:
    return [name for name in sorted(manifest.files) if is_common(name)]


def _is_for_all(path: Path, manifest: Manifest, tree: str, *, is_resized: bool) -> bool:
    """Return whether all ranks read what one has written beside this file."""
    verify(path, manifest, tree)
    keys = json.loads((path / tree).read_text(encoding="utf-8"))["tensors"]
    return any(is_part(key) or (is_resized and adds_up(key)) for key in keys)


def _inspect(path: Path, comm: Comm, mates: tuple[int, int]) -> tuple[str | None, str]:
    """Verify the files this rank would read; return the problem or None, and the hash of the manifest it saw.

    Of the files that all read each is read and hashed by one rank of a node. The others find it in that node's memory."""
    try:
        if not path.is_dir():
            return NOT_SEEN, ""
        manifest = read_manifest(path)
        if manifest.step != folder.step_of(path.name):  # an old folder, renamed, would hide newer ones
            raise Damaged(f"{MANIFEST} is of step {manifest.step}, which is not that of its folder")
        place, count = mates
        mine = files_for(path, manifest, comm.rank, comm.size)
        own = share_name(comm.rank if comm.rank < manifest.world_size else 0)
        order = {name: number for number, name in enumerate(sorted(manifest.files))}  # the same on all ranks of a node
        by_mates = {name for name in mine if not name.startswith(f"{own}.") and order[name] % count != place}
        for name in mine:
            (check_size if name in by_mates else verify)(path, manifest, name)
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
    """Reads a verified checkpoint on one rank."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self.manifest = read_manifest(path)
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        self._shares: dict[str, list[Any]] = {}
        """Files that hold a share of each key that adds up over ranks; used when a different number of ranks saved it."""
        self.is_resized = size != self.manifest.world_size
        self.objects: dict[str, Json] = {}
        self.own: list[str] = []
        """Names of objects and keys of tensors that differ between ranks."""
        for name in files_for(path, self.manifest, rank, size):
            if name.endswith(".json"):
                self._read_tree(path / name, is_own=not is_common(name))
            else:
                opened = self._stack.enter_context(safe_open(path / name, framework="pt"))
                self._where |= dict.fromkeys(opened.keys(), opened)
                for key in filter(adds_up, opened.keys()):
                    self._shares.setdefault(key, []).append(opened)

    def _read_tree(self, path: Path, *, is_own: bool) -> None:
        tree = json.loads(path.read_text(encoding="utf-8"))
        self.objects |= tree["objects"]
        if is_own:
            self.own += [*tree["objects"], *tree["tensors"]]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def state(self, name: str, *, wanted: bool = True) -> tuple[str, Any]:
        """Return kind and state of an object. An unwanted object is skipped (None), unless it is a plain value."""
        kind, state = self.objects[name]["kind"], self.objects[name]["state"]
        decoded = decode(state, self._fetch) if wanted or kind == VALUE.name else None
        stages = decoded["stages"] if self.is_resized and kind == TRAINING.name and decoded is not None else {}
        for stage in (stages.get("reduce"), stages.get("average")):
            if stage and stage.get("shares"):
                stage["summed_over"] = self.manifest.world_size
        return kind, decoded

    def _fetch(self, key: str) -> Tensor:
        if self.is_resized and key in self._shares:
            return self._sum_of_shares(key)
        tensor: Tensor = self._where[key].get_tensor(key)
        return tensor.clone()  # a copy: the mapped file may be deleted while training continues

    def _sum_of_shares(self, key: str) -> Tensor:
        """Sum a key over all ranks that saved it. A tensor that was equal on all ranks is stored once and counts for each."""
        files, dtype = self._shares[key], self._where[key].get_tensor(key).dtype
        total: Tensor = sum(file.get_tensor(key).double() for file in files)  # one at a time: they may be large
        return (total * (self.manifest.world_size / len(files))).to(dtype)


def load_into(found: Found, objects: Mapping[str, Any], comm: Comm, device: torch.device, *, new_world_size: bool) -> Loaded:
    """Load the objects, or raise on all ranks with nothing changed. Every rank calls it."""
    with ExitStack() as stack:

        def read() -> Reader:
            reader = stack.enter_context(Reader(found.path, comm.rank, comm.size))
            refuse_other_world(reader, comm, allowed=new_world_size)
            return reader

        def check() -> tuple[dict[str, tuple[str, Any]], Any]:
            saved = {name: reader.state(name, wanted=name in objects) for name in reader.objects if name != RANDOM}
            check_all(objects, saved)
            return saved, _random_of(reader, comm, device)

        def fails(failures: Failures) -> Exception:
            if any(is_gone for _, is_gone in failures.by_rank.values()):
                return Vanished(_too_fast(found.path.parent))
            text = "; ".join(dict.fromkeys(text for text, _ in failures.by_rank.values()))
            return CheckpointError(f"{found.path} cannot be loaded: {text}")

        def report(error: Exception) -> list[str | bool]:
            return [sentence(error), not found.path.is_dir()]

        reader = run_on_all(comm, read, report=report, fails=fails)
        _take_up_strategies(reader, objects, comm)
        saved, random_states = run_on_all(comm, check, report=report, fails=fails)
        put_all(objects, saved)
        _restore_random(random_states, reader.manifest.step, objects, comm, device)
        if comm.rank == 0:
            _warn(found, objects, saved)  # last: if the user turns warnings into errors, only rank 0 raises here
        return Loaded(reader.manifest.step, {name: state for name, (kind, state) in saved.items() if kind == VALUE.name})


def _take_up_strategies(reader: Reader, objects: Mapping[str, Any], comm: Comm) -> None:
    """Go on with what `auto` has chosen in the run that saved, if it was asked the same: a new measurement may choose another.

    Taking it up is a collective, so all ranks agree on it first."""
    for name, target in objects.items():
        if not isinstance(target, FleetOptimizer) or target.take_up is None or target.strategy_record is None:
            continue
        state = reader.objects.get(name, {}).get("state")
        saved = decode(state.get("strategy"), _no_tensor) if isinstance(state, dict) else None
        chosen: dict[str, Any] = saved if isinstance(saved, dict) and saved.get("auto") == target.asked_of_auto else {}
        differs = bool(chosen) and chosen["settings"] != target.strategy_record["settings"]
        if all(comm.gather_json(differs)):
            target.take_up(chosen)


def _no_tensor(key: str) -> Tensor:
    raise CheckpointError(f"it holds a tensor, {key}, among the settings of a strategy.")


def refuse_other_world(reader: Reader, comm: Comm, *, allowed: bool) -> None:
    """Raise if a different number of ranks saved state that is neither equal on all ranks nor a share of a sum."""
    size = reader.manifest.world_size
    if size == comm.size:
        return
    own = [entry for entry in reader.own if not is_part(entry)]
    if not own:
        return
    entries = sorted({entry for entry in own if RANDOM not in entry and not adds_up(entry)})
    lost = sorted({entry.split("/")[0] for entry in entries})
    if lost:
        raise CheckpointError(
            f"it was saved by {size} ranks, and this run has {comm.size}. These differ between ranks and cannot be "
            f"redistributed: {', '.join(lost)} ({listed(entries, 3)}). Resume on {size} ranks; or save when no merge window is "
            "open (after optimizer.flush()) and, under Local SGD, with average_state=True and right after optimizer.average()."
        )
    if not allowed:
        raise CheckpointError(
            f"it was saved by {size} ranks, and this run has {comm.size}: each rank's random numbers (dropout, augmentation) "
            f"would go on differently. Resume on {size} ranks, or allow it: load_checkpoint(..., new_world_size=True)."
        )


def _warn(found: Found, objects: Mapping[str, Any], saved: Mapping[str, tuple[str, Any]]) -> None:
    if found.passed_over:
        warn_user(found.passed_over)
    for name, target in objects.items():
        if isinstance(target, FleetOptimizer):
            _tell_strategy(found.path, target.strategy_record, saved[name][1].get("strategy"))
    unused = [name for name, (kind, _) in saved.items() if name not in objects and kind != VALUE.name]
    if unused:
        warn_user(f"{found.path} also holds {', '.join(unused)}, which load_checkpoint was not given: not loaded.")


def _tell_strategy(path: Path, mine: dict[str, Any] | None, saved: dict[str, Any] | None) -> None:
    """Say what differs from the strategy of the run that saved. Checkpoints of older versions hold none."""
    if mine is None or saved is None:
        return
    parts, settings = differences(saved, mine)
    if settings:
        log.say(f"fleetx: {path} was saved with other settings: {told(settings)}.")
    if parts:
        warn_user(f"{path} was saved under another strategy: {told(parts)}. Training goes on by the strategy of this run.")


def _random_of(reader: Reader, comm: Comm, device: torch.device) -> Any:
    """Return the checked states of this rank's generators; None for a rank that did not exist when they were saved."""
    differs = any(entry.split("/")[0] == RANDOM for entry in reader.own)
    if comm.rank >= reader.manifest.world_size and differs:
        return None
    if RANDOM not in reader.objects:
        raise CheckpointError("it holds no states of the random number generators.")
    _, states = reader.state(RANDOM)
    check_random_states(states, device)
    return states


def _restore_random(states: Any, step: int, objects: Mapping[str, Any], comm: Comm, device: torch.device) -> None:
    """Restore the generators last, since loading may draw from them, and again when a sampler resumes a half-read epoch."""
    if states is None:
        return seed_added_rank(step, comm.rank)
    restore_random_states(states, device)
    for value in objects.values():
        if isinstance(value, FleetSampler):
            value.when_resumed(lambda: restore_random_states(states, device))
    return None
