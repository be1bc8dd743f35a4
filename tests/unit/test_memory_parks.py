"""Plans in which units may park inputs in host memory, against all of them, by a step that is written down here."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest

from fleetx.recompute.batches import Growth
from fleetx.recompute.budget_solver import Solution, cheapest, smallest_budget
from fleetx.recompute.plan import moments
from fleetx.recompute.profile import Element, Profile, Way, from_plain, host_bytes, joined, peak_bytes, to_plain
from tests.helpers.limits import within

STORED, AGAIN, JOINS, PARKS = range(4)


def ways_of(profile: Profile, plan: Sequence[int]) -> list[Way]:
    ways = []
    for element in profile.elements:
        by_kind = (element.stored, element.again, element.joins, element.offloads)
        way = element.stored if element.unit is None else by_kind[plan[element.unit]]
        assert way is not None
        ways.append(way)
    return ways


def true_peak(profile: Profile, plan: Sequence[int]) -> int:
    """Every moment of a step. What is back when backward is at an element: the inputs of its segment up to it; and, once a unit
    behind it (or itself) has been computed again, what the last unit before it with inputs in host memory has there."""
    ways, found = ways_of(profile, plan), [profile.floor]
    runs_again = [e.unit is not None and plan[e.unit] != STORED for e in profile.elements]
    for i, way in enumerate(ways):
        before = set().union(*(w.kept for w in ways[:i]))
        coming = next((w.offloaded for w in reversed(ways[:i]) if w.offloaded), 0) if any(runs_again[i:]) else 0
        segment = 0
        for other, its in reversed(list(zip(profile.elements[: i + 1], ways[: i + 1], strict=True))):
            if other.unit is not None:
                if not its.brought:
                    break
                segment += its.brought
        found.append(sum(profile.sizes[s] for s in before) + way.forward_extra)
        found.append(sum(profile.sizes[s] for s in before | way.kept) + coming + segment + way.backward_extra)
    return max(found)


def true_seconds(profile: Profile, plan: Sequence[int]) -> Fraction:
    return sum((Fraction(way.seconds) for way in ways_of(profile, plan)), Fraction(0))


def every_plan(profile: Profile, *, segments: bool) -> Iterator[tuple[int, ...]]:
    """A unit joins the one before it, which must be computed again."""
    kinds = []
    for unit in range(len(profile.units)):
        calls = [e for e in profile.elements if e.unit == unit]
        can_join = segments and all(e.joins is not None for e in calls)
        can_park = all(e.offloads is not None for e in calls)
        kinds.append([STORED, AGAIN, *([JOINS] if can_join else []), *([PARKS] if can_park else [])])
    for plan in itertools.product(*kinds):
        if all(kind != JOINS or plan[unit - 1] != STORED for unit, kind in enumerate(plan)):
            yield plan


def plan_of(profile: Profile, found: Solution) -> list[int]:
    assert found.joins <= found.again and found.offloads <= found.again and not found.joins & found.offloads
    return [
        JOINS if u in found.joins else PARKS if u in found.offloads else AGAIN if u in found.again else STORED
        for u in range(len(profile.units))
    ]


def random_profile(draw: random.Random, *, most_units: int, is_row: bool) -> Profile:
    """Storages that are shared by neighbours and far ones, glue, many equal numbers. In a row every unit is called once, and some
    may join the one before; else some are called twice."""
    units = draw.randint(1, most_units)
    number = (lambda: draw.choice([0, 8, 16])) if draw.random() < 0.4 else (lambda: draw.randint(0, 99))
    sizes = {s: 1 + number() for s in range(draw.randint(3, 3 * units + 3))}

    def some(storages: list[int], most: int) -> frozenset[int]:
        return frozenset(draw.sample(sorted(storages), min(len(storages), draw.randint(0, most))))

    def time_of() -> float:
        return draw.randint(0, 32) / 64

    calls = [u for u in range(units) for _ in range(1 if is_row else draw.choice([1, 1, 2]))]
    offloadable = [draw.random() < 0.7 for _ in range(units)]
    elements: list[Element] = []
    for unit in calls:
        if draw.random() < 0.3:
            elements.append(Element(None, Way(some(list(sizes), 2), number(), number())))
        inputs = some(list(sizes), 2) | {draw.choice(list(sizes))}
        stored = Way(some(list(sizes), 4), number(), number())
        again = Way(inputs, number(), number() + 10, time_of())
        joins = offloads = None
        if is_row and unit and draw.random() < 0.6:
            gift = min(inputs)
            joins = Way(inputs - {gift}, again.forward_extra, again.backward_extra, again.seconds + time_of(), sizes[gift])
        if offloadable[unit]:
            out = some(list(inputs), 2) or inputs
            count = sum(sizes[s] for s in out)
            extra = again.backward_extra + count
            offloads = Way(inputs - out, again.forward_extra, extra, again.seconds + time_of(), offloaded=count)
        elements.append(Element(unit, stored, again, joins, offloads))
    elements.append(Element(None, Way(some(list(sizes), 2), number(), number())))
    return Profile(tuple(f"unit{u}" for u in range(units)), tuple(elements), sizes, number())


@pytest.mark.parametrize("segments", [False, True], ids=["alone", "with segments"])
@pytest.mark.parametrize("seed", range(60))
def test_the_cheapest_of_all_plans_is_found_at_every_budget_that_matters(seed: int, segments: bool) -> None:
    draw = random.Random(seed)
    profile = random_profile(draw, most_units=4 if segments else 5, is_row=segments)
    plans = [(true_peak(profile, plan), true_seconds(profile, plan)) for plan in every_plan(profile, segments=segments)]
    peaks = sorted({peak for peak, _ in plans})
    assert smallest_budget(profile, segments=segments, offload=True) == peaks[0]
    for peak in peaks if len(peaks) <= 6 else [peaks[0], peaks[1], *draw.sample(peaks, 4)]:
        for budget in (peak - 1, peak):
            fitting = [seconds for peak, seconds in plans if peak <= budget]
            found = cheapest(profile, budget, segments=segments, offload=True)
            if found is None:
                assert not fitting
                continue
            plan = plan_of(profile, found)
            assert found.seconds == min(fitting) == true_seconds(profile, plan)
            assert found.peak_bytes == true_peak(profile, plan) <= budget


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_of_any_plan_is_that_of_the_step_written_down_and_so_are_its_moments(seed: int) -> None:
    draw = random.Random(100 + seed)
    profile = random_profile(draw, most_units=5, is_row=True)
    plans = list(every_plan(profile, segments=True))
    for plan in draw.sample(plans, min(20, len(plans))):
        again, joins, offloads = ({u for u, kind in enumerate(plan) if kind in kinds} for kinds in ((1, 2, 3), (2,), (3,)))
        peak = peak_bytes(profile, again, joins, offloads)
        assert peak == true_peak(profile, plan)
        solution = Solution(frozenset(again), 0.0, peak, frozenset(joins), frozenset(offloads))
        steps = moments(profile, solution)
        assert max([profile.floor, *(step.peak_bytes for step in steps)]) == peak
        assert {step.unit for step in steps if step.parks} == {profile.units[u] for u in offloads}


# --- by hand ------------------------------------------------------------------------------------------------------------------


def row(count: int, *, inside: int = 100, between: int = 30, offload: float = 0.125) -> Profile:
    """Units that save what is inside them, and are given what the one before returned; only they keep that."""
    sizes = {0: 0} | {2 * i + 1: inside for i in range(count)} | {2 * i + 2: between for i in range(count)}
    elements = []
    for i in range(count):
        given, inner = 2 * i, 2 * i + 1
        again = Way(frozenset({given}), inside + between, inside, 1.0)
        size = sizes[given]
        offloads = Way(frozenset(), inside + between, inside + size, 1.0 + offload, offloaded=size) if i else None
        elements.append(Element(i, Way(frozenset({given, inner}), inside + between, 0), again, None, offloads))
    elements.append(Element(None, Way(frozenset(), 0, 0)))
    return Profile(tuple(f"unit{i}" for i in range(count)), tuple(elements), sizes, 0)


def test_inputs_are_parked_only_where_computing_again_is_not_enough() -> None:
    profile = row(4)
    # Computed again, all of them: at the last unit's backward 3 inputs (30) and its own inside (100) are in use.
    assert peak_bytes(profile, range(4)) == 190 == smallest_budget(profile)
    # With 1 and 2 offloaded and the last stored: at the last, its own input and inside, since nothing has run again yet; at
    # unit 2, its own input is back, and that of unit 1 on its way: 100 + 30 + 30. With unit 1 alone it is as much.
    assert peak_bytes(profile, {0, 1, 2}, (), {1, 2}) == 160 == peak_bytes(profile, {0, 1, 2}, (), {1})
    found = cheapest(profile, 189, offload=True)
    assert found is not None and found.again == {0, 1, 2} and len(found.offloads) == 1 and found.seconds == 3.125
    found = cheapest(profile, 190, offload=True)
    assert found is not None and not found.offloads
    assert cheapest(profile, 189) is None


def test_what_is_parked_is_on_its_way_while_the_next_unit_runs_again_and_not_before() -> None:
    profile = row(3)
    stored_last, all_again = peak_bytes(profile, {0, 1}, (), {1}), peak_bytes(profile, {0, 1, 2}, (), {1})
    # The last unit's backward: 130 stored; computed again, the input of the unit before it comes beside: 130 + 30.
    assert (stored_last, all_again) == (130, 160)


def test_bytes_in_host_memory_count_each_tensor_once() -> None:
    profile = row(4)
    assert host_bytes(profile, ()) == 0 and host_bytes(profile, {1, 2, 3}) == 90
    shared = profile.elements[1]
    both = Profile(("a", "b"), (shared, Element(0, shared.stored, shared.again, None, shared.offloads)), profile.sizes, 0)
    assert host_bytes(both, {0, 1}) == 30


def test_profiles_travel_grow_and_are_joined_with_what_they_park() -> None:
    profile = random_profile(random.Random(5), most_units=5, is_row=True)
    profile = replace(profile, places=(frozenset({0, 2}),) * len(profile.units))
    assert any(element.offloads for element in profile.elements)
    assert from_plain(to_plain(profile)) == profile
    assert joined([profile, profile]) == profile
    assert Growth(2, profile, 4, profile).at(3) == profile
    one, two = row(3, between=30), row(3, between=50)
    offloads = joined([one, two]).elements[1].offloads
    assert offloads is not None and offloads.offloaded == 50
    offloads = Growth(1, one, 3, two).at(5).elements[1].offloads
    assert offloads is not None and (offloads.offloaded, offloads.backward_extra) == (70, 170)
    without = Profile(one.units, tuple(Element(e.unit, e.stored, e.again) for e in one.elements), one.sizes, 0)
    assert not one.is_like(without)


@within(300, "planning a hundred units")
def test_a_hundred_units_are_planned_soon_down_to_little_more_than_one() -> None:
    mega = 2**20
    profile = row(96, inside=20 * mega, between=2 * mega)
    assert smallest_budget(profile, offload=True) == 24 * mega  # one unit's inside, its own input, the next one's
    without = smallest_budget(profile)
    for budget in (without - 1, without - 100 * mega, 24 * mega):
        found = cheapest(profile, budget, offload=True)
        assert found is not None and found.offloads and true_peak(profile, plan_of(profile, found)) <= budget
    draw = random.Random(3)
    elements = [
        e if e.offloads is None or e.again is None else Element(e.unit, e.stored, e.again, None, Way(*scaled(e.offloads, draw)))
        for e in profile.elements
    ]
    unlike = Profile(profile.units, tuple(elements), profile.sizes, 0)
    found = cheapest(unlike, without - 50 * mega, offload=True)
    assert found is not None and true_peak(unlike, plan_of(unlike, found)) <= without - 50 * mega


def scaled(way: Way, draw: random.Random) -> tuple[frozenset[int], int, int, float, int, int]:
    more = draw.randint(0, 2**20)
    return way.kept, way.forward_extra, way.backward_extra + more, way.seconds + draw.random(), 0, way.offloaded + more
