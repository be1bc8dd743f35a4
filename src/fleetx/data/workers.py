"""Read in worker processes, by torch's DataLoader: kept between passes, with a clear error when one is killed."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import DataError
from .device import Fetched
from .packing import in_worker, pack
from .remote_error import fail_everywhere
from .source import Indices, Source

Key: TypeAlias = tuple[int, Indices]
"""A batch to read: its epoch, and the indices of its samples."""

MOST_WORKERS = 16
AHEAD = 3
"""Batches each worker may read ahead. They are returned in order: with 2, one slow batch soon stalls the other workers."""
SECONDS_TO_DIE = 1.0
_LOADERS_OF_PARENT: list[Any] = []


class Workers:
    """Worker processes of one source: the number given; by default this rank's part of the cores, none for data in memory."""

    def __init__(self, source: Source, count: int | None) -> None:
        self._source, self._requested = source, count
        self._keys = _Keys()
        self._batches: DataLoader[Fetched] | None = None
        self._owner = os.getpid()

    @property
    def count(self) -> int:
        if self._requested is not None or not self._source.reads_files:
            return self._requested or 0
        cores, ranks_here = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return max(1, min(MOST_WORKERS, cores // ranks_here))

    def read(self, keys: list[Key], *, pin: bool) -> Iterator[Fetched]:
        """Return the batches in order. Reading begins now, not when the first one is requested."""
        self._keys.pending = keys
        with self._explained_deaths(), _frozen_garbage():
            fetched = iter(self._loader(pin))
        return self._with_explained_deaths(fetched)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_batches": None}  # a copy starts its own workers

    def _with_explained_deaths(self, fetched: Iterator[Fetched]) -> Iterator[Fetched]:
        with self._explained_deaths():
            yield from fetched

    @contextlib.contextmanager
    def _explained_deaths(self) -> Iterator[None]:
        """Turn a worker's death into a `DataError` that says how it ended, on all ranks; the next pass starts new workers."""
        try:
            yield
        except (RuntimeError, OSError, EOFError):  # which of them depends on what the worker was doing when it ended
            try:
                end = _how_a_worker_ended(self._batches)
            except RuntimeError:  # torch's signal handler raises once for a loader's workers, and did so during the call above
                end = _how_a_worker_ended(self._batches)
            if end is None:
                raise
            self._batches = None
            fail_everywhere(
                f"a process that reads this loader's data {end}. Unless it was killed on purpose, memory ran out (see `dmesg`) "
                "or its code crashed: use fewer workers or a smaller batch_size. With workers=0 the training process reads."
            )

    def _loader(self, pin: bool) -> DataLoader[Fetched]:
        if self._batches is not None and self._owner != os.getpid():
            _LOADERS_OF_PARENT.append(self._batches)  # this process was forked; freeing it would stop the parent's workers
            self._batches = None
        if self._batches is None:
            self._owner = os.getpid()
            options: dict[str, Any] = {"multiprocessing_context": "fork", "persistent_workers": True, "prefetch_factor": AHEAD}
            self._batches = DataLoader(
                _Reading(self._source),
                batch_size=None,
                sampler=self._keys,
                num_workers=self.count,
                collate_fn=_unchanged,
                pin_memory=pin,
                generator=torch.Generator(),  # its seed for the workers is drawn here, and the user's generator stays untouched
                **(options if self.count else {}),
            )
        return self._batches


class _Keys(Sampler[Key]):
    """The batches of the current pass, as a sampler for torch's DataLoader."""

    def __init__(self) -> None:
        self.pending: list[Key] = []

    def __iter__(self) -> Iterator[Key]:
        return iter(self.pending)

    def __len__(self) -> int:
        return len(self.pending)


class _Reading(Dataset[Fetched]):
    """Read one batch in a worker. A bad file is returned as text: an exception would arrive wrapped in the worker's traceback."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, key: Key) -> Fetched:
        epoch, indices = key
        try:
            batch, replaced = self.source.batch(epoch, indices)
            return Fetched(pack(batch) if in_worker() else batch, replaced, None, len(indices))
        except DataError as error:
            return Fetched(None, [], str(error), len(indices))


def _how_a_worker_ended(batches: DataLoader[Fetched] | None) -> str | None:
    """Describe how a worker ended and shut all of them down, or torch would go on raising; None while all live."""
    iterator = getattr(batches, "_iterator", None)
    workers = getattr(iterator, "_workers", [])
    ended = wait([worker.sentinel for worker in workers], timeout=SECONDS_TO_DIE) if workers else []
    for worker in workers:
        if worker.sentinel in ended:
            worker.join()  # its connections close a moment before it can be asked for its exit code
    codes = [worker.exitcode for worker in workers if worker.exitcode is not None]
    if iterator is None or not codes:
        return None
    iterator._shutdown_workers()
    return f"was ended by {signal.Signals(-codes[0]).name}" if codes[0] < 0 else f"ended with exit code {codes[0]}"


@contextlib.contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Keep workers forked inside from collecting inherited objects: freeing a CUDA or pinned tensor would end the worker."""
    had_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not had_frozen:  # else the user's own frozen objects would be unfrozen too
            gc.unfreeze()


def _unchanged(fetched: Any) -> Any:
    return fetched
