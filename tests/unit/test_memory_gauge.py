"""Bytes counted tensor by tensor on a CPU, beside those that torch's profiler sees its allocator hand out and take back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx.recompute.memory_probe import CountingProbe, memory_probe_for
from tests.helpers.budget_nets import Checkpointed, Reshaped, allocated_in, bytes_of, conv_layers, feed_forward

CLOSE = 0.01
"""Of the profiler's peak without kernels' workspaces, where no random states are kept."""
RANDOM_STATE = 5056
"""Bytes of one. torch.utils.checkpoint keeps one for each unit; it is made beneath the operations that are counted."""


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (lambda: conv_layers(16, inplace=False), (64, 3, 16, 16)),
    "convolutions in place": (lambda: conv_layers(16, inplace=True), (64, 3, 16, 16)),
    "transformer": (encoder_layer, (32, 24, 32)),
    "views": (Reshaped, (32, 24, 32)),
    "feed-forward, checkpointed": (lambda: Checkpointed(*(feed_forward(32) for _ in range(3))), (1024, 32)),
    "convolutions, checkpointed": (lambda: Checkpointed(conv_layers(16, inplace=True)), (64, 3, 16, 16)),
    "transformer, checkpointed": (lambda: Checkpointed(encoder_layer(), encoder_layer()), (64, 24, 32)),
}


def counted_in(work: Callable[[], Any], known: list[Tensor]) -> tuple[int, int]:
    probe = CountingProbe(lambda: known)
    with probe.watching():
        work()
        return probe.peak(), probe.now()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("autocast", [False, True])
def test_the_peak_of_a_step_is_the_profilers(case: str, autocast: bool) -> None:
    build, shape = CASES[case]
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    before = [*model.parameters(), *model.buffers(), x]

    def step() -> None:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        loss.backward()

    step()  # what is made once, by the first call of an operation, is in neither
    model.zero_grad()
    seen = allocated_in(step)
    model.zero_grad()
    peak, now = counted_in(step, before)
    counted = peak - bytes_of(before)
    if isinstance(model, Checkpointed):
        # A second run is ended inside the last operation that it needs: what that gives back then looks like a workspace.
        assert (1 - CLOSE) * seen.peak - RANDOM_STATE * len(model.units) <= counted <= (1 + CLOSE) * seen.with_workspaces
    else:
        assert abs(counted - seen.peak) <= CLOSE * seen.peak
    assert now - bytes_of(before) == seen.left == sum(p.nbytes for p in model.parameters())  # gradients


def test_a_storage_that_views_share_counts_once() -> None:
    def work() -> list[Tensor]:
        whole = torch.zeros(1000)
        return [whole, whole.view(10, 100).t()[3:], whole.unsqueeze(0).expand(50, 1000), whole[5:], whole.detach()]

    peak, _ = counted_in(work, [])
    assert peak == 4000


def test_a_view_of_what_was_known_or_was_there_before_adds_nothing() -> None:
    known, unknown = torch.zeros(100), torch.zeros(100)
    peak, now = counted_in(lambda: (known[1:].view(-1, 3).add_(1), unknown[2:]), [known, known[5:]])
    assert peak == now == 400


def test_an_operation_in_place_adds_nothing_and_one_that_is_not_does() -> None:
    x = torch.ones(256)
    assert counted_in(lambda: x.add_(1).relu_().mul_(2), [x]) == (1024, 1024)
    assert counted_in(lambda: x.add(1), [x]) == (2048, 1024)
    assert counted_in(lambda: torch.add(x, 1, out=x), [x]) == (1024, 1024)


def test_memory_is_counted_from_its_making_to_its_end() -> None:
    probe = CountingProbe(lambda: [])
    with probe.watching():
        first = torch.zeros(1000)
        assert probe.now() == 4000
        part = first[:10]
        del first
        assert probe.now() == 4000  # a view holds all of it
        del part
        assert probe.now() == 0
        for _ in range(5):  # memory at the same place, used again
            kept = torch.zeros(1000) + 1
        assert probe.now() == 4000
        del kept
    assert probe.peak() == 12_000  # the last result, and both tensors of the next


def test_a_peak_is_the_most_since_the_last_one_was_read_and_reserved_is_the_most_of_all() -> None:
    known = torch.zeros(10)
    probe = CountingProbe(lambda: [known])
    with probe.watching():
        torch.zeros(1000)
        assert probe.peak() == 4040
        torch.zeros(500)
        assert probe.peak() == 2040
        assert probe.peak() == 40
        assert probe.reserved() == 4040
    with probe.watching():
        assert probe.reserved() == probe.peak() == probe.now() == 40


def test_gradients_that_autograd_alone_holds_are_counted() -> None:
    weight = torch.ones(100, requires_grad=True)

    def work() -> None:
        (weight * 2).sum().backward()

    peak, now = counted_in(work, [weight])
    assert now == 800 and peak >= 800


def test_sparse_tensors_are_let_pass() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    peak, _ = counted_in(lambda: table(torch.tensor([1, 2])).sum().backward(), [table.weight])
    assert peak >= 160


def test_a_cpu_is_gauged_by_counting() -> None:
    assert isinstance(memory_probe_for(torch.device("cpu"), lambda: []), CountingProbe)
