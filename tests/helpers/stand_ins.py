"""Stand-ins for what one machine has not: other machines, Slurm, Kubernetes. All are network namespaces, so root is needed.

    python -m tests.helpers.stand_ins hosts 'fleetrun --ips 10.0.0.1,10.0.0.2 train.py'  a line on two hosts with these addresses
    python -m tests.helpers.stand_ins srun --nodes=2 --ntasks-per-node=1 COMMAND   the command in tasks, with Slurm's variables
    python -m tests.helpers.stand_ins sbatch job.sh                                the script, as the batch step of a job
    python -m tests.helpers.stand_ins kubectl apply -f job.yaml                    the container of an Indexed Job, for each index

The exit code is the worst of all.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bench.lib import netns

SLURM_JOB = "4711"
PROGRAMS = ("srun", "sbatch", "kubectl")


def run_all(tasks: Sequence[tuple[netns.Host, Sequence[str], Mapping[str, str]]]) -> int:
    """Each command on its host, with these variables beside our own; the worst exit code."""
    started = [subprocess.Popen(host.command(*words), env={**os.environ, **extra}) for host, words, extra in tasks]
    return max(abs(process.wait()) for process in started)


def on_hosts(line: str) -> int:
    """The addresses in the line are those of the hosts."""
    addresses = sorted(set(re.findall(r"\b10\.0\.0\.(\d+)", line)))
    if not set(addresses) <= {"1", "2"}:
        raise SystemExit(f"only 10.0.0.1 and 10.0.0.2 can be made here; the line is {line}")
    netns.NETWORK = "10.0.0"
    with netns.cluster(hosts=2) as hosts:
        return run_all([(host, ["bash", "-c", line], {}) for host in hosts])


def slurm_flags(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The flags before the command, as --name=value, and the command."""
    flags: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("--"):
        name, _, value = rest.pop(0).removeprefix("--").partition("=")
        flags[name] = value
    return flags, rest


def srun(words: Sequence[str]) -> int:
    flags, command = slurm_flags(words)
    node_count = int(flags.pop("nodes", os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    per_node = int(flags.pop("ntasks-per-node", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))
    if flags:
        raise SystemExit(f"the stand-in for srun does not know --{', --'.join(flags)}")
    with netns.cluster(hosts=node_count) as hosts:
        stem = hosts[0].namespace.removesuffix("0")
        nodes = f"{stem}[0-{node_count - 1}]" if node_count > 1 else hosts[0].namespace
        job = {
            "SLURM_JOB_ID": SLURM_JOB,
            "SLURM_STEP_ID": "0",
            **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"), nodes),
            **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), str(node_count)),
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), str(node_count * per_node)),
        }
        tasks = []
        for task in range(node_count * per_node):
            node, local = divmod(task, per_node)
            own = {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
            tasks.append((hosts[node], command, job | own))
        return run_all(tasks)


def sbatch(words: Sequence[str]) -> int:
    (script,) = words
    flags, _ = slurm_flags(re.findall(r"^#SBATCH (\S+)$", Path(script).read_text(), flags=re.MULTILINE))
    batch = {
        "ENVIRONMENT": "BATCH",
        "SLURM_JOB_ID": SLURM_JOB,
        "SLURM_JOB_NUM_NODES": flags["nodes"],
        "SLURM_NTASKS_PER_NODE": flags["ntasks-per-node"],
    }
    return subprocess.run(["bash", "-e", script], env={**os.environ, **batch}).returncode


def kubectl(words: Sequence[str]) -> int:
    *verb, file = words
    if verb != ["apply", "-f"]:
        raise SystemExit(f"the stand-in for kubectl knows `apply -f FILE`; got {' '.join(words)}")
    manifest = {entry["kind"]: entry for entry in yaml.safe_load_all(Path(file).read_text())}
    return run_pods(manifest["Job"], manifest["Service"])


def run_pods(job: Mapping[str, Any], service: Mapping[str, Any]) -> int:
    """As the cluster would name and number them; files are those of this folder, in place of the image's."""
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    name, (container,) = job["metadata"]["name"], pod["containers"]
    named = service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"]
    if spec["completionMode"] != "Indexed" or not named or service["spec"]["selector"] != {"job-name": name}:
        raise SystemExit("such pods would have no names: an Indexed Job and a headless Service that selects it are needed")
    with netns.cluster(hosts=spec["completions"]) as hosts:
        with (hosts[0].home.parent / "hosts").open("a") as names:
            for index, host in enumerate(hosts):
                names.write(f"{host.address} {name}-{index}.{pod['subdomain']}\n")
        words = [*container["command"], *container["args"]]
        return run_all([(host, words, {"JOB_COMPLETION_INDEX": str(index)}) for index, host in enumerate(hosts)])


def main(program: str, *words: str) -> int:
    if program == "hosts":
        return on_hosts(*words)
    return {"srun": srun, "sbatch": sbatch, "kubectl": kubectl}[program](words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
