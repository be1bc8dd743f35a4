"""Quantised all-reduce against its definition in NumPy, and against plain training: every rank, after every update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleetx import fleet
from tests.helpers.compression_reference import Array
from tests.helpers.compression_runs import EXACT, Slopes, distributed, heavy_tailed, merged, quantised
from tests.helpers.harness import raised, run_ranks
from tests.helpers.integers_reference import QuantisedRanks
from tests.helpers.localsgd_runs import flat, loss_of, net

SHAPES: list[tuple[int, ...]] = [(6, 10), (7,), (8, 5), (5, 2, 3)]
"""The second travels whole. Gradients lie in the opposite order: 30, 40, 7 and 60 numbers."""
BITS = pytest.mark.parametrize("bits", [8, 4])


def _run(rank: int, strategy: dict[str, Any], updates: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    model = Slopes(SHAPES, dtype)
    model, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    seen = []
    for update in range(1, updates + 1):
        optimizer.backward(model(heavy_tailed(SHAPES, rank, update)))
        reduced = [p.grad.detach().double().numpy().copy() for p in model.parameters()]
        report = optimizer.step()
        optimizer.zero_grad()
        errors = optimizer.pipeline.stages.reduce.state_dict()["shares"]["error"]
        found: dict[str, Any] = {"reduced": reduced, "residual": report.residual_norm, "density": report.density}
        found["errors"] = {name: error.double().numpy().copy() for name, error in errors.items()}
        found["weights"] = [p.detach().double().numpy().copy() for p in model.parameters()]
        seen.append(found)
    return seen


def shares_at(update: int, ranks: int) -> list[list[Array]]:
    return [[g.astype(np.float64) / ranks for g in heavy_tailed(SHAPES, rank, update)] for rank in range(ranks)]


def in_a_row(tensors: list[Array]) -> Array:
    """As they lie in the bucket, where those that travel whole are zeros."""
    return np.concatenate([(tensor * (tensor.ndim > 1)).ravel() for tensor in tensors[::-1]])


def assert_equals_reference(ranks: list[list[dict[str, Any]]], reference: QuantisedRanks) -> None:
    for update in range(1, len(ranks[0]) + 1):
        shares = shares_at(update, len(ranks))
        wanted = reference.reduce([in_a_row(share) for share in shares])
        for rank, seen in enumerate(ranks):
            now = seen[update - 1]
            np.testing.assert_allclose(in_a_row(now["reduced"]), wanted, rtol=0, atol=EXACT)
            np.testing.assert_allclose(now["reduced"][1], sum(share[1] for share in shares), rtol=0, atol=EXACT)
            if reference.feeds_back:
                kept = [now["errors"].get(f"rows.{i}", np.zeros(shape)) for i, shape in enumerate(SHAPES)]
                np.testing.assert_allclose(in_a_row(kept), reference.residuals[rank], rtol=0, atol=EXACT)
                assert now["residual"] == pytest.approx(float(np.linalg.norm(reference.residuals[rank])), rel=1e-9)
            for ours, theirs in zip(now["weights"], ranks[0][update - 1]["weights"], strict=True):
                np.testing.assert_array_equal(ours, theirs)


@BITS
@pytest.mark.parametrize(("size", "block"), [(2, 16), (3, 16), (4, 16), (4, 256)])
def test_gradients_and_residuals_equal_the_reference(bits: int, size: int, block: int) -> None:
    """137 numbers: with blocks of 16, three whole parts and one that ends in a part of a block; of 256, one part and no other."""
    ranks = run_ranks(_run, size, quantised(bits=bits, block=block), 8, torch.float64)
    assert_equals_reference(ranks, QuantisedRanks(ranks=size, numel=137, bits=bits, block=block))


def test_without_error_feedback_what_is_rounded_away_is_gone() -> None:
    ranks = run_ranks(_run, 2, quantised(error_feedback=False), 3, torch.float64)
    assert_equals_reference(ranks, QuantisedRanks(ranks=2, numel=137, bits=8, block=16, feeds_back=False))
    assert ranks[0][-1]["errors"] == {} and ranks[0][-1]["residual"] == 0.0


@BITS
@pytest.mark.parametrize("megabytes", [32, 0.0002])
def test_what_arrives_and_what_is_kept_add_up_to_what_there_was(bits: int, megabytes: float) -> None:
    """Over all ranks, in float32: gradient + residuals afterwards = residuals before + shares. In one bucket, and in four."""
    ranks = run_ranks(_run, 3, quantised(bits=bits) | {"fuse_grad_size_in_MB": megabytes}, 6, torch.float32)
    for update in range(2, 7):
        shares = shares_at(update, 3)
        for i in (0, 2, 3):
            before, after = (sum(seen[at]["errors"][f"rows.{i}"] for seen in ranks) for at in (update - 2, update - 1))
            there_was = before + sum(share[i] for share in shares)
            np.testing.assert_allclose(after + ranks[0][update - 1]["reduced"][i], there_was, rtol=0, atol=2e-6)
            assert np.abs(after).max() > 1e-3
    for seen in ranks:
        for ours, theirs in zip(seen, ranks[0], strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(ours["weights"], theirs["weights"], strict=True))


# --- beside sharding: no second hop ----------------------------------------------------------------------------------------


def _run_sharded(rank: int, strategy: dict[str, Any]) -> list[tuple[list[Array], list[Array]]]:
    model = Slopes(SHAPES, torch.float64)
    model, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=1.0), strategy)
    seen = []
    for update in range(1, 7):
        optimizer.minimize(model(heavy_tailed(SHAPES, rank, update)))
        errors = optimizer.pipeline.stages.reduce.state_dict()["shares"]["error"]
        kept = [errors.get(f"rows.{i}", torch.zeros(shape)).numpy().copy() for i, shape in enumerate(SHAPES)]
        seen.append(([p.detach().numpy().copy() for p in model.parameters()], kept))
    return seen


@pytest.mark.parametrize(("size", "stage", "bits"), [(2, 1, 8), (3, 1, 4), (2, 2, 4), (3, 2, 8)])
def test_under_sharding_the_owner_takes_the_sum_as_it_is(size: int, stage: int, bits: int) -> None:
    """137 numbers in shares of a multiple of 64: 128 and 9, or 64, 64 and 9; blocks of 24 end with a share."""
    ranks = run_ranks(_run_sharded, size, quantised(bits=bits, block=24) | {"sharding": {"stage": stage}})
    part = {2: 128, 3: 64}[size]
    reference = QuantisedRanks(ranks=size, numel=137, bits=bits, block=24, part=part, both=False)
    moved, whole = np.zeros(137), np.zeros(7)
    for update in range(1, 7):
        shares = shares_at(update, size)
        moved -= reference.reduce([in_a_row(share) for share in shares])
        whole = whole - sum(share[1] for share in shares)
        for rank, seen in enumerate(ranks):
            weights, kept = seen[update - 1]
            np.testing.assert_allclose(in_a_row(weights), moved, rtol=0, atol=EXACT)
            np.testing.assert_allclose(weights[1], whole, rtol=0, atol=EXACT)
            np.testing.assert_allclose(in_a_row(kept), reference.residuals[rank], rtol=0, atol=EXACT)


# --- training ---------------------------------------------------------------------------------------------------------------


def _beside_a_large_one(rank: int, strategy: dict[str, Any]) -> Array:
    """One matrix, one block. Its first entry is pulled by 1000 to and fro, the others to 1, by a force of 1 and less."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1, 16, dtype=torch.float64))
    model, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.02), strategy)
    for update in range(200):
        distance = (model.weight[0, 1:] - 1).square().sum() / 2
        optimizer.minimize(distance + model.weight[0, 0] * 1000 * (-1) ** update + rank)
    return flat(model)


def test_error_feedback_reaches_what_rounding_alone_never_moves_towards() -> None:
    """The scale of the block is 1000 / 127: a force of 1 is rounded to 0, again and again, unless it adds up."""
    for stalled in run_ranks(_beside_a_large_one, 2, quantised(error_feedback=False)):
        np.testing.assert_array_equal(stalled[1:], np.zeros(15))
    for reached in run_ranks(_beside_a_large_one, 2, quantised()):
        assert np.abs(reached[1:] - 1).max() < 0.02 * 1000 / 127 + 0.98**200  # one move by a scale, and what is not yet gone


def _train(rank: int, strategy: dict[str, Any], kind: str) -> tuple[list[Array], list[float]]:
    model = net(torch.float32)
    make: dict[str, Any] = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "adam": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.0),
    }
    model, optimizer = distributed(model, make[kind](model.parameters()), strategy)
    k = strategy.get("gradient_merge_configs", {"k_steps": 1})["k_steps"]
    weights, losses = [], []
    for update in range(1, 16):
        for micro in range(k):
            report = optimizer.minimize(loss_of(model, rank, update, micro))
        weights.append(flat(model))
        losses.append(float(report.loss))
    return weights, losses


BESIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("adam", {}),
    "lamb": ("adam", {"lamb": True}),
    "lars": ("sgd", {"lars": {"lars_coeff": 0.1}}),
    "clipping, merged": ("sgd", {"clip_norm": {"max_norm": 0.5}} | merged(2)),
    "sharding, clipping": ("adam", {"sharding": True, "clip_norm": {"max_norm": 0.5}}),
    "sharding, where parameters may be unused": ("adam", {"sharding": True, "find_unused_parameters": True}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_training_ends_near_that_without_it_with(name: str) -> None:
    kind, beside = BESIDE[name]
    plain, ours = run_ranks(_train, 2, beside, kind), run_ranks(_train, 2, quantised() | beside, kind)
    np.testing.assert_array_equal(ours[0][0], ours[1][0])
    np.testing.assert_allclose(ours[0][0][-1], plain[0][0][-1], rtol=0, atol=0.02)
    assert not np.array_equal(ours[0][0], plain[0][0])


def test_one_rank_alone_trains_as_without_it(alone: None) -> None:
    ours, plain = _train(0, quantised(), "adam"), _train(0, {}, "adam")
    np.testing.assert_array_equal(ours[0], plain[0])
    assert ours[1] == plain[1]


def _in_bfloat16(rank: int) -> list[Array]:
    model = net(torch.float32).to(torch.bfloat16)
    model, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1), quantised())
    for update in range(1, 9):
        optimizer.minimize(loss_of(model, rank, update))
    errors = optimizer.pipeline.stages.reduce.state_dict()["shares"]["error"]
    assert {error.dtype for error in errors.values()} == {torch.float32} and optimizer.skipped == 0
    return [flat(model)]


def test_a_model_in_bfloat16_keeps_its_residual_in_float32() -> None:
    ours, theirs = run_ranks(_in_bfloat16, 2)
    np.testing.assert_array_equal(ours, theirs)
    assert np.abs(np.array(ours) - flat(net(torch.float32))).max() > 0.01


def _five_updates(rank: int, fails: bool) -> Array:
    """Whether in update 3 backward raises on all ranks behind the first three of four buckets; the update is then made again."""
    model = net(torch.float32)
    model, optimizer = distributed(
        model, torch.optim.SGD(model.parameters(), lr=0.1), quantised() | {"fuse_grad_size_in_MB": 0.00001}
    )

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("out of patience")

    for update in range(1, 6):
        loss = loss_of(model, rank, update)
        if fails and update == 3:
            handle = model[0].weight.register_hook(fail)
            assert raised(lambda loss=loss: optimizer.minimize(loss)) == "RuntimeError: out of patience"
            handle.remove()
            optimizer.zero_grad()
            loss = loss_of(model, rank, update)
        optimizer.minimize(loss)
    return flat(model)


def test_a_backward_that_fails_half_way_leaves_what_is_kept_as_it_was() -> None:
    np.testing.assert_array_equal(run_ranks(_five_updates, 2, True), run_ranks(_five_updates, 2, False))


# --- bytes ------------------------------------------------------------------------------------------------------------------


def _sent(rank: int, strategy: dict[str, Any]) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    model, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.01), strategy | {"desync_check_steps": 0})
    torch.manual_seed(rank)
    sent = [optimizer.minimize(model(torch.randn(2, 512)).square().mean()).bytes_sent for _ in range(3)]
    return int(sent[-1])


@pytest.mark.parametrize(("bits", "each"), [(8, 8.0625), (4, 4.0625)])
def test_both_ways_are_counted(bits: int, each: float) -> None:
    numbers, ranks = 2 * 512 * 512, 4
    for sent in run_ranks(_sent, ranks, quantised(bits=bits, block=256)):
        assert sent == pytest.approx(2 * (ranks - 1) / ranks * numbers * each / 8, rel=2e-3)


# --- refusals ---------------------------------------------------------------------------------------------------------------


def test_settings_that_cannot_be_are_refused_by_name() -> None:
    assert 'quantized_allreduce_configs["bits"] is 6; it must be one of 8, 4.' in raised(lambda: _asked(bits=6))
    assert '["block"] is 100; it must be an integer of at least 16, a multiple of 8.' in raised(lambda: _asked(block=100))
    table = fleet.DistributedStrategy(quantized_allreduce=True, bf16_allreduce=True).explain()
    assert "bf16_allreduce and quantized_allreduce both claim `reduce`" in table


def _asked(**configs: Any) -> fleet.DistributedStrategy:
    return fleet.DistributedStrategy(quantized_allreduce=True, quantized_allreduce_configs=configs)
