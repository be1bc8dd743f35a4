"""Environment variables that change training without a word. Only names known here are ever shown with their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .facts import Facts
from .finding import Finding, note, ok, problem

TOPIC = "variables"
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
BY_LAUNCHER = ("FLEETX_WORKER_LOG", "TORCHELASTIC_RUN_ID")
"""One of them is set where a launcher has started this process just now."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
CHANGES = {
    "NVIDIA_TF32_OVERRIDE": "decides over TF32 whatever the script says, and so changes results",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "turns TF32 on, and so changes results",
    "CUDA_LAUNCH_BLOCKING": "waits for every kernel: for looking for errors, and slow",
    "TORCH_DISTRIBUTED_DEBUG": "compares every collective: for looking for errors, and slow",
    "TORCH_SHOW_CPP_STACKTRACES": "makes errors slow",
    "TORCHDYNAMO_DISABLE": "turns torch.compile off",
    "ATEN_CPU_CAPABILITY": "keeps torch from the CPU's faster instructions",
    "KMP_AFFINITY": "binds threads to cores; ranks that inherit it may share them",
    "GOMP_CPU_AFFINITY": "binds threads to cores; ranks that inherit it share them",
    "LD_PRELOAD": "puts other code in place of the system's, in every process",
    "PYTHONOPTIMIZE": "removes assertions from all packages",
    "PYTORCH_ALLOC_CONF": "changes how torch keeps memory",
    "PYTORCH_CUDA_ALLOC_CONF": "changes how torch keeps GPU memory",
    "NCCL_P2P_DISABLE": "keeps GPUs of one machine from copying to each other directly",
    "NCCL_SHM_DISABLE": "keeps ranks of one machine from shared memory",
    "NCCL_IB_DISABLE": "keeps NCCL from InfiniBand: sockets are slower by far",
    "NCCL_NET_GDR_LEVEL": "decides which network cards read GPU memory directly",
    "NCCL_ALGO": "fixes NCCL's algorithm",
    "NCCL_PROTO": "fixes NCCL's protocol",
    "NCCL_MIN_NCHANNELS": "fixes how many blocks of the GPU NCCL takes",
    "NCCL_MAX_NCHANNELS": "fixes how many blocks of the GPU NCCL takes",
    "NCCL_BUFFSIZE": "fixes NCCL's buffers",
    "TORCH_NCCL_BLOCKING_WAIT": "waits in every collective: slow",
}
"""What each does while it is set."""
KNOWN = (
    *LAUNCHED,
    *BY_LAUNCHER,
    *THREADS,
    *IFNAMES,
    *CHANGES,
    "LOCAL_WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "FLEETX_DEVICE",
    "FLEETX_VERBOSE",
    "PYTHONPATH",
)
NAME_ONLY = "NCCL_"
"""Other names that begin so are shown without their values."""
OFF = ("", "0", "OFF", "off", "false")


def known(environment: Mapping[str, str]) -> dict[str, str]:
    """What may be looked at, and shown: a value that is not known may be anybody's secret."""
    named = {name: value for name, value in environment.items() if name in KNOWN}
    return named | {name: "..." for name in environment if name.startswith(NAME_ONLY) and name not in named}


def is_launched(variables: Mapping[str, str]) -> bool:
    return "RANK" in variables or "WORLD_SIZE" in variables


def check(facts: Facts) -> Iterable[Finding]:
    found = [*_threads(facts), *_interfaces(facts), *_devices(facts), *_left_over(facts), *_changes(facts), *_shadows(facts)]
    return found or [ok(TOPIC, "none that changes training")]


def _threads(facts: Facts) -> Iterable[Finding]:
    cores = facts.devices.allowed_cores
    for name in THREADS:
        if name not in facts.variables or any(launcher in facts.variables for launcher in BY_LAUNCHER):
            continue
        value = facts.variables[name]
        if not (value.isascii() and value.isdigit() and int(value) >= 1):
            yield problem(TOPIC, f"{name} is {value!r}, which is no number of threads", f"unset {name}")
        elif int(value) > cores:
            yield note(
                TOPIC, f"{name}={value} is more than the {cores} cores there are", f"unset {name}: fleetrun shares them out"
            )
        elif int(value) < cores:
            told = f"{name}={value}: each rank keeps to so many of {cores} cores"
            yield note(TOPIC, told, f"unset {name}, if that is not meant: fleetrun shares the cores out")


def missing_interfaces(value: str, name: str, interfaces: Iterable[str]) -> list[str]:
    """Which of the listed ones are not there. NCCL takes beginnings of names, "=name" and "^name" (all but this) as well."""
    there = list(interfaces)
    if name == "NCCL_SOCKET_IFNAME":
        if value.startswith("^"):
            return []
        wanted = value.removeprefix("=").split(",")
        if not value.startswith("="):
            return [one for one in wanted if not any(other.startswith(one.split(":")[0]) for other in there)]
    else:
        wanted = value.split(",")
    return [one for one in wanted if one.split(":")[0] not in there]


def _interfaces(facts: Facts) -> Iterable[Finding]:
    there = facts.network.interfaces
    for name in IFNAMES:
        missing = missing_interfaces(facts.variables[name], name, there) if facts.variables.get(name) else []
        if missing:
            told = f"{name}={facts.variables[name]} names {', '.join(missing)}, but the interfaces here are {', '.join(there)}"
            yield problem(TOPIC, told, f"unset {name}: fleetrun sets it to the interface of the node's address")


def _devices(facts: Facts) -> Iterable[Finding]:
    visible, device = facts.variables.get("CUDA_VISIBLE_DEVICES"), facts.variables.get("FLEETX_DEVICE", "")
    if visible is not None and facts.devices.driver is not None:
        if visible.strip() in ("", "-1"):
            yield note(TOPIC, f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES")
        else:
            yield note(
                TOPIC, f"CUDA_VISIBLE_DEVICES={visible}: other GPUs are not seen", "unset it, or choose with fleetrun --gpus"
            )
    if device not in ("", "cpu", "cuda"):
        yield problem(TOPIC, f"FLEETX_DEVICE is {device!r}; it must be cpu or cuda, or not set", "unset FLEETX_DEVICE")
    elif device == "cpu" and facts.devices.gpus:
        yield note(TOPIC, "FLEETX_DEVICE=cpu: training leaves the GPUs alone", "unset FLEETX_DEVICE")
    elif device == "cuda" and not facts.devices.gpus:
        yield problem(TOPIC, "FLEETX_DEVICE=cuda, but torch sees no GPU here", "unset FLEETX_DEVICE")


def _left_over(facts: Facts) -> Iterable[Finding]:
    there = [name for name in LAUNCHED if name in facts.variables]
    if not there or any(name in facts.variables for name in BY_LAUNCHER):
        return
    told = ", ".join(f"{name}={facts.variables[name]}" for name in there)
    if is_launched(facts.variables):
        why = "a script started with `python` would wait for other ranks"
        yield problem(TOPIC, f"{told}: left over from another run, it seems; {why}", f"unset {' '.join(there)}")
    else:
        why = "srun and mpirun would take it for this job's, and a script started with `python` would refuse to train alone"
        yield note(TOPIC, f"{told}: {why}", f"unset {' '.join(there)}")


def _changes(facts: Facts) -> Iterable[Finding]:
    for name, effect in CHANGES.items():
        if facts.variables.get(name, "") not in OFF:
            yield note(TOPIC, f"{name}={facts.variables[name]} {effect}", f"unset {name}, if that is not meant")
    others = sorted(name for name in facts.variables if name.startswith(NAME_ONLY) and name not in KNOWN)
    if others:
        yield note(TOPIC, f"set for NCCL: {', '.join(others)}", f"unset {' '.join(others)}, if they are of another machine")


def _shadows(facts: Facts) -> Iterable[Finding]:
    for module, path in facts.software.shadows:
        if module == "fleetx":
            yield note(TOPIC, f"PYTHONPATH puts {path} in place of the fleetx that is installed", "unset PYTHONPATH")
        else:
            yield problem(
                TOPIC, f"{path} is imported in place of the module {module}", f"rename {path}, or take it off PYTHONPATH"
            )
