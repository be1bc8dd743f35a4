"""The kinds of value a strategy key can have: what is accepted, and how it is said when it is not."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value. `parse` returns the value in its plain form, or raises ValueError."""

    allowed: str
    parse: Callable[[Any], Any]
    hint: str = "Any"
    """Type of what is accepted, as annotations spell it: for the stubs that type checkers and editors read."""

    def check(self, where: str, value: Any) -> Any:
        try:
            return self.parse(value)
        except (ValueError, OverflowError):
            raise ConfigError(f"{where} is {_shown(value)}; it must be {self.allowed}.") from None


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return f"a very long {type(value).__name__}"
    return text if len(text) <= 200 else text[:200] + "..."


def require(condition: bool) -> None:
    """Refuse a value; `Kind.check` turns this into the message."""
    if not condition:
        raise ValueError


def boolean() -> Kind:
    def parse(value: Any) -> bool:
        require(isinstance(value, bool))
        return bool(value)

    return Kind("True or False", parse, "bool")


def integer(minimum: int, maximum: int | None = None, *, multiple_of: int = 1) -> Kind:
    def parse(value: Any) -> int:
        # bool is a subclass of int: `k_steps=True` is a slip, never a wish for 1.
        require(isinstance(value, int) and not isinstance(value, bool))
        require(value >= minimum and (maximum is None or value <= maximum) and value % multiple_of == 0)
        return int(value)

    upper = f" and at most {maximum}" if maximum is not None else ""
    step = f", a multiple of {multiple_of}" if multiple_of > 1 else ""
    return Kind(f"an integer of at least {minimum}{upper}{step}", parse, "int")


def integer_among(*allowed: int) -> Kind:
    """Describe one of a few integers."""

    def parse(value: Any) -> int:
        require(isinstance(value, int) and not isinstance(value, bool) and value in allowed)
        return int(value)

    listed = ", ".join(map(str, allowed))
    return Kind(f"one of {listed}", parse, f"Literal[{listed}]")


def number(minimum: float = -math.inf, maximum: float = math.inf, *, above: float = -math.inf, below: float = math.inf) -> Kind:
    """Describe a finite float with `minimum <= value <= maximum` and `above < value < below`."""

    def parse(value: Any) -> float:
        require(isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value))
        require(minimum <= value <= maximum and above < value < below)
        return float(value)

    bounds = [
        f"at least {minimum:g}" if minimum > -math.inf else "",
        f"above {above:g}" if above > -math.inf else "",
        f"at most {maximum:g}" if maximum < math.inf else "",
        f"below {below:g}" if below < math.inf else "",
    ]
    return Kind(" ".join(["a finite number", " and ".join(b for b in bounds if b)]).strip(), parse, "float")


def power_of_two(minimum: int, maximum: int) -> Kind:
    def parse(value: Any) -> int:
        parsed = int(integer(minimum, maximum).parse(value))
        require(parsed.bit_count() == 1)
        return parsed

    return Kind(f"a power of two of at least {minimum} and at most {maximum}", parse, "int")


def choice(*allowed: str) -> Kind:
    def parse(value: Any) -> str:
        require(isinstance(value, str) and value in allowed)
        return str(value)

    listed = ", ".join(repr(a) for a in allowed)
    return Kind(f"one of {listed}", parse, f"Literal[{listed}]")


def path(suffix: str) -> Kind:
    """Describe the path of a file."""

    def parse(value: Any) -> str:
        require(isinstance(value, str | os.PathLike) and str(value).endswith(suffix))
        return str(value)

    return Kind(f'a path that ends in "{suffix}"', parse, "str | PathLike[str]")


def names(*example: str) -> Kind:
    """Describe a list of strings; messages show `example`."""
    shown = json.dumps(example or ("norm", "bias"))

    def parse(value: Any) -> list[str]:
        # A bare string is a sequence of letters: "bn" would mean "b" and "n".
        require(isinstance(value, (list, tuple)) and all(isinstance(v, str) and v for v in value))
        return list(value)

    # No Sequence[str], which a bare string is as well.
    return Kind(f"a list of non-empty strings, such as {shown}", parse, "list[str] | tuple[str, ...]")


def numbers(element: Kind, *, ascending: bool = False, count: int | None = None) -> Kind:
    """Describe a list of numbers; `count`: how many there must be, None: any but none."""

    def parse(value: Any) -> list[float]:
        require(isinstance(value, (list, tuple)) and (len(value) > 0 if count is None else len(value) == count))
        parsed = [element.parse(v) for v in value]
        require(not ascending or parsed == sorted(parsed))
        return parsed

    order = "ascending " if ascending else ""
    kind = f"a non-empty {order}list" if count is None else f"a list of {count}"
    return Kind(f"{kind}, each element {element.allowed}", parse, f"Sequence[{element.hint}]")


def optional(kind: Kind) -> Kind:
    return Kind(f"None or {kind.allowed}", lambda value: None if value is None else kind.parse(value), f"{kind.hint} | None")


_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(i?))?B?\s*", re.IGNORECASE)


def size() -> Kind:
    """Describe a number of bytes: an integer, or text such as "20GB" (1000s) or "20GiB" (1024s)."""

    def parse(value: Any) -> int:
        if isinstance(value, str):
            match = _SIZE.fullmatch(value)
            require(match is not None)
            assert match is not None
            base = 1024 if match[3] else 1000
            value = int(float(match[1]) * base ** " KMGT".index((match[2] or " ").upper()))
        return int(integer(1).parse(value))

    return Kind('a number of bytes, such as 20_000_000_000, "20GB" or "20GiB"', parse, "int | str")


def once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Make a dict of these pairs; raise ValueError where a name comes twice."""
    found: dict[Any, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        found[name] = value
    return found


def key(default: Any, kind: Kind, doc: str) -> Any:
    """Make a dataclass field that carries its kind and its one-line meaning."""
    metadata = {"kind": kind, "doc": doc}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
