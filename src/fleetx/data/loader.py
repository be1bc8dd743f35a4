"""Batches of this rank's share of a source: the same bits with any number of workers, resumable on any number of ranks.

epoch, indices = sampler.take_pass()     one order for the epoch, this rank's share of it
workers        : (epoch, indices) -> source.batch       small tensors, a pure function: nobody's order matters
this process   : onto the device -> source.finish -> the loop; the sampler is told what the loop has been given
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import warnings
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import ConfigError, DataError, FleetWarning
from ..sampler import FleetSampler
from .device import Fetched, on_device
from .packing import in_worker, pack
from .source import Indices, Source
from .trouble import Watch, fail_everywhere

MOST_WORKERS = 16
AHEAD = 3
"""Batches each worker may be ahead. They are handed out in order: with 2, one slow batch soon stops the other workers."""
SECONDS_TO_DIE = 1.0
_OF_A_PARENT: list[Any] = []


def cut(indices: Indices, batch_size: int, *, drop_last: bool) -> list[Indices]:
    """Consecutive groups of batch_size; what is left over makes a smaller one, or none."""
    batches = count_batches(len(indices), batch_size, drop_last=drop_last)
    return [indices[i * batch_size : (i + 1) * batch_size] for i in range(batches)]


def count_batches(samples: int, batch_size: int, *, drop_last: bool) -> int:
    return samples // batch_size if drop_last else math.ceil(samples / batch_size)


class Loader:
    """An iterable of batches on `fleet.device()`; `for batch in loader():` is Fleet's spelling of the same.

    `loader.sampler` is its position: give the loader or the sampler to `fleet.save_checkpoint`. The loader itself tells the
    sampler what was handed out, so that the position is exact with workers too. The share of this rank is settled at the first
    use, not when the loader is made: `fleet.init()` may come in between.

    In training (`train`, by default the same as `shuffle`) every rank gets equally many batches, by default full ones
    (`drop_last`); in evaluation every sample comes once. A pass left by `break` begins again where it began.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        shuffle: bool,
        train: bool | None = None,
        seed: int = 0,
        drop_last: bool | None = None,
        workers: int | None = None,
        max_bad_share: float = 0.0,
        sampler: FleetSampler | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.source, self.shuffle, self.seed = source, shuffle, seed
        self.train = shuffle if train is None else train
        self.batch_size = 1 if source.plans_batches else _whole("batch_size", batch_size, at_least=1)
        self.drop_last = (self.train if drop_last is None else drop_last) and not source.plans_batches
        self.workers = None if workers is None else _whole("workers", workers, at_least=0)
        self.max_bad_share = _share(max_bad_share)
        self._sampler, self._device = sampler, device
        self._batches: DataLoader[Fetched] | None = None
        self._owner = os.getpid()
        self._keys = _Keys()
        self._passes, self._watch = 0, Watch()

    @property
    def sampler(self) -> FleetSampler:
        """This rank's order and position; made when first asked for."""
        if self._sampler is None:
            from .. import fleet  # here, not above: data stands below fleet

            # In order, a sampler gives every sample once, and some ranks one more than others: in training that would hang.
            in_order = self.train and not self.shuffle
            self._sampler = fleet.sampler(len(self.source), shuffle=self.shuffle, seed=self.seed, drop_last=in_order)
        return self._sampler

    @property
    def device(self) -> torch.device:
        if self._device is None:
            from .. import fleet

            self._device = fleet.device()
        return self._device

    def __len__(self) -> int:
        """Batches of the coming pass on this rank: after a resume in mid-epoch, what is left of it."""
        return count_batches(len(self.sampler), self.batch_size, drop_last=self.drop_last)

    def __call__(self) -> Iterator[Any]:
        return iter(self)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator itself: the pass begins here, before the first batch is asked for.
        self._require_batches()
        epoch, indices = self.sampler.take_pass()
        self._passes += 1
        self._keys.pending = [(epoch, group) for group in cut(indices, self.batch_size, drop_last=self.drop_last)]
        if not self._keys.pending:
            self.sampler.seen(len(indices))  # the rest of an epoch, less than a batch: or it would begin again for ever
        with self._living_workers(), _garbage_kept():
            fetched = on_device(iter(self._workers()), self.device, self.source.finish)
        return self._hand_out(self._while_they_live(fetched), samples=len(indices), this_pass=self._passes)

    def __repr__(self) -> str:
        samples, workers = len(self.source), self._worker_count()
        size = "as planned" if self.source.plans_batches else str(self.batch_size)
        return f"{type(self).__name__}({type(self.source).__name__} of {samples}, batch_size={size}, workers={workers})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_batches": None}  # a copy has workers of its own

    def state_dict(self) -> dict[str, int | bool]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)

    def _hand_out(self, fetched: Iterator[Fetched], *, samples: int, this_pass: int) -> Iterator[Any]:
        given, bad, batches = 0, 0, len(self._keys.pending)
        for number, item in enumerate(fetched, start=1):
            if this_pass != self._passes:
                raise DataError(
                    "this loader was iterated again before an earlier pass over it had ended; its workers serve one pass at a "
                    "time. Make a second loader for the inner loop."
                )
            self._watch.look()
            if item.failure:
                fail_everywhere(item.failure)
            bad += self._count_bad(item.complaints, bad=bad, samples=samples)
            # The last batch takes the tail that drop_last left over with it: saved after it, the position is the next epoch.
            used = samples - given if number == batches else item.samples
            self.sampler.seen(used)
            given += used
            yield item.batch
        self._watch.look(now=True)

    def _count_bad(self, complaints: list[str], *, bad: int, samples: int) -> int:
        for number, complaint in enumerate(complaints, start=bad + 1):
            if number > self.max_bad_share * samples:
                fail_everywhere(
                    f"{complaint} It is bad sample {number} of the {samples} of this pass; allowed is a share of "
                    f"{self.max_bad_share:g}. Mend the files named, or allow a larger share."
                )
            warnings.warn(f"{complaint} The next readable sample takes its place.", FleetWarning, stacklevel=4)
        return len(complaints)

    def _require_batches(self) -> None:
        # Every rank of a training pass has equally many samples, so that all raise or none. The rest of a resumed epoch may be
        # less than a batch, and evaluation may leave a rank without any: those are no mistakes.
        sampler = self.sampler
        whole = math.ceil(sampler.length / sampler.size)
        if self.train and count_batches(whole, self.batch_size, drop_last=self.drop_last) == 0:
            raise DataError(
                f"{sampler.length} samples on {sampler.size} workers are {whole} for each: not one full batch of "
                f"{self.batch_size}. Use a smaller batch_size, more samples, or drop_last=False."
            )

    def _while_they_live(self, fetched: Iterator[Fetched]) -> Iterator[Fetched]:
        with self._living_workers():
            yield from fetched

    @contextlib.contextmanager
    def _living_workers(self) -> Iterator[None]:
        """A worker that was killed is told in words, here and to the other ranks; the next pass gets new ones."""
        try:
            yield
        except (RuntimeError, OSError, EOFError):  # which of them depends on what the worker was doing when it ended
            end = _how_a_worker_ended(self._batches)
            if end is None:
                raise
            self._batches = None
            fail_everywhere(
                f"a process that reads this loader's data {end}. If nobody killed it, memory ran out (`dmesg` tells) or its code "
                "crashed: use fewer workers or a smaller batch_size. With workers=0 the training process reads by itself."
            )

    def _workers(self) -> DataLoader[Fetched]:
        if self._batches is not None and self._owner != os.getpid():
            _OF_A_PARENT.append(self._batches)  # this process was forked; let go here, it would end its parent's workers
            self._batches = None
        if self._batches is None:
            self._owner = os.getpid()
            workers = self._worker_count()
            options: dict[str, Any] = {"multiprocessing_context": "fork", "persistent_workers": True, "prefetch_factor": AHEAD}
            self._batches = DataLoader(
                _Reading(self.source),
                batch_size=None,
                sampler=self._keys,
                num_workers=workers,
                collate_fn=_unchanged,
                pin_memory=self.device.type == "cuda",
                generator=torch.Generator(),  # its seed for the workers is drawn here, and the user's generator stays untouched
                **(options if workers else {}),
            )
        return self._batches

    def _worker_count(self) -> int:
        """Asked for; or none for data in memory; or this rank's part of the machine's cores."""
        if self.workers is not None or not self.source.reads_files:
            return self.workers or 0
        cores, ranks_here = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return max(1, min(MOST_WORKERS, cores // ranks_here))


class _Keys(Sampler[tuple[int, Indices]]):
    """The batches of the pass, as torch's DataLoader wants them: each key is an epoch and some indices."""

    def __init__(self) -> None:
        self.pending: list[tuple[int, Indices]] = []

    def __iter__(self) -> Iterator[tuple[int, Indices]]:
        return iter(self.pending)

    def __len__(self) -> int:
        return len(self.pending)


class _Reading(Dataset[Fetched]):
    """In a worker. A bad file is handed over as a sentence: an exception would arrive wrapped in the worker's traceback."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, key: tuple[int, Indices]) -> Fetched:
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


def _whole(name: str, value: object, *, at_least: int) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"loader: {name} = {value!r}; allowed is a whole number from {at_least}.")
    return int(value)


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise ConfigError(f"loader: max_bad_share = {value!r}; allowed is a number from 0 to 1.")
    return float(cast(float, value))
