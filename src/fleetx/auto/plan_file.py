"""Read and write the plan in a file, if it was made for this very training. Rank 0 does so for all."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..config import log
from ..dist.agree import Failures, run_on_first
from ..engine.modules.nested_tensors import tensors_in
from ..engine.setup.placement import plain_name
from ..errors import ConfigError
from ..strategies.auto import Auto
from .plan import Plan, differences, from_json
from .subject import Subject


def require_folder(subject: Subject, auto: Auto) -> None:
    """Refuse a folder that rank 0 cannot write to, before a minute is spent on a plan."""
    folder = Path(auto.plan).parent if auto.plan is not None else None

    def look() -> None:
        if folder is not None and not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(
                f'auto_configs["plan"] is {auto.plan!r}, and rank 0 cannot write into a folder {str(folder)!r}. Make it first.'
            )

    run_on_first(subject.comm, look, fails=_config_error)


def _config_error(failures: Failures) -> ConfigError:
    return ConfigError(failures.text)


def key_of(subject: Subject, auto: Auto) -> dict[str, Any]:
    """Collect the facts a plan is made for. Collective: samples of ranks may differ in their last batch, and rank 0's counts."""
    model, optimizer = subject.model, subject.optimizer
    lines = [f"{plain_name(name)} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()]
    lines += [f"{plain_name(name)} {type(module).__qualname__}" for name, module in model.named_modules()]
    lines += [type(optimizer).__qualname__]
    is_gpu = subject.device.type == "cuda"
    key = {
        "model": hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
        "sample": [[list(t.shape), str(t.dtype)] for t in tensors_in(subject.batch)],
        "device": torch.cuda.get_device_name(subject.device) if is_gpu else f"{platform.machine()} CPU",
        "ranks": subject.comm.size,
        "torch": torch.__version__,
        "fleetx": __version__,
        "scalars": dict(subject.scalars),
        "fixed": subject.fixed.settings,
        "asked": {"risk": auto.risk, "trials": auto.trials, "memory": auto.memory, "global_batch": auto.global_batch}
        | ({} if auto.total_steps is None else {"total_steps": auto.total_steps}),
    }
    agreed: dict[str, Any] = subject.comm.gather_json(key)[0]
    return agreed


def kept_plan(subject: Subject, auto: Auto, key: dict[str, Any]) -> Plan | None:
    """Return the plan of the file if it fits, else None. Rank 0 reads it for all, and all raise what is wrong with it."""
    if auto.plan is None:
        return None
    path = Path(auto.plan)
    text = run_on_first(
        subject.comm,
        lambda: path.read_text(encoding="utf-8") if path.exists() else None,
        report=lambda error: f"the plan {auto.plan} cannot be read: {error}.",
        fails=_config_error,
    )
    if text is None:
        return None
    plan = from_json(text, source=auto.plan)
    other = differences(key, plan.key)
    if not other:
        return plan
    if subject.comm.rank == 0:
        log.say(f"auto: the plan in {auto.plan} is for something else, and a new one is made: {'; '.join(other)}.")
    return None


def save(subject: Subject, plan: Plan, path: str) -> None:
    run_on_first(
        subject.comm,
        lambda: plan.save(path),
        report=lambda error: f"the plan cannot be written to {path}: {error}.",
        fails=_config_error,
    )
