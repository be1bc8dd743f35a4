"""Format what is printed before the ranks start: settings, rank 0's variables, the plan of a dry run. Pure functions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..config.secret_texts import command_without_secrets, without_secrets
from ..config.text import framed
from .console import escape
from .outcome import join_ranks
from .topology import Plan, expected_assignment, log_path, worker_arguments, worker_environment

SHOWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")
SHOWN_IF_SET = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
VALUE_WIDTH = 41
SECRET = re.compile("TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH", flags=re.IGNORECASE)


def hide_secret(name: str, value: str) -> str:
    return "***" if SECRET.search(name) else without_secrets(value)


def _master(plan: Plan) -> str:
    return f"{plan.nodes.master}, port {plan.nodes.port or 'any free one'}"


def _secret(plan: Plan) -> str:
    if plan.nodes.count == 1:
        return "made for this run"
    return "given" if plan.secret else f"none: a host that reaches {plan.nodes.master} can join; see --job_secret_file"


def configuration_table(plan: Plan) -> str:
    nodes = plan.nodes
    ranks = plan.tee if plan.tee == "all" else ",".join(str(rank) for rank in sorted(plan.tee)) or "none"
    rows: dict[str, object] = {
        "devices": ",".join(plan.devices),
        "env": " ".join(f"{name}={hide_secret(name, value)}" for name, value in plan.variables.items()) or "none",
        "hang_timeout": f"{plan.hang_timeout_seconds:g} s",
        "host": nodes.address,
        "job_id": plan.job_id,
        "job_secret": _secret(plan),
        "log_dir": plan.log_dir,
        "log_max_mb": plan.log_max_mb or "no limit",
        "log_overwrite": plan.log_overwrite,
        "master": _master(plan),
        "max_restart": plan.max_restart,
        "nnodes": nodes.count,
        "node_grace": f"{plan.node_grace_seconds:g} s",
        "nproc_per_node": plan.process_count,
        "rank": "in order of arrival" if nodes.rank is None else nodes.rank,
        "module" if plan.is_module else "script": shlex.join(command_without_secrets((plan.target, *plan.arguments))),
        "restart_window": f"{plan.restart_window_seconds:g} s",
        "tee": ranks,
        "warm_restart": "auto" if plan.keeps_warm else "off",
    }
    body = [f"{key}: {escape(str(value))}" for key, value in rows.items()]
    return "\n".join(["-----------  Configuration Arguments -----------", *body, "-" * 48])


def environment_table(environment: Mapping[str, str], names: Iterable[str] | None = None) -> str:
    """Format a rank's variables in fleetrun's usual frame; a long value is cut to its end."""
    if names is None:
        names = [*SHOWN, *(name for name in SHOWN_IF_SET if name in environment)]
    values = {name: escape(hide_secret(name, environment[name])) for name in names}
    cut = {name: value if len(value) <= VALUE_WIDTH else "... " + value[4 - VALUE_WIDTH :] for name, value in values.items()}
    wide = max(20, *(len(value) for value in cut.values()))
    name_wide = max(24, *(len(name) for name in cut))
    head, *body = (f"{name:>{name_wide}}    {value:^{wide}} " for name, value in [("Distributed Envs", "Value"), *cut.items()])
    return "\n".join(framed([([head], body)], len(head)))


def start_line(plan: Plan, ranks: Sequence[int], node: int, *, kept: Path | None = None) -> str:
    """Say what starts here, and where its output goes. `kept`: where the logs of an earlier run are now."""
    where = f"Local start of {plan.process_count} process{'' if plan.process_count == 1 else 'es'}"
    if plan.nodes.count > 1:
        where = f"Start of {join_ranks(ranks)} on node {node} of {plan.nodes.count}"
    shown = "warnings and tracebacks"
    if plan.tee:
        shown = "all ranks" if plan.tee == "all" else f"{join_ranks(plan.tee)}, and of others their {shown}"
    earlier = f" (those of an earlier run are in {kept} now)" if kept is not None else ""
    return f"{where}. Rank N writes to {log_path(plan.log_dir, 0).with_suffix('.N')}{earlier}; shown here: {shown}."


def dry_run_text(plan: Plan, *, executable: str, shim: Path, inherited: Mapping[str, str], cores: int) -> str:
    nodes = plan.nodes
    local = [expected_assignment(plan, local_rank) for local_rank in range(plan.process_count)]
    where = f"this is node {local[0]['GROUP_RANK']} of {nodes.count}, at {nodes.address}"
    if nodes.rank is None:
        where = f"this node, at {nodes.address}, gets its number of {nodes.count} on arrival; shown as if it were node 1"
    pairs = zip(local, plan.devices, strict=True)
    rows = [f"  {own['RANK']:>4}  {device:<8}  {log_path(plan.log_dir, int(own['RANK']))}" for own, device in pairs]
    added = worker_environment(local[0], plan, inherited=inherited, cores=cores, terminal=None)
    environment = {**local[0], **added}
    return "\n".join(
        [
            configuration_table(plan),
            f"nodes: {where}; node 0 listens on {_master(plan)}",
            f"  rank  {'device':<8}  log",
            *rows,
            f"variables of rank {local[0]['RANK']}, besides those it inherits:",
            environment_table(environment, environment),
            "command of a rank:",
            f"  {escape(shlex.join((executable, *worker_arguments(shim, plan))))}",
            "This was a dry run: nothing was started.",
        ]
    )
