"""Loops that people have, unchanged but for fleet.distribute and each rank's data: the same numbers as under DDP, or as with a
mean over ranks made by hand, on two ranks; plain, and under parts of a strategy."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.helpers.harness import run_ranks
from tests.zoo import habits, loops
from tests.zoo.oracles import Api, Ddp, Fleetx, Mean
from tests.zoo.register import LOOPS, Outcome

assert habits and loops  # importing them fills LOOPS

PERIOD = 2
EXACT = 1e-10
"""Of float64, after some twelve updates: only the order of additions differs."""
FLOAT32 = 1e-6
BFLOAT16 = 1e-4
"""The same 16-bit kernels on both sides: what differs is the order of additions in float32, which may tip a rounding."""
MERGED = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": PERIOD}}
AMP = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}
DENSE = {"powersgd": True, "powersgd_configs": {"begin_step": 10**9}}
COMPRESSED = {"powersgd": True, "powersgd_configs": {"rank": 1, "begin_step": 2, "min_compression": 1.0}}


def under(*parts: str) -> list[str]:
    return [name for name, loop in LOOPS.items() if loop.under & set(parts)]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _run(rank: int, name: str, kind: str, settings: dict[str, Any], dtype: torch.dtype) -> Outcome:
    loop = LOOPS[name]
    api: Api
    if kind == "fleetx":
        api = Fleetx({"find_unused_parameters": loop.find_unused, **settings})
    elif kind == "ddp":
        api = Ddp(find_unused=loop.find_unused, **settings)
    else:
        api = Mean(**settings)
    torch.manual_seed(17 + rank)
    with default_dtype(dtype), api.running():
        return loop.run(api, rank)


def run(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> list[Outcome]:
    return run_ranks(_run, 2, name, "fleetx", settings, dtype)


@functools.cache
def oracle(name: str, kind: str = "", dtype: torch.dtype = torch.float64, **settings: Any) -> list[Outcome]:
    """DDP where it can run the loop, or the mean made by hand, or the kind that is asked for; several tests compare with one."""
    return run_ranks(_run, 2, name, kind or ("mean" if LOOPS[name].no_ddp else "ddp"), settings, dtype)


def assert_close(ours: list[Outcome], theirs: list[Outcome], tolerance: float) -> None:
    """Rank by rank, the losses on the way too."""
    for mine, its in zip(ours, theirs, strict=True):
        for part in ("losses", "seen", "weights"):
            got, wanted = torch.as_tensor(getattr(mine, part)), torch.as_tensor(getattr(its, part))
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=lambda said, part=part: f"{part}: {said}")


def assert_same_bits(outcomes: list[Outcome]) -> None:
    for other in outcomes[1:]:
        torch.testing.assert_close(other.weights, outcomes[0].weights, rtol=0, atol=0)
        torch.testing.assert_close(other.seen, outcomes[0].seen, rtol=0, atol=0)


def assert_same_buffers(outcomes: list[Outcome]) -> None:
    for other in outcomes[1:]:
        torch.testing.assert_close(other.buffers, outcomes[0].buffers, rtol=0, atol=0)


# --- the oracles, of one another: a campaign ----------------------------------------------------------------------------


@pytest.mark.campaign
@pytest.mark.parametrize("name", LOOPS)
def test_the_mean_made_by_hand_gives_equal_ranks_and_is_that_of_ddp(name: str) -> None:
    by_hand = oracle(name, "mean")
    assert_same_bits(by_hand)
    assert all(outcome.losses for outcome in by_hand)
    assert by_hand[0].losses != by_hand[1].losses, "both ranks have the same data"
    if not LOOPS[name].no_ddp:
        assert_close(oracle(name, "ddp"), by_hand, EXACT)


# --- fleetx -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_as_under_its_oracle(name: str) -> None:
    ours = run(name, fuse_grad_size_in_MB=0.001)  # several buckets
    assert_same_bits(ours)
    assert_same_buffers(ours)
    assert_close(ours, oracle(name), EXACT)


@pytest.mark.parametrize("name", under("amp"))
def test_a_loop_in_float32_trains_as_under_its_oracle(name: str) -> None:
    ours = run(name, torch.float32)
    assert_same_bits(ours)
    assert_close(ours, oracle(name, dtype=torch.float32), FLOAT32)


@pytest.mark.parametrize("name", under("merge"))
def test_a_loop_under_gradient_merge_trains_on_the_mean_of_its_micro_batches(name: str) -> None:
    ours = run(name, **MERGED)
    assert_same_bits(ours)
    assert_close(ours, oracle(name, "mean", period=PERIOD), EXACT)


@pytest.mark.parametrize("name", under("amp"))
def test_a_loop_under_amp_trains_as_its_oracle_under_autocast(name: str) -> None:
    ours = run(name, torch.float32, **AMP)
    assert_same_bits(ours)
    assert_close(ours, oracle(name, dtype=torch.float32, autocast=True), BFLOAT16)


@pytest.mark.parametrize("name", under("recompute"))
def test_a_loop_under_recompute_has_the_bits_of_the_one_without(name: str) -> None:
    assert_close(run(name, recompute=True), run(name), 0.0)


@pytest.mark.parametrize("name", under("powersgd"))
def test_a_loop_under_powersgd_trains_as_its_oracle_while_updates_are_dense(name: str) -> None:
    ours = run(name, **DENSE)
    assert_same_bits(ours)
    assert_close(ours, oracle(name), EXACT)


@pytest.mark.parametrize("name", under("powersgd"))
def test_a_loop_under_powersgd_learns_with_equal_ranks(name: str) -> None:
    ours, plain = run(name, **COMPRESSED), run(name)
    assert_same_bits(ours)
    assert not torch.equal(ours[0].weights, plain[0].weights), "nothing was compressed"
    losses = [statistics.mean(pair) for pair in zip(*(outcome.losses for outcome in ours), strict=True)]
    third = len(losses) // 3
    assert statistics.mean(losses[-third:]) < 0.95 * statistics.mean(losses[:third])
