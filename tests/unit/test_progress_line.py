"""Progress of what takes long: a spinner on a terminal, elsewhere a line now and then, nothing for other ranks."""

from __future__ import annotations

import logging
import os
import pty

import pytest

from fleetx.auto.candidate import Candidate
from fleetx.auto.search import unstable
from fleetx.auto.trial import Trial, quartiles
from fleetx.config.progress import Lines, progress, show_nothing
from fleetx.config.terminal import TERMINAL


def test_without_a_terminal_a_line_is_said_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter([0.0, 3.0, 11.0, 12.0, 22.0])
    tell = Lines("auto", clock=lambda: next(seconds))
    for text in ("a", "b", "c", "d"):
        tell(text)
    assert capsys.readouterr().out == "auto: b (11 s)\nauto: d (22 s)\n"


def test_other_ranks_and_a_quiet_script_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with progress("auto", is_shown=False) as tell:
        assert tell is show_nothing
    monkeypatch.setenv("FLEETX_VERBOSE", "0")
    with progress("auto", is_shown=True) as tell:
        assert tell is show_nothing


def test_on_fleetruns_terminal_what_is_tried_is_drawn_and_leaves_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv(TERMINAL, os.ttyname(theirs))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with progress("auto", is_shown=True) as tell:
        tell("running plan 2, bf16")
    os.set_blocking(ours, False)
    drawn = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    assert "auto: running plan 2, bf16 (0 s)" in drawn, "drawn at the end at the latest"
    assert drawn.rstrip().endswith("\x1b[2K") or "\x1b[?25h" in drawn


def test_a_script_with_handlers_of_its_own_gets_records(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("fleetx")
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()  # of levels asked for before
    with progress("auto", is_shown=True) as tell:
        assert isinstance(tell, Lines)
    monkeypatch.undo()
    logger.manager._clear_cache()


def test_the_spread_of_timings_leaves_a_quarter_out_at_both_ends() -> None:
    assert quartiles([5.0, 1.0]) == (1.0, 5.0)
    assert quartiles([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == (3.0, 6.0)


def test_timings_that_disagree_are_cautioned_of_with_both_numbers() -> None:
    calm, restless = Candidate("float32"), Candidate("bfloat16")
    trials = {calm: Trial(0.1, spread_s=(0.1, 0.149)), restless: Trial(0.5, spread_s=(0.4398, 1.9858))}
    [note] = unstable(trials)
    assert note.startswith(f"measurements unstable: {restless.name} 439.8 / 1,985.8 ms.") and calm.name + " 100" not in note
    assert unstable({calm: trials[calm], restless: Trial(failed="ran out of memory")}) == []
