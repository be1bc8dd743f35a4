"""The planner's choice against all subsets, by a peak that is worked out here from the definition and not by its functions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection
from fractions import Fraction

import pytest

from fleetx.recompute.budget_solver import cheapest, smallest_budget
from fleetx.recompute.profile import Element, Profile, Way
from tests.helpers.limits import within

MANY = 120
"""Random profiles of each kind."""


def way_of(element: Element, again: Collection[int]) -> Way:
    return element.again if element.again is not None and element.unit in again else element.stored


def true_peak(profile: Profile, again: Collection[int]) -> int:
    """Every moment of a step written down: forwards in order, backwards from the end, then the update."""
    ways = [way_of(element, again) for element in profile.elements]
    moments = [profile.floor]
    for i, way in enumerate(ways):
        before = set().union(*(w.kept for w in ways[:i]))
        moments.append(sum(profile.sizes[s] for s in before) + way.forward_extra)
        moments.append(sum(profile.sizes[s] for s in before | way.kept) + way.backward_extra)
    return max(moments)


def true_seconds(profile: Profile, again: Collection[int]) -> Fraction:
    return sum((Fraction(way_of(element, again).seconds) for element in profile.elements), Fraction(0))


def every_plan(profile: Profile) -> list[tuple[frozenset[int], int, Fraction]]:
    units = range(len(profile.units))
    subsets = itertools.chain.from_iterable(itertools.combinations(units, count) for count in range(len(units) + 1))
    return [(frozenset(s), true_peak(profile, s), true_seconds(profile, s)) for s in subsets]


def chain(sizes: list[tuple[int, int]], seconds: list[float], *, extra: int = 0, floor: int = 0) -> Profile:
    """Units in a row, each the (bytes inside it, bytes of its output); an output is the next one's input, and saved by it."""
    storages: dict[int, int] = {0: 0}
    elements: list[Element] = []
    given = 0
    for i, (inside, output) in enumerate(sizes):
        inner, out = 2 * i + 1, 2 * i + 2
        storages |= {inner: inside, out: output}
        stored = Way(frozenset({given, inner}), inside + output + extra, extra)
        again = Way(frozenset({given}), inside + output + extra, inside + extra, seconds[i])
        elements.append(Element(i, stored, again))
        given = out
    elements.append(Element(None, Way(frozenset({given}), extra, extra)))
    return Profile(tuple(f"unit{i}" for i in range(len(sizes))), tuple(elements), storages, floor)


def random_profile(draw: random.Random, most_units: int = 7) -> Profile:
    """Storages shared by neighbours and far ones, glue between, units called up to three times, and many equal numbers."""
    units = draw.randint(1, most_units)
    few = draw.random() < 0.4
    number = (lambda: draw.choice([0, 8, 16])) if few else (lambda: draw.randint(0, 99))
    sizes = {s: number() for s in range(draw.randint(3, 3 * units + 3))}
    storages = list(sizes)

    def kept(most: int) -> frozenset[int]:
        return frozenset(draw.sample(storages, min(len(storages), draw.randint(0, most))))

    calls = [u for u in range(units) for _ in range(draw.choice([1, 1, 1, 2, 3]))]
    if draw.random() < 0.5:
        draw.shuffle(calls)
    elements: list[Element] = []
    for unit in calls:
        if draw.random() < 0.3:
            elements.append(Element(None, Way(kept(2), number(), number())))
        inputs = kept(2)
        saved = kept(4) | (inputs if draw.random() < 0.7 else frozenset())
        again = Way(inputs, number(), number() + 10, draw.choice([0.0, 0.25, 0.5, 1.0, draw.randint(1, 64) / 64]))
        elements.append(Element(unit, Way(saved, number(), number()), again))
    elements.append(Element(None, Way(kept(2), number(), number())))
    return Profile(tuple(f"unit{u}" for u in range(units)), tuple(elements), sizes, number())


def assert_best(profile: Profile, budget: int, plans: list[tuple[frozenset[int], int, Fraction]]) -> None:
    fitting = [seconds for _, peak, seconds in plans if peak <= budget]
    found = cheapest(profile, budget)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert found.seconds == min(fitting)
    assert true_seconds(profile, found.again) == min(fitting)
    assert found.peak_bytes == true_peak(profile, found.again) <= budget


# --- against all subsets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(MANY))
def test_the_cheapest_of_all_subsets_is_found_at_every_budget_that_matters(seed: int) -> None:
    draw = random.Random(seed)
    profile = random_profile(draw)
    plans = every_plan(profile)
    peaks = sorted({peak for _, peak, _ in plans})
    chosen = peaks if len(peaks) <= 8 else [peaks[0], peaks[-1], *draw.sample(peaks, 6)]
    for peak in chosen:
        for budget in (peak - 1, peak, peak + 1):
            assert_best(profile, budget, plans)


@pytest.mark.parametrize("seed", range(MANY))
def test_the_smallest_budget_is_the_least_peak_of_all_subsets_and_below_it_there_is_no_plan(seed: int) -> None:
    profile = random_profile(random.Random(1000 + seed))
    least = min(peak for _, peak, _ in every_plan(profile))
    assert smallest_budget(profile) == least
    assert cheapest(profile, least - 1) is None
    found = cheapest(profile, least)
    assert found is not None and true_peak(profile, found.again) == least


@pytest.mark.parametrize("seed", range(3))
def test_twelve_units_equal_brute_force(seed: int) -> None:
    draw = random.Random(2000 + seed)
    sizes = [(draw.randint(10, 500), draw.randint(1, 40)) for _ in range(12)]
    profile = chain(sizes, [draw.randint(1, 64) / 64 for _ in sizes], extra=draw.randint(0, 50), floor=draw.randint(0, 200))
    plans = every_plan(profile)
    peaks = sorted({peak for _, peak, _ in plans})
    assert smallest_budget(profile) == peaks[0]
    for budget in (peaks[0], peaks[len(peaks) // 8], peaks[len(peaks) // 3], peaks[len(peaks) // 2], peaks[-1]):
        assert_best(profile, budget, plans)


# --- by hand ------------------------------------------------------------------------------------------------------------------


def test_of_two_equal_units_the_earlier_one_is_computed_again_since_backward_needs_the_last_at_once() -> None:
    profile = chain([(100, 10), (100, 10)], [1.0, 1.0])
    # Plain, the last backward has 100 + 10 + 100 in use; with the last again the same: it is back when backward needs it.
    # With the first again: 10 + 100 at the last, 100 at the first; the forward of the last has 0 + 110, and the end 110 + 10.
    assert true_peak(profile, {1}) == 210 and true_peak(profile, {0}) == 120
    found = cheapest(profile, 209)
    assert found is not None and found.again == {0} and found.peak_bytes == 120


def test_a_storage_kept_by_two_elements_counts_once() -> None:
    both = Way(frozenset({0}), 0, 0)
    profile = Profile((), (Element(None, both), Element(None, both)), {0: 64}, 0)
    assert smallest_budget(profile) == 64


def test_a_unit_called_twice_is_computed_again_in_both_calls_or_in_none() -> None:
    sizes = {0: 100, 1: 100}
    calls = [Element(0, Way(frozenset({s}), 0, 0), Way(frozenset(), 0, 10, 1.0)) for s in (0, 1)]
    profile = Profile(("unit",), tuple(calls), sizes, 0)
    found = cheapest(profile, 150)
    assert found is not None and found.again == {0} and found.seconds == 2.0 and found.peak_bytes == 10


def test_what_the_update_needs_is_a_floor_to_every_plan() -> None:
    profile = chain([(100, 10)], [1.0], floor=1000)
    assert cheapest(profile, 999) is None
    assert smallest_budget(profile) == 1000
    found = cheapest(profile, 1000)
    assert found is not None and not found.again


def test_nothing_is_computed_again_where_everything_fits() -> None:
    profile = chain([(100, 10)] * 6, [1.0] * 6)
    found = cheapest(profile, true_peak(profile, ()))
    assert found is not None and not found.again


# --- many units ---------------------------------------------------------------------------------------------------------------


@within(300, "planning sixty-four blocks")
def test_sixty_four_equal_blocks_are_planned_soon_with_no_block_too_many() -> None:
    mega = 2**20
    profile = chain([(20 * mega, 2 * mega)] * 64, [0.01] * 64, extra=3 * mega, floor=100 * mega)
    least = smallest_budget(profile)
    assert least == min(true_peak(profile, range(count)) for count in range(65))  # the first so many: earlier is never worse
    for budget in (least, least + 40 * mega, 2 * least, 5 * least):
        found = cheapest(profile, budget)
        assert found is not None and true_peak(profile, found.again) <= budget
        needed = next(count for count in range(65) if true_peak(profile, range(count)) <= budget)
        assert len(found.again) == needed


@pytest.mark.campaign
@within(300, "planning 128 units")
def test_a_hundred_and_twenty_eight_unlike_units_are_planned_soon_and_keep_to_the_budget() -> None:
    draw = random.Random(7)
    sizes = [(draw.randint(10**5, 10**7), draw.randint(10**4, 10**6)) for _ in range(128)]
    profile = chain(sizes, [draw.uniform(0.001, 0.1) for _ in sizes], extra=10**6)
    least, plain = smallest_budget(profile), true_peak(profile, ())
    everything = true_peak(profile, range(128))
    assert least <= everything < plain
    slower = None
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        budget = int(least + share * (plain - least))
        found = cheapest(profile, budget)
        assert found is not None and true_peak(profile, found.again) <= budget
        assert slower is None or found.seconds <= slower
        slower = found.seconds
    assert slower == 0


def nested_skips(depth: int, draw: random.Random) -> Profile:
    """A U-Net: what the i-th unit makes goes, made smaller, to the next one, and as it is to the i-th from the end."""
    units = 2 * depth
    sizes: dict[int, int] = {}
    elements: list[Element] = []
    for u in range(units):
        inner, out, smaller = 3 * u, 3 * u + 1, 3 * u + 2
        sizes |= {inner: draw.randint(100, 1000), out: draw.randint(50, 200), smaller: draw.randint(10, 50)}
        given = {3 * (u - 1) + 2} if u else set()
        if u >= depth:
            given.add(3 * (units - 1 - u) + 1)
        made = sizes[inner] + sizes[out] + sizes[smaller]
        stored = Way(frozenset({*given, inner, out, smaller}), made, 50)
        elements.append(Element(u, stored, Way(frozenset(given), made, made + 50, draw.randint(1, 64) / 64)))
    elements.append(Element(None, Way(frozenset({3 * units - 1}), 0, 50)))
    return Profile(tuple(map(str, range(units))), tuple(elements), sizes, 0)


@pytest.mark.parametrize("seed", range(4))
def test_a_u_net_of_ten_units_equals_brute_force(seed: int) -> None:
    profile = nested_skips(5, random.Random(seed))
    plans = every_plan(profile)
    peaks = sorted({peak for _, peak, _ in plans})
    assert smallest_budget(profile) == peaks[0]
    for budget in (peaks[0], peaks[len(peaks) // 6], peaks[len(peaks) // 2], peaks[-1]):
        assert_best(profile, budget, plans)


@within(300, "planning a U-Net")
def test_a_u_net_of_thirty_two_units_is_planned_soon_down_to_the_least_that_all_of_them_need() -> None:
    """Each of sixteen skips may be kept or not while deeper units are decided: 65536 combinations, more than are followed."""
    profile = nested_skips(16, random.Random(3))
    everything, plain = true_peak(profile, range(32)), true_peak(profile, ())
    assert smallest_budget(profile) <= everything
    slower = float(true_seconds(profile, range(32)))
    for budget in (everything, (everything + plain) // 2):
        found = cheapest(profile, budget)
        assert found is not None and true_peak(profile, found.again) <= budget
        assert found.seconds <= slower
        slower = found.seconds


def test_where_not_all_partial_plans_are_followed_the_plan_is_at_most_a_hundredth_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(11)
    sizes = [(draw.randint(10**5, 10**7), draw.randint(10**4, 10**6)) for _ in range(40)]
    profile = chain(sizes, [draw.uniform(0.001, 0.1) for _ in sizes], extra=10**6)
    least, plain = smallest_budget(profile), true_peak(profile, ())
    for share in (0.2, 0.5):
        budget = int(least + share * (plain - least))
        best = cheapest(profile, budget)
        with monkeypatch.context() as fewer:
            fewer.setattr("fleetx.recompute.budget_solver.MOST_STATES", 300)
            found = cheapest(profile, budget)
        assert best is not None and found is not None
        assert true_peak(profile, found.again) <= budget
        assert best.seconds <= found.seconds <= 1.01 * best.seconds
