"""What is known of this machine, as plain values: gathered in one place, judged in another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Answer = Literal["answers", "refuses", "silent", "unreachable", "unknown name", "free", "held"]
"""Of a host's port: somebody listens; the host says that nobody does; nothing comes back; there is no way to it; nobody knows
the name; or, at an address of this machine, the port can be listened on, or cannot."""


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    wanted: str
    """The least version, or "" for any."""
    version: str | None
    """None: not installed."""
    extra: str = ""
    """The extra of fleetx that brings it; "" for a hard dependency."""


@dataclass(frozen=True, slots=True)
class Software:
    python: str = "3.11.0"
    wanted_python: str = "3.11"
    fleetx: str = "0.1.0"
    installed: str | None = "0.1.0"
    """Version of the installed metadata; None: a folder of sources that was never installed."""
    packages: tuple[Package, ...] = ()
    torch_error: str = ""
    """Why torch cannot be imported."""
    shadows: tuple[tuple[str, str], ...] = ()
    """Modules of Python or of the hard dependencies that a file in the working folder or on PYTHONPATH hides: name, file."""


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
    """The CUDA that torch was built with; None: a build for CPUs."""
    architectures: tuple[str, ...] = ()
    """What torch was compiled for: "sm_90", "compute_90"."""
    driver: str | None = None
    """NVIDIA's, of the running kernel."""
    driver_cuda: str | None = None
    """The newest CUDA that the driver runs."""
    cuda_error: str = ""
    """What torch said when it was asked for GPUs."""
    cores: int = 2
    allowed_cores: int = 2
    """By the affinity of this process."""
    cpu_quota: float | None = None
    """Cores that the control group may keep busy."""
    threads: int = 2
    """Of torch, in one process."""
    memory_bytes: int = 8 << 30
    available_bytes: int = 4 << 30
    memory_limit_bytes: int | None = None
    """Of the control group."""


@dataclass(frozen=True, slots=True)
class Backends:
    gloo: bool = True
    nccl: str | None = None
    """Its version; None: this torch has none."""
    mpi: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """A host that was named on the command line, and its port."""

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
    """Interfaces that are switched off, or have no cable."""
    outward: str | None = "10.0.0.1"
    """The address from which this machine would speak to others."""
    peers: tuple[Peer, ...] = ()
    peers_error: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    shm_bytes: int | None = 16 << 30
    """None: there is no /dev/shm."""
    shm_free_bytes: int = 16 << 30
    open_files: tuple[int, int] = (65536, 65536)
    """Soft and hard; -1 is no limit."""
    processes: int = -1
    locked_bytes: int = -1
    address_space_bytes: int = -1
    infiniband: tuple[str, ...] = ()
    log_dir: str = "log"
    log_error: str = ""
    log_free_bytes: int = 100 << 30
    clock_behind_seconds: float = 0.0
    """How long before this library's own files were written the clock stands."""
    is_clock_synchronised: bool | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    software: Software = Software()
    devices: Devices = Devices()
    backends: Backends = Backends()
    network: Network = Network()
    limits: Limits = Limits()
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment, only names that are known to matter."""
