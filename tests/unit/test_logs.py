"""The follower of the ranks' logs: complete, in order, across restarts, and indifferent to a console that is gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetx.errors import ConfigError
from fleetx.launch.console import Bare, Prefixed, View
from fleetx.launch.logs import ConsoleGone, Follower, check_folder, innermost_calls, last_lines, start_fresh, write_all

LIMIT_SECONDS = 30.0


class Shown:
    """A console that a test can wait for."""

    def __init__(self) -> None:
        self.data = b""
        self._changed = threading.Condition()

    def write(self, data: bytes) -> None:
        with self._changed:
            self.data += data
            self._changed.notify_all()

    def wait_for(self, text: bytes) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.data, timeout=LIMIT_SECONDS), self.data


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def follower(shown: Shown) -> Iterator[Follower]:
    follower = Follower(shown.write)
    yield follower
    follower.stop(LIMIT_SECONDS)


def make_logs(folder: Path, *views: View) -> list[tuple[Path, View]]:
    logs = [(folder / f"workerlog.{rank}", view) for rank, view in enumerate(views)]
    for path, _ in logs:
        path.write_bytes(b"")
    return logs


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as log:
        log.write(data)


def test_the_last_lines_are_shown_also_without_a_line_end(tmp_path: Path, shown: Shown, follower: Follower) -> None:
    logs = make_logs(tmp_path, Bare(), Prefixed("r1| "))
    follower.start(logs)
    append(logs[0][0], b"first\n")
    shown.wait_for(b"first\n")
    append(logs[0][0], b"x" * 300_000 + b"\n")
    append(logs[1][0], b"last of 1")
    follower.stop(LIMIT_SECONDS)
    assert shown.data == b"first\n" + b"x" * 300_000 + b"\nr1| last of 1\n"


def test_a_prefixed_line_begins_at_the_left_edge(tmp_path: Path, shown: Shown, follower: Follower) -> None:
    logs = make_logs(tmp_path, Bare(), Prefixed("r1| "))
    follower.start(logs)
    append(logs[0][0], b"bar 10%")
    shown.wait_for(b"bar 10%")
    append(logs[1][0], b"odd\n")
    shown.wait_for(b"odd\n")
    append(logs[0][0], b"\rbar 20%\n")
    follower.stop(LIMIT_SECONDS)
    assert shown.data == b"bar 10%\nr1| odd\n\rbar 20%\n"


def test_a_log_may_be_appended_to_emptied_or_replaced_by_a_restart(tmp_path: Path, shown: Shown, follower: Follower) -> None:
    logs = make_logs(tmp_path, Prefixed("r0| "))
    path = logs[0][0]
    follower.start(logs)
    append(path, b"attempt one, cut sh")
    append(path, b"ort\n--- attempt 2 ---\nunfinished")
    shown.wait_for(b"attempt 2")
    path.write_bytes(b"emptied\n")
    shown.wait_for(b"r0| unfinished\nr0| emptied\n")
    replacement = tmp_path / "new"
    replacement.write_bytes(b"replaced\n")
    replacement.rename(path)
    shown.wait_for(b"r0| replaced\n")
    path.unlink()
    follower.stop(LIMIT_SECONDS)
    assert shown.data.count(b"\n") == 5


def test_a_console_that_is_gone_ends_the_copying_and_nothing_else(tmp_path: Path) -> None:
    asked = threading.Event()

    def write(data: bytes) -> None:
        asked.set()
        raise ConsoleGone

    logs = make_logs(tmp_path, Bare())
    follower = Follower(write)
    follower.start(logs)
    append(logs[0][0], b"nobody reads this\n")
    assert asked.wait(LIMIT_SECONDS)
    follower.stop(LIMIT_SECONDS)


def test_a_console_that_takes_nothing_holds_a_stopped_run_up_for_a_limit_only(tmp_path: Path) -> None:
    blocked, released = threading.Event(), threading.Event()

    def write(data: bytes) -> None:
        blocked.set()
        released.wait(LIMIT_SECONDS)

    logs = make_logs(tmp_path, Bare())
    follower = Follower(write)
    follower.start(logs)
    append(logs[0][0], b"stuck\n")
    assert blocked.wait(LIMIT_SECONDS)
    before = time.monotonic()
    follower.stop(0.01)
    assert time.monotonic() - before < LIMIT_SECONDS / 2
    released.set()
    follower.stop(LIMIT_SECONDS)


def test_writing_to_a_closed_pipe_says_that_the_console_is_gone() -> None:
    import os

    reader, writer = os.pipe()
    write_all(b"seen", writer)
    assert os.read(reader, 10) == b"seen"
    os.close(reader)
    try:
        with pytest.raises(ConsoleGone):
            write_all(b"unseen", writer)
    finally:
        os.close(writer)


def test_a_pipe_that_does_not_block_gets_every_byte() -> None:
    import os

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    data = bytes(range(256)) * 4096
    thread = threading.Thread(target=lambda: (write_all(data, writer), os.close(writer)))
    thread.start()
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == data
    thread.join(LIMIT_SECONDS)


def present(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_node_0_starts_its_own_logs_afresh_and_moves_those_of_a_larger_run(tmp_path: Path) -> None:
    for name in ("0", "1", "1.1", "2", "3", "4", "11", "1.gz", "x"):
        (tmp_path / f"workerlog.{name}").write_text("old")
    kept = start_fresh(tmp_path, range(2), world_size=4)
    assert kept == tmp_path / "run-1"
    assert present(kept) == {f"workerlog.{name}": "old" for name in ("0", "1", "1.1", "4", "11")}
    assert present(tmp_path) == {
        **{"workerlog.0": "", "workerlog.1": ""},
        **{f"workerlog.{name}": "old" for name in ("2", "3", "1.gz", "x")},
    }


def test_another_node_touches_its_own_logs_only_and_moves_them_to_the_same_folder(tmp_path: Path) -> None:
    for rank in range(6):
        (tmp_path / f"workerlog.{rank}").write_text("alive")
    assert start_fresh(tmp_path, range(2, 4), world_size=4) == tmp_path / "run-1"
    assert present(tmp_path) == {f"workerlog.{rank}": "" if rank in (2, 3) else "alive" for rank in range(6)}
    assert start_fresh(tmp_path, range(2), world_size=4) == tmp_path / "run-1"
    assert sorted(present(tmp_path / "run-1")) == [f"workerlog.{rank}" for rank in range(6)]


def test_logs_without_a_line_and_links_are_not_kept_and_each_run_has_a_number(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("theirs")
    for run in (1, 2):
        assert start_fresh(tmp_path, range(2), world_size=2) is None
        (tmp_path / "workerlog.1").unlink()
        (tmp_path / "workerlog.1").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "workerlog.0").write_text(f"run {run}")
        assert start_fresh(tmp_path, range(2), world_size=2) == tmp_path / f"run-{run}"
        assert present(tmp_path / f"run-{run}") == {"workerlog.0": f"run {run}"}
    assert present(tmp_path) == {"workerlog.0": "", "workerlog.1": "", "elsewhere": "theirs"}


def test_a_numbered_folder_that_is_a_link_gets_no_logs(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "run-1").symlink_to(tmp_path / "theirs")
    (tmp_path / "workerlog.0").write_text("old")
    assert start_fresh(tmp_path, range(1), world_size=1) == tmp_path / "run-2"
    assert present(tmp_path / "theirs") == {}


def test_a_folder_that_cannot_be_written_is_told_before_anything_starts(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--log_dir .*file cannot be written"):
        check_folder(tmp_path / "file")
    (tmp_path / "a" / "workerlog.0").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        start_fresh(tmp_path / "a", range(1), world_size=1)


def test_a_folder_of_another_user_is_refused_but_not_to_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    os.chown(folder, 4242, 4242)
    check_folder(folder)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="it belongs to another user.* Name a folder of your own"):
        check_folder(folder)
    check_folder(tmp_path / "mine")


def test_a_log_that_is_not_there_yet_is_shown_once_it_is_made(tmp_path: Path, shown: Shown, follower: Follower) -> None:
    follower.start([(tmp_path / "log" / "workerlog.0", Bare())])
    (tmp_path / "log").mkdir()
    append(tmp_path / "log" / "workerlog.0", b"late\n")
    shown.wait_for(b"late\n")


def test_the_last_lines_of_a_long_log_are_harmless_text(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100_000 + b"\none\n\n  two\x1b[2J\n\xffthree\n")
    assert last_lines(log, 3) == ["one", r"  two\x1b[2J", "�three"]
    assert last_lines(log, 0) == last_lines(tmp_path / "missing", 3) == []


def test_the_innermost_calls_are_those_of_the_main_thread_if_a_stack_is_the_last_thing_written(tmp_path: Path) -> None:
    log = tmp_path / "workerlog.0"
    heading, calls = (
        "Thread 0x7f (most recent call first):\n",
        '  File "a.py", line 3 in wait\n  File "a.py", line 9 in <module>\n',
    )
    log.write_text(f'loss 0.5\n{heading}  File "loader.py", line 1 in feed\n\n{heading}{calls}')
    assert innermost_calls(log, 1) == ['  File "a.py", line 3 in wait']
    assert innermost_calls(log, 8) == calls.splitlines()
    log.write_text(f"{heading}{calls}loss 0.4\n")
    assert innermost_calls(log, 8) == innermost_calls(tmp_path / "missing", 8) == []
