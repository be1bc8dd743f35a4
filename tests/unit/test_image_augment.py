"""Which part of an image is shown: boxes checkable by hand, and their distribution against a reference."""

import math

import numpy as np
import pytest

from fleetx.data.images.augment import (
    CROP_DRAWS,
    central_box,
    evaluation_box,
    padded_crop_offset,
    resized_crop_box,
    shift_into,
    whole_below,
)
from fleetx.data.stateless_random import uniforms

HALF = [0.5] * CROP_DRAWS


def test_a_box_of_middle_draws_is_checkable_by_hand():
    # Area: 0.54 of 100 x 100; shape: exp(0) = 1; so 73.48 -> 73 pixels each way, in the middle of the 28 places.
    assert resized_crop_box(100, 100, HALF) == (14, 14, 87, 87)


def test_the_largest_draws_stay_inside():
    top = 1 - 2**-53
    left, upper, right, lower = resized_crop_box(100, 100, [0.0, 0.5] + [0.5] * (CROP_DRAWS - 4) + [top, top])
    assert (right, lower) == (100, 100) and (left, upper) == (72, 72)  # 0.08 of the area: 28 pixels


def test_a_try_that_does_not_fit_gives_way_to_the_next():
    # All of the area as 4:3 needs 115 pixels across; the second try is the middle one.
    assert resized_crop_box(100, 100, [1.0, 1.0, *HALF[2:]]) == resized_crop_box(100, 100, HALF)


@pytest.mark.parametrize("size,box", [((100, 10), (43, 0, 56, 10)), ((10, 100), (0, 43, 10, 56)), ((12, 10), (0, 0, 12, 10))])
def test_after_ten_tries_the_largest_central_box_is_taken(size, box):
    never = [1.0, 1.0 if size[0] >= size[1] else 0.0] * 10 + [0.0, 0.0]
    if size == (12, 10):
        never = [1.0, 0.0] * 10 + [0.0, 0.0]
    assert resized_crop_box(*size, never) == box


def test_areas_are_uniform_and_shapes_log_uniform_wherever_the_first_try_fits():
    draws = uniforms(1, 0, np.arange(20_000)[:, None], np.arange(CROP_DRAWS)).tolist()
    boxes = np.array([resized_crop_box(4000, 4000, row, scale=(0.08, 0.5)) for row in draws])
    across, down = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0 and boxes.max() <= 4000
    share = across * down / 4000**2
    shape = np.log(across / down) / math.log(4 / 3)
    for values, low, high in [(share, 0.08, 0.5), (shape, -1, 1), (boxes[:, 0] / (4000 - across), 0, 1)]:
        # The largest distance of the empirical from the uniform distribution; above 1.95 / sqrt(n) in one case of a thousand.
        expected = (np.arange(len(values)) + 0.5) / len(values)
        assert np.abs((np.sort(values) - low) / (high - low) - expected).max() < 1.95 / math.sqrt(len(values))


def test_boxes_of_a_photo_have_the_distribution_of_rejection_sampling():
    """An independent reference: torch's own generator, and tries until one fits, which ten tries nearly always contain."""
    generator = np.random.default_rng(0)
    reference = []
    while len(reference) < 20_000:
        area, shape = 500 * 375 * generator.uniform(0.08, 1), math.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if across <= 500 and down <= 375:
            reference.append((across * down / (500 * 375), math.log(across / down)))
    draws = uniforms(3, 7, np.arange(20_000)[:, None], np.arange(CROP_DRAWS)).tolist()
    boxes = np.array([resized_crop_box(500, 375, row) for row in draws])
    across, down = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    ours = np.stack([across * down / (500 * 375), np.log(across / down)], axis=1)
    np.testing.assert_allclose(ours.mean(axis=0), np.mean(reference, axis=0), rtol=0, atol=0.01)
    np.testing.assert_allclose(ours.std(axis=0), np.std(reference, axis=0), rtol=0, atol=0.01)


def test_every_offset_of_a_padded_crop_is_equally_likely():
    drawn = uniforms(0, 0, np.arange(9000), 0).tolist()
    counts = np.bincount([padded_crop_offset(draw, 4) + 4 for draw in drawn], minlength=9)
    assert len(counts) == 9 and np.abs(counts - 1000).max() < 120  # four standard deviations
    assert whole_below(9, 1.0) == 8


def test_a_shifted_window_is_black_where_it_leaves_the_image():
    pixels = np.arange(1, 13, dtype=np.uint8).reshape(2, 2, 3)
    padded = np.pad(pixels, ((2, 2), (2, 2), (0, 0)))
    for across in range(-2, 3):
        for down in range(-2, 3):
            out = np.full_like(pixels, 99)
            shift_into(out, pixels, across, down)
            np.testing.assert_array_equal(out, padded[2 + down : 4 + down, 2 + across : 4 + across])


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (256, 256), (224, 1000), (30, 40), (1, 1)])
def test_the_evaluation_box_is_the_centre_of_the_image(size):
    left, top, right, bottom = evaluation_box(*size, 224)
    assert 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]
    short = min(size)
    # A central square of 224/256 of the short side, up to the rounding of the scaled long side.
    np.testing.assert_allclose([right - left, bottom - top], short * 224 / 256, rtol=0.005)
    np.testing.assert_allclose([left + right, top + bottom], size, rtol=0, atol=1.01 * short / 256)


def test_the_central_square_of_a_photo():
    assert central_box(500, 375, (1, 1)) == (62, 0, 437, 375)
    assert central_box(1, 9, (1, 1)) == (0, 4, 1, 5)
