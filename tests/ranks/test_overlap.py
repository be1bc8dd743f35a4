"""Buckets are reduced while backward goes on: in index order on every rank, every element once, and no rank waits for ever."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fleetx import fleet
from fleetx.dist.comm import Pending
from fleetx.engine.optimizer import FleetOptimizer
from fleetx.engine.sidecar import ALARMS
from fleetx.engine.user_loop.model_pairs import queue_callback
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch

LAYERS = 6
WIDTH = 16
ONE_LAYER_MB = (WIDTH * WIDTH + WIDTH) * 8 / 2**20
"""Room for one layer in float64 and no byte more: each layer is a bucket, the last layer's the first."""
TOLERANCE = 1e-12

Event = tuple[str, Any]


class Layers(nn.Module):
    """Layers that are called in an order of their own, which need not be that of registration."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def rows_of(rank: int, step: int) -> Tensor:
    return batch(2 * step + rank, shape=(WIDTH,), dtype=torch.float64)[0]


def bucketed(model: nn.Module, **settings: Any) -> FleetOptimizer:
    strategy = fleet.DistributedStrategy(fuse_grad_size_in_MB=ONE_LAYER_MB, desync_check_steps=0, **settings)
    _, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    return optimizer


def record(model: nn.Module, optimizer: FleetOptimizer) -> list[Event]:
    """Gradients as they arrive and collectives as they are called, in the order in which they happen.

    A collective appears as the index of its bucket, or as "other".
    """
    events: list[Event] = []
    comm = optimizer.pipeline.comm
    index_of = {bucket.wire.data_ptr(): bucket.index for bucket in optimizer.pipeline.buckets}
    all_reduce: Callable[..., Pending] = comm.all_reduce

    def recorded(tensor: Tensor, mode: str = "sum") -> Pending:
        events.append(("reduce", index_of.get(tensor.data_ptr(), "other")))
        return all_reduce(tensor, mode)

    comm.all_reduce = recorded  # type: ignore[method-assign]
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: events.append(("gradient", name)))  # type: ignore[misc]
    return events


def reduced(events: list[Event]) -> list[int]:
    return [index for kind, index in events if kind == "reduce" and index != "other"]


# --- order ----------------------------------------------------------------------------------------------------------

FORWARD = list(range(LAYERS))
ORDERS = {
    "as registered": [FORWARD, FORWARD],
    "reversed": [FORWARD[::-1], FORWARD[::-1]],
    "shuffled": [[2, 0, 5, 1, 4, 3]] * 2,
    "another on each rank": [FORWARD, [5, 3, 1, 0, 2, 4]],
    "opposite": [FORWARD, FORWARD[::-1]],
}


def _ordered(rank: int, orders: list[list[int]], spelling: str = "optimizer.backward") -> tuple[list[Event], list[Tensor], int]:
    model = Layers()
    optimizer = bucketed(model)
    events = record(model, optimizer)
    optimizer.minimize(model(rows_of(rank, 0), orders[rank]).square().sum())  # the first step also compares batches
    events.clear()  # and moves our hooks behind those that were registered since
    loss = model(rows_of(rank, 1), orders[rank]).square().sum()
    if spelling == "loss.backward":
        optimizer.zero_grad()
        loss.backward()
    else:
        optimizer.backward(loss)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return events, gradients, len(optimizer.pipeline.buckets)


def _reference_gradients(orders: list[list[int]]) -> list[Tensor]:
    """The mean over ranks in one process, after the same first step."""
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        losses = [model(rows_of(rank, step), orders[rank]).square().sum() for rank in range(2)]
        torch.stack(losses).mean().backward()
        if step == 0:
            optimizer.step()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_buckets_are_reduced_in_index_order_however_gradients_arrive(name: str) -> None:
    ranks = run_ranks(_ordered, 2, ORDERS[name])
    for rank, (events, gradients, buckets) in enumerate(ranks):
        assert buckets == LAYERS
        assert reduced(events) == list(range(LAYERS))
        arrived = [int(of.split(".")[1]) for kind, of in events if kind == "gradient"]
        assert list(dict.fromkeys(arrived)) == ORDERS[name][rank][::-1], "the gradients did come in the order of this rank"
        torch.testing.assert_close(gradients, _reference_gradients(ORDERS[name]), rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(ranks[0][1], ranks[1][1], rtol=0, atol=0)


@pytest.mark.parametrize("spelling", ["optimizer.backward", "loss.backward"])
def test_reducing_starts_while_gradients_are_still_to_come(spelling: str) -> None:
    for events, gradients, _ in run_ranks(_ordered, 2, ORDERS["as registered"], spelling):
        torch.testing.assert_close(gradients, _reference_gradients(ORDERS["as registered"]), rtol=TOLERANCE, atol=TOLERANCE)
        # Bucket i holds layer 5-i alone: it starts when that layer is done, before the gradients of the layer below.
        kinds = [("reduce", of) if kind == "reduce" else ("layer", int(of.split(".")[1])) for kind, of in events if of != "other"]
        for index in range(LAYERS - 1):
            start = kinds.index(("reduce", index))
            assert ("layer", LAYERS - 2 - index) in kinds[start:], events
        last_gradient = max(i for i, (kind, _) in enumerate(kinds) if kind == "layer")
        assert len([None for kind, _ in kinds[:last_gradient] if kind == "reduce"]) >= LAYERS - 1


def test_reducing_waits_for_the_first_bucket_where_its_layer_comes_last() -> None:
    # Run in reverse, layer 5 gets its gradient last, and bucket 0 is its: nothing may overtake it.
    for events, _, _ in run_ranks(_ordered, 2, ORDERS["reversed"]):
        before = events[: events.index(("reduce", 0))]
        assert {of for kind, of in before if kind == "gradient"} >= {f"layers.{i}.weight" for i in range(LAYERS - 1)}


# --- once -----------------------------------------------------------------------------------------------------------


def _by_hand(rank: int, k_steps: int) -> tuple[list[list[tuple[int, int]]], list[tuple[int, int]], list[Tensor], int]:
    """Gradients that are known: (rank + 1) * (position in the parameter + 1) for each element, in every micro-step."""
    model = Layers()
    optimizer = bucketed(model, gradient_merge=True, gradient_merge_configs={"k_steps": k_steps})

    def loss() -> Tensor:
        terms = [(p.flatten() * torch.arange(1, p.numel() + 1)).sum() for p in model.parameters()]
        return (rank + 1) * torch.stack(terms).sum()

    for _ in range(k_steps):
        optimizer.minimize(loss())
    spans: list[list[tuple[int, int]]] = []
    comm = optimizer.pipeline.comm
    all_reduce = comm.all_reduce

    def recorded(tensor: Tensor, mode: str = "sum") -> Pending:
        spans[-1].append((tensor.data_ptr(), tensor.nbytes))
        return all_reduce(tensor, mode)

    comm.all_reduce = recorded  # type: ignore[method-assign]
    for micro_step in range(k_steps):
        spans.append([])
        optimizer.backward(loss())
        if micro_step + 1 < k_steps:
            optimizer.step()
    views = [(p.grad.data_ptr(), p.grad.nbytes) for p in model.parameters() if p.grad is not None]
    return (
        spans,
        views,
        [p.grad.clone() for p in model.parameters() if p.grad is not None],
        sum(p.nbytes for p in model.parameters()),
    )


@pytest.mark.parametrize("k_steps", [1, 3])
def test_every_element_is_reduced_exactly_once(k_steps: int) -> None:
    for spans, views, gradients, parameter_bytes in run_ranks(_by_hand, 2, k_steps):
        *inside_the_window, closing = spans
        assert not any(inside_the_window), "collectives wait for the micro-step that closes the window"
        tail = 4 * ALARMS  # one float32 for each
        assert sum(nbytes for _, nbytes in closing) == parameter_bytes + tail
        for start, nbytes in views:
            holding = [span for span in closing if span[0] <= start and start + nbytes <= span[0] + span[1]]
            assert len(holding) == 1
        ordered = sorted(closing)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ordered)), "two collectives share bytes"
        for gradient in gradients:
            # The mean of 1 and 2 times the position; small whole numbers and halves, so equal to the bit.
            expected = 1.5 * torch.arange(1, gradient.numel() + 1, dtype=torch.float64).view(gradient.shape)
            torch.testing.assert_close(gradient, expected, rtol=0, atol=0 if k_steps == 1 else TOLERANCE)


# --- ranks that are not ready together ------------------------------------------------------------------------------


def _held_back(rank: int) -> tuple[list[Event], list[Tensor]]:
    """Rank 1 stops at its first gradient until rank 0 has been through its whole backward and started everything."""
    model = Layers()
    optimizer = bucketed(model)
    optimizer.minimize(model(rows_of(rank, 0), FORWARD).square().sum())
    events = record(model, optimizer)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        # When autograd has computed all gradients, ours has started the last bucket, and has not waited for any yet.
        def is_through() -> None:
            if len(reduced(events)) == LAYERS:
                store.set("rank 0 is through", "yes")

        model.layers[0].weight.register_post_accumulate_grad_hook(lambda _: queue_callback(is_through))
    else:
        for param in model.layers[LAYERS - 1].parameters():
            param.register_post_accumulate_grad_hook(lambda _: store.wait(["rank 0 is through"], timedelta(seconds=30)))
    optimizer.backward(model(rows_of(rank, 1), FORWARD).square().sum())
    return events, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_rank_that_is_ready_early_goes_on_with_its_backward() -> None:
    # If starting a collective waited for the others, rank 0 would never be through and rank 1 would wait for ever.
    for events, gradients in run_ranks(_held_back, 2):
        assert reduced(events) == list(range(LAYERS))
        torch.testing.assert_close(gradients, _reference_gradients(ORDERS["as registered"]), rtol=TOLERANCE, atol=TOLERANCE)


USED = [[0, 1, 2, 3], [5, 3, 1, 0]]
"""Layer 5 (bucket 0) is not used on rank 0, layer 2 not on rank 1, layer 4 on neither."""


def _partly_used(rank: int) -> tuple[list[Event], dict[str, Tensor | None]]:
    model = Layers()
    optimizer = bucketed(model, find_unused_parameters=True)
    optimizer.minimize(model(rows_of(rank, 0), USED[rank]).square().sum())
    events = record(model, optimizer)
    optimizer.backward(model(rows_of(rank, 1), USED[rank]).square().sum())
    return events, {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def test_ranks_that_use_different_layers_do_not_wait_for_ever() -> None:
    ranks = run_ranks(_partly_used, 2)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        losses = [model(rows_of(rank, step), USED[rank]).square().sum() for rank in range(2)]
        torch.stack(losses).mean().backward()
        if step == 0:
            optimizer.step()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert [name for name, gradient in expected.items() if gradient is None] == ["layers.4.weight", "layers.4.bias"]
    for events, gradients in ranks:
        assert reduced(events) == list(range(LAYERS))
        torch.testing.assert_close(gradients, expected, rtol=TOLERANCE, atol=TOLERANCE)
    # On rank 0 bucket 0 is complete only when backward is over; on rank 1 it is the last layer's, in backward still.
    first_of_rank_0 = ranks[0][0].index(("reduce", 0))
    assert not [of for kind, of in ranks[0][0][first_of_rank_0:] if kind == "gradient"]


def _failed_backward(rank: int, broken_layer: int) -> tuple[str, str, Tensor]:
    """A backward that fails on every rank, then zero_grad() and on with the next batch: what many do on out-of-memory."""
    model = Layers()
    optimizer = bucketed(model)
    optimizer.minimize(model(rows_of(rank, 0), FORWARD).square().sum())
    handle = model.layers[broken_layer].weight.register_hook(_refuse)
    seen = raised(lambda: optimizer.backward(model(rows_of(rank, 1), FORWARD).square().sum()))
    handle.remove()

    def go_on() -> None:
        optimizer.zero_grad()
        optimizer.minimize(model(rows_of(rank, 2), FORWARD).square().sum())

    return seen, raised(go_on), torch.cat([p.detach().flatten() for p in model.parameters()])


def _refuse(_: Tensor) -> Tensor:
    raise RuntimeError("the user's own hook failed")


@pytest.mark.parametrize("broken_layer", [5, 2])
def test_after_a_backward_that_failed_training_is_right_or_refused(broken_layer: int) -> None:
    ranks = run_ranks(_failed_backward, 2, broken_layer)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (0, 2):
        optimizer.zero_grad()
        losses = [model(rows_of(rank, step), FORWARD).square().sum() for rank in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    reference = torch.cat([p.detach().flatten() for p in model.parameters()])
    for failure, afterwards, weights in ranks:
        assert failure == "RuntimeError: the user's own hook failed"
        if afterwards == "nothing raised":
            torch.testing.assert_close(weights, reference, rtol=TOLERANCE, atol=TOLERANCE)
        else:
            assert afterwards.startswith(("FleetError: ", "ConfigError: ")), afterwards


def _hooked_later(rank: int) -> list[Event]:
    """One parameter in each bucket, and hooks of the user that were registered after ours."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(3)))
    optimizer = bucketed(model)
    events = record(model, optimizer)
    model(rows_of(rank, 0)).square().sum().backward()
    return events


def test_a_bucket_starts_after_the_hooks_of_its_gradient_also_in_the_first_backward() -> None:
    for events in run_ranks(_hooked_later, 2):
        assert sorted(reduced(events)) == [0, 1, 2]
        for index in range(3):
            assert events.index(("gradient", f"{2 - index}.weight")) < events.index(("reduce", index)), events
