"""The processes that read: torch's DataLoader with what it lacks. They live over passes, and their end is told in words."""

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
"""A batch to read: its epoch, and the samples in it."""

MOST_WORKERS = 16
AHEAD = 3
"""Batches each worker may be ahead. They are handed out in order: with 2, one slow batch soon stops the other workers."""
SECONDS_TO_DIE = 1.0
_OF_A_PARENT: list[Any] = []


class Workers:
    """Readers of one source: as many as asked for, none for data in memory, or this rank's part of the machine's cores."""

    def __init__(self, source: Source, count: int | None) -> None:
        self._source, self._asked = source, count
        self._keys = _Keys()
        self._batches: DataLoader[Fetched] | None = None
        self._owner = os.getpid()

    @property
    def count(self) -> int:
        if self._asked is not None or not self._source.reads_files:
            return self._asked or 0
        cores, ranks_here = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return max(1, min(MOST_WORKERS, cores // ranks_here))

    def read(self, keys: list[Key], *, pin: bool) -> Iterator[Fetched]:
        """These batches in their order. Reading begins now, not when the first one is asked for."""
        self._keys.pending = keys
        with self._living(), _garbage_kept():
            fetched = iter(self._loader(pin))
        return self._while_they_live(fetched)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_batches": None}  # a copy has workers of its own

    def _while_they_live(self, fetched: Iterator[Fetched]) -> Iterator[Fetched]:
        with self._living():
            yield from fetched

    @contextlib.contextmanager
    def _living(self) -> Iterator[None]:
        """A worker that was killed is told in words, here and to the other ranks; the next pass gets new ones."""
        try:
            yield
        except (RuntimeError, OSError, EOFError):  # which of them depends on what the worker was doing when it ended
            try:
                end = _how_a_worker_ended(self._batches)
            except (
                RuntimeError
            ):  # torch's signal handler told of one more death, just here: it does so once for a loader's workers
                end = _how_a_worker_ended(self._batches)
            if end is None:
                raise
            self._batches = None
            fail_everywhere(
                f"a process that reads this loader's data {end}. If nobody killed it, memory ran out (`dmesg` tells) or its code "
                "crashed: use fewer workers or a smaller batch_size. With workers=0 the training process reads by itself."
            )

    def _loader(self, pin: bool) -> DataLoader[Fetched]:
        if self._batches is not None and self._owner != os.getpid():
            _OF_A_PARENT.append(self._batches)  # this process was forked; let go here, it would end its parent's workers
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
    """The batches of the pass, as torch's DataLoader wants them."""

    def __init__(self) -> None:
        self.pending: list[Key] = []

    def __iter__(self) -> Iterator[Key]:
        return iter(self.pending)

    def __len__(self) -> int:
        return len(self.pending)


class _Reading(Dataset[Fetched]):
    """In a worker. A bad file is handed over as a sentence: an exception would arrive wrapped in the worker's traceback."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, key: Key) -> Fetched:
        epoch, indices = key
        try:
            batch, complaints = self.source.batch(epoch, indices)
            return Fetched(pack(batch) if in_worker() else batch, complaints, None, len(indices))
        except DataError as error:
            return Fetched(None, [], str(error), len(indices))


def _how_a_worker_ended(batches: DataLoader[Fetched] | None) -> str | None:
    """In words; None while all of them live. Then they are all let go, or torch would go on raising for the dead one."""
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
def _garbage_kept() -> Iterator[None]:
    """Workers forked in here never collect what they inherit: a CUDA or pinned tensor among it ends the process that frees it."""
    had_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not had_frozen:  # else the user's own frozen objects would be let go too
            gc.unfreeze()


def _unchanged(fetched: Any) -> Any:
    return fetched
