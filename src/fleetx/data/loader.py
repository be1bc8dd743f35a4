"""Load this rank's share of a source in batches: the same bits with any number of workers, resumable on any number of ranks.

epoch, indices = sampler.take_pass()     one order for the epoch, this rank's share of it
workers        : (epoch, indices) -> source.batch       small tensors, a pure function: the order of workers has no effect
this process   : onto the device -> source.finish -> the loop; the sampler counts what the loop has received
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch

from ..dist import world
from ..errors import ConfigError, DataError, warn_user
from .device import Fetched, on_device
from .remote_error import RemoteErrorWatch, fail_everywhere
from .sampler import FleetSampler
from .source import Indices, Source
from .workers import Workers


def cut(indices: Indices, batch_size: int, *, drop_last: bool) -> list[Indices]:
    """Split the indices into consecutive batches; the rest makes a smaller one, or is dropped with `drop_last`."""
    batches = count_batches(len(indices), batch_size, drop_last=drop_last)
    return [indices[i * batch_size : (i + 1) * batch_size] for i in range(batches)]


def count_batches(samples: int, batch_size: int, *, drop_last: bool) -> int:
    return samples // batch_size if drop_last else math.ceil(samples / batch_size)


class Loader:
    """Iterate over batches on `fleet.device()`; `for batch in loader():` is Fleet's spelling of the same.

    `loader.sampler` holds the position: give the loader or the sampler to `fleet.save_checkpoint`. The loader reports to the
    sampler what the loop has received, so the position is exact with workers too. The share of this rank is fixed at the first
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
        workers = None if workers is None else _whole("workers", workers, at_least=0)
        self.max_bad_share = _share(max_bad_share)
        self._sampler, self._device = sampler, device
        self._workers = Workers(source, workers)
        self._passes, self._watch = 0, RemoteErrorWatch()

    @property
    def sampler(self) -> FleetSampler:
        """This rank's order and position, created at the first use."""
        if self._sampler is None:
            # In order, a sampler gives every sample once, and some ranks one more than others: in training that would hang.
            in_order = self.train and not self.shuffle
            comm = world.current().comm
            self._sampler = FleetSampler(
                len(self.source), rank=comm.rank, size=comm.size, shuffle=self.shuffle, seed=self.seed, drop_last=in_order
            )
        return self._sampler

    @property
    def device(self) -> torch.device:
        if self._device is None:
            self._device = world.current().device
        return self._device

    def __len__(self) -> int:
        """Count this rank's batches of a whole epoch; the pass after a resume has fewer (`loader.sampler.remaining` samples)."""
        return count_batches(len(self.sampler), self.batch_size, drop_last=self.drop_last)

    def __call__(self) -> Iterator[Any]:
        return iter(self)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator itself: the pass begins here, before the first batch is asked for.
        self._require_batches()
        epoch, indices = self.sampler.take_pass()
        self._passes += 1
        keys = [(epoch, group) for group in cut(indices, self.batch_size, drop_last=self.drop_last)]
        if not keys:
            self.sampler.seen(len(indices))  # the rest of an epoch, less than a batch: or it would begin again for ever
        read = self._workers.read(keys, pin=self.device.type == "cuda")
        fetched = on_device(read, self.device, self.source.finish)
        return self._hand_out(fetched, batches=len(keys), samples=len(indices), this_pass=self._passes)

    def __repr__(self) -> str:
        size = "as planned" if self.source.plans_batches else str(self.batch_size)
        what = f"{type(self.source).__name__} of {len(self.source)}"
        return f"{type(self).__name__}({what}, batch_size={size}, workers={self._workers.count})"

    def state_dict(self) -> dict[str, int | bool]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)

    def _hand_out(self, fetched: Iterator[Fetched], *, batches: int, samples: int, this_pass: int) -> Iterator[Any]:
        given, bad = 0, 0
        for number, item in enumerate(fetched, start=1):
            if this_pass != self._passes:
                raise DataError(
                    "this loader was iterated again before an earlier pass over it had ended; its workers serve one pass at a "
                    "time. Make a second loader for the inner loop."
                )
            self._watch.check()
            if item.failure:
                fail_everywhere(item.failure)
            bad += self._count_bad(item.replaced, bad=bad, samples=samples)
            # The last batch takes the tail that drop_last left over with it: saved after it, the position is the next epoch.
            used = samples - given if number == batches else item.samples
            self.sampler.seen(used)
            given += used
            yield item.batch
        self._watch.check(now=True)

    def _count_bad(self, replaced: list[str], *, bad: int, samples: int) -> int:
        for number, reason in enumerate(replaced, start=bad + 1):
            if number > self.max_bad_share * samples:
                fail_everywhere(
                    f"{reason} It is bad sample {number} of the {samples} of this pass; allowed is a share of "
                    f"{self.max_bad_share:g}. Repair the files named, or allow a larger share."
                )
            warn_user(f"{reason} The next readable sample takes its place.")
        return len(replaced)

    def _require_batches(self) -> None:
        # Every rank of a training pass has equally many samples, so that all raise or none. The rest of a resumed epoch may be
        # less than a batch, and evaluation may leave a rank without any: neither is an error.
        sampler = self.sampler
        whole = math.ceil(sampler.length / sampler.size)
        if self.train and count_batches(whole, self.batch_size, drop_last=self.drop_last) == 0:
            raise DataError(
                f"{sampler.length} samples on {sampler.size} workers are {whole} for each: not one full batch of "
                f"{self.batch_size}. Use a smaller batch_size, more samples, or drop_last=False."
            )


def _whole(name: str, value: object, *, at_least: int) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"loader: {name} = {value!r}; allowed is a whole number from {at_least}.")
    return int(value)


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise ConfigError(f"loader: max_bad_share = {value!r}; allowed is a number from 0 to 1.")
    return float(cast(float, value))
