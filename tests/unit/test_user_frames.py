"""Where a failure is said to be: in the user's own file, also where the error is raised by the library."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fleetx import fleet
from fleetx.launch.worker import innermost_user_frame


def test_an_error_that_the_library_raises_is_told_at_the_users_line(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("def ask(strategy):\n    strategy.no_such_key = 3\n")
    spec = importlib.util.spec_from_file_location("mine", script)
    assert spec is not None and spec.loader is not None
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    with pytest.raises(Exception) as caught:
        mine.ask(fleet.DistributedStrategy())
    assert innermost_user_frame(caught.value) == "mine.py:2, in ask"


def test_an_error_inside_the_library_alone_is_told_there() -> None:
    try:
        fleet.DistributedStrategy.from_json("{")
    except Exception as error:
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ is not None else None
        assert "from_json" in str(innermost_user_frame(error)) or "strategy.py" in str(innermost_user_frame(error))
    else:
        raise AssertionError("no error")
