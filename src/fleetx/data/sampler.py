"""Decide which samples a rank reads and in which order, and save the position.

epoch order   6 3 8 1 | 4 5 9 2 | 7 0 (6 3)     one order per (seed, epoch), whatever the number of ranks
rank 0 of 4   6         4         7             rank r takes positions r, r + N, r + 2N, ...
rank 2 of 4       8         9        (6)        so a global batch holds the same samples for every N

for epoch in range(sampler.epoch, epochs):      # 0 in a new run, the right one after load_state_dict
    for x, y in loader:
        optimizer.minimize(criterion(model(x), y))
        sampler.seen(len(x))                    # only needed when the loader has workers: they draw indices ahead
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, Sampler

from ..errors import CheckpointError, ConfigError, DataError, warn_user

Indices: TypeAlias = npt.NDArray[np.int64]
Tail: TypeAlias = Literal["pad", "cut", "ragged"]
"""The last, incomplete row of one sample per rank: filled from the epoch's start, dropped, or read by some ranks only."""

STATE_KEYS = ("seed", "epoch", "consumed", "length", "shuffle")


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> Indices:
    """Return all indices in the order of this epoch: the same on every rank and machine, without a global generator."""
    if not shuffle:
        return np.arange(length, dtype=np.int64)
    # Sorted random keys, not Generator.permutation: NumPy promises the bits of PCG64 for ever, but not its shuffling, and
    # two nodes with different versions would silently read different shards. The epoch as spawn key cannot collide with a seed.
    keys = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(length)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def shard_length(length: int, *, rank: int, size: int, start: int, tail: Tail) -> int:
    """Count the samples that this rank reads when all ranks together begin at global position `start`."""
    rest = max(length - start, 0)
    if tail == "ragged":
        return max(-(-(rest - rank) // size), 0)
    return rest // size if tail == "cut" else -(-rest // size)


def shard(order: Indices, *, rank: int, size: int, start: int, tail: Tail) -> Indices:
    """Return positions start + rank, start + rank + size, ... of the order. A padded last row wraps to the epoch's start."""
    count = shard_length(len(order), rank=rank, size=size, start=start, tail=tail)
    positions = start + rank + size * np.arange(count, dtype=np.int64)
    return order[positions % len(order)]


@dataclass(slots=True)
class _Pass:
    """One pass over (the rest of) an epoch. Each iterator owns its pass, so an abandoned one cannot move the position."""

    epoch: int
    start: int  # global samples of this epoch consumed before the pass
    count: int  # local samples this rank yields in it
    loaded: bool = False
    begun: bool = False
    drawn: int = 0
    seen: int | None = None
    whole: bool = False  # all indices were handed out at once, so only `seen` says how many were used

    @property
    def drawn_out(self) -> bool:
        return self.used_up if self.whole else self.begun and self.drawn >= self.count

    @property
    def used(self) -> int:
        return self.drawn if self.seen is None else self.seen

    @property
    def used_up(self) -> bool:
        return self.begun and self.used >= self.count


class FleetSampler(Sampler[int]):
    """This rank's share of a dataset, with a position that can be saved and resumed on another number of ranks.

    `pad=True` (training; the default with `shuffle=True`): every rank yields equally many. The last row is padded by wrapping to
    the epoch's start. The order for different numbers of ranks differs in that last row only.
    `pad=False` (evaluation; the default with `shuffle=False`): every sample exactly once, so that shards may differ by one in
    length. In training the rank with one batch more would wait for the others for ever: a pass that begins while gradients are on
    and a distributed model is in training mode warns once.
    `drop_last=True` cuts the last row: equal counts, and up to size - 1 samples of an epoch are not read.

    **Epochs.** `set_epoch` is as in torch's DistributedSampler. Without a call, the epoch advances by itself after each
    complete pass (complete: its last index was drawn). A pass left by `break` starts again where it started.

    **Position.** `state_dict()` counts the global samples of this epoch that were handed out; the end of an epoch is the start
    of the next one, so resume with `range(sampler.epoch, epochs)`. That is exact in a loop over a DataLoader with
    `num_workers=0`, which draws one batch at a time. DataLoader workers draw ahead, and a sampler cannot know how far the loop
    has come: without `seen`, a state taken in mid-pass then skips the batches still in flight on resume. Call
    `sampler.seen(len(batch))` in each step. In training the position is the same on all ranks between two steps; in
    evaluation save that of rank 0, whose shard is never the shorter one. A resumed pass yields the rest of its epoch,
    `sampler.remaining` samples; `len(sampler)`, and with it `len(loader)`, is always the whole epoch's.
    """

    def __init__(
        self,
        dataset_or_length: Sized | int,
        *,
        rank: int,
        size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool | None = None,
    ) -> None:
        super().__init__()
        self.length = _length_of(dataset_or_length)
        self.size = _whole("size", size, at_least=1)
        self.rank = _whole("rank", rank, at_least=0)
        self.seed = _whole("seed", seed, at_least=0)
        self.shuffle = _flag("shuffle", shuffle)
        self.drop_last = _flag("drop_last", drop_last)
        if pad is not None and self.drop_last:
            raise ConfigError(
                f"sampler: pad = {pad!r} with drop_last=True: both say what becomes of the last, incomplete row. Leave one out."
            )
        self.pad = self.shuffle and not self.drop_last if pad is None else _flag("pad", pad)
        if self.rank >= self.size:
            raise ConfigError(f"sampler: rank={rank} with size={size}: a rank is between 0 and size - 1 = {size - 1}.")
        if self.drop_last and self.length < self.size:
            raise DataError(
                f"sampler: drop_last=True with {self.length} samples on {self.size} ranks leaves nothing to read. "
                "Use drop_last=False, more samples, or fewer ranks."
            )
        self._pass = self._pass_from(epoch=0, start=0)
        self._when_resumed: Callable[[], None] | None = None
        self._has_warned = False

    @property
    def epoch(self) -> int:
        """The current epoch, or after a complete pass the next one."""
        return self._position()[0]

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch at the next iteration. A loaded position inside the same epoch is kept."""
        epoch = _whole("epoch", epoch, at_least=0)
        now = self._pass
        if now.epoch == epoch and not now.drawn_out:
            return
        if now.loaded and not now.begun and epoch < now.epoch:
            warn_user(
                f"set_epoch({epoch}) goes back from the loaded position (epoch {now.epoch}, {now.start} samples consumed) and "
                f"reads epoch {epoch} again from its start. To continue, write `for epoch in range(sampler.epoch, epochs)`.",
            )
        self._pass = self._pass_from(epoch=epoch, start=0)

    def seen(self, samples: int) -> None:
        """Count `samples` more local samples as used by the loop. From then on these alone make the position of this pass."""
        total = (self._pass.seen or 0) + _whole("seen(samples)", samples, at_least=0)
        if total > self._pass.drawn:
            raise DataError(
                f"sampler: seen({samples}) makes {total} local samples used in this pass, but only {self._pass.drawn} were "
                "handed out. Call it once per batch, with the number of samples in that batch on this rank."
            )
        self._pass.seen = total

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position as plain integers and booleans; it does not depend on the number of ranks."""
        epoch, consumed = self._position()
        return {"seed": self.seed, "epoch": epoch, "consumed": consumed, "length": self.length, "shuffle": self.shuffle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position at the next iteration, on any number of ranks."""
        self.check_state_dict(state)
        self._pass = self._pass_from(epoch=int(state["epoch"]), start=int(state["consumed"]))
        self._pass.loaded = True

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise if the saved position belongs to other data; nothing is changed."""
        if set(state) != set(STATE_KEYS):
            raise CheckpointError(
                f"sampler: the saved state holds {sorted(state)}; a sampler's state holds {sorted(STATE_KEYS)}."
            )
        for key, ours in (("length", self.length), ("seed", self.seed), ("shuffle", self.shuffle)):
            if state[key] != ours:
                raise CheckpointError(
                    f"sampler: the checkpoint was saved with {key} = {state[key]!r}, this run has {key} = {ours!r}; the samples "
                    f"would come in another order. Use the same dataset and {key}, or do not load the sampler's state."
                )
        epoch, consumed = state["epoch"], state["consumed"]
        if not _is_whole(epoch) or not _is_whole(consumed) or epoch < 0 or not 0 <= consumed <= self.length:
            raise CheckpointError(
                f"sampler: the saved position is epoch = {epoch!r}, consumed = {consumed!r}; allowed are whole numbers, "
                f"epoch from 0, consumed from 0 to the dataset's length {self.length}."
            )

    def when_resumed(self, action: Callable[[], None]) -> None:
        """Run `action` once, when the rest of a loaded, half-read epoch begins.

        A DataLoader draws from torch's generator when a pass begins. The run that was saved drew at its epoch's start, long
        before the save; the resumed one draws once more. Restored here, after that draw, the generator is as it was saved.
        """
        self._when_resumed = action if self._pass.loaded and self._pass.start > 0 else None

    def __len__(self) -> int:
        """Count this rank's samples of a whole epoch, also after a resume in mid-epoch: `step // len(loader)` is the epoch."""
        return self._count_from(0)

    @property
    def remaining(self) -> int:
        """Count this rank's samples of the epoch that are not used yet: `len(sampler)` at its start, fewer after a resume."""
        now = self._pass
        return len(self) if now.used_up else now.count - now.used

    def __iter__(self) -> Iterator[int]:
        # Not a generator itself: the pass begins at iter(), before the first index is asked for.
        current, action = self._begin()
        self._warn_of_unequal_training(current)
        return self._draw(current, action)

    def take_pass(self) -> tuple[int, Indices]:
        """Begin the next pass and return its epoch and all of its indices. Only `seen` moves the position in it."""
        current, action = self._begin()
        current.whole, current.drawn, current.seen = True, current.count, 0
        if action is not None:
            action()
        return current.epoch, self._indices(current)

    def _begin(self) -> tuple[_Pass, Callable[[], None] | None]:
        action, self._when_resumed = self._when_resumed, None
        if not self._pass.loaded or self._pass.begun:
            action = None
        self._pass = self._next_pass()
        self._pass.begun = True
        return self._pass, action

    def _draw(self, current: _Pass, first_of_all: Callable[[], None] | None) -> Iterator[int]:
        if first_of_all is not None:
            first_of_all()  # not at iter(): without batches a DataLoader calls that before it draws
        for index in self._indices(current):
            current.drawn += 1  # before the yield: the caller of next() holds the index when it asks for the position
            yield int(index)

    def _indices(self, current: _Pass) -> Indices:
        order = epoch_order(self.length, seed=self.seed, epoch=current.epoch, shuffle=self.shuffle)
        return shard(order, rank=self.rank, size=self.size, start=current.start, tail=self._tail)

    @property
    def _tail(self) -> Tail:
        if self.drop_last:
            return "cut"
        return "pad" if self.pad else "ragged"

    def _pass_from(self, *, epoch: int, start: int) -> _Pass:
        return _Pass(epoch=epoch, start=start, count=self._count_from(start))

    def _count_from(self, start: int) -> int:
        return shard_length(self.length, rank=self.rank, size=self.size, start=start, tail=self._tail)

    def _warn_of_unequal_training(self, current: _Pass) -> None:
        """Warn before the first batch: at the end of the epoch a rank would wait in a collective that the others never join."""
        samples = max(self.length - current.start, 0)
        unequal = self._tail == "ragged" and samples % self.size > 0
        if self.rank != 0 or self._has_warned or not unequal or not _is_training():
            return
        self._has_warned = True
        warn_user(
            f"sampler: {samples} samples cannot be shared out equally to {self.size} ranks, and without padding some ranks read "
            "one more than others, as evaluation needs it. In training the rank with one batch more waits for the others for "
            f"ever. To train write {self._padded_line()}; to evaluate call model.eval() before the loop.",
        )

    def _padded_line(self) -> str:
        return f"fleet.sampler(data{'' if self.shuffle else ', shuffle=False'}, pad=True)"

    def _next_pass(self) -> _Pass:
        now = self._pass
        if now.drawn_out:  # not used_up: a DataLoader with drop_last never uses its tail, and would repeat one epoch for ever
            return self._pass_from(epoch=now.epoch + 1, start=0)
        return self._pass_from(epoch=now.epoch, start=now.start)

    def _position(self) -> tuple[int, int]:
        now = self._pass
        if now.used_up:
            return now.epoch + 1, 0
        return now.epoch, now.start + now.used * self.size


def _is_training() -> bool:
    """Guess whether this loop trains: gradients are on, and a distributed model is in training mode."""
    from ..engine.setup import registry  # imported late: it is needed in a training loop only

    models = (pair.model() for pair in registry.pairs())
    return torch.is_grad_enabled() and any(model is not None and model.training for model in models)


def _length_of(dataset_or_length: object) -> int:
    if _is_whole(dataset_or_length):
        length = operator.index(dataset_or_length)  # type: ignore[arg-type]
    elif isinstance(dataset_or_length, IterableDataset) or not isinstance(dataset_or_length, Sized):
        raise DataError(
            f"sampler: {type(dataset_or_length).__name__} cannot be read by index, so no sampler can share it out. Share it out "
            "inside its own __iter__, for example `itertools.islice(samples, fleet.worker_index(), None, fleet.worker_num())`, "
            "and give the DataLoader no sampler."
        )
    else:
        length = len(dataset_or_length)
    if length < 1:
        raise DataError(f"sampler: the dataset has {length} samples; at least 1 is needed. Is its path or its filter right?")
    return length


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _whole(name: str, value: int, *, at_least: int) -> int:
    if not _is_whole(value) or value < at_least:
        raise ConfigError(f"sampler: {name} = {value!r}; allowed is a whole number from {at_least}.")
    return int(value)


def _flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"sampler: {name} = {value!r}; allowed are True and False.")
    return value
