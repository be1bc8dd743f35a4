"""Check GPUs, cores, memory, backends, limits and the log folder. Pure functions of facts."""

from __future__ import annotations

from collections.abc import Iterable

from ..config.text import MIB, binary
from .facts import Devices, Facts, Gpu
from .finding import Finding, note, ok, problem
from .software import numbers

GIB = 1024 * MIB
SMALL_SHM_BYTES = 64 * MIB
"""Default size in a container."""
ROOM_BYTES = GIB
FEW_FILES, ENOUGH_FILES = 1024, 4096
FEW_PROCESSES = 1024
BF16_SINCE = (8, 0)


# --- devices ----------------------------------------------------------------------------------------------------------------


def check_gpus(facts: Facts) -> Iterable[Finding]:
    topic, devices = "GPUs", facts.devices
    if facts.software.torch_error:
        return
    for index, gpu in enumerate(devices.gpus):
        yield _one_gpu(index, gpu, devices)
    if devices.gpus:
        return
    if devices.driver is None:
        yield ok(topic, "none; training runs on the CPU")
    elif devices.torch_cuda is None:
        what = f"this machine has an NVIDIA driver ({devices.driver}), but torch was built for CPUs only"
        yield problem(topic, what, "install a CUDA build of torch: see its start page for the command")
    elif facts.variables.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        yield note(topic, "hidden by CUDA_VISIBLE_DEVICES")
    else:
        yield _unusable(devices)


def _unusable(devices: Devices) -> Finding:
    assert devices.torch_cuda is not None
    error = f": {devices.cuda_error}" if devices.cuda_error else ""
    has_old_driver = devices.driver_cuda is not None and numbers(devices.driver_cuda)[:1] < numbers(devices.torch_cuda)[:1]
    fix = "look at nvidia-smi; in a container, start it with --gpus all"
    if has_old_driver:
        fix = f"install a newer driver, or a torch built for CUDA {devices.driver_cuda} or older"
    return problem("GPUs", f"driver {devices.driver}, torch for CUDA {devices.torch_cuda}, but no GPU can be used{error}", fix)


def runs_on(gpu: Gpu, architectures: Iterable[str]) -> bool:
    """Return whether torch's code runs on the GPU: "sm_" code from its minor version on, "compute_" code on any later one."""
    major, minor = gpu.capability
    for name in architectures:
        kind, _, digits = name.partition("_")
        digits = "".join(letter for letter in digits if letter.isdigit())
        built = (int(digits[:-1]), int(digits[-1])) if len(digits) >= 2 else (99, 0)
        if built <= (major, minor) and (kind == "compute" or built[0] == major):
            return True
    return False


def _one_gpu(index: int, gpu: Gpu, devices: Devices) -> Finding:
    what = f"{index}: {gpu.name}, {binary(gpu.memory_bytes)}, capability {gpu.capability[0]}.{gpu.capability[1]}"
    if devices.architectures and not runs_on(gpu, devices.architectures):
        built = ", ".join(devices.architectures)
        return problem("GPUs", f"{what}: torch was built for {built}", "install a torch that is built for this GPU")
    if not gpu.has_bf16 or gpu.capability < BF16_SINCE:
        return note("GPUs", f"{what}: no bfloat16; amp takes float16 with a loss scale")
    return ok("GPUs", f"{what}, bfloat16 (driver {devices.driver}, torch for CUDA {devices.torch_cuda})")


def check_cpu(facts: Facts) -> Iterable[Finding]:
    topic, devices = "CPU", facts.devices
    cores = devices.allowed_cores
    if devices.cpu_quota is not None and devices.cpu_quota < cores:
        share = max(1, int(devices.cpu_quota))
        what = f"the control group allows {devices.cpu_quota:g} of {cores} cores: threads for all of them slow each other down"
        yield note(topic, what, f"fleetrun --env OMP_NUM_THREADS={share} train.py, divided by the ranks of this machine")
    if cores < devices.cores:
        yield note(topic, f"this process may use {cores} of {devices.cores} cores (its affinity)", "start it without taskset")
    threads = f"{devices.threads} thread{'s' * (devices.threads != 1)}"
    yield ok(topic, f"{cores} core{'s' * (cores != 1)}, {threads} of torch in one process")


def check_memory(facts: Facts) -> Iterable[Finding]:
    topic, devices = "memory", facts.devices
    limit = devices.memory_limit_bytes
    if devices.available_bytes < ROOM_BYTES:
        what = f"only {binary(devices.available_bytes)} of {binary(devices.memory_bytes)} are free"
        yield problem(topic, what, "end other processes, or start fewer ranks: torch alone takes about 0.3 GiB in each")
    if limit is not None and limit < devices.memory_bytes:
        yield note(
            topic, f"the control group allows {binary(limit)} of {binary(devices.memory_bytes)}; beyond it, ranks are killed"
        )
    yield ok(topic, f"{binary(devices.available_bytes)} of {binary(devices.memory_bytes)} free")


def check_backends(facts: Facts) -> Iterable[Finding]:
    topic, backends = "backends", facts.backends
    if facts.software.torch_error:
        return
    if not backends.gloo:
        yield problem(topic, "this torch has no gloo, which every rank needs", "install torch's own build for Linux")
    if facts.devices.gpus and backends.nccl is None:
        yield problem(topic, "there are GPUs, but this torch has no NCCL", "install torch's own CUDA build for Linux")
    there = [
        *(["gloo"] if backends.gloo else []),
        *([f"NCCL {backends.nccl}"] if backends.nccl else []),
        *(["MPI"] if backends.mpi else []),
    ]
    yield ok(topic, ", ".join(there) or "none")


# --- limits -------------------------------------------------------------------------------------------------------------


def check_shared_memory(facts: Facts) -> Iterable[Finding]:
    topic, limits = "/dev/shm", facts.limits
    fix = "docker run --shm-size=8g (or --ipc=host); elsewhere: mount -o remount,size=8G /dev/shm"
    if limits.shm_bytes is None:
        yield problem(topic, "it does not exist: data loaders with workers, and NCCL, cannot share memory", fix)
    elif limits.shm_bytes <= SMALL_SHM_BYTES:
        yield problem(topic, f"{binary(limits.shm_bytes)}: data loaders with workers die of a bus error", fix)
    elif limits.shm_free_bytes < ROOM_BYTES:
        yield note(
            topic, f"{binary(limits.shm_free_bytes)} of {binary(limits.shm_bytes)} free: batches of data loaders need it", fix
        )
    else:
        yield ok(topic, f"{binary(limits.shm_free_bytes)} of {binary(limits.shm_bytes)} free")


def check_limits(facts: Facts) -> Iterable[Finding]:
    topic, limits = "limits", facts.limits
    soft, hard = limits.open_files
    if 0 <= soft < ENOUGH_FILES:
        wanted = 65536 if hard < 0 else min(65536, hard)
        raised = f"ulimit -n {wanted}" if wanted > soft else "raise nofile in /etc/security/limits.conf"
        if soft < FEW_FILES:
            yield problem(topic, f"{soft} open files are too few for ranks and data loaders", raised)
        else:
            yield note(topic, f"{soft} open files: few, for data loaders with many workers", raised)
    if 0 <= limits.processes < FEW_PROCESSES:
        what = f"{limits.processes} processes and threads of this user; a rank alone takes dozens"
        yield problem(topic, what, "ulimit -u 65536, or nproc in /etc/security/limits.conf")
    if limits.infiniband and limits.locked_bytes >= 0:
        what = f"InfiniBand ({', '.join(limits.infiniband)}) pins memory, of which only {binary(limits.locked_bytes)} are allowed"
        yield problem(topic, what, "ulimit -l unlimited, or memlock in /etc/security/limits.conf")
    if limits.address_space_bytes >= 0:
        what = f"address space limited to {binary(limits.address_space_bytes)}: torch with CUDA reserves far more than it uses"
        yield note(topic, what, "ulimit -v unlimited")
    yield ok(topic, f"open files {_limit(soft)}, processes {_limit(limits.processes)}")


def _limit(count: int) -> str:
    return "without limit" if count < 0 else f"{count:,}"


def check_log_folder(facts: Facts) -> Iterable[Finding]:
    topic, limits = "log folder", facts.limits
    if limits.log_error:
        what = f"{limits.log_dir} cannot be written: {limits.log_error}"
        yield problem(topic, what, "change to another folder, or write fleetrun --log_dir DIR")
    elif limits.log_free_bytes < ROOM_BYTES:
        fix = "free some, or write fleetrun --log_dir DIR on another disk"
        yield note(topic, f"only {binary(limits.log_free_bytes)} free for {limits.log_dir}", fix)
    else:
        yield ok(topic, f"{limits.log_dir} can be written, {binary(limits.log_free_bytes)} free")
