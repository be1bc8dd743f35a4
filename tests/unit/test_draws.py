"""Random numbers by coordinates: against a reference in whole numbers, and against chance."""

import numpy as np

from fleetx.data.stateless_random import random_words, uniforms

MASK = 2**64 - 1


def splitmix(state, value):
    """One round on Python's unbounded integers."""
    word = (state + (value + 1) * 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def reference(seed, epoch, index, position):
    state = 0
    for value in (seed, epoch, index, position):
        state = splitmix(state, value)
    return state


def test_words_equal_a_reference_in_whole_numbers():
    words = random_words(2**70 + 3, 12, np.array([0, 5, 2**40])[:, None], np.arange(4))
    assert words.shape == (3, 4)
    for row, index in enumerate([0, 5, 2**40]):
        for position in range(4):
            assert int(words[row, position]) == reference(2**70 + 3, 12, index, position)


def test_a_number_depends_on_its_coordinates_and_on_no_other_in_the_call():
    whole = uniforms(1, 2, np.arange(100)[:, None], np.arange(7))
    np.testing.assert_array_equal(uniforms(1, 2, 42, np.arange(7)), whole[42])
    np.testing.assert_array_equal(uniforms(1, 2, np.array([99, 3])[:, None], [6]), whole[[99, 3], 6:])


def test_every_coordinate_changes_the_number():
    words = {int(random_words(*at)[0]) for at in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]}
    assert len(words) == 5


def test_uniforms_are_uniform_and_neighbours_are_not_related():
    drawn = uniforms(0, 0, np.arange(1000)[:, None], np.arange(200))
    assert drawn.min() >= 0.0 and drawn.max() < 1.0
    counts = np.bincount((drawn * 100).astype(int).ravel(), minlength=100)
    chi_squared = ((counts - 2000) ** 2 / 2000).sum()
    assert 50 < chi_squared < 160  # 99 degrees of freedom: both ends are beyond one chance in ten thousand
    along = np.corrcoef(drawn[:, :-1].ravel(), drawn[:, 1:].ravel())[0, 1]
    across = np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]
    assert abs(along) < 0.01 and abs(across) < 0.01  # four standard deviations of 1 / sqrt(199,000)
