"""Where the line is shown: drawn over itself on a terminal, a plain line now and then elsewhere, nothing on other ranks."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import IO, Any, Protocol, final

TERMINAL = "FLEETX_TTY"
"""fleetrun names its terminal to worker 0, whose own output goes to a log."""
DRAW_SECONDS = 0.2
LINE_SECONDS = 10.0
COLUMNS = 80


class Screen(Protocol):
    @property
    def is_due(self) -> bool:
        """Whether the line may be shown again."""

    def show(self, line: str) -> None: ...

    def end(self, line: str) -> None:
        """The last line, which stays."""


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
    """One line, drawn by rich. What the script prints meanwhile appears above it."""

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
        with contextlib.suppress(OSError):  # a terminal that was closed meanwhile
            self._live.stop()
            self._live.console.print(styled(line, cuts=False))  # whole, over several rows if need be: it is what the user keeps
            if self._file is not None:
                self._file.close()


def columns_of(file: IO[str]) -> int:
    """A terminal may not know its own width."""
    told = os.environ.get("COLUMNS", "")
    return os.get_terminal_size(file.fileno()).columns or (int(told) if told.isdecimal() and int(told) else COLUMNS)


def styled(line: str, *, cuts: bool = True) -> Any:
    from rich.text import Text

    text = Text(line, overflow="ellipsis" if cuts else "fold", no_wrap=cuts)
    text.highlight_regex("━+", "green")
    text.highlight_regex("─+", "bright_black")
    text.highlight_regex(r"loss [^ ]+", "bold")
    text.highlight_regex(r"worker \d+ (is|was) waited for[^·]+", "yellow")
    text.highlight_regex(" · ", "bright_black")
    return text


def is_terminal(file: IO[str]) -> bool:
    return file.isatty() and os.environ.get("TERM") != "dumb"


def screen(*, rank: int) -> Screen:
    if rank != 0:
        return Silent()
    terminal = os.environ.get(TERMINAL)
    if terminal is not None and os.environ.get("TERM") != "dumb":
        with contextlib.suppress(OSError):  # a terminal that is gone, or another container's
            return Live(open(os.open(terminal, os.O_RDWR | os.O_NOCTTY), "w", encoding="utf-8"))
    return Live(None) if terminal is None and is_terminal(sys.stdout) else Lines()
