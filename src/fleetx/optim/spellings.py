"""What users write for a setting: other optimizers' names for it, slips, and two names at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

from ..errors import ConfigError, did_you_mean


@final
class Default(float):
    """The default of an argument, told from the same number given by the user."""


def in_our_words(given: Mapping[str, Any], spellings: Mapping[str, str], *, where: str) -> dict[str, Any]:
    """A copy under our own keys. Two spellings of one setting are refused: which of the values was meant?"""
    for theirs, ours in spellings.items():
        if theirs in given and ours in given:
            raise ConfigError(
                f"{where} has {theirs}={given[theirs]!r} and {ours}={given[ours]!r}, which are one setting. Write one of them."
            )
    return {spellings.get(key, key): value for key, value in given.items()}


def refuse_arguments(kind: str, given: Iterable[str], *, known: Iterable[str], instead: Mapping[str, str]) -> None:
    """As Python refuses an argument that nobody knows, with what to write for it."""
    known = [name for name in known if name != "synonyms"]
    for name in given:
        hint = f" {instead[name]}." if name in instead else did_you_mean(name, known)
        raise TypeError(f"{kind}() has no argument {name!r}.{hint} It takes {', '.join(known)}.")
