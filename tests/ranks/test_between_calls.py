"""Guards what a loop does between forward, backward and step: clips, throws work away, calls a method, evaluates on one rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from tests.helpers.harness import run_ranks
from tests.helpers.joined_batch import (
    STEPS,
    assert_equal_on_all_ranks,
    assert_trained_alike,
    ddp_on_images,
    images_of,
    joined_rows,
    net,
    plain_loop,
    rows_of,
    sgd,
    weights,
)
from tests.helpers.models import cnn, flat_state


def _clipped_by_hand(rank: int) -> tuple[Tensor, list[float]]:
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(fuse_grad_size_in_MB=0.0005))
    norms = []
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.backward(F.cross_entropy(model(x), y))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), norms


def test_clipping_by_hand_between_backward_and_step_equals_clipping_in_one_process() -> None:
    model = net()
    optimizer = sgd(model)
    norms = []
    for step in range(STEPS):
        x, y = joined_rows(step)
        F.cross_entropy(model(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
        optimizer.zero_grad()
    assert max(norms) > 0.2, "or nothing was clipped"
    assert_trained_alike(run_ranks(_clipped_by_hand, 2), (weights(model), norms))


def _two_forwards(rank: int) -> Tensor:
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model))
    for step in range(STEPS):
        (x, y), (other_x, other_y) = rows_of(rank, step), rows_of(rank, 100 + step)
        optimizer.minimize(F.cross_entropy(model(x), y) + 2 * F.cross_entropy(model(other_x), other_y))
    return weights(model)


def test_two_forwards_for_one_backward_add_up() -> None:
    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        (x, y), (other_x, other_y) = joined_rows(step), joined_rows(100 + step)
        (F.cross_entropy(model(x), y) + 2 * F.cross_entropy(model(other_x), other_y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike(run_ranks(_two_forwards, 2), weights(model))


def _thrown_away(rank: int, what: str, who_zeroes: str) -> Tensor:
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(fuse_grad_size_in_MB=0.0005))
    for step in range(STEPS):
        x, y = rows_of(rank, 100 + step)
        unwanted = F.cross_entropy(model(x), y)
        if what == "backward":
            unwanted.backward()
        if what == "optimizer.backward":
            optimizer.backward(unwanted)
        if what == "part of a backward":
            (model[4].weight.sum() * unwanted.detach()).backward()
        if who_zeroes == "optimizer":
            optimizer.zero_grad()
        if who_zeroes == "model":
            model.zero_grad()
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return weights(model)


@pytest.mark.parametrize(
    ("what", "who_zeroes"),
    [
        ("forward", "nobody"),
        ("backward", "optimizer"),
        ("part of a backward", "optimizer"),
        ("optimizer.backward", "optimizer"),
        ("backward", "model"),
        ("part of a backward", "model"),
    ],
)
def test_work_that_is_thrown_away_leaves_no_trace(what: str, who_zeroes: str) -> None:
    assert_trained_alike(run_ranks(_thrown_away, 2, what, who_zeroes), plain_loop())


def _two_bare_backwards(rank: int) -> Tensor:
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(fuse_grad_size_in_MB=0.0005))
    for step in range(STEPS):
        for x, y in (rows_of(rank, step), rows_of(rank, 100 + step)):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_gradients_of_two_bare_backwards_add_up_as_in_torch() -> None:
    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        for x, y in (joined_rows(step), joined_rows(100 + step)):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike(run_ranks(_two_bare_backwards, 2), weights(model))


class WithLoss(nn.Module):
    """Its loss is a method that calls the children and never the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.head = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("not the way in")

    def loss(self, rows: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(rows[0]))), rows[1])


def _by_method(rank: int) -> Tensor:
    model = WithLoss()
    model, optimizer = fleet.distribute(model, sgd(model))
    for step in range(STEPS):
        optimizer.minimize(model.loss(rows_of(rank, step)))
    return weights(model)


def test_any_method_of_the_model_may_compute_the_loss() -> None:
    ranks = run_ranks(_by_method, 2)
    torch.manual_seed(1234)  # as the harness does: the head is drawn after the body's own seed
    model = WithLoss()
    optimizer = sgd(model)
    for step in range(STEPS):
        model.loss(joined_rows(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike(ranks, weights(model))


def _evaluated_alone(rank: int) -> tuple[Tensor, Tensor]:
    model = cnn().double()
    model, optimizer = fleet.distribute(model, sgd(model))
    for step in range(STEPS):
        x, y = images_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
        if rank == 0 and step % 2:
            model.eval()
            with torch.no_grad():
                first = model(images_of(0, 70)[0])
            assert torch.equal(first, model(images_of(0, 70)[0]))
            model.train()
    return weights(model), flat_state(model)


def test_rank_0_may_evaluate_alone_in_mid_training() -> None:
    ours = run_ranks(_evaluated_alone, 2)
    assert_equal_on_all_ranks([state for _, state in ours])
    assert_trained_alike([trained for trained, _ in ours], run_ranks(ddp_on_images, 2)[0])
