"""Show that something long is under way: one line with a spinner on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeAlias, final

from . import log
from .terminal import columns_of, launchers_terminal, own_terminal

LINE_SECONDS = 10.0
"""Least seconds between two lines where there is no terminal."""
DRAWS_PER_SECOND = 4
Tell: TypeAlias = Callable[[str], None]
"""Receives what is being done now."""


def show_nothing(text: str) -> None:
    """Show nothing: the other ranks, and tests."""


@contextlib.contextmanager
def progress(title: str, *, is_shown: bool) -> Iterator[Tell]:
    """Show `title: what is done now (12 s)` until the block ends. `is_shown`: whether this rank is the one that shows it."""
    if not is_shown or not log.shows(logging.INFO):
        yield show_nothing
        return
    file = None if log.LOGGER.hasHandlers() else launchers_terminal()
    if file is None and (log.LOGGER.hasHandlers() or not own_terminal()):
        yield Lines(title)
        return
    with _spinning(title, file) as tell:
        yield tell


@final
class Lines:
    """Says what is done, at most every ten seconds."""

    def __init__(self, title: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._title, self._clock = title, clock
        self._begun = self._said = clock()

    def __call__(self, text: str) -> None:
        now = self._clock()
        if now >= self._said + LINE_SECONDS:
            self._said = now
            log.say(f"{self._title}: {text} ({now - self._begun:.0f} s)")


@contextlib.contextmanager
def _spinning(title: str, file: IO[str] | None) -> Iterator[Tell]:
    """Draw a spinner; it leaves no line behind. A terminal that is closed meanwhile ends the drawing, not the work."""
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    console = Console() if file is None else Console(file=file, force_terminal=True, width=columns_of(file))
    begun, doing = time.monotonic(), ["begins"]

    def drawn() -> Any:
        line = f"{title}: {doing[0]} ({time.monotonic() - begun:.0f} s)"
        spinner.update(text=Text(line, overflow="ellipsis", no_wrap=True))
        return spinner

    spinner = Spinner("line")
    own = file is None
    live = Live(
        console=console,
        get_renderable=drawn,
        transient=True,
        refresh_per_second=DRAWS_PER_SECOND,
        redirect_stdout=own,
        redirect_stderr=own,
    )
    with contextlib.suppress(OSError):  # raised on this rank alone it would leave the others waiting
        live.start()
    try:
        yield lambda text: doing.__setitem__(0, text)
    finally:
        with contextlib.suppress(OSError):
            live.stop()
        if file is not None:
            file.close()
