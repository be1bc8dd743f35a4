"""Format and show the live line about a running job, and the line at its end. Formatting is done by pure functions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any, Protocol, final

from ..config.terminal import columns_of, launchers_terminal, own_terminal
from ..config.text import binary, decimal
from .split import PARTS, Split, compute_of

BAR_CELLS = 12
VALUES_SHOWN = 4


@dataclass
class RunState:
    """What is known of the run so far; None: not known."""

    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    flops_per_second: float | None = None
    """Floating-point operations of the model, on all ranks."""
    peak_share: float | None = None
    """Share of what the devices can compute at most."""
    memory_bytes: int = 0
    bytes_sent: int = 0
    """Bytes per update, averaged over the last updates; so is `bytes_dense`, the bytes of a dense all-reduce."""
    bytes_dense: int = 0
    period: int | None = None
    loss_scale: float | None = None
    slowest: tuple[int, float] | None = None
    """Rank for which the others wait, and their waiting time in seconds per update."""

    def set_values(self, loss: float | None, values: Mapping[str, float]) -> None:
        self.loss = self.loss if loss is None else loss
        self.values |= values


def number_text(value: float) -> str:
    """Format with four significant digits, or in full below 100,000."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:.3g}"


def duration_text(seconds: float) -> str:
    seconds = round(seconds)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    if hours >= 48:
        return f"{hours // 24} days {hours % 24} h"
    return f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"


def bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * BAR_CELLS)
    return "━" * full + "─" * (BAR_CELLS - full)


def wire_text(sent: float, dense: float) -> str | None:
    """Compare the bytes of an update with a dense all-reduce; None on a single rank, where nothing is sent."""
    if dense <= 0:
        return None
    return f"wire {decimal(sent)} ({percent(sent / dense)} of dense)"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.2g} %"


def eta_seconds(now: RunState) -> float | None:
    if now.total_steps is None or not now.steps_per_second:
        return None
    return max(now.total_steps - now.step, 0) / now.steps_per_second


def pieces(now: RunState) -> list[str]:
    """List the known values, most important first: a narrow terminal cuts the end."""
    share = now.step / now.total_steps if now.total_steps else None
    parts: list[str | None] = [
        f"step {now.step:,}" if share is None else f"{bar(share)} {now.step:,}/{now.total_steps:,}",
        None if now.loss is None else f"loss {number_text(now.loss)}",
        *(f"{name} {number_text(value)}" for name, value in list(now.values.items())[:VALUES_SHOWN]),
        speed_text(now.steps_per_second, now.samples_per_second),
        flops_text(now.flops_per_second, now.peak_share),
        None if (left := eta_seconds(now)) is None else f"ETA {duration_text(left)}",
        f"mem {binary(now.memory_bytes, decimals=1)}" if now.memory_bytes else None,
        wire_text(now.bytes_sent, now.bytes_dense),
        None if now.period is None else f"period {now.period}",
        None if now.loss_scale in (None, 1.0) else f"scale {number_text(now.loss_scale or 1.0)}",
        waits_text(now.slowest, now.steps_per_second),
    ]
    return [piece for piece in parts if piece]


def speed_text(steps_per_second: float | None, samples_per_second: float | None) -> str | None:
    if samples_per_second:
        return f"{number_text(samples_per_second)} samples/s"
    if not steps_per_second:
        return None
    return f"{number_text(steps_per_second)} steps/s" if steps_per_second >= 1 else f"{number_text(1 / steps_per_second)} s/step"


def flops_text(flops_per_second: float | None, peak_share: float | None) -> str | None:
    """Format the speed of computing; below a billion a second, which no device of use has, it says nothing."""
    if flops_per_second is None or flops_per_second < 1e9:
        return None
    unit, scale = ("TFLOP/s", 1e12) if flops_per_second >= 1e12 else ("GFLOP/s", 1e9)
    share = "" if peak_share is None else f" ({percent(peak_share)} of peak)"
    return f"{number_text(flops_per_second / scale)} {unit}{share}"


def waits_text(slowest: tuple[int, float] | None, steps_per_second: float | None) -> str | None:
    """Name the slowest rank if the others wait for it for at least a tenth of an update."""
    if slowest is None or not steps_per_second or slowest[1] * steps_per_second < 0.1:
        return None
    return f"worker {slowest[0]} is waited for {1e3 * slowest[1]:,.3g} ms a step"


def line(now: RunState) -> str:
    return " · ".join(pieces(now))


def split_text(split: Mapping[str, float], *, is_wrapped: bool = False) -> str | None:
    """Format the shares of time. `is_wrapped`: DDP reduces gradients inside backward, where the two cannot be separated."""
    total = sum(split[part] for part in PARTS)
    if total <= 0:
        return None
    shares = {
        "compute and communication" if is_wrapped else "compute": compute_of(split),
        "communication": split["communication"],
        "data and script": split["data"],
        "evaluation and saving": split["other"],
    }
    return " ".join(f"{name} {percent(seconds / total)}" for name, seconds in shares.items() if seconds / total >= 0.005)


def last_line(
    state: str,
    now: RunState,
    seconds: float,
    split: Split,
    wire: tuple[int, int],
    slowest: tuple[int, float] | None,
    folder: str,
    *,
    is_wrapped: bool = False,
) -> str:
    sent, dense = wire
    parts = [
        f"{state} after {duration_text(seconds)}",
        f"{now.step:,} steps",
        None if now.loss is None else f"loss {number_text(now.loss)}",
        *(f"{name} {number_text(value)}" for name, value in now.values.items()),
        split_text(split, is_wrapped=is_wrapped),
        f"sent {decimal(sent)} ({percent(sent / dense)} of dense)" if dense else None,
        None if slowest is None or slowest[1] < 0.02 * seconds else f"worker {slowest[0]} was waited for {slowest[1]:,.3g} s",
        folder,
    ]
    return " · ".join(piece for piece in parts if piece)


# --- output: redrawn in place on a terminal, a plain line every 10 seconds elsewhere, nothing on other ranks ------------

DRAW_SECONDS = 0.2
LINE_SECONDS = 10.0


class Screen(Protocol):
    @property
    def is_due(self) -> bool:
        """Whether it is time to show the line again."""

    def show(self, line: str) -> None: ...

    def end(self, line: str) -> None:
        """Show the last line, which stays."""


@final
class Silent:
    is_due = False

    def show(self, line: str) -> None:
        return None

    def end(self, line: str) -> None:
        return None


@final
class Lines:
    def __init__(self, every_seconds: float = LINE_SECONDS) -> None:
        self._every, self._next = every_seconds, 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def show(self, line: str) -> None:
        self._next = time.monotonic() + self._every
        print(line, flush=True)

    end = show


@final
class Live:
    """One line redrawn by rich. The script's own output appears above it."""

    def __init__(self, file: IO[str] | None) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._file, self._next = file, 0.0
        width = columns_of(file) if file is not None else None
        console = Console(file=file, force_terminal=True, width=width) if file is not None else Console()
        self._live = RichLive(console=console, auto_refresh=False, redirect_stdout=file is None, redirect_stderr=file is None)
        self._live.start()

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def show(self, line: str) -> None:
        self._next = time.monotonic() + DRAW_SECONDS
        with contextlib.suppress(OSError):
            self._live.update(styled(line), refresh=True)

    def end(self, line: str) -> None:
        self._live.transient = True
        with contextlib.suppress(OSError):  # the terminal may be closed by now
            self._live.stop()
            self._live.console.print(styled(line, cuts=False))  # in full, wrapped: it stays on the screen
            if self._file is not None:
                self._file.close()


def styled(line: str, *, cuts: bool = True) -> Any:
    from rich.text import Text

    text = Text(line, overflow="ellipsis" if cuts else "fold", no_wrap=cuts)
    text.highlight_regex("━+", "green")
    text.highlight_regex("─+", "bright_black")
    text.highlight_regex(r"loss [^ ]+", "bold")
    text.highlight_regex(r"worker \d+ (is|was) waited for[^·]+", "yellow")
    text.highlight_regex(" · ", "bright_black")
    return text


def screen(*, rank: int) -> Screen:
    """Choose the output for this rank: a terminal, plain lines, or nothing."""
    if rank != 0:
        return Silent()
    file = launchers_terminal()
    return Live(file) if file is not None or own_terminal() else Lines()
