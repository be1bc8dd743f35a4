"""Helpers around a training script."""

from __future__ import annotations

from ..download.downloader import Downloader

__all__ = ["Downloader"]


def __dir__() -> list[str]:
    return sorted(__all__)
