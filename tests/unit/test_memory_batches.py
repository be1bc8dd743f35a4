"""The arithmetic of the batch finder, beside straight lines and searches written out by hand."""

from __future__ import annotations

import random

import pytest

from fleetx.errors import ConfigError
from fleetx.recompute.batches import Growth, largest_that, merged, sizes_to_try
from fleetx.recompute.budget_solver import cheapest
from fleetx.recompute.profile import Element, Profile, Way, peak_bytes

# --- a step that grows in a straight line ---------------------------------------------------------------------------------------


def straight(batch: int, *, seed: int = 0, joins: bool = True) -> Profile:
    """Every number of it is `fixed + each * batch`, with numbers from a die."""
    draw = random.Random(seed)

    def grown() -> int:
        return draw.randint(0, 10_000) + draw.randint(0, 300) * batch

    def way(kept: set[int], *, seconds: bool = True) -> Way:
        spent = draw.randint(1, 9) / 8 + draw.randint(1, 9) / 16 * batch  # eighths and sixteenths: exact in floats
        return Way(frozenset(kept), grown(), grown(), spent if seconds else 0.0)

    sizes = {storage: grown() for storage in range(9)}
    elements = [Element(None, way({0}, seconds=False))]
    for unit in range(4):
        stored, again = way({2 * unit, 2 * unit + 1}, seconds=False), way({2 * unit})
        elements.append(Element(unit, stored, again, Way(frozenset(), grown(), grown(), 1.0 * batch, grown()) if joins else None))
    elements.append(Element(None, way({8}, seconds=False)))
    return Profile(tuple("abcd"), tuple(elements), sizes, floor=draw.randint(0, 9_000))


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 8, 16, 100, 4096, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_a_straight_line_is_predicted_to_the_byte_and_to_the_second(batch: int, seed: int) -> None:
    growth = Growth(8, straight(8, seed=seed), 16, straight(16, seed=seed))
    found, expected = growth.at(batch), straight(batch, seed=seed)
    bytes_alone = [(e.unit, *((w.kept, w.forward_extra, w.backward_extra, w.brought) for w in ways(e))) for e in found.elements]
    assert bytes_alone == [
        (e.unit, *((w.kept, w.forward_extra, w.backward_extra, w.brought) for w in ways(e))) for e in expected.elements
    ]
    assert found.sizes == expected.sizes and found.floor == expected.floor and found.units == expected.units
    if batch >= 8:  # of fewer rows, seconds are held above a quarter of the smaller batch's
        assert [[w.seconds for w in ways(e)] for e in found.elements] == [[w.seconds for w in ways(e)] for e in expected.elements]


def ways(element: Element) -> list[Way]:
    return [way for way in (element.stored, element.again, element.joins) if way is not None]


def test_an_odd_batch_between_the_two_is_on_the_line_as_well() -> None:
    assert Growth(3, straight(3), 10, straight(10)).at(5).sizes == straight(5).sizes


def test_so_are_the_peaks_of_plans_and_the_cheapest_of_them() -> None:
    growth = Growth(8, straight(8), 16, straight(16))
    for batch in (9, 50, 1000):
        for again, joins in [((), ()), ((0, 2), ()), ((0, 1, 2, 3), (1, 3))]:
            assert peak_bytes(growth.at(batch), again, joins) == peak_bytes(straight(batch), again, joins)
        budget = peak_bytes(straight(batch), (1, 3))
        assert cheapest(growth.at(batch), budget) == cheapest(straight(batch), budget)


def test_a_way_that_there_is_not_stays_away() -> None:
    found = Growth(8, straight(8, joins=False), 16, straight(16, joins=False)).at(64)
    assert all(e.joins is None for e in found.elements) and found.elements[0].again is None


def test_nothing_is_predicted_to_take_less_than_no_bytes_or_no_time() -> None:
    """Of 10 bytes at 10 rows and 200 at 20, one row would have -161; of 1 s and 20 s, one would take less than none."""

    def profile(size: int, seconds: float) -> Profile:
        stored, again = Way(frozenset({0}), 0, 0), Way(frozenset(), 0, 0, seconds)
        return Profile(("a",), (Element(0, stored, again),), {0: size}, 0)

    found = Growth(10, profile(10, 1.0), 20, profile(200, 20.0)).at(1)
    assert found.sizes == {0: 0}
    assert found.elements[0].again is not None and found.elements[0].again.seconds == 0.25


@pytest.mark.parametrize("other", ["units", "kept", "joins", "sizes", "length"])
def test_profiles_of_two_ways_through_a_model_are_told_apart(other: str) -> None:
    one = straight(8)
    assert Growth(8, one, 16, straight(16)).is_comparable()
    element = one.elements[1]
    changed = {
        "units": Profile(("a", "b", "c", "e"), one.elements, one.sizes, one.floor),
        "kept": Profile(one.units, (Element(None, Way(frozenset({1}), 0, 0)), *one.elements[1:]), one.sizes, one.floor),
        "joins": Profile(
            one.units, (one.elements[0], Element(0, element.stored, element.again), *one.elements[2:]), one.sizes, one.floor
        ),
        "sizes": Profile(one.units, one.elements, {**one.sizes, 9: 1}, one.floor),
        "length": Profile(one.units, one.elements[:-1], one.sizes, one.floor),
    }[other]
    assert not Growth(8, changed, 16, straight(16)).is_comparable()


# --- the largest that fits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_most", [1, 2, 3, 31, 32, 33])
def test_the_largest_that_fits_is_that_of_trying_all(at_most: int) -> None:
    for limit in range(40):
        assert largest_that(lambda size, limit=limit: size <= limit, at_most=at_most) == min(limit, at_most)


def test_no_size_beyond_the_most_and_none_below_one_is_asked_about_and_few_are() -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= 700_001

    assert largest_that(fits, at_most=1 << 20) == 700_001
    assert min(asked) >= 1 and max(asked) <= 1 << 20 and len(asked) <= 42 and len(set(asked)) == len(asked)


# --- a global batch -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_global_batch_is_made_up_exactly_in_the_fewest_steps(ranks: int) -> None:
    for share in range(1, 50):
        for largest in range(1, 54):
            steps, size = merged(share * ranks, ranks=ranks, largest=largest)
            assert steps * size * ranks == share * ranks and size <= largest
            assert steps == min(k for k in range(1, share + 1) if share % k == 0 and share // k <= largest)


def test_a_prime_share_that_does_not_fit_at_once_is_made_of_single_rows() -> None:
    assert merged(101, ranks=1, largest=100) == (101, 1)


@pytest.mark.parametrize(("wanted", "ranks", "instead"), [(100, 3, 99), (7, 4, 4), (1, 2, 2), (3, 8, 8)])
def test_a_global_batch_that_ranks_cannot_share_is_refused_with_one_that_they_can(wanted: int, ranks: int, instead: int) -> None:
    with pytest.raises(ConfigError, match=rf"global_batch is {wanted}, which {ranks} ranks .* such as {instead}\."):
        merged(wanted, ranks=ranks, largest=5)
    assert merged(instead, ranks=ranks, largest=instead) == (1, instead // ranks)


# --- sizes whose speed is measured ----------------------------------------------------------------------------------------------


def test_sizes_to_try_hold_both_largest_and_rise_from_one_on() -> None:
    for largest in (1, 2, 3, 5, 17, 400, 1 << 20):
        for stored in {0, 1, 2, largest // 3, largest - 1, largest} - {-1}:
            if stored <= largest:
                sizes = list(sizes_to_try(stored, largest))
                assert sizes == sorted(set(sizes)) and sizes[0] >= 1 and sizes[-1] == largest
                assert stored == 0 or stored in sizes
                assert len(sizes) <= 6


def test_some_lie_below_what_needs_no_recompute_and_some_between() -> None:
    assert list(sizes_to_try(100, 800)) == [50, 75, 100, 200, 400, 800]  # between: twice as many each
    assert list(sizes_to_try(0, 800)) == [400, 600, 800]
    assert list(sizes_to_try(800, 800)) == [400, 600, 800]
