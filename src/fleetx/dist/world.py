"""This process's place in the job: communicator, device and rank, set up once by `fleet.init`."""

from __future__ import annotations

import atexit
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch

from ..config import log
from ..errors import ConfigError
from . import comm as c10d
from . import gloo_threads, stop_signal
from .comm import Comm, SoloComm, TorchComm
from .launch_variables import Role, role_from_env, role_in_group


@dataclass(frozen=True, slots=True)
class World:
    comm: Comm
    device: torch.device
    local_rank: int
    node_num: int
    endpoints: tuple[str, ...]
    """`host:local_rank` of every rank: a label of where it runs, not an address that accepts connections."""
    token: str
    """Random text, equal on all ranks and different in each world: for keys in a store that outlives a process group."""
    calls: Comm
    """Collectives that scripts call themselves (fleet.util): a group apart, so that no such call pairs with a collective of
    training."""


_current: World | None = None
_forget_at_close: list[Callable[[], None]] = []
"""Callbacks that drop what other modules cached about the world."""


def current() -> World:
    """Return the world, opened on first use: without `fleet.init()` it is the launcher's job, or a single process."""
    return _current if _current is not None else open_world()


def for_call(name: str) -> Comm:
    """Return the group for calls of scripts, with the name of this call for errors."""
    comm = current().calls
    comm.call = name
    return comm


def is_open() -> bool:
    return _current is not None


def open_world(
    *, backend: str | None = None, timeout: timedelta | float | None = None, device: torch.device | None = None
) -> World:
    """Adopt the existing process group, create one from the launcher's variables, or run as a single process.

    `device`: chosen by a calling framework; None chooses one here."""
    global _current
    if _current is not None:
        return _current
    log.require_known_level()
    adopted = c10d.rank_and_size() if c10d.is_initialized() else None
    role = role_from_env(os.environ) if adopted is None else role_in_group(os.environ, rank=adopted[0], size=adopted[1])
    device = choose_device(role) if device is None else device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    comm: Comm = SoloComm()
    if adopted is not None:
        comm = TorchComm()
        atexit.unregister(gloo_threads.wait_until_idle)  # register once, however many worlds were opened
        atexit.register(gloo_threads.wait_until_idle)
        atexit.unregister(c10d.post_departure)
        atexit.register(c10d.post_departure)
    elif role.address is not None:
        _open_group(role, backend or choose_backend(role, device), timeout)
        comm = TorchComm()
    _current = _survey(comm, device, role)
    return _current


def at_close(forget: Callable[[], None]) -> None:
    """Call `forget` whenever a world is closed."""
    _forget_at_close.append(forget)


def close_world() -> None:
    """Drop the world and close its process group; for tests and for scripts that continue without one."""
    global _current
    _current = None
    stop_signal.forget()
    for forget in _forget_at_close:
        forget()
    c10d.close_group()


def choose_device(role: Role) -> torch.device:
    """Choose a GPU for this rank (shared when ranks outnumber GPUs), or the CPU. FLEETX_DEVICE=cpu leaves GPUs alone."""
    wanted = os.environ.get("FLEETX_DEVICE", "")
    if wanted not in ("", "cpu", "cuda"):
        raise ConfigError(f"FLEETX_DEVICE is {wanted!r}; it must be cpu or cuda, or not set.")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("FLEETX_DEVICE is cuda, but torch sees no GPU here.")
    if wanted == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", role.local_rank % count) if count else torch.device("cpu")


def choose_backend(role: Role, device: torch.device) -> str:
    # NCCL refuses two ranks on one GPU; gloo takes CUDA tensors too.
    if device.type == "cuda" and role.local_size <= torch.cuda.device_count():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def _open_group(role: Role, backend: str, timeout: timedelta | float | None) -> None:
    if timeout is not None and not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=float(timeout))
    if timeout is not None and timeout <= timedelta(0):
        raise ConfigError(f"timeout is {timeout}; it must be more than 0 seconds.")
    if role.source == "torchrun":
        c10d.open_group_from_env(backend, timeout=timeout)
    else:
        assert role.address is not None and role.port is not None
        c10d.open_group(backend, rank=role.rank, size=role.size, address=role.address, port=role.port, timeout=timeout)
    # A group left open at exit makes NCCL print warnings and lets gloo threads outlive the interpreter.
    atexit.register(c10d.close_group)


def _survey(comm: Comm, device: torch.device, role: Role) -> World:
    """Gather host and local rank of all ranks, once, while every rank is here, so that no later query needs a collective."""
    if comm.rank == 0 and comm.size > 1:
        c10d.forget_departures()
    host = socket.gethostname()
    local_rank = role.local_rank if role.source != "none" else comm.rank
    ranks = comm.gather_json([host, local_rank, secrets.token_hex(8)])
    return World(
        comm=comm,
        device=device,
        local_rank=local_rank,
        node_num=role.node_num or len({name for name, _, _ in ranks}),
        endpoints=tuple(f"{name}:{index}" for name, index, _ in ranks),
        token=ranks[0][2],
        calls=comm.for_calls(),
    )
