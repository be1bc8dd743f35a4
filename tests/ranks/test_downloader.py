"""Several real processes and one folder: one of them downloads; another goes on after a kill; all raise the same error."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fleetx
from fleetx.download import once_per_node
from fleetx.download.folder import opened
from fleetx.errors import ConfigError, DataError
from fleetx.utils import Downloader
from tests.helpers.file_server import Handler, Server, row, serving, snapshot
from tests.helpers.harness import raised, run_ranks

DATA = os.urandom(8_000_000)
SOURCE = Path(fleetx.__file__).parents[1]
SCRIPT = f"""
import sys
sys.path.insert(0, {str(SOURCE)!r})
from fleetx.errors import DataError
from fleetx.utils import Downloader
try:
    print(Downloader(retries=2, timeout_seconds=20, backoff_seconds=0.05).download(sys.argv[1], sys.argv[2]))
except DataError as error:
    sys.exit(f"DataError: {{error}}")
"""


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as state:
        yield state


@pytest.fixture
def start() -> Iterator[Callable[[str, Path], subprocess.Popen[str]]]:
    """A process that downloads; none outlives its test."""
    with contextlib.ExitStack() as stack:

        def process(manifest: str, target: Path) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", SCRIPT, manifest, str(target)]
            made = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            stack.callback(made.kill)
            return made

        yield process


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < limit, what
        time.sleep(0.002)


def is_at_the_lock(process: subprocess.Popen[str]) -> bool:
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{process.pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/fd/{number}").endswith(".fleetx-lock"):
                    return True
    return False


def size_of(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def test_on_a_terminal_a_bar_shows_the_file_by_its_very_name(server: Server, tmp_path: Path) -> None:
    server.files["/%5Bred%5Da.bin"] = DATA
    manifest, server.pause_seconds = server.publish(row("[red]a.bin", DATA)), 0.002
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", SCRIPT, manifest, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=os.environ | {"TERM": "xterm", "COLUMNS": "100"}):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # how a terminal ends
            while piece := os.read(ours, 2**16):
                shown += piece
    os.close(ours)
    assert b"downloading [red]a.bin" in shown and b"8.0/8.0 MB" in shown


def test_of_four_processes_one_downloads_and_all_return_the_folder(
    server: Server, tmp_path: Path, start: Callable[[str, Path], subprocess.Popen[str]]
) -> None:
    manifest, all_there = server.publish(a_bin=DATA), threading.Event()

    def patient(handler: Handler) -> None:
        all_there.wait(30)
        handler.send_file("/a.bin")

    server.faults["/a.bin"] = [patient]
    processes = [start(manifest, tmp_path) for _ in range(4)]
    wait_until(lambda: all(is_at_the_lock(process) for process in processes), "all four want the lock")
    all_there.set()
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [out for out, _ in outputs] == [f"{tmp_path}\n"] * 4, outputs
    assert server.count("a.bin") == 1 and server.count("manifest.json") == 1
    assert snapshot(tmp_path) == {"a.bin": DATA}


def test_when_the_one_that_downloads_fails_all_that_waited_raise_the_same_and_do_not_try_again(
    server: Server, tmp_path: Path, start: Callable[[str, Path], subprocess.Popen[str]]
) -> None:
    manifest, all_there = server.publish(a_bin=DATA), threading.Event()

    def broken(handler: Handler) -> None:
        all_there.wait(30)
        handler.send_error(500)

    server.faults["/a.bin"] = [broken] * 100
    processes = [start(manifest, tmp_path) for _ in range(4)]
    wait_until(lambda: all(is_at_the_lock(process) for process in processes), "all four want the lock")
    all_there.set()
    last_lines = [process.communicate(timeout=60)[1].splitlines()[-1] for process in processes]
    assert last_lines[0].startswith(f"DataError: a.bin from {server.url}/a.bin: the server answered 500")
    assert len(set(last_lines)) == 1 and server.count("a.bin") == 3
    server.faults.clear()
    assert start(manifest, tmp_path).communicate(timeout=60)[0] == f"{tmp_path}\n"  # an old failure is not raised again


def test_a_killed_download_is_taken_over_by_the_one_that_waits_from_where_it_was(
    server: Server, tmp_path: Path, start: Callable[[str, Path], subprocess.Popen[str]]
) -> None:
    manifest, server.hold_at = server.publish(a_bin=DATA), 2_000_000
    first = start(manifest, tmp_path)
    wait_until(lambda: size_of(tmp_path / "a.bin.part") > 1_000_000, "the first has begun")
    second = start(manifest, tmp_path)
    wait_until(lambda: is_at_the_lock(second), "the second waits")
    first.send_signal(signal.SIGKILL)
    first.wait(10)
    assert not (tmp_path / "a.bin").exists()
    server.released.set()
    assert second.communicate(timeout=60)[0] == f"{tmp_path}\n"
    assert snapshot(tmp_path) == {"a.bin": DATA}
    ranges = server.ranges("a.bin")
    assert len(ranges) == 2 and ranges[1] is not None and int(ranges[1][6:-1]) > 1_000_000
    assert server.bytes_sent["/a.bin"] < 1.5 * len(DATA)


def test_ctrl_c_leaves_a_piece_that_the_next_run_takes_up(
    server: Server, tmp_path: Path, start: Callable[[str, Path], subprocess.Popen[str]]
) -> None:
    manifest, server.hold_at = server.publish(a_bin=DATA), 2_000_000
    process = start(manifest, tmp_path)
    wait_until(lambda: size_of(tmp_path / "a.bin.part") > 1_000_000, "it has begun")
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=20)[1]
    piece = (tmp_path / "a.bin.part").read_bytes()
    assert snapshot(tmp_path) == {"a.bin.part": piece} and piece == DATA[: len(piece)]
    server.released.set()
    Downloader().download(manifest, tmp_path)
    assert server.ranges("a.bin")[-1] == f"bytes={len(piece)}-" and snapshot(tmp_path) == {"a.bin": DATA}


def test_a_process_killed_while_unpacking_leaves_no_file_of_the_archive(
    server: Server, tmp_path: Path, start: Callable[[str, Path], subprocess.Popen[str]]
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number in range(4000):
            info = tarfile.TarInfo(f"images/{number}")
            info.size = 3
            archive.addfile(info, io.BytesIO(b"abc"))
    data = server.files["/x.tar"] = buffer.getvalue()
    manifest = server.publish(row("x.tar", data, unpack=True))
    process = start(manifest, tmp_path)
    wait_until(lambda: any(tmp_path.glob(".fleetx-unpacking-*/images/10")), "it unpacks")
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".fleetx-")] == ["x.tar"]
    Downloader().download(manifest, tmp_path)
    assert server.count("x.tar") == 1 and len(list((tmp_path / "images").iterdir())) == 4000
    assert not list(tmp_path.glob(".fleetx-unpacking-*"))


def wait_while(folder: Path, monkeypatch: pytest.MonkeyPatch, note: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What a process said and did that had to wait, while another one worked and left this note."""
    monkeypatch.setattr(once_per_node, "FIRST_WORD_S", 0.05)
    (folder / ".fleetx-note.json").write_text('{"pid": 4321, "host": "node7", "doing": "a.bin: 1.0 MB of 8.0 MB"}')
    holder = os.open(folder / ".fleetx-lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    said: list[str] = []
    done: list[str] = []

    def line(text: str) -> None:
        said.append(text)
        (folder / ".fleetx-note.json").write_text(json.dumps(note))
        os.close(holder)

    with opened(str(folder)) as root:
        once_per_node.once(root, "mine", lambda _: done.append("worked"), line)
    return said, done


def test_waiting_is_told_with_the_process_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, done = wait_while(tmp_path, monkeypatch, {"turns": 1, "has_ended": True, "request": "mine"})
    assert said[0].startswith("waiting for pid 4321 on node7 to download (a.bin: 1.0 MB of 8.0 MB)") and done == []


@pytest.mark.parametrize(
    "note",
    [
        {"turns": 1, "has_ended": False, "request": "mine"},  # killed, after a turn of another process
        {"turns": 0, "has_ended": True, "request": "mine"},  # ended before we came
        {"turns": 1, "has_ended": True, "request": "another"},
        {"turns": 1, "has_ended": True, "request": "another", "error": ["DataError", "no"]},
        {"turns": "1", "has_ended": True, "request": "mine"},
    ],
)
def test_only_a_turn_for_the_same_that_ended_while_one_waited_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: dict[str, Any]
) -> None:
    assert wait_while(tmp_path, monkeypatch, note)[1] == ["worked"]


@pytest.mark.parametrize("kind", [DataError, ConfigError])
def test_an_error_met_while_one_waited_is_raised_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match="^no$"):
        wait_while(tmp_path, monkeypatch, {"turns": 1, "has_ended": True, "request": "mine", "error": [kind.__name__, "no"]})


def _download(rank: int, manifest: str, target: str) -> str:
    return Downloader(retries=0).download(manifest, target)


def _fail_to_download(rank: int, manifest: str, target: str) -> str:
    return raised(lambda: Downloader(retries=0).download(manifest, target))


def test_ranks_of_a_run_share_one_download_and_one_error(server: Server, tmp_path: Path) -> None:
    manifest = server.publish(a_bin=DATA)
    assert run_ranks(_download, 2, manifest, str(tmp_path)) == [str(tmp_path)] * 2
    assert server.count("a.bin") == 1
    server.files["/a.bin"] = DATA[:-1] + bytes([DATA[-1] ^ 1])
    messages = run_ranks(_fail_to_download, 2, manifest, str(tmp_path / "other"))
    assert messages[0] == messages[1] and "sent other bytes than the manifest promises" in messages[0]
    assert snapshot(tmp_path) == {"a.bin": DATA, "other": None}
