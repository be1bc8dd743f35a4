"""What travels with the gradients: buffers and flags."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fleetx.engine.buffers.buffer_kinds import LARGE_NUMEL, apply_change, average_of_change, sort_buffers
from fleetx.engine.sidecar import Alarms, Tail
from fleetx.errors import ConfigError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("constant", torch.tensor([0.1, float("inf"), -0.3]))
        self.register_buffer("count", torch.tensor([7, -1], dtype=torch.int64))
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("table", torch.zeros(LARGE_NUMEL + 1))


def test_a_buffer_of_another_shape_is_refused_by_name() -> None:
    (net,) = _nets(1)
    net.constant = torch.zeros(4)
    with pytest.raises(ConfigError, match=r"buffer `constant` has the shape \(4,\), and had \(3,\)"):
        net.tail.pack(torch.empty(net.tail.numel), alarms=Alarms(), used=None)  # type: ignore[operator, union-attr]


def _exchange(nets: list[Net]) -> None:
    size = len(nets)
    tails = [net.tail for net in nets]  # type: ignore[attr-defined]
    sums = torch.zeros(tails[0].numel)
    for tail in tails:
        out = torch.empty(tail.numel)
        tail.pack(out, alarms=Alarms(missing=tail.rank), used=None)
        sums += out
    for tail in tails:
        tail.unpack(sums)
    assert sums[0] == size * (size - 1) / 2


def _nets(size: int) -> list[Net]:
    nets = [Net() for _ in range(size)]
    for rank, net in enumerate(nets):
        net.tail = Tail(net, rank=rank, size=size, flags=0)  # type: ignore[assignment]
    return nets


def test_statistics_are_averaged_and_integers_come_from_rank_0() -> None:
    nets = _nets(2)
    nets[0].norm.running_mean.copy_(torch.tensor([1.0, 2.0]))
    nets[1].norm.running_mean.copy_(torch.tensor([3.0, 6.0]))
    nets[0].count.fill_(2**40 + 3)
    nets[1].count.fill_(5)
    nets[1].flag.fill_(True)
    _exchange(nets)
    for net in nets:
        assert net.norm.running_mean.tolist() == [2.0, 4.0]
        assert net.count.tolist() == [2**40 + 3] * 2
        assert net.flag.tolist() == [True, False, True]


def test_a_constant_keeps_its_bits_on_three_ranks_over_many_updates() -> None:
    nets = _nets(3)
    before = nets[0].constant.clone()
    for step in range(20):
        for rank, net in enumerate(nets):
            net.norm.running_var.add_(rank + step)
        _exchange(nets)
    torch.testing.assert_close(nets[0].constant, before, rtol=0, atol=0)
    torch.testing.assert_close(nets[0].norm.running_var, nets[2].norm.running_var, rtol=0, atol=0)


def test_infinities_and_nans_are_averaged_by_value_and_can_be_left_again() -> None:
    last = torch.tensor([float("-inf"), float("nan"), float("inf"), 1.0])
    now = torch.tensor([3.0, 2.0, float("inf"), 1.0])
    change = 2 * average_of_change(now, last, 2)  # two ranks that hold the same
    assert apply_change(last, change).tolist() == now.tolist()


def _alarms_sent(net: Net) -> Alarms:
    out = torch.empty(net.tail.numel)  # type: ignore[arg-type]
    net.tail.pack(out, alarms=Alarms(), used=None)  # type: ignore[operator]
    return Alarms(*out[: len(Alarms._fields)].tolist())


def test_a_large_table_is_not_sent_and_a_change_of_one_is_an_alarm() -> None:
    (net,) = _nets(1)
    assert net.tail.numel < LARGE_NUMEL  # type: ignore[operator]
    assert _alarms_sent(net).changed_tables == 0
    net.table.add_(1)
    assert _alarms_sent(net).changed_tables == 1
    net.tail.tables.resume(())  # type: ignore[union-attr]
    assert _alarms_sent(net).changed_tables == 0
    net.table = torch.ones_like(net.table)
    assert _alarms_sent(net).changed_tables == 1


def test_a_buffer_that_ranks_change_alike_is_no_alarm_and_one_that_they_change_differently_is() -> None:
    nets = _nets(3)
    for rank, net in enumerate(nets):
        net.constant.mul_(1.1)
        net.norm.running_mean.add_(rank)
    _exchange(nets)
    assert [_alarms_sent(net).unequal_buffers for net in nets] == [0, 0, 0]
    for rank, net in enumerate(nets):
        net.constant.mul_(1 + 0.1 * rank)
        net.count.fill_(7 + rank // 2)
    _exchange(nets)
    assert [_alarms_sent(net).unequal_buffers for net in nets] == [1, 0, 2]  # the mean is what rank 1 has


def test_a_reset_to_zero_is_alike_whatever_the_mean_rounds_to() -> None:
    nets = _nets(3)
    for net in nets:
        net.constant.zero_()
    _exchange(nets)
    assert [_alarms_sent(net).unequal_buffers for net in nets] == [0, 0, 0]


def test_buffers_are_sorted_by_norm_layers_names_and_size() -> None:
    net = Net()
    net.wide = nn.BatchNorm1d(LARGE_NUMEL + 1)
    net.alias = nn.Module()
    net.alias.register_buffer("other_name", net.count)
    found = sort_buffers(net, ["cou*", "table"])
    assert set(found.local) == {"count", "table", "alias.other_name"} and not found.tables
    assert "wide.running_mean" in found.floats and "wide.running_mean" in found.statistics
    assert set(found.outside_norm_layers()) == {"constant", "flag"}


def test_a_16_bit_buffer_is_remembered_as_it_was_rounded() -> None:
    net = nn.Module()
    net.register_buffer("value", torch.tensor([1.0], dtype=torch.bfloat16))
    tail = Tail(net, rank=0, size=1, flags=0)
    net.value.fill_(1.2345)
    out = torch.empty(tail.numel)
    tail.pack(out, alarms=Alarms(), used=None)
    tail.unpack(out)
    tail.pack(out, alarms=Alarms(), used=None)
    assert out[len(Alarms._fields)] == 0
