"""The only user of torch.distributed: collectives that count what they put on the wire.

Bytes are what this rank sends, by the usual ring algorithms for N ranks and S bytes: all-reduce 2(N-1)/N*S,
all-gather (N-1)*S, broadcast (N-1)/N*S on average. Control messages are JSON in byte tensors, never pickle.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

# Before a process group is open: this module keeps the one that is open when it is first imported, in the defaults of its
# functions, and torch.optim brings it in. A group that is kept never closes its connections, and ranks that wait for one that
# has left would wait for ever.
import torch.distributed.nn.functional
from torch import Tensor, nn

from . import gloo_threads, heartbeat
from ..errors import ConfigError, DataError, PeerError, first_line, warn_user
from .heartbeat import Phase

# torch 2.13 renamed it, and warns of the old name; 2.11 has only the old one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


@final
class Pending:
    """A collective under way. `wait` returns once its result may be used (on CUDA: by the current stream)."""

    __slots__ = ("_finish", "_work")

    def __init__(self, work: dist.Work | None, finish: Callable[[], None] | None = None) -> None:
        self._work = work
        self._finish = finish

    def wait(self) -> None:
        if self._work is not None:
            with heartbeat.during(Phase.WAIT), _or_a_reason():
                self._work.wait()
        if self._finish is not None:
            self._finish()

    def then(self, finish: Callable[[], None]) -> Pending:
        """Run `finish` when waited for, in the waiting thread: never in a backend's own thread, whose order is not ours."""
        return Pending(self._work, finish)


class Comm(abc.ABC):
    """The ranks that work together, as one of them sees them."""

    rank: int
    size: int
    control_device: torch.device
    bytes_sent: float = 0.0
    backend: str | None = None
    """What carries the messages; None where there are none."""

    @abc.abstractmethod
    def all_reduce(self, tensor: Tensor, mode: str = "sum") -> Pending:
        """Reduce in place over all ranks."""

    @abc.abstractmethod
    def all_gather(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        """The tensors of all ranks, stacked in rank order; valid once waited for. Shapes must be equal."""

    @abc.abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        """Overwrite in place with the tensor of `source`."""

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        # An all-reduce of one number: it needs no device guess, and works on every backend.
        reached = torch.zeros(1, device=self.control_device)
        self.all_reduce(reached).wait()
        reached.item()  # NCCL's wait holds up the stream alone; the host waits for the number

    @abc.abstractmethod
    def subgroup(self, ranks: Sequence[Sequence[int]]) -> Comm:
        """The member of a partition of all ranks that holds this one. Every rank calls it with the same partition."""

    def leave_word(self, text: str) -> None:
        """Say why this rank is about to stop. No collective: the others read it when they look, or when a connection breaks."""
        return None

    def word_left(self) -> str | None:
        """What the last rank to stop left behind, if any has."""
        return None

    @contextlib.contextmanager
    def word_during(self, text: str) -> Iterator[None]:
        """Leave a word for the time of a collective that another rank may miss; once it is done, all of them know."""
        self.leave_word(text)
        yield
        self.take_back_word()

    def take_back_word(self) -> None:
        """Leave no word any more, of this rank or of another."""
        return None

    def leave_note(self, key: str, text: str) -> None:
        """For other ranks to find, in place of an earlier one. No collective: nobody waits for it."""
        return None

    def notes_left(self, keys: Sequence[str]) -> list[str] | None:
        """The notes under these keys; None while one of them is missing. No collective: what lies there is taken."""
        return None

    def meet(self, key: str, *, lacking: str) -> None:
        """Wait until every rank has called this with the key: for a place that only some ranks may have come to.

        A collective would pair with another one of the ranks that are elsewhere. `lacking`: what those have not done, for the
        warning after half a minute, and for the error when the group's time limit has passed."""
        return None

    def background(self) -> Comm:
        """The same ranks over connections of their own, for CPU tensors: another thread may use it beside this one.

        Every rank calls it, at the same place."""
        return self

    def metered(self) -> Comm:
        """The same ranks with a byte counter of its own: each pair reports what it sent itself."""
        twin = copy.copy(self)
        twin.bytes_sent = 0.0
        return twin

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        data = json.dumps(value).encode()
        length = torch.tensor([len(data)], dtype=torch.int64, device=self.control_device)
        lengths, pending = self.all_gather(length)
        pending.wait()
        sizes = [int(n) for n in lengths.flatten()]
        # gloo refuses ragged gathers: all ranks pad to the longest.
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered, pending = self.all_gather(padded.to(self.control_device))
        pending.wait()
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(gathered.cpu(), sizes, strict=True)]


@final
class SoloComm(Comm):
    """One rank alone: every collective is already done."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.control_device = torch.device("cpu")

    def all_reduce(self, tensor: Tensor, mode: str = "sum") -> Pending:
        return Pending(None)

    def all_gather(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        return tensor.unsqueeze(0).clone(), Pending(None)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        return Pending(None)

    def barrier(self) -> None:
        return None

    def subgroup(self, ranks: Sequence[Sequence[int]]) -> Comm:
        return self


LAST_WORD, READERS = "fleetx/last_word", "fleetx/last_word_readers"
SECONDS_FOR_READERS = 2.0
SECONDS_BEFORE_WARNING = 30.0
_kept_for_readers: list[tuple[Any, list[str]]] = []
"""Stores in which this rank left a word, and what the others write there when they have read it."""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def _word_left() -> str | None:
    store = dist.distributed_c10d._get_default_store()
    try:
        if not store.check([LAST_WORD]):
            return None
        word = store.get(LAST_WORD).decode()
        if not word:  # taken back
            return None
        store.set(f"{READERS}/{dist.get_rank()}", "")
        return word
    except RuntimeError:  # the store went with the rank that kept it: ranks need not end at the same time
        return None


@contextlib.contextmanager
def _or_a_reason() -> Iterator[None]:
    """What a connection that broke means: on every rank the reason that a rank told before it stopped, or what is known here."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as broken:
        word = _word_left()
        if word is not None:
            raise DataError(word) from broken
        raise PeerError(
            f"rank {dist.get_rank()} has lost the other ranks in {heartbeat.where()}: one of them has left, or is in another "
            "call. If a rank shows an error of its own, that is the cause. Else they have made different numbers of backwards or "
            "collectives: a batch skipped on one of them, one batch more, a call on one rank alone. Give all equally many "
            "batches, as fleet.sampler(data) does, and skip a batch on all or on none: ask them by fleet.util.all_reduce. "
            f"The transport said: {first_line(broken)}"
        ) from broken


@final
class TorchComm(Comm):
    """Ranks of a torch.distributed process group (gloo, NCCL, or both)."""

    def leave_word(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # without a store there is nobody left to tell
            store = dist.distributed_c10d._get_default_store()
            store.set(LAST_WORD, text)
            everyone = range(dist.get_world_size())
            _kept_for_readers.append((store, [f"{READERS}/{rank}" for rank in everyone if rank != dist.get_rank()]))

    def word_left(self) -> str | None:
        return _word_left()

    def take_back_word(self) -> None:
        with contextlib.suppress(RuntimeError):
            # Not deleted: another rank that has just seen the key would wait for it.
            dist.distributed_c10d._get_default_store().set(LAST_WORD, "")
        _kept_for_readers.clear()

    def leave_note(self, key: str, text: str) -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the store went with the rank that kept it, or with the group
            dist.distributed_c10d._get_default_store().set(key, text)

    def notes_left(self, keys: Sequence[str]) -> list[str] | None:
        with contextlib.suppress(RuntimeError, ValueError):
            store = dist.distributed_c10d._get_default_store()
            # `multi_get` would wait for a key that is not there.
            if store.check(list(keys)):
                return [value.decode() for value in store.multi_get(list(keys))]
        return None

    def meet(self, key: str, *, lacking: str) -> None:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{key}/{self.rank}", "")
        start, warned = time.monotonic(), False
        limit = store.timeout.total_seconds()  # type: ignore[attr-defined]
        while absent := [rank for rank in range(self.size) if not store.check([f"{key}/{rank}"])]:
            waited = time.monotonic() - start
            if waited > limit:
                text = f"rank {self.rank} has waited {waited:.0f} s for {_ranks(absent)}, which {lacking}"
                self.leave_word(text)
                raise ConfigError(text)
            if waited > SECONDS_BEFORE_WARNING and not warned:
                warned = True
                warn_user(f"rank {self.rank} waits for {_ranks(absent)}, which {lacking}")
            time.sleep(0.002 if waited < 1 else 0.05)

    def background(self) -> Comm:
        return TorchComm(dist.new_group(backend="gloo"))

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        carriers = str(dist.get_backend_config(group)).split(",")
        self.backend = ",".join(sorted({carrier.rpartition(":")[2] for carrier in carriers}))
        # Control flags travel on the CPU where they can: they then cost the device stream nothing.
        on_cpu = "gloo" in str(dist.get_backend_config(group)) or "mpi" in str(dist.get_backend_config(group))
        self.control_device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def all_reduce(self, tensor: Tensor, mode: str = "sum") -> Pending:
        self.bytes_sent += 2 * (self.size - 1) / self.size * tensor.nbytes
        return Pending(dist.all_reduce(tensor, op=OPS[mode], group=self._group, async_op=True))

    def all_gather(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        self.bytes_sent += (self.size - 1) * tensor.nbytes
        gathered = tensor.new_empty((self.size, *tensor.shape))
        flat = gathered.view(-1) if tensor.dim() else gathered
        work = _all_gather_single(flat, tensor.contiguous().view(-1), group=self._group, async_op=True)
        return gathered, Pending(work)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        self.bytes_sent += (self.size - 1) / self.size * tensor.nbytes
        return Pending(dist.broadcast(tensor, group_src=source, group=self._group, async_op=True))

    def subgroup(self, ranks: Sequence[Sequence[int]]) -> Comm:
        mine: Comm | None = None
        for members in ranks:
            # Every rank creates every group, in one order: new_group is a collective of the whole world.
            group = dist.new_group(list(members))
            if self.rank in members:
                mine = TorchComm(group) if len(members) > 1 else SoloComm()
        if mine is None:
            raise ConfigError(f"rank {self.rank} is in none of the groups {[list(m) for m in ranks]}")
        return mine


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank_and_size() -> tuple[int, int]:
    """In the default process group."""
    return dist.get_rank(), dist.get_world_size()


def open_group(backend: str, *, rank: int, size: int, address: str, port: int, timeout: timedelta | None) -> None:
    """Make the default process group at a known address."""
    dist.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=size, timeout=timeout)


def open_group_from_env(backend: str, *, timeout: timedelta | None) -> None:
    """Make the default process group from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, with a launcher's own store."""
    dist.init_process_group(backend, init_method="env://", timeout=timeout)


def close_group() -> None:
    if is_initialized():
        dist.destroy_process_group()
    gloo_threads.rest()
    _stay_for_readers()


def _stay_for_readers() -> None:
    """After a word was left. Ranks that wait for this one find it when the connection breaks, and the store may be here."""
    while _kept_for_readers:
        store, readers = _kept_for_readers.pop()
        deadline = time.monotonic() + SECONDS_FOR_READERS
        with contextlib.suppress(RuntimeError):  # kept by another rank, which has gone: nobody reads it any more
            while readers and time.monotonic() < deadline and not store.check(readers):
                time.sleep(0.02)


def sharding_of(module: nn.Module) -> str | None:
    """The name of the wrapper or tensor type by which a module is already distributed, or None."""
    from torch.distributed.tensor import DTensor

    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")
    for child in module.modules():
        for base in type(child).__mro__:
            if base.__name__ in wrappers and base.__module__.startswith("torch."):
                return base.__name__
    if any(isinstance(p, DTensor) or isinstance(p.data, DTensor) for p in module.parameters()):
        return "DTensor"
    return None
