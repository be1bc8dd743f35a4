"""Guards loops in which one rank decides by itself, about a NaN or a failed backward: every rank gets the reason as its error."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.engine.checks import half_sent
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch, flat_state, mlp

WIDTH = 64


def _edits_by_its_own_loss(rank: int, on_nan_inf: str) -> tuple[str, int, Tensor]:
    strategy = fleet.DistributedStrategy(on_nan_inf=on_nan_inf)
    model, optimizer = fleet.distribute(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1), strategy)

    def train() -> None:
        for step in range(4):
            x, y = batch(2 * step + rank)
            loss = F.cross_entropy(model(x), y)
            if rank == 1 and step == 2:
                loss = loss * float("nan")
            optimizer.zero_grad()
            loss.backward()
            if not torch.isfinite(loss):
                for p in model.parameters():
                    p.grad = torch.nan_to_num(p.grad)  # type: ignore[arg-type]
            optimizer.step()

    return raised(train), optimizer.skipped, flat_state(model)


def test_gradients_made_finite_on_one_rank_only_stop_all_ranks_with_the_reason() -> None:
    for message, _, _ in run_ranks(_edits_by_its_own_loss, 2, "stop"):
        assert message.startswith("FleetError: update 3 was not made: its loss or gradients are not finite."), message
        assert "The script has made them finite on ranks [1] only" in message


def test_gradients_made_finite_on_one_rank_only_are_skipped_on_all_under_skip() -> None:
    (nothing, skipped, mine), (nothing_either, also_skipped, theirs) = run_ranks(_skipping, 2)
    assert nothing == nothing_either == "nothing raised"
    assert skipped == also_skipped == 1
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def _skipping(rank: int) -> tuple[str, int, Tensor]:
    warnings.filterwarnings("ignore", message="update 3 was skipped")
    return _edits_by_its_own_loss(rank, "skip")


def _said_by_the_rank_that_steps(rank: int) -> str | None:
    """What the others may find while one rank is in step() with a NaN, and whether it is gone when all of them were there."""
    model, optimizer = fleet.distribute(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
    comm = optimizer.pipeline.comm
    x, y = batch(rank)
    (F.cross_entropy(model(x), y) * float("nan")).backward()
    found = None
    if rank == 1:
        while (found := comm.posted_error()) is None:  # before this rank's own step(), which rank 0 waits for
            pass
    assert "not finite" in raised(optimizer.step)
    comm.barrier()
    assert comm.posted_error() is None
    return found


def test_a_rank_in_step_with_a_nan_leaves_word_of_it_for_one_that_has_not_come() -> None:
    word = run_ranks(_said_by_the_rank_that_steps, 2)[1]
    assert word.startswith("rank 0: update 1 is not made, since its loss or gradients are not finite: "), word


def _skips_its_step(rank: int, zeroes: bool) -> str:
    model, optimizer = fleet.distribute(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))

    def train() -> None:
        for step in range(4):
            x, y = batch(2 * step + rank)
            loss = F.cross_entropy(model(x), y)
            loss = loss * float("nan") if rank == 1 and step == 2 else loss
            if zeroes:
                optimizer.zero_grad()
            loss.backward()
            if not torch.isfinite(loss):
                while optimizer.pipeline.comm.posted_error() is None:  # until rank 0 is in its step(), or it might come later
                    pass
                continue
            optimizer.step()

    return raised(train)


@pytest.mark.parametrize("zeroes", [False, True])
def test_a_rank_that_skips_its_step_by_its_own_loss_and_the_others_learn_of_the_nan(zeroes: bool) -> None:
    waiting, skipping = run_ranks(_skips_its_step, 2, zeroes)
    for message, kind in ((waiting, "DataError"), (skipping, "FleetError")):
        assert message.startswith(f"{kind}: rank 0: update 3 is not made, since its loss or gradients are not finite: "), message
        assert "skip a batch on all ranks or on none" in message


class Deep(nn.Module):
    """Layers of one size, with a bucket each: messages that are taken for each other have the same length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _fail(_: Tensor) -> Tensor:
    raise RuntimeError("out of memory, say")


def _caught(rank: int, ranks_that_fail: tuple[int, ...], how: str) -> tuple[str, Tensor]:
    model = Deep()
    strategy = fleet.DistributedStrategy(fuse_grad_size_in_MB=WIDTH * WIDTH * 4 / 2**20)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    assert len(optimizer.pipeline.buckets) == 5

    def loss_of(step: int) -> Tensor:
        return model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()

    def backward(loss: Tensor) -> None:
        loss.backward() if how == "bare" else optimizer.backward(loss)

    def train() -> None:
        for step in range(5):
            optimizer.zero_grad()
            if step == 2 and rank in ranks_that_fail:
                handle: Any = model.layers[2].weight.register_hook(_fail)
                with pytest.raises(RuntimeError, match="out of memory, say"):
                    backward(loss_of(step))
                handle.remove()
                continue
            backward(loss_of(step))
            optimizer.step()

    with pytest.MonkeyPatch.context() as patch:
        if len(ranks_that_fail) == 1:
            patch.setattr(half_sent, "SECONDS_FOR_OTHERS", 1.0)
        return raised(train), flat_state(model)


@pytest.mark.parametrize("how", ["bare", "backward"])
def test_a_backward_that_failed_on_one_rank_after_a_part_was_sent_ends_all_ranks_with_the_reason(how: str) -> None:
    (waiting, _), (failed, _) = run_ranks(_caught, 2, (1,), how)
    reason = "rank 1: a backward failed here after it had sent 2 of 5 buckets in backward 1 of update 3, and was caught"
    assert failed.startswith(f"FleetError: {reason}"), failed
    assert waiting.startswith(f"DataError: {reason}"), waiting


@pytest.mark.parametrize("how", ["bare", "backward"])
def test_a_backward_that_failed_on_every_rank_at_the_same_place_is_skipped_on_all(how: str) -> None:
    (first, mine), (second, theirs) = run_ranks(_caught, 2, (0, 1), how)
    assert first == second == "nothing raised"
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
