"""Plain text that several packages show: lists that are cut, numbers of bytes, and tables in columns or in a frame."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

MIB = 2**20
BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
DECIMAL = ("B", "kB", "MB", "GB", "TB")


def listed(names: Sequence[str], most: int, *, separator: str = ", ") -> str:
    """Join the first `most` names, and count the rest: "a, b and 3 more"."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + rest


# --- bytes ------------------------------------------------------------------------------------------------------------------


def binary(count: float, *, decimals: int = 2) -> str:
    """Write bytes of memory or of files in units of 1024: 8 * 2**30 is "8 GiB", which `kinds.size` reads back.

    Bytes on the wire are written by `decimal`: the rates of links are decimal (a link of 1 Gbit/s takes 8 ms for 1 MB)."""
    place = 0
    while count >= 1024 and place < len(BINARY) - 1:
        count, place = count / 1024, place + 1
    return f"{_short(f'{count:.{decimals if place else 0}f}')} {BINARY[place]}"


def decimal(count: float) -> str:
    """Write bytes on the wire in units of 1000, with three digits: 1500000 is "1.5 MB"."""
    place = 0
    while count >= 999.5 and place < len(DECIMAL) - 1:
        count, place = count / 1000, place + 1
    return f"{count:,.0f} {DECIMAL[place]}" if place == 0 or count >= 1000 else f"{count:.3g} {DECIMAL[place]}"


def _short(number: str) -> str:
    return number.rstrip("0").rstrip(".") if "." in number else number


# --- tables -----------------------------------------------------------------------------------------------------------------


def aligned(rows: Sequence[Sequence[str]], *, left: Collection[int] = ()) -> list[str]:
    """Return the lines of a table whose columns are as wide as their longest cell; those in `left` begin at the left."""
    columns = [
        [cell.ljust(width) if place in left else cell.rjust(width) for cell in column]
        for place, column in enumerate(zip(*rows, strict=True))
        for width in [max(map(len, column))]
    ]
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def framed(blocks: Iterable[tuple[Sequence[str], Sequence[str]]], width: int) -> list[str]:
    """Return the lines of a frame around blocks of a head and a body: a double rule around each, a single one between them."""
    double, single = f"+{'=' * width}+", f"+{'-' * width}+"
    lines = [double]
    for head, body in blocks:
        parts = [*head, *([single] if body else []), *body, double]
        lines += [part if part in (single, double) else f"|{part:^{width}}|" for part in parts]
    return lines
