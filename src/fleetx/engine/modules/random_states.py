"""The random generators that a module's forward draws from, set back for a second run to what they were before the first."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

NUMPY_WORDS = 625
"""Length of a Mersenne twister's state: 624 words, and the position among them."""


class Source(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], None]


States = list[tuple[Source, Any]]

TORCH = Source(torch.get_rng_state, torch.set_rng_state)
PYTHON = Source(random.getstate, random.setstate)
NUMPY = Source(partial(np.random.get_state, legacy=False), np.random.set_state)
HELD: dict[type, Callable[[Any], Source]] = {
    torch.Generator: lambda held: Source(held.get_state, held.set_state),
    random.Random: lambda held: Source(held.getstate, held.setstate),
    np.random.RandomState: lambda held: Source(held.get_state, held.set_state),
    np.random.Generator: lambda held: Source(lambda: held.bit_generator.state, partial(setattr, held.bit_generator, "state")),
}
"""Generators that are objects: a module's attribute, or an argument of its forward."""


@contextlib.contextmanager
def set_back(states: States) -> Iterator[None]:
    now = [(source, source.get()) for source, _ in states]
    try:
        for source, state in states:
            source.set(state)
        yield
    finally:
        for source, state in now:
            source.set(state)


def torch_sources(device: torch.device) -> list[Source]:
    if device.type != "cuda":
        return [TORCH]
    return [TORCH, Source(partial(torch.cuda.get_rng_state, device), partial(torch.cuda.set_rng_state, device=device))]


def held_sources(values: Iterable[Any]) -> list[Source]:
    return [HELD[type(value)](value) for value in values if type(value) in HELD]


@contextlib.contextmanager
def kept(sources: Iterable[Source], drawn: set[Source], states: States) -> Iterator[None]:
    """Around a forward, whose `states` these become; with Python's and numpy's, which are large, once it has `drawn` from them.

    They are there during the forward too: it may itself run a backward."""
    python, (words, numpy) = random.getstate(), _numpy_now()
    shared: States = [(PYTHON, python), (NUMPY, numpy)]
    states += [(source, source.get()) for source in sources]
    states += shared
    yield
    if PYTHON not in drawn and _python_drew(python, random.getstate()):
        drawn.add(PYTHON)
    if NUMPY not in drawn and _numpy_drew(words, numpy):
        drawn.add(NUMPY)
    states[-2:] = [state for state in shared if state[0] in drawn]


def _python_drew(before: Any, after: Any) -> bool:
    """Return whether Python's generator was used: a draw moves the position, the last of the words, or a new round changes all
    the others; or it uses up a spare normal."""
    return bool(before[1][-8:] != after[1][-8:] or before[2] != after[2])


# --- numpy's shared generator -------------------------------------------------------------------------------------------------

_numpy_last: tuple[bytes, Any] | None = None


def _numpy_now() -> tuple[bytes, Any]:
    """Return the words of NumPy's generator and its state, which takes 40 us to ask for: while the words are the same, the last
    answer holds."""
    global _numpy_last
    words = _numpy_words()
    if _numpy_last is None or _numpy_last[0] != words or _numpy_last[1]["has_gauss"]:
        _numpy_last = words, NUMPY.get()
    return _numpy_last


def _numpy_drew(words: bytes, state: Any) -> bool:
    # The words lack the spare of a pair of normal numbers. To use it up moves none of them; to leave one does.
    return _numpy_words() != words or bool(state["has_gauss"] and not NUMPY.get()["has_gauss"])


def _numpy_words() -> bytes:
    generator = np.random.mtrand.get_bit_generator()
    if not isinstance(generator, np.random.MT19937):
        return repr(generator.state).encode()
    return ctypes.string_at(generator.ctypes.state_address, 4 * NUMPY_WORDS)
