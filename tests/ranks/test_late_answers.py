"""Decisions that stay on the device: the way of a GPU, taken on a CPU, gives the bits and the answers of the immediate one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.engine.sidecar import HostCopy, deferring
from fleetx.errors import FleetWarning
from tests.helpers.harness import run_ranks
from tests.helpers.models import cnn, learnable_images

UPDATES = 8
FP16 = {"amp": True, "amp_configs": {"dtype": "float16", "decr_every_n_nan_or_inf": 1, "incr_every_n_steps": 3}}
MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
SKIP = {"on_nan_inf": "skip"}


def sgd(params: Any, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, **more)


def adam(params: Any, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, **more)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "sgd_fused": lambda params: sgd(params, fused=True),
    "adamw": adam,
    "adamw_fused": lambda params: adam(params, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "adam_plain": lambda params: torch.optim.Adam(params, lr=0.01),
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", SKIP),
    "sgd_fused": ("sgd_fused", SKIP),
    "adamw": ("adamw", SKIP),
    "adamw_fused": ("adamw_fused", SKIP),
    "rmsprop": ("rmsprop", SKIP),
    "fp16": ("sgd", FP16),
    "fp16_adamw_fused_merge_clip": ("adamw_fused", {**FP16, **MERGE, "clip_norm": True, "clip_norm_configs": {"max_norm": 0.5}}),
    "merge_clip": ("sgd_fused", {**MERGE, **SKIP, "clip_norm": True, "clip_norm_configs": {"max_norm": 0.5}}),
    "lars": ("sgd", {"lars": True, **SKIP}),
    "lamb": ("adam_plain", {"lamb": True, **SKIP}),
    "lamb_fp16_clip": ("adam_plain", {"lamb": True, **FP16, "clip_norm": True}),
    "muon": ("adamw", {"muon": True, **SKIP}),
    "muon_fp16_clip": ("adamw_fused", {"muon": True, **FP16, "clip_norm": True}),
    "dgc": ("sgd", {"dgc": True, "dgc_configs": {"rampup_begin_step": 2, "sparsity": [0.9], "min_numel": 64}, **SKIP}),
    "powersgd": ("sgd", {"powersgd": True, "powersgd_configs": {"begin_step": 1, "rank": 2, "min_compression": 1.0}, **SKIP}),
    "quantised": ("adamw", {"quantized_allreduce": {"bits": 4, "block": 16}, **SKIP}),
    "powersgd_fp16_merge": (
        "sgd_fused",
        {"powersgd": True, "powersgd_configs": {"begin_step": 0, "rank": 1, "min_compression": 1.0}, **FP16, **MERGE},
    ),
    "bf16_wire": ("sgd_fused", {"bf16_allreduce": True, **SKIP}),
    "noise_scale": ("sgd", {"noise_scale_steps": 2, **MERGE, **SKIP}),
    "localsgd": ("sgd", {"localsgd": True, "localsgd_configs": {"k_steps": 3, "begin_step": 2}, **SKIP}),
    "localsgd_fp16": ("sgd_fused", {"localsgd": True, "localsgd_configs": {"k_steps": 3}, **FP16}),
    "sync_bn": ("sgd", {"sync_batch_norm": True, **SKIP}),
}


def trained_pair(optimizer: str, settings: dict[str, Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(5)
    model = cnn()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        return fleet.distribute(model, OPTIMIZERS[optimizer](model.parameters()), fleet.DistributedStrategy(**settings))


def loss_of(model: nn.Module, micro: int, rank: int, *, bad: float | None) -> Tensor:
    x, y = learnable_images(2 * micro + rank)
    loss = F.cross_entropy(model(x), y)
    return loss if bad is None else loss * bad


def everything_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Copies of all that training has changed, by name."""
    named = {f"model/{name}": t.detach().clone() for name, t in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            named[f"state/{number}/{key}"] = value.detach().clone() if isinstance(value, Tensor) else value
    reduce = optimizer.pipeline.stages.reduce.state_dict()
    for key, rows in reduce.get("shares", {}).items():
        named |= {f"share/{key}/{name}": row.clone() for name, row in rows.items()}
    named |= {f"right/{name}": right.clone() for name, right in reduce.get("rights", {}).items()}
    return named


def require_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert sorted(one) == sorted(other)
    for name, value in one.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


def _run(rank: int, optimizer: str, settings: dict[str, Any], deferred: bool) -> dict[str, Any]:
    """Eight updates, of which the third, the sixth and the last have an infinity, on rank 1 alone."""
    merge = settings.get("gradient_merge_configs", {}).get("k_steps", 1)
    with deferring(deferred), warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        model, ours = trained_pair(optimizer, settings)
        told = []
        for micro in range(UPDATES * merge):
            update = micro // merge + 1
            bad = float("inf") if rank == 1 and update in (3, 6, UPDATES) and micro % merge == 0 else None
            report = ours.minimize(loss_of(model, micro, rank, bad=bad))
            told.append(report)
        answers = [(r.due, r.updated, r.skipped, r.loss_scale, r.step, r.loss, r.grad_norm) for r in told]
        pipeline = ours.pipeline
        return {
            "answers": repr(answers),
            "skipped": ours.skipped,
            "noise": told[-1].noise_scale,
            "state": everything_of(model, ours),
            "scale": pipeline.stages.backward.scale(),
            "index": pipeline.index,
        }


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_bad_updates_is_the_same_to_the_bit(name: str) -> None:
    optimizer, settings = CASES[name]
    at_once = run_ranks(_run, 2, optimizer, settings, False)
    late = run_ranks(_run, 2, optimizer, settings, True)
    for rank in range(2):
        state, other = at_once[rank].pop("state"), late[rank].pop("state")
        assert at_once[rank] == late[rank]
        require_same(state, other)
    assert at_once[1]["skipped"] == 3


BARE_CASES = ("sgd", "adamw_fused", "rmsprop", "merge_clip", "lars", "lamb", "dgc", "localsgd")


def _run_bare(rank: int, name: str, deferred: bool, edit: str = "") -> dict[str, Any]:
    """The same updates by `loss.backward()` and `optimizer.step()`; and in which steps the host has waited for the device."""
    optimizer, settings = CASES[name]
    merge = settings.get("gradient_merge_configs", {}).get("k_steps", 1)
    reads, answers = [], []
    numbers = HostCopy.numbers

    def counted(copy: HostCopy) -> list[float]:
        reads.append(copy._read is None)
        return numbers(copy)

    with deferring(deferred), warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore", FleetWarning)
        patch.setattr(HostCopy, "numbers", counted)
        model, ours = trained_pair(optimizer, settings)
        waited = []
        for micro in range(UPDATES * merge):
            update = micro // merge + 1
            bad = float("inf") if rank == 1 and update in (3, 6, UPDATES) and micro % merge == 0 else None
            loss_of(model, micro, rank, bad=bad).backward()
            if edit == "repair" and update == 6:
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.nan_to_num_(0.0, 0.0, 0.0)
            if edit == "clip":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            reads.clear()
            report = ours.step()
            waited += [update] * any(reads)
            answers.append(report)
            ours.zero_grad()
        told = [(r.due, r.updated, r.skipped, r.step, r.grad_norm) for r in answers]
        return {"answers": repr(told), "skipped": ours.skipped, "state": everything_of(model, ours), "waited": waited}


@pytest.mark.parametrize("name", BARE_CASES)
def test_step_of_a_bare_loop_does_not_wait_and_gives_the_same_bits(name: str) -> None:
    at_once = run_ranks(_run_bare, 2, name, False)
    late = run_ranks(_run_bare, 2, name, True)
    for rank in range(2):
        require_same(at_once[rank]["state"], late[rank]["state"])
        assert at_once[rank]["answers"] == late[rank]["answers"]
        assert late[rank]["waited"] == ([2, 5, 8] if name == "localsgd" else [])  # ranks that average must know how they are
    assert at_once[1]["skipped"] == late[1]["skipped"] == 3


@pytest.mark.parametrize(("edit", "waited"), [("repair", [6]), ("clip", [2, 3, 4, 5, 6, 7, 8])])
def test_gradients_edited_before_step_are_judged_again(edit: str, waited: list[int]) -> None:
    at_once = run_ranks(_run_bare, 2, "sgd", False, edit)
    late = run_ranks(_run_bare, 2, "sgd", True, edit)
    for rank in range(2):
        require_same(at_once[rank]["state"], late[rank]["state"])
        assert at_once[rank]["answers"] == late[rank]["answers"]
        assert late[rank]["waited"] == waited
    assert at_once[1]["skipped"] == late[1]["skipped"] == (2 if edit == "repair" else 3)
