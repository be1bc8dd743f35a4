"""Guards backwards that run inside a backward: reentrant checkpointing of a shared layer, and a user's autograd function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fleetx import fleet
from tests.helpers.ddp_loops import STEPS, loss_of, rows, sgd, small_buckets, weights
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import mlp


class Shared(nn.Module):
    """One layer used by two segments that are computed again in backward, and once outside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first, self.shared, self.head = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda x: self.shared(x).tanh(), x, use_reentrant=True) if self.reentrant else self.shared(x).tanh()
        return self.head(self.shared(x))[:, :4]


def _reentrant(rank: int, spelling: str) -> tuple[Tensor, Tensor]:
    ended = []
    for reentrant in (True, False):
        model = Shared(reentrant)
        model, optimizer = fleet.distribute(model, sgd(model), small_buckets())
        for step in range(STEPS):
            loss = loss_of(model, rank, step)
            if spelling == "bare":
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            else:
                optimizer.backward(loss)
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
        ended.append(weights(model))
    return ended[0], ended[1]


@pytest.mark.parametrize("spelling", ["bare", "optimizer.backward"])
def test_reentrant_checkpointing_of_a_shared_layer_trains_as_without(spelling: str) -> None:
    for reentrant, plain in run_ranks(_reentrant, 2, spelling):
        torch.testing.assert_close(reentrant, plain, rtol=1e-12, atol=1e-12)


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.layer(x).backward(grad)
        return x.grad, None


def _nested(rank: int) -> str:
    model = mlp(torch.float64)
    model, _ = fleet.distribute(model, sgd(model), small_buckets())
    x, y = rows(rank, 0)
    out = Nested.apply(x.requires_grad_(), model)
    return raised(F.cross_entropy(out, y).backward)


def test_a_backward_inside_a_function_of_the_users_is_one_right_sentence() -> None:
    for message in run_ranks(_nested, 2):
        assert message.startswith("FleetError: a backward inside another one"), message
