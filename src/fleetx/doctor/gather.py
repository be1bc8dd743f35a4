"""Gather the facts of this machine, without judging or changing anything and without long waits."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import psutil

import fleetx

from ..dist.control_groups import cpu_quota, memory_left, memory_limit
from ..errors import first_line
from .facts import Backends, Devices, Facts, Gpu, Limits, Package, Software
from .gather_network import gather_network
from .software import parse_requirement
from .variables import known

# --- all facts ----------------------------------------------------------------------------------------------------------

LOG_DIR = "log"
WANTED_PYTHON = "3.11"
SHM = Path("/dev/shm")
DRIVER = Path("/proc/driver/nvidia/version")
INFINIBAND = Path("/sys/class/infiniband")


def gather(*, hosts: tuple[str, ...] = (), port: int) -> Facts:
    """Gather all facts. `hosts`: from --master or --ips, whose port is tried."""
    torch_error = _import_torch()
    return Facts(
        software=_software(torch_error),
        devices=_devices(has_torch=not torch_error),
        backends=Backends() if torch_error else _backends(),
        network=gather_network(hosts, port, has_torch=not torch_error),
        limits=_limits(),
        variables=known(os.environ),
    )


def _import_torch() -> str:
    try:
        import torch  # noqa: F401
    except Exception as error:  # broken installations raise many kinds of errors
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


# --- software -----------------------------------------------------------------------------------------------------------


def _software(torch_error: str) -> Software:
    try:
        requirements = importlib.metadata.requires("fleetx") or []
        installed = importlib.metadata.version("fleetx")
    except importlib.metadata.PackageNotFoundError:
        requirements, installed = [], None
    wanted = [package for text in requirements if (package := parse_requirement(text)) is not None]
    packages = tuple(
        Package(one.name, one.wanted, _version(one.name), one.extra) for one in wanted if one.name.lower() != "fleetx"
    )
    if all(one.name != "triton" for one in packages):
        packages += (Package("triton", "", _version("triton"), "dev"),)
    return Software(
        python=platform.python_version(),
        wanted_python=WANTED_PYTHON,
        fleetx=fleetx.__version__,
        installed=installed,
        packages=packages,
        torch_error=torch_error,
        shadows=find_shadows([os.getcwd()], _python_path(), {one.name.replace("-", "_") for one in packages if not one.extra}),
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def find_shadows(first: list[str], python_path: list[str], dependencies: set[str]) -> tuple[tuple[str, str], ...]:
    """Find files that hide a module. `first`: folders like that of a script, in which another `fleetx` is expected."""
    hidden = set(sys.stdlib_module_names) | {name.lower() for name in dependencies} | dependencies
    shadows: dict[str, str] = {}
    for folder in [*first, *python_path]:
        names = hidden | {"fleetx"} if folder in python_path and folder not in first else hidden
        for path in sorted(Path(folder).glob("*")):
            is_module = path.suffix == ".py" or (path / "__init__.py").is_file()
            if is_module and path.stem in names and not _is_installed(path):
                shadows.setdefault(path.stem, str(path))
    return tuple(shadows.items())


def _is_installed(path: Path) -> bool:
    """Return whether the path is the installed module itself: PYTHONPATH may name the folder in use."""
    if path.stem != "fleetx":
        return "site-packages" in path.parts
    return path.resolve() == Path(fleetx.__file__).resolve().parent


# --- devices ------------------------------------------------------------------------------------------------------------


def _devices(*, has_torch: bool) -> Devices:
    memory = psutil.virtual_memory()
    limit, left = memory_limit(), memory_left()
    cores = os.cpu_count() or 1
    bare = Devices(
        driver=_driver(),
        cores=cores,
        allowed_cores=len(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(),
        threads=cores,
        memory_bytes=int(memory.total),
        available_bytes=int(memory.available if left is None else min(memory.available, left)),
        memory_limit_bytes=limit,
    )
    return _with_torch(bare) if has_torch else bare


def _with_torch(bare: Devices) -> Devices:
    """Add the facts that only torch can provide."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gpus = _gpus()
    return replace(
        bare,
        threads=torch.get_num_threads(),
        gpus=gpus,
        torch_cuda=torch.version.cuda,
        architectures=tuple(torch.cuda.get_arch_list()) if gpus else (),
        driver_cuda=_driver_cuda(),
        cuda_error=" ".join(str(caught[0].message).split())[:300] if caught and not gpus else "",
    )


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Gpu(one.name, int(one.total_memory), (one.major, one.minor), has_bf16) for one in devices)


def _driver() -> str | None:
    """Read "580.65.06" from a line such as "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  ..."."""
    try:
        words = DRIVER.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), "of unknown version")


def _driver_cuda() -> str | None:
    """Ask the driver for the newest CUDA version it supports, such as "13.0": torch does not report it."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # no driver
        return None
    return None if failed or not number.value else f"{number.value // 1000}.{number.value % 1000 // 10}"


def _backends() -> Backends:
    from ..launch.backends import has_gloo, has_mpi, nccl_version

    return Backends(gloo=has_gloo(), nccl=nccl_version(), mpi=has_mpi())


# --- limits -------------------------------------------------------------------------------------------------------------


def _limits() -> Limits:
    shm = shutil.disk_usage(SHM) if SHM.is_dir() else None
    error, free = _log_folder(Path(LOG_DIR).absolute())
    return Limits(
        shm_bytes=shm.total if shm else None,
        shm_free_bytes=shm.free if shm else 0,
        open_files=_limit_of(resource.RLIMIT_NOFILE),
        processes=_limit_of(resource.RLIMIT_NPROC)[0],
        locked_bytes=_limit_of(resource.RLIMIT_MEMLOCK)[0],
        address_space_bytes=_limit_of(resource.RLIMIT_AS)[0],
        infiniband=tuple(sorted(os.listdir(INFINIBAND))) if INFINIBAND.is_dir() else (),
        log_dir=str(Path(LOG_DIR).absolute()),
        log_error=error,
        log_free_bytes=free,
    )


def _limit_of(kind: int) -> tuple[int, int]:
    soft, hard = resource.getrlimit(kind)
    return (-1 if soft == resource.RLIM_INFINITY else soft), (-1 if hard == resource.RLIM_INFINITY else hard)


def _log_folder(folder: Path) -> tuple[str, int]:
    """Return why the folder cannot be written ("" if it can) and its free bytes, without creating it."""
    there = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
        return "", shutil.disk_usage(there).free
    except OSError as error:
        return error.strerror or str(error), 0
