"""DGC's kernels, interpreted on a CPU: they send what a stable sort would, whatever the bound of the last update was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fleetx.dist.codec import Codec
from fleetx.engine.bucket import Bucket
from fleetx.reduce.compressor import pieces_of
from fleetx.reduce.dgc import ListedRows, Row, Rule
from tests.helpers import kernel_interpreter

interpreted = kernel_interpreter.interpreted
pytestmark = pytest.mark.usefixtures("interpreted")
PLAIN = Rule(momentum=0.9, nesterov=False, decay=0.0)
SHAPES = ((50, 100), (7,), (33, 70))
"""The second stays dense: places in the bucket are not those in a tensor."""


def rows_in_a_bucket() -> tuple[Bucket, list[Row]]:
    random = torch.Generator().manual_seed(1)
    named = [(str(i), nn.Parameter(torch.randn(shape, generator=random))) for i, shape in enumerate(SHAPES)]
    bucket = Bucket(0, named, tail_numel=3)
    pieces = [piece for piece in pieces_of(bucket) if piece.param.dim() > 1]
    return bucket, [Row(piece, torch.zeros(piece.grad.numel()), torch.zeros(piece.grad.numel())) for piece in pieces]


def sent(wire: Tensor) -> tuple[list[int], Tensor]:
    """Places and values, in the order of places: kernels find them in any."""
    entries = len(wire) // 2
    order = wire[entries:].argsort()
    return wire[entries:][order].tolist(), wire[:entries].view(torch.float32)[order]


class Both:
    """The same updates by kernels and by list operations."""

    def __init__(self) -> None:
        from fleetx.reduce.dgc_fused import FusedRows

        (self.bucket, self.rows), (self.other_bucket, self.other_rows) = rows_in_a_bucket(), rows_in_a_bucket()
        self.kernels, self.lists = FusedRows(self.rows), ListedRows(self.other_rows)

    def assert_alike(self, gradients: Tensor, counts: Sequence[int], rule: Rule = PLAIN) -> list[int]:
        """One update both ways, compared; which tensors the kernels could decide by their bound."""
        self.bucket.flat.copy_(gradients)
        self.other_bucket.flat.copy_(gradients)
        ours = self.kernels.compress([rule] * 2, counts)
        theirs = self.lists.compress([rule] * 2, counts)
        (places, values), (right_places, right_values) = sent(ours), sent(theirs)
        assert places == right_places
        torch.testing.assert_close(values, right_values, rtol=1e-4, atol=1e-5)
        for mine, right in zip(self.rows, self.other_rows, strict=True):
            torch.testing.assert_close(mine.u, right.u, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mine.v, right.v, rtol=1e-4, atol=1e-5)
            mine.u.copy_(right.u)  # rounding must not add up to another choice
            mine.v.copy_(right.v)
        self.kernels.spread(torch.stack([theirs, theirs]), counts)
        self.lists.spread(torch.stack([theirs, theirs]), counts)
        torch.testing.assert_close(self.bucket.flat, self.other_bucket.flat, rtol=0, atol=0)
        done: list[int] = self.kernels._done.tolist()
        return done


def noise(seed: int) -> Tensor:
    return torch.randn(sum(int(np.prod(shape)) for shape in SHAPES), generator=torch.Generator().manual_seed(seed))


def test_the_first_update_looks_at_all_entries_and_the_next_ones_at_few() -> None:
    both = Both()
    assert [both.assert_alike(noise(seed), (50, 23)) for seed in range(4)] == [[0, 0], [1, 1], [1, 1], [1, 1]]


@pytest.mark.parametrize("rule", [Rule(0.9, True, 0.0), Rule(0.5, False, 0.01), Rule(0.9, True, 0.1), Rule(0.0, False, 0.0)])
def test_momentum_nesterov_and_decay_are_those_of_the_list_operations(rule: Rule) -> None:
    both = Both()
    for seed in range(3):
        both.assert_alike(noise(seed), (40, 30), rule)


def test_of_equal_entries_the_first_are_sent() -> None:
    both, rule = Both(), Rule(momentum=0.0, nesterov=False, decay=0.0)
    for seed in range(3):
        done = both.assert_alike(noise(seed).mul(2).round(), (50, 23), rule)
    assert done == [1, 1]


def test_a_sparsity_that_changes_makes_room_again() -> None:
    both = Both()
    for seed, counts in enumerate([(500, 200), (500, 200), (50, 20), (5, 2), (5, 2)]):
        both.assert_alike(noise(seed), counts)


def test_gradients_that_fall_by_far_leave_too_few_above_the_bound_and_all_entries_are_looked_at() -> None:
    both = Both()
    for seed in range(3):
        both.assert_alike(noise(seed), (50, 23))
    for row in (*both.rows, *both.other_rows):
        row.u.mul_(1e-3)
        row.v.mul_(1e-3)
    assert both.assert_alike(noise(9) * 1e-3, (50, 23)) == [0, 0]
    assert both.assert_alike(noise(10) * 1e-3, (50, 23)) == [1, 1]


def test_gradients_that_rise_by_far_leave_no_room_for_all_above_the_bound() -> None:
    both = Both()
    for seed in range(3):
        both.assert_alike(noise(seed) * 1e-6, (20, 5))
    assert both.assert_alike(noise(9), (20, 5)) == [0, 0]


def test_a_gradient_of_zeros_is_no_trouble() -> None:
    both: Any = Both()
    for _ in range(3):
        both.assert_alike(torch.zeros_like(noise(0)), (50, 23))
    both.assert_alike(noise(0), (50, 23))


# --- the codec of blockwise integers ------------------------------------------------------------------------------------------


def coded(row: Tensor, codec: Codec) -> list[Tensor]:
    """The bytes, what they miss, what they mean, and that added to ones."""
    wire, kept = torch.zeros(codec.nbytes(len(row)), dtype=torch.uint8), torch.empty_like(row)
    decoded, added = torch.empty_like(row), torch.ones_like(row)
    codec.encode(row, wire, kept=kept)
    codec.decode(wire, decoded)
    codec.add_decoded(wire, added)
    again = torch.zeros_like(wire)
    codec.encode(row, again)
    assert torch.equal(wire, again), "keeping changes nothing of what is sent"
    return [wire, kept, decoded, added]


ROWS = {
    "sizes of all kinds": torch.randn(700, generator=torch.Generator().manual_seed(3)) * torch.logspace(-40, 30, 700),
    "ties": torch.arange(-350.0, 350.0) / 2,
    "zeros": torch.zeros(33),
    "one": torch.ones(1),
    "not finite": torch.tensor([1.0, float("nan"), 3.0] + [0.5] * 60 + [float("inf"), -2.0] + [1e-42] * 64),
}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ROWS)
def test_integers_and_what_they_miss_have_the_bits_of_the_list_operations(
    name: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = coded(ROWS[name], Codec(bits, 32))
    monkeypatch.setattr("fleetx.dist.codec.has_triton", lambda: False)
    theirs = coded(ROWS[name], Codec(bits, 32))
    bad = theirs[2].isnan()
    for mine, right in zip(ours[1:], theirs[1:], strict=True):
        assert torch.equal(mine[~bad], right[~bad]) and torch.equal(mine.isfinite(), right.isfinite())
    if not bad.any():  # which integers stand beside a scale of NaN does not matter
        assert torch.equal(ours[0], theirs[0])
