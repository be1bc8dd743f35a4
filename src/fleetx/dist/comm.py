"""The only user of torch.distributed: collectives that count what they put on the wire.

Bytes are what this rank sends, by the usual ring algorithms for N ranks and S bytes: all-reduce 2(N-1)/N*S,
reduce-scatter and all-to-all (N-1)/N*S, all-gather (N-1)*S, broadcast (N-1)/N*S on average. Control messages are JSON in byte
tensors, never pickle.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import ctypes
import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

# Imported now, before a process group is open: this module stores the group that is open at its first import as a default
# argument, and torch.optim imports it. A group held there never closes its connections, and ranks that wait for a rank that
# has left would wait for ever.
import torch.distributed.nn.functional
from torch import Tensor, nn

from ..errors import ConfigError, DataError, PeerError, first_line, user_line, warn_user
from . import deadlock, departures, gloo_threads, heartbeat
from .deadlock import Wait
from .departures import Departure
from .heartbeat import Phase
from .notes import NoteBook

# torch 2.13 renamed all_gather_into_tensor and warns about the old name; 2.11 has only the old one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


@final
class Pending:
    """A collective in flight. `wait` returns once its result may be used (on CUDA: by the current stream)."""

    __slots__ = ("_finish", "_stall", "_work")

    def __init__(
        self, work: dist.Work | None, finish: Callable[[], None] | None = None, *, stall: Callable[[], Stall] | None = None
    ) -> None:
        self._work = work
        self._finish = finish
        self._stall = stall
        """Makes what compares this wait with those of other ranks when it lasts; None where the host cannot wait in pieces."""

    def wait(self) -> None:
        if self._work is not None:
            with _explain_lost_connection():
                if heartbeat.record.is_read:
                    with heartbeat.during(Phase.WAIT):
                        self._wait(self._work)
                else:
                    self._wait(self._work)
        if self._finish is not None:
            self._finish()

    def _wait(self, work: dist.Work) -> None:
        if self._stall is None:
            work.wait()
            return
        stall: Stall | None = None
        while True:
            if deadlock.found and not work.is_completed():
                raise PeerError(deadlock.found)
            with contextlib.suppress(RuntimeError):
                work.wait(PIECE)
                return
            if work.is_completed():  # with an error of its own, or just after the piece
                work.wait()
                return
            stall = stall or self._stall()
            stall.look()

    def then(self, finish: Callable[[], None]) -> Pending:
        """Return a Pending whose `wait` also runs `finish`, in the waiting thread: a backend's threads keep no order."""
        return Pending(self._work, finish, stall=self._stall)


class Comm(abc.ABC):
    """A group of ranks and its collectives, seen from one of them."""

    rank: int
    size: int
    control_device: torch.device
    bytes_sent: float = 0.0
    backend: str | None = None
    """Name of the transport (gloo, nccl, or both); None for a single rank."""
    call: str = ""
    """The call of the script that uses this group now, for errors; empty in the group of training."""

    @abc.abstractmethod
    def all_reduce(self, tensor: Tensor, mode: str = "sum") -> Pending:
        """Reduce in place over all ranks."""

    @abc.abstractmethod
    def all_gather(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        """Return the tensors of all ranks, stacked in rank order; valid after `wait`. Shapes must be equal."""

    @abc.abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        """Overwrite the tensor in place with that of rank `source`."""

    def reduce_scatter(self, row: Tensor, own: Tensor) -> Pending:
        """Sum a row over all ranks, and write this rank's part of the sum into `own`: the parts are equal, in rank order.

        `own` may be part of the row, and of a wider type."""
        raise NotImplementedError

    def all_to_all(self, rows: Tensor, received: Tensor) -> Pending:
        """Send row i of `rows` to rank i; row i of `received`, which is other memory, becomes what rank i has sent here."""
        raise NotImplementedError

    def all_gather_into(self, row: Tensor, own: Tensor) -> Pending:
        """Fill the row with the parts of all ranks, in rank order; `own` is this rank's, and no part of the row."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Return when every rank has called it."""
        # An all-reduce of one number needs no device guess and works on every backend.
        reached = torch.zeros(1, device=self.control_device)
        self.all_reduce(reached).wait()
        reached.item()  # NCCL's wait blocks only the stream; reading the number blocks the host

    @abc.abstractmethod
    def subgroup(self, ranks: Sequence[Sequence[int]]) -> Comm:
        """Return the group that holds this rank, of a partition of all ranks. Every rank calls it with the same partition."""

    def post_error(self, text: str) -> None:
        """Post the error for which this rank stops. Not a collective: others read it on demand or when a connection breaks."""
        return None

    def posted_error(self) -> str | None:
        """Return the error that a rank posted last, or None."""
        return None

    @contextlib.contextmanager
    def error_during(self, text: str) -> Iterator[None]:
        """Post an error for the time of a collective that another rank may miss; withdraw it once all have passed."""
        self.post_error(text)
        yield
        self.withdraw_error()

    def withdraw_error(self) -> None:
        """Withdraw the posted error, of this rank or of another."""
        return None

    def post_note(self, key: str, text: str) -> None:
        """Store a text that other ranks can read, replacing an earlier one. Not a collective: no rank waits."""
        return None

    def read_notes(self, keys: Sequence[str]) -> list[str] | None:
        """Return the notes under these keys, or None while one is missing or not a rank's own. No rank waits."""
        return None

    def wait_for_all(self, key: str, *, missing: str) -> None:
        """Wait until every rank has called this with the same key, at a place that perhaps only some ranks reach.

        Not a collective: it would pair with a different collective of the ranks that are elsewhere. `missing` says what absent
        ranks have not done, for the warning after 30 seconds and for the error after the group's timeout."""
        return None

    def background(self) -> Comm:
        """Return a group of the same ranks with connections of its own, for CPU tensors, so that another thread can use it.

        A collective: every rank calls it at the same place."""
        return self

    def for_calls(self) -> Comm:
        """Return a group of the same ranks for the calls of scripts (fleet.util), apart from the collectives of training.

        A rank with one batch more than the others would otherwise reduce gradients into their metrics: gloo pairs collectives by
        their order alone. A collective: every rank calls it at the same place."""
        return self

    def metered(self) -> Comm:
        """Return the same group with a byte counter of its own, so that each model and optimizer pair reports what it sent."""
        metered = copy.copy(self)
        metered.bytes_sent = 0.0
        return metered

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
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


PIECE = timedelta(seconds=5)
"""A wait that lasts longer than this is compared with those of other ranks, and again after each further piece."""
ERROR_KEY, READ_KEY = "fleetx/error", "fleetx/error_read_by"
WAIT_KEY, DEADLOCK_KEY = "fleetx/wait", "fleetx/deadlock"
LEFT_KEY = "fleetx/left"
MOST_LEFT = 16
"""So many of the ranks that left are read: in a large job each rank reads for itself."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
SECONDS_FOR_READERS = 2.0
SECONDS_BEFORE_WARNING = 30.0
ERROR_LETTERS = 8000
_notes = NoteBook()
_unread_errors: list[tuple[Any, list[str]]] = []
"""Each store in which this rank posted an error, and the keys that the other ranks set once they have read it."""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def _posted_error() -> str | None:
    store = dist.distributed_c10d._get_default_store()
    try:
        if not store.check([ERROR_KEY]):
            return None
        text: str | None = _notes.open(ERROR_KEY, store.get(ERROR_KEY))
        if not text:  # withdrawn, or not written by a rank
            return None
        store.set(f"{READ_KEY}/{dist.get_rank()}", "")
        return text
    except RuntimeError:  # the rank that hosts the store has ended: ranks need not end at the same time
        return None


def _is_there(store: Any, key: str) -> bool:
    return bool(store.check([key])) and _notes.open(key, store.get(key)) is not None


@contextlib.contextmanager
def _explain_lost_connection() -> Iterator[None]:
    """Raise the error another rank posted instead of the connection error; without one, say where this rank lost the others."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as broken:
        posted = _posted_error()
        if posted is not None:
            raise (PeerError if posted.startswith(deadlock.START) else DataError)(posted) from None
        departures.has_lost_others = True
        if left := _departures():
            raise PeerError(_told(left)) from None
        raise PeerError(
            f"rank {dist.get_rank()} has lost the other ranks in {heartbeat.where()}: one of them has left, or is in another "
            "call. If a rank shows an error of its own, that is the cause. Otherwise the ranks ran different numbers of "
            "backward passes or collectives: a batch skipped on one rank, one batch more, a call on one rank alone. Give every "
            "rank equally many batches, as fleet.sampler(data) does, and skip a batch on all ranks or on none, agreed by "
            "fleet.util.all_reduce. "
            f"The transport said: {first_line(broken)}"
        ) from None


def _told(left: Sequence[Departure]) -> str:
    is_in_backward, place = heartbeat.record.reduce is not None, heartbeat.where()
    return departures.sentence(left, rank=dist.get_rank(), step=is_in_backward * heartbeat.record.step, place=place)


def _left_key(number: int | str) -> str:
    return f"{LEFT_KEY}/{number}"


def forget_departures() -> None:
    """Clear what ranks have left of an earlier group: the store may outlive it. Called by rank 0 before the first collective of
    this group, which every rank has joined: none of them can still be leaving the earlier one."""
    with contextlib.suppress(RuntimeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
        for number in range(1, min(store.add(_left_key("count"), 0), MOST_LEFT) + 1):
            store.set(_left_key(number), _notes.seal(_left_key(number), dist.get_rank(), ""))
        store.set(_left_key("count"), "0")


def _departures() -> list[Departure]:
    """Return the ranks that have left, but for those that did because another one had."""
    left: list[Departure] = []
    with contextlib.suppress(RuntimeError, ValueError):  # the store's rank has ended, or the group is closed
        store = dist.distributed_c10d._get_default_store()
        for number in range(1, MOST_LEFT + 1):
            key = _left_key(number)
            if not store.check([key]):
                break
            if text := _notes.open(key, store.get(key)):
                left.append(Departure.from_json(text))
    return left


def post_departure() -> Callable[[], None]:
    """Post how this rank ends, before its connections close; return what waits until the others have read it.

    Not a collective: each rank ends when it likes. Only the rank whose process holds the store waits, and no longer than
    SECONDS_FOR_READERS: until every rank has posted its own end."""
    if not is_initialized() or dist.get_world_size() == 1:
        return lambda: None
    rank, size, count = dist.get_rank(), dist.get_world_size(), _left_key("count")
    with contextlib.suppress(RuntimeError, ValueError):  # the store's rank has ended, and with it those that would read
        store = dist.distributed_c10d._get_default_store()
        departure, key = departures.own_departure(rank), _left_key(store.add(count, 1))
        store.set(key, _notes.seal(key, rank, "" if departure is None else departure.to_json()))
        store.check([key])  # answered once the note is there: the connections close after it
        if rank == 0 and _is_held_by_a_rank(store):
            return functools.partial(_wait_until_all_left, store, count, size)
    return lambda: None


def _is_held_by_a_rank(store: Any) -> bool:
    while type(store).__name__ == "PrefixStore":
        store = store.underlying_store
    return type(store).__name__ == "TCPStore" and os.environ.get(AGENT_STORE) != "True"


def _wait_until_all_left(store: Any, count: str, size: int) -> None:
    deadline = time.monotonic() + SECONDS_FOR_READERS
    with contextlib.suppress(RuntimeError):
        while store.add(count, 0) < size and time.monotonic() < deadline:
            time.sleep(0.02)


@final
class Stall:
    """A wait that lasts: what this rank waits for is noted in the store, and compared with what the others wait for."""

    def __init__(self, comm: Comm, channel: str, number: int, shape: str) -> None:
        self._comm, self._channel, self._number, self._shape = comm, channel, number, shape
        self._ticks = itertools.count(1)
        self._before: list[Wait] | None = None

    def look(self) -> None:
        """Note this wait; raise if no rank can go on. Rank 0 and ranks in calls of the script compare all waits, and post what
        they find: all ranks of a large job would load the store."""
        place = heartbeat.where()
        if self._channel == "calls":
            place = f"{self._comm.call} at {user_line()}, before update {max(heartbeat.record.step, 1)}"
        mine = Wait(next(self._ticks), self._channel, self._number, dict(deadlock.launched), place, self._shape)
        self._comm.post_note(f"{WAIT_KEY}/{self._comm.rank}", mine.to_json())
        compares = self._channel == "calls" or self._comm.rank == 0
        waits = self._read([f"{WAIT_KEY}/{rank}" for rank in range(self._comm.size)]) if compares else None
        if waits is not None and self._before is not None and deadlock.is_certain(waits, self._before):
            self._comm.post_note(DEADLOCK_KEY, json.dumps([wait.to_json() for wait in waits]))
            self._stop(waits)
        self._before = waits
        found = self._comm.read_notes([DEADLOCK_KEY])
        if found is not None:
            posted = [Wait.from_json(note) for note in json.loads(found[0])]
            if (posted[self._comm.rank].channel, posted[self._comm.rank].number) == (self._channel, self._number):
                self._stop(posted)
        left = _departures()
        if departures.never_launched(left, self._channel, self._number):
            departures.has_lost_others = True
            raise PeerError(_told(left))

    def _read(self, keys: Sequence[str]) -> list[Wait] | None:
        notes = self._comm.read_notes(keys)
        return None if notes is None else [Wait.from_json(note) for note in notes]

    def _stop(self, waits: Sequence[Wait]) -> None:
        deadlock.found, deadlock.holds_all = deadlock.sentence(waits), deadlock.are_unlike(waits)
        self._comm.post_error(deadlock.found)  # for ranks whose connection breaks when this one leaves
        raise PeerError(deadlock.found)


def _timeout_of_default_group() -> timedelta | None:
    """Return the timeout that the default group was made with: `new_group` would take torch's own default."""
    with contextlib.suppress(AttributeError, RuntimeError):
        group: Any = dist.distributed_c10d._get_default_group()
        timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
        return timeout
    return None


@final
class TorchComm(Comm):
    """Ranks of a torch.distributed process group (gloo, NCCL, or both)."""

    def post_error(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store has gone, and with it the ranks that would read
            store = dist.distributed_c10d._get_default_store()
            store.set(ERROR_KEY, _notes.seal(ERROR_KEY, dist.get_rank(), text[:ERROR_LETTERS]))
            others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
            _unread_errors.append((store, [f"{READ_KEY}/{rank}" for rank in others]))

    def posted_error(self) -> str | None:
        return _posted_error()

    def withdraw_error(self) -> None:
        with contextlib.suppress(RuntimeError):
            # Not deleted: another rank that has just seen the key would wait for it.
            store = dist.distributed_c10d._get_default_store()
            store.set(ERROR_KEY, _notes.seal(ERROR_KEY, dist.get_rank(), ""))
        _unread_errors.clear()

    def post_note(self, key: str, text: str) -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the store's rank has ended, or the group is closed
            dist.distributed_c10d._get_default_store().set(key, _notes.seal(key, dist.get_rank(), text))

    def read_notes(self, keys: Sequence[str]) -> list[str] | None:
        with contextlib.suppress(RuntimeError, ValueError):
            store = dist.distributed_c10d._get_default_store()
            # Checked first: `multi_get` waits for a key that is missing.
            if store.check(list(keys)):
                texts = [_notes.open(key, value) for key, value in zip(keys, store.multi_get(list(keys)), strict=True)]
                return [text for text in texts if text is not None] if None not in texts else None
        return None

    def wait_for_all(self, key: str, *, missing: str) -> None:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{key}/{self.rank}", _notes.seal(f"{key}/{self.rank}", dist.get_rank(), ""))
        start, warned = time.monotonic(), False
        limit = store.timeout.total_seconds()  # type: ignore[attr-defined]
        while absent := [rank for rank in range(self.size) if not _is_there(store, f"{key}/{rank}")]:
            waited = time.monotonic() - start
            if waited > limit:
                text = f"rank {self.rank} has waited {waited:.0f} s for {_ranks(absent)}, which {missing}"
                self.post_error(text)
                raise ConfigError(text)
            if waited > SECONDS_BEFORE_WARNING and not warned:
                warned = True
                warn_user(f"rank {self.rank} waits for {_ranks(absent)}, which {missing}")
            time.sleep(0.002 if waited < 1 else 0.05)

    def background(self) -> Comm:
        return _connected(TorchComm(dist.new_group(backend="gloo")))

    def for_calls(self) -> Comm:
        if not dist.is_gloo_available():
            return self
        return _connected(TorchComm(dist.new_group(backend="gloo", timeout=_timeout_of_default_group()), channel="calls"))

    def __init__(self, group: dist.ProcessGroup | None = None, *, channel: str | None = None) -> None:
        self._group = group
        self._channel = "training" if group is None else channel
        """Under which name waits of this group are compared with those of others (deadlock.py); None: not compared."""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        carriers = str(dist.get_backend_config(group)).split(",")
        self.backend = ",".join(sorted({carrier.rpartition(":")[2] for carrier in carriers}))
        # Control flags go over the CPU where the backend can: the device stream then does not wait for them.
        on_cpu = "gloo" in str(dist.get_backend_config(group)) or "mpi" in str(dist.get_backend_config(group))
        self.control_device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def all_reduce(self, tensor: Tensor, mode: str = "sum") -> Pending:
        self.bytes_sent += 2 * (self.size - 1) / self.size * tensor.nbytes
        return self._pending(dist.all_reduce(tensor, op=OPS[mode], group=self._group, async_op=True), tensor, "all_reduce")

    def all_gather(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        self.bytes_sent += (self.size - 1) * tensor.nbytes
        gathered = tensor.new_empty((self.size, *tensor.shape))
        flat = gathered.view(-1) if tensor.dim() else gathered
        work = _all_gather_single(flat, tensor.contiguous().view(-1), group=self._group, async_op=True)
        return gathered, self._pending(work, tensor, "all_gather")

    def reduce_scatter(self, row: Tensor, own: Tensor) -> Pending:
        self.bytes_sent += (self.size - 1) / self.size * row.nbytes
        if self._is_over_nccl(row):
            received = row.new_empty(own.shape)
            work = dist.reduce_scatter_tensor(received, row, group=self._group, async_op=True)
        else:
            # gloo's own reduce-scatter sends as much as an all-reduce; this sends each part to its owner alone.
            received = torch.empty_like(row)
            work = dist.all_to_all_single(received, row, group=self._group, async_op=True)
        parts = received.view(-1, own.numel())

        def add() -> None:
            for part in parts[1:]:  # in rank order
                parts[0].add_(part)
            own.copy_(parts[0])

        return self._pending(work, row, "reduce_scatter").then(add)

    def all_to_all(self, rows: Tensor, received: Tensor) -> Pending:
        self.bytes_sent += (self.size - 1) / self.size * rows.nbytes
        work = dist.all_to_all_single(received, rows, group=self._group, async_op=True)
        return self._pending(work, rows, "all_to_all")

    def _is_over_nccl(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and "nccl" in str(self.backend)

    def all_gather_into(self, row: Tensor, own: Tensor) -> Pending:
        self.bytes_sent += (self.size - 1) * own.nbytes
        return self._pending(_all_gather_single(row, own, group=self._group, async_op=True), row, "all_gather_into")

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        self.bytes_sent += (self.size - 1) / self.size * tensor.nbytes
        return self._pending(dist.broadcast(tensor, group_src=source, group=self._group, async_op=True), tensor, "broadcast")

    def _pending(self, work: dist.Work | None, tensor: Tensor, kind: str) -> Pending:
        if self._channel is None:
            return Pending(work)
        deadlock.launched[self._channel] += 1
        if self._is_over_nccl(tensor):  # waits in the stream; waiting in pieces would stop the host
            return Pending(work)
        number, shape = deadlock.launched[self._channel], f"{kind} of {tensor.nbytes} bytes"
        return Pending(work, stall=functools.partial(Stall, self, self._channel, number, shape))

    def subgroup(self, ranks: Sequence[Sequence[int]]) -> Comm:
        mine: Comm | None = None
        for members in ranks:
            # Every rank creates every group in the same order: new_group is a collective of all ranks.
            group = dist.new_group(list(members))
            if self.rank in members:
                mine = _connected(TorchComm(group)) if len(members) > 1 else SoloComm()
        if mine is None:
            raise ConfigError(f"rank {self.rank} is in none of the groups {[list(m) for m in ranks]}")
        return mine


def _connected(comm: TorchComm) -> TorchComm:
    """Return the group once every rank has joined it. Every rank of the group is here.

    A rank leaves gloo's `new_group` when its own connections stand. If it ends at once, because the script refuses its settings,
    say, a rank that is still connecting would report a lost connection in place of the error that all ranks share."""
    comm.barrier()
    comm.bytes_sent = 0.0
    return comm


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks in the default process group."""
    return dist.get_rank(), dist.get_world_size()


def open_group(backend: str, *, rank: int, size: int, address: str, port: int, timeout: timedelta | None) -> None:
    """Create the default process group at a known address."""
    dist.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=size, timeout=timeout)


def open_group_from_env(backend: str, *, timeout: timedelta | None) -> None:
    """Create the default process group from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, with the launcher's store."""
    dist.init_process_group(backend, init_method="env://", timeout=timeout)


def close_group() -> None:
    wait_until_all_left = post_departure()
    if is_initialized():
        if deadlock.found:  # else it would be waited for collectives that never end
            for group in list(dist.distributed_c10d._world.pg_map):
                if deadlock.holds_all and "gloo" in str(dist.get_backend_config(group)):
                    _keep_for_ever(group)
                group.abort()
        dist.destroy_process_group()
    wait_until_all_left()
    heartbeat.record.step, heartbeat.record.reduce, departures.has_lost_others = 0, None, False
    deadlock.forget()
    gloo_threads.wait_until_idle()
    _wait_for_readers()


def _keep_for_ever(group: dist.ProcessGroup) -> None:
    """Keep the destructor from running: it joins threads, and one of them waits for bytes that the other ranks never send, as
    theirs do. The connections close with the process."""
    for held in (group, group._get_backend(torch.device("cpu"))):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def _wait_for_readers() -> None:
    """Stay until the other ranks have read a posted error: they look when the connection breaks, perhaps in this rank's store."""
    while _unread_errors:
        store, readers = _unread_errors.pop()
        deadline = time.monotonic() + SECONDS_FOR_READERS
        with contextlib.suppress(RuntimeError):  # the rank that hosts the store has ended, and nothing can be read any more
            while readers and time.monotonic() < deadline and not store.check(readers):
                time.sleep(0.02)


def sharding_of(module: nn.Module) -> str | None:
    """Return the name of the wrapper or tensor type that already distributes this module in a way that is not ours; or None."""
    from torch.distributed.tensor import DTensor

    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
    for child in module.modules():
        for base in type(child).__mro__:
            if base.__name__ in wrappers and base.__module__.startswith("torch."):
                return base.__name__
    if not any(base.__name__ == "FSDPModule" for child in module.modules() for base in type(child).__mro__) and any(
        isinstance(p, DTensor) or isinstance(p.data, DTensor) for p in module.parameters()
    ):
        return "DTensor"  # of no fully_shard, but of tensor parallelism, say
    return None
