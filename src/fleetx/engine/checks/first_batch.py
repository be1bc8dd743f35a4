"""A look at the first forward: has each rank its own data, and was the model put into DDP behind our back?"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ...dist.comm import Comm
from ...errors import ConfigError, warn_user
from .. import dry_steps
from ..modules.compiling import compiled_by
from ..modules.plain_copy import keep_copies_plain, left_out
from ..slots import Part
from ..user_loop.ddp import refuse_other_wrapper


def digest(value: Any) -> str | None:
    """Hash all tensors in a (nested) value; None when it holds none."""
    hasher = hashlib.sha256()
    found = _feed(hasher, value)
    return hasher.hexdigest()[:16] if found else None


def _feed(hasher: Any, value: Any) -> bool:
    if isinstance(value, Tensor):
        if value.is_sparse or value.is_quantized:
            return False
        data = (
            value.detach().cpu().contiguous().flatten().view(torch.uint8) if value.numel() else torch.zeros(0, dtype=torch.uint8)
        )
        hasher.update(str((value.shape, value.dtype)).encode() + data.numpy().tobytes())
        return True
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any([_feed(hasher, item) for item in value])
    return False


@final
class FirstLook:
    """Hooks the model's first training forward. Says nothing, and costs nothing, afterwards."""

    def __init__(self, model: nn.Module, wrapper: DistributedDataParallel | None = None, parts: Sequence[Part] = ()) -> None:
        """Watch the first batch. `wrapper`: of the model, where it reduces. `parts`: of its strategy."""
        self._model, self._wrapper, self._parts = model, wrapper, parts
        self._was_called = False
        self._digest: str | None = None
        self._handle = model.register_forward_pre_hook(self._on_forward, with_kwargs=True)
        keep_copies_plain(model)

    def __reduce__(self) -> tuple[Any, ...]:
        return _look_at_nothing, ()  # a copy that a class's own `__deepcopy__` makes has the hook; there it says nothing

    @left_out
    def _on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # In a copy of the model it is another one. Compiled code is traced without this: `finish` compares losses then.
        if torch.compiler.is_compiling() or module is not self._model or dry_steps.is_on():
            return
        self._was_called = True
        refuse_other_wrapper(module, self._wrapper)
        if module.training and self._digest is None and torch.is_grad_enabled():
            with contextlib.suppress(RuntimeError):  # tensors without data (torch.func, fake tensors) tell nothing
                self._digest = digest([args, kwargs])

    def give_up(self) -> None:
        self._handle.remove()

    def finish(self, comm: Comm, *, loss: Tensor | None, weighted: bool) -> None:
        """Compare the ranks once, at the first update. Every rank is here: it is about to reduce."""
        self._handle.remove()
        if comm.rank == 0:
            self._tell_of_compiling(comm.size)
        if comm.size == 1:
            return
        seen = self._digest or (None if loss is None else float(loss.detach()).hex())
        loaders = shuffled_loaders(comm.size)
        ranks = comm.gather_json({"batch": seen, "weighted": weighted} | ({"loaders": loaders} if loaders else {}))
        if len({rank["weighted"] for rank in ranks}) > 1:
            having = [i for i, rank in enumerate(ranks) if rank["weighted"]]
            raise ConfigError(f"only ranks {having} pass weight= to minimize/backward; every rank must, or none.")
        if comm.rank != 0:
            return
        advice = advice_on([rank.get("loaders", []) for rank in ranks])
        if seen is not None and len({rank["batch"] for rank in ranks}) == 1:
            whom = "both" if comm.size == 2 else f"all {comm.size}"
            advice = (
                f"{whom} ranks saw the same first batch, so they do the same work. Give each its share of the data: "
                "DataLoader(data, batch_size, sampler=fleet.sampler(data)). Input drawn at random (the noise of a GAN, for "
                f"{type(self._model).__name__}) needs another seed on each rank: torch.manual_seed(seed + fleet.worker_index()) "
                "after the model is made."
            )
        if advice is not None:
            warn_user(advice)

    def _tell_of_compiling(self, ranks: int) -> None:
        """Say what of a compiled model is not one graph, or not compiled at all."""
        how = {found for module in self._model.modules() if (found := compiled_by(module)) is not None}
        if how and type(self._model).__name__ == "OptimizedModule" and not self._was_called:
            warn_user(
                "torch.compile(model) compiles the call model(x) alone, and the loss came from a method of the module inside, "
                "which runs uncompiled. Write model.compile() in its place, which compiles every call of the model."
            )
        if compiled_by(self._model) == "strategy" and not self._was_called:
            warn_user(
                'compile_configs["scope"] is "model", which compiles the call model(x); the loss came from a method of the model '
                'that does not call it, and runs uncompiled. Write "scope": "blocks".'
            )
        acting = [part for part in self._parts if ranks > 1 or not part.talks_in_backward] if how else []
        cuts = [part.cuts_graphs(by_user="user" in how) for part in acting]
        for cut in cuts:
            if cut is not None:
                warn_user(f"the model is compiled, and not into one graph: {cut}")


def _look_at_nothing() -> FirstLook:
    look = object.__new__(FirstLook)
    look._model = nn.Module()
    return look


# Does every rank draw from all of the data? Looks for DataLoaders under way that shuffle, and have no sampler that shares out.
# DataLoader(data, 32, shuffle=True)                      rank 0 and rank 1 each shuffle all of it: an epoch is twice as long
# DataLoader(data, 32, sampler=fleet.sampler(data))       each has its half
#
# Each rank describes by a fingerprint what its loaders draw from. Equal ones on all ranks, in different orders, are a mistake.
# A dataset that the script has shared out itself has another fingerprint on each rank. Ranks that draw in the same order share
# the
# batches out later, or get the warning about the same first batch.

ITERATORS = ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter")
SHUFFLES = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that shuffle, by exact type: a subclass may share out by itself."""
ITEMS, VALUES, CHARACTERS = 16, 64, 200
"""Most items of a container, values of a row and characters of a text that are looked at: a look at a large dataset
must take milliseconds."""
DEPTH, LIMIT = 5, 20_000
"""So deep, and at so many things in all."""


class Opaque(Exception):
    """A dataset keeps its samples where they cannot be looked at, so that nothing can be said of it."""


def shuffled_loaders(size: int) -> list[dict[str, Any]]:
    """Describe the loaders of this process that are being read and shuffle all they have, for a comparison of `size` ranks."""
    described = []
    for iterator in _iterators():
        try:
            sampler = _sampler_of(iterator)
            if sampler is None or not _draws_all(sampler, iterator._dataset, size):
                continue
            described.append(
                {
                    "data": [type(sampler).__name__, _drawn_by(sampler), fingerprint(iterator._dataset)],
                    "order": str(iterator._base_seed),
                    "samples": len(sampler),
                    "sampler": type(sampler).__name__,
                    "replacement": bool(getattr(sampler, "replacement", False)),
                }
            )
        except Exception:  # attributes of a user's dataset may raise anything; a look must not end the training
            continue
    return described


def advice_on(ranks: Sequence[Sequence[dict[str, Any]]]) -> str | None:
    """Say what to write where each rank shuffles the same data in an order of its own; None where none do."""
    for mine in ranks[0]:
        alike = [[other for other in loaders if other["data"] == mine["data"]] for loaders in ranks]
        if all(alike) and len({loaders[0]["order"] for loaders in alike}) > 1:
            return _advice(mine, size=len(ranks))
    return None


def _advice(loader: dict[str, Any], *, size: int) -> str:
    if loader["sampler"] == "WeightedRandomSampler":
        write = "WeightedRandomSampler(weights, num_samples // fleet.worker_num())"
    elif loader["sampler"] == "RandomSampler" and loader.get("replacement"):
        write = "RandomSampler(data, replacement=True, num_samples=num_samples // fleet.worker_num())"
    elif loader["sampler"] == "SubsetRandomSampler":
        write = "DataLoader(Subset(data, indices), batch_size, sampler=fleet.sampler(len(indices)))"
    else:
        write = "DataLoader(data, batch_size, sampler=fleet.sampler(data))"
    if loader.get("replacement"):
        return (
            f"each of the {size} ranks draws {loader['samples']} samples by itself ({loader['sampler']}), so that an epoch is "
            f"{size} times as long. Give each rank its share: {write}."
        )
    return (
        f"each of the {size} ranks shuffles all {loader['samples']} samples by itself ({loader['sampler']}), so that an epoch "
        f"reads every sample {size} times. Give each rank its share: {write}."
    )


def _iterators() -> Iterator[Any]:
    """List the iterators of torch's DataLoaders that have handed out a batch and are not exhausted."""
    dataloader = sys.modules["torch.utils.data.dataloader"]
    kinds = {getattr(dataloader, name) for name in ITERATORS}
    for one in [one for one in gc.get_objects() if type(one) in kinds]:
        if one._num_yielded > 0 and _is_under_way(one):
            yield one


def _is_under_way(iterator: Any) -> bool:
    """Return whether the iterator's last batch is in use or to come. After that one no worker has a task, though the loop may be
    training on it.

    An iterator that ends shuts its workers down; one with persistent workers keeps them, and may have ended long ago."""
    if getattr(iterator, "_tasks_outstanding", 1) > 0:
        return True
    return not (getattr(iterator, "_persistent_workers", True) or getattr(iterator, "_shutdown", True))


def _sampler_of(iterator: Any) -> Any:
    sampler = iterator._index_sampler
    if type(sampler) is BatchSampler:  # a subclass of it may share batches out, as Accelerate's does
        sampler = sampler.sampler
    return sampler if type(sampler) in SHUFFLES else None


def _draws_all(sampler: Any, dataset: Any, size: int) -> bool:
    """Return whether it draws more than one rank's part: a script may have written `num_samples=len(data) // size`.

    More draws with replacement than there are samples are no epoch, and nothing is read twice that should be read once."""
    if getattr(sampler, "replacement", False) and len(sampler) > len(dataset):
        return False
    return type(sampler) is SubsetRandomSampler or len(sampler) * size > len(dataset) + size


def _drawn_by(sampler: Any) -> str:
    return fingerprint([getattr(sampler, name, None) for name in ("indices", "weights")])


def fingerprint(dataset: Any) -> str:
    """Make one of what can be seen of a dataset without reading a sample through it; raise Opaque where that is too little."""
    look = _Look()
    look.at(len(dataset), DEPTH)
    look.at(dataset, DEPTH)
    return look.hasher.hexdigest()[:16]


class _Look:
    """Goes through the attributes and items of a value, some of each, and puts them into a hash."""

    def __init__(self) -> None:
        self.hasher = hashlib.sha256()
        self._things = 0

    def at(self, value: Any, depth: int) -> None:
        self._things += 1
        if depth < 0 or self._things > LIMIT:
            raise Opaque("there is too much to look at")
        self._put(type(value).__qualname__)
        if isinstance(value, (str, bytes)):
            self._put(len(value), value[:CHARACTERS])
        elif value is None or isinstance(value, (bool, int, float, PurePath, range, np.generic)):
            self._put(value)
        elif isinstance(value, (Tensor, np.ndarray)):
            self._at_array(value, depth)
        elif isinstance(value, (list, tuple, dict)):
            self._put(len(value))
            for item in itertools.islice(value.items(), ITEMS) if isinstance(value, dict) else _some(value):
                self.at(item, depth - 1)
        elif isinstance(value, (set, frozenset)) or (callable(value) and depth < DEPTH):
            pass  # no samples are kept there: names of classes, transforms, tokenizers
        elif hasattr(value, "__dict__"):
            self._inside(value, depth)
        elif hasattr(value, "__len__"):
            raise Opaque(type(value).__qualname__)

    def _inside(self, value: Any, depth: int) -> None:
        known = getattr(value, "_fingerprint", None)
        if isinstance(known, str):  # of Hugging Face's datasets: another one for each shard
            return self._put(known)
        for name, attribute in vars(value).items():
            self._put(name)
            self.at(attribute, depth - 1)
        return None

    def _at_array(self, array: Any, depth: int) -> None:
        self._put(tuple(array.shape), str(array.dtype))
        for row in _some(array) if array.ndim > 0 else [array]:
            flat = row.detach().reshape(-1) if isinstance(row, Tensor) else np.asarray(row).reshape(-1)
            values = flat[:: max(1, len(flat) // VALUES)].tolist()
            if array.dtype == object:
                self.at(values, depth - 1)
            else:
                self._put(values)

    def _put(self, *values: Any) -> None:
        self.hasher.update(repr(values).encode())


def _some(items: Any) -> list[Any]:
    """Select at most ITEMS of them, from the first to the last."""
    places = {round(at) for at in np.linspace(0, len(items) - 1, ITEMS)} if len(items) else set()
    return [items[at] for at in sorted(places)]
