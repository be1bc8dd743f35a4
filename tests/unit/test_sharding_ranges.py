"""Which elements of each tensor a rank owns under sharding."""

from __future__ import annotations

import pytest

from fleetx.engine.bucket import share_of
from fleetx.shard.ranges import Range, ranges_of


def test_shares_are_equal_multiples_of_64_that_hold_all_elements() -> None:
    assert share_of(1000, 1) == 1000
    assert share_of(1000, 2) == 512
    assert share_of(1, 4) == 64
    assert share_of(256, 4) == 64


def test_a_tensor_that_crosses_a_border_is_cut_there() -> None:
    # Shares of 100: tensor 0 has 0..70, tensor 1 has 70..130, tensor 2 has 130..200.
    assert ranges_of([70, 60, 70], share=100, ranks=2) == [
        Range(0, 0, 0, 70, 0),
        Range(1, 0, 0, 30, 70),
        Range(1, 1, 30, 60, 100),
        Range(2, 1, 0, 70, 130),
    ]


def test_a_tensor_larger_than_a_share_is_on_several_ranks_and_a_late_rank_may_own_nothing() -> None:
    assert ranges_of([150], share=64, ranks=4) == [Range(0, 0, 0, 64, 0), Range(0, 1, 64, 128, 64), Range(0, 2, 128, 150, 128)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("numels", [[1], [5, 1, 700, 64, 3], [64] * 9, [1000, 1, 1]])
def test_every_element_has_exactly_one_owner(numels: list[int], ranks: int) -> None:
    found = ranges_of(numels, share=share_of(sum(numels), ranks), ranks=ranks, first_place=10)
    begin = 0
    for place, numel in enumerate(numels, 10):
        mine = [one for one in found if one.place == place]
        assert [one.start for one in mine] == [0, *(one.stop for one in mine[:-1])] and mine[-1].stop == numel
        assert all(one.offset == begin + one.start for one in mine)
        assert [one.rank for one in mine] == sorted({one.rank for one in mine})
        begin += numel
