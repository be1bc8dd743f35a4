"""Optimizers for very large batches, usable alone in any loop, and the schedules around them."""

from __future__ import annotations

from . import schedules
from .lamb import Lamb
from .lars import Lars
from .muon import Muon
from .trust_ratio_report import TrustRatios

__all__ = ["Lamb", "Lars", "Muon", "TrustRatios", "schedules"]


def __dir__() -> list[str]:
    return sorted(__all__)
