"""Flag types of all subcommands: rates, times and sizes such as 10Gbit, 50us and 32GB, and errors in one line."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..config.kinds import Kind, require, size
from ..errors import ConfigError, did_you_mean

PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = r"([0-9]+(?:\.[0-9]*)?)\s*"
_RATE = re.compile(_NUMBER + r"([kKMGT]?)(bit/s|bit|bps|B/s)")
_TIME = re.compile(_NUMBER + "(" + "|".join(SECONDS) + ")")
_COUNT = re.compile(r"[0-9]{1,12}")


class Parser(argparse.ArgumentParser):
    """Raises ConfigError on wrong flags, to be printed in one line without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See `{self.prog} --help`.")


# --- kinds of values ----------------------------------------------------------------------------------------------------


def bandwidth() -> Kind:
    """Parse a rate into bytes per second."""

    def parse(text: Any) -> float:
        match = _RATE.fullmatch(text)
        require(match is not None)
        assert match is not None
        rate = float(match[1]) * PREFIXES[match[2].lower()] / (1 if match[3] == "B/s" else 8)
        require(rate > 0)
        return rate

    return Kind("a rate such as 10Gbit, 100Mbit or 1.25GB/s", parse)


def duration() -> Kind:
    """Parse a time into seconds."""

    def parse(text: Any) -> float:
        match = _TIME.fullmatch(text)
        require(match is not None)
        assert match is not None
        return float(match[1]) * SECONDS[match[2]]

    return Kind("a time such as 50us, 1ms or 0.1s", parse)


def count(least: int, most: int) -> Kind:
    def parse(text: Any) -> int:
        require(_COUNT.fullmatch(text) is not None and least <= int(text) <= most)
        return int(text)

    return Kind(f"a whole number from {least} to {most}", parse)


def memory() -> Kind:
    return Kind("a size such as 32GB or 32GiB", size().parse)


def file(*endings: str) -> Kind:
    """Accept a path where such a file can be written: an error now is better than one after a minute of measuring."""

    def parse(text: Any) -> str:
        folder = Path(text).parent
        require(Path(text).suffix in endings and not Path(text).is_dir() and folder.is_dir() and os.access(folder, os.W_OK))
        return str(text)

    return Kind(f"a file that ends in {' or '.join(endings)}, in a folder that is there and can be written to", parse)


def readable(*endings: str) -> Kind:
    """Accept the path of an existing file with one of these suffixes."""

    def parse(text: Any) -> str:
        require(Path(text).suffix in endings and Path(text).is_file())
        return str(text)

    return Kind(f"a file that is there and ends in {' or '.join(endings)}", parse)


def settings(flag: str, text: str, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Parse NAME=VALUE,NAME=VALUE."""
    parsed: dict[str, Any] = {}
    for entry in text.split(","):
        name, has_value, value = (part.strip() for part in entry.partition("="))
        if not has_value:
            raise ConfigError(f"{flag} takes NAME=VALUE,NAME=VALUE with names {', '.join(kinds)}; got {entry!r}.")
        if name not in kinds:
            raise ConfigError(f"{flag} knows {', '.join(kinds)}, and not {name!r}.{did_you_mean(name, kinds)}")
        if name in parsed:
            raise ConfigError(f"{flag} says {name}= twice.")
        parsed[name] = kinds[name].check(f"{name} of {flag}", value)
    return parsed


def arg_type(kind: Kind) -> Callable[[str], Any]:
    """Turn a kind into a `type=` function for argparse."""

    def parse(text: str) -> Any:
        try:
            return kind.parse(text)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"{text!r} was given; it must be {kind.allowed}") from None

    return parse
