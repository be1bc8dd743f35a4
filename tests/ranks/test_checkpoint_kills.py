"""A save that is killed, or that finds the disk full: what was complete before is complete afterwards."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from fleetx import fleet
from fleetx.checkpoint import save as save_module
from fleetx.checkpoint.folder import newest_first
from fleetx.checkpoint.hashes import read_manifest, verify
from tests.helpers.forked import CONTEXT, start_process
from tests.helpers.harness import raised, run_ranks

TIME_LIMIT_S = 60.0
FEW, MANY = 5, 100
EVERY_LINE, SOME_LINES = 2, 37
WRITERS = ("checkpoint/save.py", "checkpoint/writer.py", "checkpoint/folder.py", "checkpoint/hashes.py", "shutil.py")


class Script:
    """A model and an optimizer whose every number is the step it was saved at."""

    def __init__(self) -> None:
        self.model = nn.Linear(40, 40)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    @torch.no_grad()
    def be_at(self, step: int) -> None:
        for param in self.model.parameters():
            param.fill_(step)
            self.optimizer.state[param]["momentum_buffer"] = torch.full_like(param, step)

    def numbers(self) -> set[float]:
        momenta = [self.optimizer.state[p]["momentum_buffer"] for p in self.model.parameters()]
        return {number for tensor in (*self.model.parameters(), *momenta) for number in tensor.flatten().tolist()}


def step_loaded(folder: str | Path) -> int:
    """The step that loads; all its numbers must be of that step."""
    script = Script()
    loaded = fleet.load_checkpoint(folder, number=None, **script.objects())
    assert loaded is not None
    assert script.numbers() == {loaded.step} and loaded.values == {"number": loaded.step}
    return loaded.step


def assert_all_are_whole(folder: Path) -> None:
    """Also those that were about to be deleted: what looks like a checkpoint is one."""
    for name in newest_first(folder):
        manifest = read_manifest(folder / name)
        for file in manifest.files:
            verify(folder / name, manifest, file)


def leftovers(folder: str | Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith(".") and name != ".writer")


# --- killed -------------------------------------------------------------------------------------------------------------


def _save_for_ever(pipe: Connection, folder: str, first: int, die_at_line: int | None) -> None:
    """Say the step of every complete save. With a line, die by SIGKILL before that line of the third save is run."""
    torch.set_num_threads(1)
    fleet.init()
    script, step = Script(), first
    while True:
        script.be_at(step)
        traced = die_at_line is not None and step == first + 2  # the first save that also deletes an old one
        if traced and die_at_line is not None:
            sys.settrace(_killer(die_at_line))
        fleet.save_checkpoint(folder, step=step, keep=2, number=step, **script.objects())
        if traced:
            sys.settrace(None)
            pipe.send(None)  # it has fewer lines
            return
        pipe.send(step)
        step += 1


def _killer(line: int) -> Any:
    """A trace function that counts the lines of what writes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(WRITERS):
            return None
        if event == "line":
            count += 1
            if count == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def _victim(folder: Path, first: int, die_at_line: int | None = None) -> tuple[Any, Connection]:
    mine, theirs = CONTEXT.Pipe(duplex=False)
    process = start_process(_save_for_ever, theirs, str(folder), first, die_at_line)
    theirs.close()
    return process, mine


def _last_told(pipe: Connection, *, until: float | None = None) -> int | None:
    """The last step in the pipe: wait for one, or look for so many seconds."""
    last = None
    while pipe.poll(TIME_LIMIT_S if until is None else until):
        try:
            last = pipe.recv()
        except EOFError:
            break
        if until is None:
            break
    return last


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kills", [FEW, pytest.param(MANY, marks=pytest.mark.campaign)])
def test_after_a_kill_in_any_random_instant_the_last_complete_checkpoint_loads(kills: int, tmp_path: Path) -> None:
    chance, first, in_a_save = random.Random(3), 1, 0
    for _ in range(kills):
        process, pipe = _victim(tmp_path, first)
        complete = _last_told(pipe)
        assert complete == first
        process.join(chance.uniform(0, 0.02))  # it never ends by itself: it saves on, and is killed in the middle
        process.kill()
        process.join(TIME_LIMIT_S)
        complete = _last_told(pipe, until=0.0) or complete
        found = step_loaded(tmp_path)
        assert found in (complete, complete + 1)  # complete, but killed before it could say so
        assert_all_are_whole(tmp_path)
        in_a_save += bool(leftovers(tmp_path))
        assert len([name for name in os.listdir(tmp_path) if name.startswith("step-")]) <= 3
        first = found + 1
    assert kills < MANY or in_a_save > kills / 4, "most of these kills were not in a save: they show nothing"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("lines_apart", [SOME_LINES, pytest.param(EVERY_LINE, marks=pytest.mark.campaign)])
def test_after_a_kill_before_a_line_of_a_save_the_last_complete_checkpoint_loads(lines_apart: int, tmp_path: Path) -> None:
    line, seen = 1, set()
    while True:
        folder = tmp_path / str(line)
        process, pipe = _victim(folder, 1, die_at_line=line)
        assert (_last_told(pipe), _last_told(pipe)) == (1, 2)
        process.join(TIME_LIMIT_S)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        assert_all_are_whole(folder)
        seen.add(step_loaded(folder))
        _assert_the_next_save_clears(folder)
        line += lines_apart
    assert seen == {2, 3}, "the rename lies between the first line and the last"


def _assert_the_next_save_clears(folder: Path) -> None:
    script = Script()
    script.be_at(4)
    fleet.save_checkpoint(folder, step=4, keep=2, number=4, **script.objects())
    assert leftovers(folder) == []
    assert step_loaded(folder) == 4


@pytest.mark.usefixtures("alone")
def test_leftovers_of_killed_saves_and_deletions_are_cleared_and_nothing_else(tmp_path: Path) -> None:
    for name in (".saving-7-" + "0f" * 16, ".removing-6-" + "0f" * 16, ".mine", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    fleet.save_checkpoint(tmp_path, step=8, number=8)
    assert sorted(os.listdir(tmp_path)) == [".mine", ".writer", "notes", "step-0000000008"]


# --- no room ------------------------------------------------------------------------------------------------------------

ROOM_BYTES = 2**20
BIG_NUMBERS = 50_000
"""200 kB of float32: of four such checkpoints a megabyte holds the first, of ten such tensors none."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one megabyte."""
    where = tmp_path / "disk"
    where.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a file system of one megabyte needs root")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES}", "tmpfs", str(where)], capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {made.stderr.decode().strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


def _value(rank: int, step: int, count: int = BIG_NUMBERS) -> torch.Tensor:
    """Different on each rank, so that each writes its own."""
    return torch.full((count,), float(step + rank / 2))


def _save_too_much(rank: int, folder: str, in_background: bool) -> tuple[str, str]:
    fleet.save_checkpoint(folder, step=1, big=_value(rank, 1))
    many = _value(rank, 2, 10 * BIG_NUMBERS)
    return raised(lambda: fleet.save_checkpoint(folder, step=2, async_save=in_background, big=many).wait()), _loaded(rank, folder)


def _save_into_a_filling_disk(rank: int, folder: str, in_background: bool) -> tuple[str, list[str], str, str]:
    """Past the look for room, as when another process fills the disk meanwhile."""
    fleet.save_checkpoint(folder, step=1, big=_value(rank, 1))
    prepare = save_module._prepare

    def and_then_fill(directory: Path, step: int, needed_bytes: int, keep: int) -> str:
        name = prepare(directory, step, needed_bytes, keep)
        (directory / "filler").write_bytes(bytes(shutil.disk_usage(directory).free - 250_000))
        return name

    save_module._prepare = and_then_fill
    try:
        told = raised(lambda: fleet.save_checkpoint(folder, step=2, async_save=in_background, big=_value(rank, 2)).wait())
    finally:
        save_module._prepare = prepare
    fleet.barrier_worker()
    left, loaded = leftovers(folder), _loaded(rank, folder)
    fleet.barrier_worker()
    if rank == 0:
        (Path(folder) / "filler").unlink()
    fleet.barrier_worker()
    fleet.save_checkpoint(folder, step=3, keep=1, async_save=in_background, big=_value(rank, 3)).wait()
    return told, left, loaded, _loaded(rank, folder)


def _loaded(rank: int, folder: str) -> str:
    loaded = fleet.load_checkpoint(folder, big=None)
    assert loaded is not None
    whole = torch.equal(loaded.values["big"], _value(rank, loaded.step))
    return f"step {loaded.step} {'whole' if whole else 'wrong'}"


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "async"])
def test_a_checkpoint_that_is_too_large_is_refused_with_the_bytes_needed_and_free(small_disk: Path, in_background: bool) -> None:
    for told, loaded in run_ranks(_save_too_much, 2, str(small_disk), in_background):
        # 3.81 MiB of values, and a description of this machine that differs by some KiB from one to another.
        assert re.match(r"CheckpointError: no room for the checkpoint: it needs 3\.[89]\d? MiB, ", told)
        assert f"{small_disk} has " in told
        assert "Nothing was written; the checkpoints that are there are untouched" in told
        assert loaded == "step 1 whole"
    assert leftovers(small_disk) == []


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "async"])
def test_a_disk_that_fills_while_writing_costs_only_that_checkpoint(small_disk: Path, in_background: bool) -> None:
    for told, left, before, after in run_ranks(_save_into_a_filling_disk, 2, str(small_disk), in_background):
        assert told.startswith("CheckpointError: ") and "could not write: " in told and "No space left on device" in told
        assert left == []
        assert (before, after) == ("step 1 whole", "step 3 whole")


def _fill_before_the_manifest(rank: int, folder: str) -> tuple[str, list[str], str]:
    fleet.save_checkpoint(folder, step=1, big=_value(rank, 1))
    commit = save_module._commit

    def fill_and_commit(aside: Path, directory: Path, *args: Any, **options: Any) -> str:
        with (directory / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)) == 4096:
                if shutil.disk_usage(directory).free == 0:
                    break
        return commit(aside, directory, *args, **options)

    save_module._commit = fill_and_commit
    try:
        told = raised(lambda: fleet.save_checkpoint(folder, step=2, big=_value(rank, 2)))
    finally:
        save_module._commit = commit
    fleet.barrier_worker()
    return told, leftovers(folder), _loaded(rank, folder)


def test_no_room_for_the_manifest_leaves_nothing_behind(small_disk: Path) -> None:
    for told, left, loaded in run_ranks(_fill_before_the_manifest, 2, str(small_disk)):
        assert told.startswith("CheckpointError: rank 0 could not write: [Errno 28] No space left on device")
        assert (left, loaded) == ([], "step 1 whole")
