"""Check environment variables that silently change training. Only variables listed here are shown with their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .facts import Facts
from .finding import Finding, note, ok, problem

TOPIC = "variables"
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
BY_LAUNCHER = ("FLEETX_WORKER_LOG", "TORCHELASTIC_RUN_ID")
"""Variables of which one is set in a process started by fleetrun or torchrun."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
CHANGES = {
    "NVIDIA_TF32_OVERRIDE": "overrides the script's choice of TF32, and so changes results",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "turns TF32 on, and so changes results",
    "CUDA_LAUNCH_BLOCKING": "waits for every kernel: for debugging, and slow",
    "TORCH_DISTRIBUTED_DEBUG": "compares every collective: for debugging, and slow",
    "TORCHDYNAMO_DISABLE": "turns torch.compile off",
    "ATEN_CPU_CAPABILITY": "keeps torch from using the CPU's faster instructions",
    "KMP_AFFINITY": "binds threads to cores; ranks that inherit it may share them",
    "GOMP_CPU_AFFINITY": "binds threads to cores; ranks that inherit it share them",
    "LD_PRELOAD": "replaces system functions in every process",
    "PYTHONOPTIMIZE": "removes assertions from all packages",
    "NCCL_P2P_DISABLE": "disables direct copies between GPUs of one machine",
    "NCCL_SHM_DISABLE": "disables shared memory between ranks of one machine",
    "NCCL_IB_DISABLE": "disables InfiniBand: sockets are much slower",
    "NCCL_ALGO": "fixes NCCL's algorithm",
    "TORCH_NCCL_BLOCKING_WAIT": "waits in every collective: slow",
}
"""Variables and their effects while set."""
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
"""Other variables with this prefix are shown without their values."""
OFF = ("", "0", "OFF", "off", "false")


def known(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may be shown; the value of any other may be a secret."""
    named = {name: value for name, value in environment.items() if name in KNOWN}
    return named | {name: "..." for name in environment if name.startswith(NAME_ONLY) and name not in named}


def is_launched(variables: Mapping[str, str]) -> bool:
    return "RANK" in variables or "WORLD_SIZE" in variables


def check(facts: Facts) -> Iterable[Finding]:
    findings = [*_threads(facts), *_interfaces(facts), *_devices(facts), *_left_over(facts), *_changes(facts), *_shadows(facts)]
    return findings or [ok(TOPIC, "none that changes training")]


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
                TOPIC,
                f"{name}={value} is more than the {cores} cores there are",
                f"unset {name}: fleetrun divides them among its ranks",
            )
        elif int(value) < cores:
            what = f"{name}={value}: each rank uses at most that many of {cores} cores"
            yield note(TOPIC, what, f"unset {name}, unless intended: fleetrun divides the cores among its ranks")


def missing_interfaces(value: str, name: str, interfaces: Iterable[str]) -> list[str]:
    """Return the listed interfaces that do not exist. NCCL also accepts prefixes, "=name", and "^name" (all except it)."""
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
            what = f"{name}={facts.variables[name]} names {', '.join(missing)}, but the interfaces here are {', '.join(there)}"
            yield problem(TOPIC, what, f"unset {name}: fleetrun sets it to the interface of the node's address")


def _devices(facts: Facts) -> Iterable[Finding]:
    visible, device = facts.variables.get("CUDA_VISIBLE_DEVICES"), facts.variables.get("FLEETX_DEVICE", "")
    if visible is not None and facts.devices.driver is not None:
        if visible.strip() in ("", "-1"):
            yield note(TOPIC, f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES")
        else:
            yield note(
                TOPIC, f"CUDA_VISIBLE_DEVICES={visible}: other GPUs are not visible", "unset it, or choose with fleetrun --gpus"
            )
    if device not in ("", "cpu", "cuda"):
        yield problem(TOPIC, f"FLEETX_DEVICE is {device!r}; it must be cpu or cuda, or not set", "unset FLEETX_DEVICE")
    elif device == "cpu" and facts.devices.gpus:
        yield note(TOPIC, "FLEETX_DEVICE=cpu: training does not use the GPUs", "unset FLEETX_DEVICE")
    elif device == "cuda" and not facts.devices.gpus:
        yield problem(TOPIC, "FLEETX_DEVICE=cuda, but torch sees no GPU here", "unset FLEETX_DEVICE")


def _left_over(facts: Facts) -> Iterable[Finding]:
    there = [name for name in LAUNCHED if name in facts.variables]
    if not there or any(name in facts.variables for name in BY_LAUNCHER):
        return
    what = ", ".join(f"{name}={facts.variables[name]}" for name in there)
    if is_launched(facts.variables):
        why = "a script started with `python` would wait for other ranks"
        yield problem(TOPIC, f"{what}: probably left over from another run; {why}", f"unset {' '.join(there)}")
    else:
        why = "srun and mpirun would use it for this job, and a script started with `python` would refuse to train alone"
        yield note(TOPIC, f"{what}: {why}", f"unset {' '.join(there)}")


def _changes(facts: Facts) -> Iterable[Finding]:
    for name, effect in CHANGES.items():
        if facts.variables.get(name, "") not in OFF:
            yield note(TOPIC, f"{name}={facts.variables[name]} {effect}", f"unset {name}, unless intended")
    others = sorted(name for name in facts.variables if name.startswith(NAME_ONLY) and name not in KNOWN)
    if others:
        yield note(TOPIC, f"set for NCCL: {', '.join(others)}", f"unset {' '.join(others)}, if they were set for another machine")


def _shadows(facts: Facts) -> Iterable[Finding]:
    for module, path in facts.software.shadows:
        if module == "fleetx":
            yield note(TOPIC, f"PYTHONPATH puts {path} in place of the installed fleetx", "unset PYTHONPATH")
        else:
            yield problem(
                TOPIC, f"{path} is imported in place of the module {module}", f"rename {path}, or take it off PYTHONPATH"
            )
