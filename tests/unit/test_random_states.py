"""Random states that are kept for a second run: which, and at what moment a draw is seen."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fleetx.engine.modules.random_states import NUMPY, PYTHON, TORCH, Source, States, _numpy_words, kept, set_back

DRAWS: dict[str, tuple[Callable[[], object], list[Source]]] = {
    "nothing": (lambda: None, []),
    "torch's are always kept": (lambda: torch.rand(1), []),
    "python, one": (random.random, [PYTHON]),
    "python, a whole round": (lambda: [random.getrandbits(32) for _ in range(624)], [PYTHON]),
    "python, the same again": (lambda: (random.seed(1), random.random()), [PYTHON]),
    "numpy, one": (np.random.rand, [NUMPY]),
    "numpy, a whole round": (lambda: np.random.randint(0, 2**32, 624, dtype=np.uint32), [NUMPY]),
    "both": (lambda: (random.random(), np.random.rand()), [PYTHON, NUMPY]),
}


@pytest.mark.parametrize("case", DRAWS)
def test_states_of_python_and_numpy_are_kept_of_a_forward_that_draws_and_give_its_numbers_again(case: str) -> None:
    draw, expected = DRAWS[case]
    drawn: set[Source] = set()
    for _ in range(3):
        states: States = []
        with kept([TORCH], drawn, states):
            first = draw()
        assert [source for source, _ in states] == [TORCH, *expected]
        with set_back(states):
            assert str(draw()) == str(first)


def test_generators_stand_where_they_were_after_numbers_were_drawn_again() -> None:
    states: States = []
    with kept([TORCH], set(), states):
        torch.rand(1), random.random(), np.random.rand()
    torch.rand(3), random.random(), np.random.rand(2)  # other code
    before = [str(source.get()) for source, _ in states]
    with set_back(states):
        torch.rand(1), random.random(), np.random.rand()
    assert [str(source.get()) for source, _ in states] == before


def test_a_spare_normal_number_that_is_used_up_is_a_draw() -> None:
    for normal, source in ((np.random.randn, NUMPY), (lambda: random.gauss(0, 1), PYTHON)):
        normal()  # of a pair: the other is at hand
        states: States = []
        with kept([], set(), states):
            spare = normal()
        assert [found for found, _ in states] == [source]
        with set_back(states):
            assert normal() == spare


def test_numpys_words_are_those_of_its_state() -> None:
    np.random.seed(5)
    np.random.rand(7)
    state = np.random.get_state(legacy=False)["state"]
    assert _numpy_words() == state["key"].tobytes() + np.int32(state["pos"]).tobytes()
