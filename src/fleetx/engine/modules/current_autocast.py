"""Whose autocast `fleet.autocast()` is: that of the last pair that asked for amp, or of one that is being tried."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager

from ..optimizer import FleetOptimizer

_face: weakref.ref[FleetOptimizer] | None = None
"""Weak: once the pair is gone, fleet.autocast() does nothing again."""


def use(face: FleetOptimizer) -> None:
    """Use this pair's autocast from now on."""
    global _face
    if face.forward_stage is not None:
        _face = weakref.ref(face)


def context() -> AbstractContextManager[None]:
    face = None if _face is None else _face()
    found: AbstractContextManager[None]
    found = contextlib.nullcontext() if face is None or face.forward_stage is None else face.forward_stage.context()
    return found


@contextlib.contextmanager
def used_by(face: FleetOptimizer) -> Iterator[None]:
    """Use this pair's autocast inside, or none if it has none."""
    global _face
    before, _face = _face, weakref.ref(face)
    try:
        yield
    finally:
        _face = before
