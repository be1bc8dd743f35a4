"""Compressors when the numbers of one rank are not finite: agreed on before anything that is kept has changed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx.errors import FleetWarning
from tests.helpers.compression_runs import AMP, dgc, distributed, kept, leaves, merged, powersgd, quantised, unequal
from tests.helpers.harness import raised, run_ranks
from tests.helpers.localsgd_runs import on_nodes, rendezvous
from tests.helpers.models import batch, flat_state, mlp

DGC = dgc(sparsity=[0.9], rampup_begin_step=2, min_numel=32)
"""Updates 1 and 2 are dense; biases are small."""
POWER = powersgd(rank=2, begin_step=2, min_compression=1.0)
QUANTISED = quantised(bits=4)
PARTS = {"dgc": DGC, "powersgd": POWER, "quantised": QUANTISED}


def with_infinite_slope(loss: Tensor, weight: Tensor) -> Tensor:
    """The same loss, with a gradient that is not finite."""
    return loss + weight.flatten()[0].mul(0.0).sqrt()


def spoiled(loss: Tensor, model: nn.Module, where: str) -> Tensor:
    if where == "loss":
        return loss * torch.inf
    if where == "loss alone":
        return loss + torch.inf  # its gradient is finite
    return with_infinite_slope(loss, dict(model.named_parameters())[where])


def optimizer_of(model: nn.Module, adam: bool) -> torch.optim.Optimizer:
    if adam:
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def everything(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Whatever an update may change, apart from counters and the loss scale."""
    return leaves(
        {
            "kept": optimizer.pipeline.stages.reduce.state_dict(),
            "inner": optimizer.state_dict()["state"],
            "model": dict(model.named_parameters()),
        }
    )


def _run(rank: int, strategy: dict[str, Any], where: str, at: int, micro_steps: int, adam: bool) -> dict[str, Any]:
    """Twelve updates; in update `at` the last micro-batch but one, or the only one, is spoiled on rank 1."""
    model = mlp()
    model, optimizer = distributed(model, optimizer_of(model, adam), strategy)
    seen: dict[str, Any] = {"skipped": [], "scales": [], "weights": [], "changed": [], "norms": []}
    for update in range(1, 13):
        before = everything(model, optimizer)
        for micro in range(micro_steps):
            x, y = batch(100 * update + 10 * micro + rank)
            loss = F.cross_entropy(model(x), y)
            if rank == 1 and update == at and micro == max(micro_steps - 2, 0):
                loss = spoiled(loss, model, where)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FleetWarning)
                report = optimizer.minimize(loss)
        seen["skipped"].append(report.skipped)
        seen["scales"].append(report.loss_scale)
        seen["weights"].append(flat_state(model))
        seen["changed"].append(unequal(before, everything(model, optimizer)))
        seen["norms"].append(report.residual_norm)
    return seen


def assert_skipped_everywhere(ranks: list[dict[str, Any]], at: int) -> None:
    for seen in ranks:
        assert [u for u, skipped in enumerate(seen["skipped"], start=1) if skipped] == [at]
        assert seen["changed"][at - 1] == [], "an update that is skipped must leave all as it was"
        assert all(seen["changed"][: at - 1]) and all(seen["changed"][at:])
        for ours, theirs in zip(seen["weights"], ranks[0]["weights"], strict=True):
            assert torch.equal(ours, theirs) and bool(ours.isfinite().all())
        assert all(0.0 <= norm < 1e3 for norm in seen["norms"])


CASES: dict[str, tuple[dict[str, Any], int, bool]] = {
    "dgc": (DGC, 1, False),
    "dgc, merged": (DGC | merged(3), 3, False),
    "dgc, clipping": (dgc(sparsity=[0.9], min_numel=32, clip_norm=0.5), 1, False),
    "powersgd": (POWER, 1, False),
    "powersgd, merged, adam": (POWER | merged(3), 3, True),
    "quantised": (QUANTISED, 1, False),
    "quantised, sharded, adam": (QUANTISED | {"sharding": {"stage": 2}}, 1, True),
    "quantised, merged, adam, small buckets": (QUANTISED | merged(3) | {"fuse_grad_size_in_MB": 0.0005}, 3, True),
}


@pytest.mark.parametrize("where", ["loss", "2.bias"])
@pytest.mark.parametrize("name", CASES)
def test_an_overflow_of_one_rank_under_float16_is_skipped_by_all_and_what_is_kept_stays(name: str, where: str) -> None:
    strategy, micro_steps, adam = CASES[name]
    ranks = run_ranks(_run, 2, strategy | AMP, where, 7, micro_steps, adam)
    assert_skipped_everywhere(ranks, 7)
    for seen in ranks:
        assert seen["scales"][7] == seen["scales"][6] / 2


@pytest.mark.parametrize(
    "name",
    [
        "dgc",
        "powersgd",
    ],
)
def test_so_is_one_in_the_first_compressed_update(name: str) -> None:
    """DGC would take the momentum over there; the optimizer still has it afterwards."""
    assert_skipped_everywhere(run_ranks(_run, 2, PARTS[name] | AMP, "2.weight", 3, 1, False), 3)


@pytest.mark.parametrize("where", ["loss", "0.weight", "4.bias"])
@pytest.mark.parametrize("name", PARTS)
def test_skip_leaves_the_update_out_on_all_ranks(name: str, where: str) -> None:
    assert_skipped_everywhere(run_ranks(_run, 2, PARTS[name] | {"on_nan_inf": "skip"}, where, 6, 1, False), 6)


@pytest.mark.parametrize("mode", ["skip", "float16"])
@pytest.mark.parametrize("name", PARTS)
def test_an_infinite_loss_whose_gradients_are_finite_leaves_what_is_kept_too(name: str, mode: str) -> None:
    guard = {"on_nan_inf": "skip"} if mode == "skip" else AMP
    assert_skipped_everywhere(run_ranks(_run, 2, PARTS[name] | guard, "loss alone", 6, 1, False), 6)


def _stopped(rank: int, strategy: dict[str, Any], where: str, at: int) -> tuple[str, int, list[str]]:
    model = mlp()
    model, optimizer = distributed(model, optimizer_of(model, False), strategy | {"on_nan_inf": "stop"})
    for update in range(1, 9):
        x, y = batch(100 * update + rank)
        loss = F.cross_entropy(model(x), y)
        if rank == 1 and update == at:
            loss = spoiled(loss, model, where)
        before = everything(model, optimizer)
        told = raised(lambda loss=loss: optimizer.minimize(loss))
        if told != "nothing raised":
            return told, update, unequal(before, everything(model, optimizer))
    return "nothing raised", 8, []


@pytest.mark.parametrize("where", ["2.weight", "2.bias"])
@pytest.mark.parametrize("name", ["dgc", "dgc, clipping", "powersgd", "quantised"])
def test_stop_raises_on_every_rank_and_names_the_bad_parameter_only(name: str, where: str) -> None:
    strategy, _, _ = CASES[name]
    ranks = run_ranks(_stopped, 2, strategy, where, 5)
    for told, update, changed in ranks:
        assert told.startswith("FleetError: update 5 was not made") and update == 5
        assert f"Gradients: {where}. " in told, told
        assert changed == []
    assert ranks[0][0] == ranks[1][0]


@pytest.mark.parametrize("where", ["2.weight", "loss alone"])
@pytest.mark.parametrize("name", ["dgc", "powersgd"])
def test_on_two_levels_an_overflow_of_one_rank_is_skipped_by_all_nodes(name: str, where: str, tmp_path: Any) -> None:
    part, configs = name, {**PARTS[name][f"{name}_configs"], "two_level": True}
    strategy = {part: True, f"{part}_configs": configs} | AMP
    ranks = run_ranks(on_nodes, 4, (0, 0, 1, 1), rendezvous(tmp_path), _run, strategy, where, 6, 1, False)
    assert_skipped_everywhere(ranks, 6)


# --- gradients that are zero, or finite and beyond what a norm can hold -----------------------------------------------------


def _zeros(rank: int, strategy: dict[str, Any], adam: bool) -> tuple[list[Tensor], list[float], dict[str, Any]]:
    """Updates 5 and 6 have a gradient of 0 on all ranks; everything else learns one and the same batch of each rank."""
    model = mlp()
    model, optimizer = distributed(model, optimizer_of(model, adam), strategy)
    states, losses = [], []
    x, y = batch(rank)
    for update in range(1, 31):
        loss = F.cross_entropy(model(x), y)
        report = optimizer.minimize(loss * (0.0 if update in (5, 6) else 1.0))
        states.append(flat_state(model))
        losses.append(float(loss.detach()))
        assert report.updated
    return states, losses, kept(optimizer)


@pytest.mark.parametrize(("name", "adam"), [("dgc", False), ("powersgd", False), ("powersgd", True), ("quantised", True)])
def test_gradients_of_zero_leave_no_nan_and_training_goes_on_learning(name: str, adam: bool) -> None:
    ranks = run_ranks(_zeros, 2, PARTS[name], adam)
    for states, losses, state in ranks:
        assert all(bool(leaf.isfinite().all()) for leaf in state.values() if isinstance(leaf, Tensor))
        assert losses[-1] < 0.7 * losses[6]
        for ours, theirs in zip(states, ranks[0][0], strict=True):
            assert torch.equal(ours, theirs) and bool(ours.isfinite().all())


def _huge(rank: int, strategy: dict[str, Any], biased: bool) -> dict[str, Any]:
    """In update 5 rank 1 has gradients near 1e30: each finite, their norm in float32 not."""
    model = mlp()
    if not biased:
        for module in model:
            module.bias = None
    model, optimizer = distributed(model, optimizer_of(model, False), strategy | {"on_nan_inf": "skip"})
    skipped, changed, states = [], [], []
    for update in range(1, 9):
        before = everything(model, optimizer)
        x, y = batch(100 * update + rank)
        loss = F.cross_entropy(model(x), y)
        if rank == 1 and update == 5:
            loss = loss * 1e30
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FleetWarning)
            skipped.append(optimizer.minimize(loss).skipped)
        changed.append(unequal(before, everything(model, optimizer)))
        states.append(flat_state(model))
    return {"skipped": skipped, "changed": changed, "states": states}


@pytest.mark.parametrize(("name", "biased"), [("dgc", True), ("powersgd", True), ("quantised", True), ("quantised", False)])
def test_gradients_whose_norm_is_beyond_their_type_are_skipped_with_nothing_changed(name: str, biased: bool) -> None:
    ranks = run_ranks(_huge, 2, PARTS[name], biased)
    for seen in ranks:
        assert seen["skipped"] == [False] * 4 + [True] + [False] * 3
        assert seen["changed"][4] == []
        assert all(
            torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(seen["states"], ranks[0]["states"], strict=True)
        )
