"""Which tensors can wait in host memory, which of them a plan lets wait there, and the buffers they wait in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fleetx.errors import ConfigError
from fleetx.recompute.host_memory import Pool, mover_for
from fleetx.recompute.offload import is_dense, is_offloadable
from fleetx.recompute.offloadable import offload_places, offloaded_way
from fleetx.recompute.profile import Way
from fleetx.recompute.rows import pieces
from fleetx.recompute.trace import record

# --- tensors --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides", "answer"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 4, 3, 5), (60, 1, 20, 4), True),
        ((2, 1, 3), (3, 99, 1), True),
        ((), (), True),
        ((2, 3), (4, 1), False),
        ((2, 3), (0, 1), False),
        ((3,), (2,), False),
    ],
)
def test_dense_means_that_every_place_belongs_to_one_element(shape: Any, strides: Any, answer: bool) -> None:
    assert is_dense(shape, strides) is answer


def made(change: Callable[[Tensor], Tensor]) -> Tensor:
    return change(torch.ones(4, 6, requires_grad=True) * 2)


def marked(x: Tensor) -> Tensor:
    x.gate = 0.5  # type: ignore[attr-defined]  # a copy would not have it
    return x


@pytest.mark.parametrize(
    ("tensor", "answer"),
    [
        (made(lambda x: x), True),
        (made(lambda x: x.half()), True),
        (made(lambda x: x.t().contiguous()), True),
        (made(lambda x: x.sum()), True),
        (made(marked), False),
        (made(lambda x: x.t()), False),
        (made(lambda x: x[:2]), False),
        (made(lambda x: x[:, :1].expand(4, 6)), False),
        (made(lambda x: x.detach()), False),
        (made(lambda x: x[:0] * 1), False),
        (made(lambda x: x.to_sparse()), False),
        (torch.ones(3), False),
        (nn.Parameter(torch.ones(3)), False),
        (torch.ones(3, requires_grad=True), False),
    ],
)
def test_only_what_the_graph_has_made_and_what_is_all_of_its_storage_can_be_parked(tensor: Tensor, answer: bool) -> None:
    assert is_offloadable(tensor) is answer


# --- places ---------------------------------------------------------------------------------------------------------------------


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return torch.sin(self.layer(sum(others, x)))


class Net(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.units, self.use = nn.Linear(4, 4), nn.ModuleList(Unit() for _ in range(3)), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def a_row(net: Any, x: Tensor) -> Tensor:
    x = net.first(x)
    for unit in net.units:
        x = unit(x)
    return x


def an_input_saved_by_glue(net: Any, x: Tensor) -> Tensor:
    x = net.units[0](net.first(x))
    x = net.units[1](torch.tanh(x))  # which saves what it returns
    return net.units[2](x)


def a_memory_for_all(net: Any, x: Tensor) -> Tensor:
    memory = net.first(x)
    x = net.units[0](memory * 2, memory)
    x = net.units[1](x, memory)
    x = net.units[2](x, memory)
    del memory
    return net.first(x)


def a_view_beside(net: Any, x: Tensor) -> Tensor:
    x = net.units[0](net.first(x))
    x = net.units[1](x, x.view(-1).view(x.shape))
    return net.units[2](x)


def held_for_a_while(net: Any, x: Tensor) -> Tensor:
    early = net.units[0](net.first(x))
    x = net.units[1](early)
    x = net.units[2](x) + early.detach()
    del early
    return net.first(x)


def called_twice(net: Any, x: Tensor) -> Tensor:
    x = net.units[0](net.first(x))
    return net.units[1](net.units[0](x))


@pytest.mark.parametrize(
    ("use", "places"),
    [
        (a_row, [{0}, {0}, {0}]),
        (an_input_saved_by_glue, [{0}, set(), {0}]),
        (a_memory_for_all, [{0}, {0}, {0, 1}]),
        (a_view_beside, [{0}, set(), {0}]),
        (held_for_a_while, [{0}, set(), {0}]),
        (called_twice, [{0}, {0}]),
    ],
)
def test_inputs_that_nothing_else_holds_afterwards_are_parked(use: Any, places: list[set[int]]) -> None:
    net = Net(use)
    trace = record(net, dict(net.named_modules()), lambda: net(torch.ones(8, 4)).sum())
    names = [f"units.{i}" for i in range(len(places))]
    assert offload_places(trace, pieces(trace, names)) == dict(zip(names, map(frozenset, places), strict=True))


def test_so_are_those_that_are_held_until_the_models_forward_is_over() -> None:
    def use(net: Any, x: Tensor) -> Tensor:
        hidden = [net.first(x)]
        for unit in net.units:
            hidden.append(unit(hidden[-1]))
        return hidden[-1]

    net = Net(use)
    trace = record(net, dict(net.named_modules()), lambda: net(torch.ones(8, 4)).sum())
    names = [f"units.{i}" for i in range(3)]
    assert set(offload_places(trace, pieces(trace, names)).values()) == {frozenset({0})}


def test_time_is_added_for_what_of_both_copies_the_unit_does_not_hide() -> None:
    again = Way(frozenset({0, 1}), 70, 50, seconds=1.0)
    hidden = offloaded_way(again, {1}, {0: 100, 1: 400}, bytes_per_second=800.0)
    assert hidden == Way(frozenset({0}), 70, 450, seconds=hidden.seconds, offloaded=400)
    assert hidden.seconds == pytest.approx(1.0 + 0.02 * 0.5 + 1e-6)
    shown = offloaded_way(again, {1}, {0: 100, 1: 400}, bytes_per_second=100.0)
    assert shown.seconds == pytest.approx(1.0 + 2 * (4.0 - 1.0) + 0.02 * 4.0 + 1e-6)


# --- buffers --------------------------------------------------------------------------------------------------------------------


def pool() -> Pool:
    return Pool(lambda size: torch.from_numpy(np.zeros(size, dtype=np.uint8)))


def test_the_smallest_idle_buffer_that_is_large_enough_is_used_again() -> None:
    buffers = pool()
    taken = [buffers.take(size) for size in (100, 300, 200)]
    for buffer in taken:
        buffers.give(buffer)
    assert buffers.take(150) is taken[2] and buffers.take(150) is taken[1]
    assert (buffers.host_bytes, buffers.idle_bytes) == (600, 100)


def test_a_new_buffer_takes_the_place_of_an_idle_one_that_is_too_small() -> None:
    buffers = pool()
    small = [buffers.take(10), buffers.take(20)]
    for buffer in small:
        buffers.give(buffer)
    assert buffers.take(100).nbytes == 100
    assert (buffers.host_bytes, buffers.idle_bytes) == (110, 10)


def test_a_host_that_has_no_more_is_an_error_that_names_the_bytes_and_what_to_do() -> None:
    def none(size: int) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(ConfigError, match='asked the host for 77 B of pinned memory beside 0 B .* or leave "offload" out'):
        Pool(none).take(77)


def test_a_cpu_has_no_mover() -> None:
    assert mover_for(torch.device("cpu")) is None
