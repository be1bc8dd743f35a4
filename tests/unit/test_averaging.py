"""The pure parts of averaging: the outer step, the period, shares, flat pieces. Numbers that can be checked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fleetx.dist.comm import SoloComm
from fleetx.engine.rank_status import Row, share_of
from fleetx.errors import FleetWarning
from fleetx.local_sgd.outer import OuterRule, outer_move
from fleetx.local_sgd.period import AdaptivePeriod, adaptive_period
from fleetx.local_sgd.pieces import STRETCH, Piece, pieces_of

# --- the outer step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_the_outer_step_is_that_of_torch_sgd_on_the_negated_delta(momentum: float, nesterov: bool) -> None:
    torch.manual_seed(0)
    rule = OuterRule(0.7, momentum, nesterov)
    anchor = torch.randn(50, dtype=torch.float64)
    velocity = torch.zeros_like(anchor) if momentum else None
    oracle = nn.Parameter(anchor.clone())
    sgd = torch.optim.SGD([oracle], lr=0.7, momentum=momentum, nesterov=nesterov)
    for _ in range(5):
        delta = torch.randn(50, dtype=torch.float64)
        oracle.grad = -delta
        sgd.step()
        anchor.add_(outer_move(delta, velocity, rule))
    torch.testing.assert_close(anchor, oracle.detach(), rtol=1e-14, atol=1e-14)


def test_without_an_outer_optimizer_the_move_is_the_mean_delta_to_the_bit() -> None:
    delta = torch.randn(9)
    torch.testing.assert_close(outer_move(delta.clone(), None, OuterRule()), delta, rtol=0, atol=0)
    assert OuterRule().is_plain and not OuterRule(momentum=0.1).is_plain and not OuterRule(lr=0.5).is_plain


# --- the period --------------------------------------------------------------------------------------------------------


def period(loss: float, lr: float, *, first_period: int = 4, most: int = 16, formula: str = "paper", now: int = 7) -> int:
    return adaptive_period(loss, lr, first_loss=2.0, first_lr=0.1, first_period=first_period, most=most, formula=formula, now=now)


def test_the_paper_has_the_first_period_outside_the_root_and_fleet_inside() -> None:
    assert period(1.0, 0.1) == 3  # sqrt(1/2) * 4 = 2.83
    assert period(1.0, 0.1, formula="fleet") == 2  # sqrt(1/2 * 4) = 1.41
    assert period(2.0, 0.1) == 4 and period(2.0, 0.1, formula="fleet") == 2


def test_a_smaller_rate_lengthens_the_period_up_to_the_longest_allowed() -> None:
    assert period(2.0, 0.025) == 8  # sqrt(4) * 4
    assert period(2.0, 0.001) == 16  # 40, cut
    assert period(1e-9, 0.1) == 1


@pytest.mark.parametrize(("loss", "lr"), [(math.nan, 0.1), (math.inf, 0.1), (-1.0, 0.1), (1.0, 0.0), (1.0, math.nan)])
def test_what_gives_no_number_leaves_the_period_as_it_is(loss: float, lr: float) -> None:
    assert period(loss, lr) == 7


def test_a_rate_above_the_first_warns_once_on_the_rank_that_speaks() -> None:
    loud, quiet = (AdaptivePeriod(4, most=16, formula="paper", speaks=speaks) for speaks in (True, False))
    for one in (loud, quiet):
        one.begin(2.0, 0.1)
    with pytest.warns(
        FleetWarning, match=r"the learning rate at update 9 is 0.2, above the 0.1 of `begin_step`.*end of the warm-up"
    ):
        loud.after_round(9, 2.0, 0.2)
    loud.after_round(13, 2.0, 0.3)
    quiet.after_round(9, 2.0, 0.2)


def test_a_change_of_the_period_is_told_with_its_reasons_and_comes_back_from_a_checkpoint() -> None:
    one = AdaptivePeriod(4, most=16, formula="paper", speaks=True)
    one.begin(2.0, 0.1)
    assert one.after_round(5, 2.0, 0.1) is None
    line = one.after_round(9, 0.5, 0.1)
    assert line == ("adaptive_localsgd: after update 9 the period goes from 4 to 2 (loss 0.5, at first 2; lr 0.1, at first 0.1)")
    other = AdaptivePeriod(4, most=16, formula="paper", speaks=True)
    other.load_state_dict(one.state_dict())
    assert other.now == 2 and other.after_round(11, 0.5, 0.1) is None


# --- shares ------------------------------------------------------------------------------------------------------------


def test_ranks_count_alike_or_by_their_weights() -> None:
    assert [share_of([Row(), Row()], rank) for rank in (0, 1)] == [0.5, 0.5]
    assert [share_of([Row(weight=30), Row(weight=10)], rank) for rank in (0, 1)] == [0.75, 0.25]
    assert share_of([Row(weight=0), Row(weight=8)], 0) == 0


# --- pieces ------------------------------------------------------------------------------------------------------------


class Doubled(SoloComm.__bases__[0]):  # type: ignore[name-defined, misc]
    """Two ranks with the same weights: their sum is twice what this one sends."""

    rank, size, control_device = 0, 2, torch.device("cpu")

    def all_reduce(self, tensor: Tensor, mode: str = "sum"):
        tensor.mul_(2)
        return SoloComm().all_reduce(tensor)

    all_gather = broadcast = barrier = subgroup = None


def no_master(_: Tensor) -> None:
    return None


def piece_of(*params: Tensor, wire_dtype: torch.dtype = torch.float32, rule: OuterRule | None = None) -> Piece:
    named = [(f"p{i}", nn.Parameter(p)) for i, p in enumerate(params)]
    piece = Piece(named, rule or OuterRule(), wire_dtype)
    piece.read(piece.anchor, no_master)
    return piece


@torch.no_grad()
def test_a_piece_longer_than_a_stretch_and_a_channels_last_weight_come_back_in_their_own_order() -> None:
    long, image = torch.randn(STRETCH + 5), torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    piece = piece_of(long.clone(), image.clone())
    for param in piece.params:
        param.add_(1.0)
    piece.launch(0.5, Doubled(), no_master, trains_on=False)
    piece.settle(no_master)
    torch.testing.assert_close(piece.params[0], long + 1, rtol=0, atol=1e-6)
    torch.testing.assert_close(piece.params[1], image + 1, rtol=0, atol=1e-6)
    assert piece.params[1].is_contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def test_a_weight_that_is_not_dense_in_memory_is_averaged_too() -> None:
    strided = torch.arange(12.0)[::2]
    piece = piece_of(strided)
    piece.params[0].mul_(3)
    piece.launch(0.5, Doubled(), no_master, trains_on=False)
    piece.settle(no_master)
    torch.testing.assert_close(piece.params[0], torch.arange(12.0)[::2] * 3, rtol=0, atol=1e-5)


@torch.no_grad()
def test_what_a_16_bit_wire_rounds_off_stays_in_the_weights_while_training_goes_on() -> None:
    piece = piece_of(torch.zeros(1), wire_dtype=torch.bfloat16)
    exact = 1 + 2**-12  # bfloat16 has no digit for the last part
    piece.params[0].fill_(exact)
    piece.launch(0.5, Doubled(), no_master, trains_on=True)
    piece.params[0].add_(0.25)
    piece.settle(no_master)
    assert piece.anchor.item() == 1.0 and piece.params[0].item() == exact + 0.25


@torch.no_grad()
def test_a_16_bit_weight_follows_the_float32_copy_that_its_optimizer_trains() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    copy = torch.full((3,), 1 + 2**-12)
    piece = Piece([("p", param)], OuterRule(), torch.float32)
    piece.launch(0.5, Doubled(), lambda _: copy, trains_on=False)
    piece.settle(lambda _: copy)
    torch.testing.assert_close(copy, torch.full((3,), 1 + 2**-12), rtol=0, atol=0)
    torch.testing.assert_close(param.detach(), torch.ones(3, dtype=torch.bfloat16), rtol=0, atol=0)


@torch.no_grad()
def test_a_rank_that_counts_nothing_takes_the_average_and_keeps_what_it_learnt_since() -> None:
    piece = piece_of(torch.zeros(2))
    piece.params[0].fill_(5.0)
    piece.launch(0.0, Doubled(), no_master, trains_on=True)
    piece.wire.fill_(1.0)  # what the other rank has sent
    piece.params[0].add_(0.5)
    piece.settle(no_master)
    assert piece.params[0].tolist() == [1.5, 1.5]


def test_every_element_is_in_exactly_one_piece() -> None:
    named = {f"p{i}": nn.Parameter(torch.randn(i + 1, 7)) for i in range(9)}
    pieces = pieces_of(named, OuterRule(), torch.float32)
    assert sorted(name for piece in pieces for name in piece.names) == sorted(named)
    assert sum(piece.anchor.numel() for piece in pieces) == sum(p.numel() for p in named.values())
