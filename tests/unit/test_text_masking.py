"""Masking: against a slow reference that follows the rule word by word, and by its statistics."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetx.data.stateless_random import random_words, uniforms
from fleetx.data.text.text_source import choose_masked, mask_counts, mask_tokens

MASK_ID = 4
ORDINARY = np.arange(5, 105)


def reference(
    ids: list[int], free: list[bool], index: int, *, seed: int, epoch: int, share: float
) -> tuple[list[int], list[int]]:
    """One sequence, one token at a time, with Python's own sorting and rounding."""
    candidates = [position for position, may in enumerate(free) if may]
    count = min(max(1, round(share * len(candidates))), len(candidates))
    rank = {position: int(random_words(seed, epoch, index, position)[0]) >> 16 for position in candidates}
    chosen = sorted(sorted(candidates, key=lambda position: (rank[position], position))[:count])
    shown = list(ids)
    for position in chosen:
        action = float(uniforms(seed, epoch, index, position + 2**32)[0])
        if action < 0.8:
            shown[position] = MASK_ID
        elif action < 0.9:
            shown[position] = int(ORDINARY[int(float(uniforms(seed, epoch, index, position + 2**33)[0]) * len(ORDINARY))])
    return shown, chosen


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 1000),
    width=st.integers(1, 40),
    share=st.sampled_from([0.15, 0.01, 0.5, 1.0]),
)
def test_a_batch_is_masked_as_the_slow_reference_masks_each_sequence(seed: int, epoch: int, width: int, share: float) -> None:
    generator = np.random.default_rng(width)
    ids = generator.integers(5, 105, size=(3, width))
    free = generator.random((3, width)) < 0.7
    indices = np.array([7, 0, 10**12])
    masked = mask_tokens(ids, free, seed=seed, epoch=epoch, indices=indices, mask_id=MASK_ID, replacements=ORDINARY, share=share)
    positions: list[int] = []
    for row, index in enumerate(indices.tolist()):
        shown, chosen = reference(ids[row].tolist(), free[row].tolist(), index, seed=seed, epoch=epoch, share=share)
        assert masked.ids[row].tolist() == shown
        positions += [row * width + position for position in chosen]
    assert masked.positions.tolist() == positions
    assert masked.labels.tolist() == ids.reshape(-1)[positions].tolist()


def test_the_number_of_masked_tokens_is_the_rounded_share_and_at_least_one() -> None:
    candidates = np.array([0, 1, 3, 4, 10, 20, 30, 100, 509])
    assert mask_counts(candidates, 0.15).tolist() == [0, 1, 1, 1, 2, 3, 4, 15, 76]  # 1.5 and 4.5 go to the even neighbour
    assert mask_counts(candidates, 0.15).tolist()[1:] == [max(1, round(0.15 * int(count))) for count in candidates[1:]]


def test_a_sequence_is_masked_alike_in_any_company_and_at_any_padding() -> None:
    free = np.zeros((4, 64), dtype=bool)
    free[:, 1:40] = True
    indices = np.array([3, 1, 4, 15])
    together = choose_masked(free, seed=5, epoch=2, indices=indices, share=0.15)
    for row, index in enumerate(indices):
        alone = choose_masked(free[row : row + 1, :48], seed=5, epoch=2, indices=np.array([index]), share=0.15)
        np.testing.assert_array_equal(alone[0], together[row, :48])


def test_seed_epoch_and_sample_each_change_what_is_masked() -> None:
    free = np.ones((1, 128), dtype=bool)
    draws = {
        (s, e, i): choose_masked(free, seed=s, epoch=e, indices=np.array([i]), share=0.15)
        for s in (0, 1)
        for e in (0, 1)
        for i in (0, 1)
    }
    assert len({choice.tobytes() for choice in draws.values()}) == 8


def test_eighty_percent_are_hidden_ten_replaced_ten_kept_and_every_position_is_equally_likely() -> None:
    rows, width = 2000, 100
    ids = np.full((rows, width), 200)
    free = np.ones((rows, width), dtype=bool)
    free[:, 0] = False
    masked = mask_tokens(ids, free, seed=1, epoch=0, indices=np.arange(rows), mask_id=MASK_ID, replacements=ORDINARY, share=0.15)
    shown = masked.ids.reshape(-1)[masked.positions]
    total = rows * 15
    assert len(shown) == total
    for count, share in (((shown == MASK_ID).sum(), 0.8), ((shown == 200).sum(), 0.1)):
        assert abs(count - share * total) < 5 * np.sqrt(total * share * (1 - share))  # five standard deviations
    replaced = shown[(shown != MASK_ID) & (shown != 200)]
    assert set(replaced.tolist()) == set(ORDINARY.tolist())
    per_column = np.bincount(masked.positions % width, minlength=width)
    assert per_column[0] == 0
    assert np.abs(per_column[1:] - total / 99).max() < 5 * np.sqrt(total / 99)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
def test_the_tokens_keep_their_type_and_the_given_array_its_values(dtype: type) -> None:
    ids = np.arange(5, 25, dtype=dtype).reshape(2, 10)
    before = ids.copy()
    masked = mask_tokens(
        ids, np.ones_like(ids, dtype=bool), seed=0, epoch=0, indices=np.arange(2), mask_id=4, replacements=ORDINARY, share=0.5
    )
    np.testing.assert_array_equal(ids, before)
    assert masked.ids.dtype == masked.labels.dtype == dtype
