"""Facts of this machine as plain values: gather.py collects them, the checks judge them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Answer = Literal["answers", "refuses", "silent", "unreachable", "unknown name", "free", "held"]
"""State of a host's port: a process listens; the host refuses the connection; no reply; no route; the name is unknown; or, at an
address of this machine, the port is free, or held by another process."""


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    wanted: str
    """Lowest version allowed; "" for any."""
    version: str | None
    """Installed version; None if not installed."""
    extra: str = ""
    """Extra of fleetx that requires it; "" for a hard dependency."""


@dataclass(frozen=True, slots=True)
class Software:
    python: str = "3.11.0"
    wanted_python: str = "3.11"
    fleetx: str = "0.1.0"
    installed: str | None = "0.1.0"
    """Version in the installed metadata; None for sources that were never installed."""
    packages: tuple[Package, ...] = ()
    torch_error: str = ""
    """Error of importing torch; "" if it can be imported."""
    shadows: tuple[tuple[str, str], ...] = ()
    """Name and file of each file in the working folder or on PYTHONPATH that hides a module of Python or of a dependency."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    has_bf16: bool = True


@dataclass(frozen=True, slots=True)
class Devices:
    gpus: tuple[Gpu, ...] = ()
    torch_cuda: str | None = None
    """CUDA version that torch was built with; None for a CPU build."""
    architectures: tuple[str, ...] = ()
    """GPU architectures that torch was compiled for, such as "sm_90" and "compute_90"."""
    driver: str | None = None
    """Version of the loaded NVIDIA kernel driver; None without one."""
    driver_cuda: str | None = None
    """Newest CUDA version that the driver supports; None without a driver."""
    cuda_error: str = ""
    """Warning of torch when it looked for GPUs; "" if none."""
    cores: int = 2
    allowed_cores: int = 2
    """Number of cores in the CPU affinity of this process."""
    cpu_quota: float | None = None
    """CPU limit of the control group, in cores; None without a limit."""
    threads: int = 2
    """Threads that torch uses in one process."""
    memory_bytes: int = 8 << 30
    available_bytes: int = 4 << 30
    memory_limit_bytes: int | None = None
    """Memory limit of the control group; None without a limit."""


@dataclass(frozen=True, slots=True)
class Backends:
    gloo: bool = True
    nccl: str | None = None
    """NCCL version; None if this torch has no NCCL."""
    mpi: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """A host given on the command line, and the state of its port."""

    name: str
    port: int
    answer: Answer
    address: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Network:
    hostname: str = "node0"
    resolved: tuple[str, ...] = ("10.0.0.1",)
    resolve_error: str = ""
    interfaces: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"lo": ("127.0.0.1",), "eth0": ("10.0.0.1",)})
    down: tuple[str, ...] = ()
    """Interfaces that are down: switched off, or without a cable."""
    outward: str | None = "10.0.0.1"
    """Address that this machine uses towards other machines; None without a route."""
    peers: tuple[Peer, ...] = ()
    peers_error: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    shm_bytes: int | None = 16 << 30
    """Size of /dev/shm; None if it does not exist."""
    shm_free_bytes: int = 16 << 30
    open_files: tuple[int, int] = (65536, 65536)
    """Soft and hard limit; -1 means no limit, here and below."""
    processes: int = -1
    locked_bytes: int = -1
    address_space_bytes: int = -1
    infiniband: tuple[str, ...] = ()
    log_dir: str = "log"
    log_error: str = ""
    log_free_bytes: int = 100 << 30


@dataclass(frozen=True, slots=True)
class Facts:
    software: Software = Software()
    devices: Devices = Devices()
    backends: Backends = Backends()
    network: Network = Network()
    limits: Limits = Limits()
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are known to matter, with their values."""
