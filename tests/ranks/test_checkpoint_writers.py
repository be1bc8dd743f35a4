"""Two runs and one folder of checkpoints, a full disk, and a reader that is overtaken: real processes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from fleetx import fleet
from fleetx.checkpoint import folder as folder_module
from fleetx.checkpoint import save as save_module
from fleetx.checkpoint import snapshot, writer
from fleetx.checkpoint.folder import newest_first
from fleetx.errors import CheckpointError, ConfigError, FleetWarning
from tests.helpers.forked import CONTEXT, start_process
from tests.helpers.harness import raised, run_ranks

TIME_LIMIT_S = 60.0
FULL = "[Errno 28] No space left on device"


def _other_run(folder: str, run: str, pipe: Connection) -> None:
    """Save once, say so, and stay until told to end."""
    os.environ[writer.RUN_ID] = run
    os.environ["FLEETX_DEVICE"] = "cpu"
    pipe.send(raised(lambda: fleet.save_checkpoint(folder, step=1, number=1)))
    pipe.recv()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[tuple[Any, Connection]]:
    """A process of the run `theirs` that has saved into the folder and lives on."""
    mine, theirs = CONTEXT.Pipe()
    process = start_process(_other_run, str(tmp_path), "theirs", theirs)
    assert mine.poll(TIME_LIMIT_S) and mine.recv() == "nothing raised"
    yield process, mine
    process.kill()
    process.join()


# --- one writer ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_a_second_run_is_refused_by_the_name_of_the_first_and_leaves_its_save_alone(tmp_path: Path, other: Any) -> None:
    under_way = tmp_path / f".saving-2-{'0' * 32}"
    under_way.mkdir()
    with pytest.raises(CheckpointError) as refused:
        fleet.save_checkpoint(tmp_path, step=5, number=5)
    assert f"is being written by another run: run theirs (process {other[0].pid} on " in str(refused.value)
    assert under_way.is_dir() and newest_first(tmp_path) == ["step-0000000001"]
    loaded = fleet.load_checkpoint(tmp_path, number=None)
    assert loaded is not None and loaded.step == 1, "reading is free"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("end", [signal.SIGKILL, None], ids=["killed", "ended"])
def test_the_folder_is_free_once_the_first_has_ended(end: signal.Signals | None, tmp_path: Path, other: Any) -> None:
    process, pipe = other
    if end is None:
        pipe.send("end")
    else:
        os.kill(process.pid, end)
    process.join(TIME_LIMIT_S)
    fleet.save_checkpoint(tmp_path, step=5, number=5)
    assert newest_first(tmp_path) == ["step-0000000005", "step-0000000001"]


@pytest.mark.usefixtures("alone")
def test_a_restarted_run_waits_for_its_own_last_process_to_end(
    tmp_path: Path, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(writer.RUN_ID, "theirs")
    threading.Timer(0.5, other[0].kill).start()
    fleet.save_checkpoint(tmp_path, step=5, number=5)
    assert newest_first(tmp_path)[0] == "step-0000000005"


def _foreign_writer(folder: Path, silent_seconds: float) -> Path:
    """What a run on another machine has left, last touched so long ago."""
    who = {"run": "afar", "host": "n\x1b[2J7", "machine": "other", "pid": 1, "since": "2026-01-01 00:00:00"}
    (folder / ".writer").write_text(json.dumps(who))
    touched = time.time() - silent_seconds
    os.utime(folder / ".writer", (touched, touched))
    return folder / ".writer"


@pytest.mark.usefixtures("alone")
def test_a_run_on_another_machine_that_is_silent_has_ended(tmp_path: Path) -> None:
    _foreign_writer(tmp_path, silent_seconds=1000)
    fleet.save_checkpoint(tmp_path, step=5, number=5)
    assert json.loads((tmp_path / ".writer").read_text())["pid"] == os.getpid()


@pytest.mark.usefixtures("alone")
def test_a_run_on_another_machine_that_is_heard_of_is_not_disturbed(tmp_path: Path) -> None:
    path = _foreign_writer(tmp_path, silent_seconds=1)
    threading.Timer(0.5, lambda: os.utime(path)).start()
    with pytest.raises(CheckpointError, match=r"run afar \(process 1 on n\\x1b\[2J7, since") as refused:
        fleet.save_checkpoint(tmp_path, step=5, number=5)
    assert "\x1b" not in str(refused.value)


@pytest.mark.usefixtures("alone")
def test_a_run_whose_folder_was_taken_over_does_not_put_its_save_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held up for an hour, as on a suspended machine: meanwhile another run has taken the folder."""
    fleet.save_checkpoint(tmp_path, step=1, number=1)

    def taken_over(path: Path) -> save_module.FileRecord:
        (tmp_path / ".writer").unlink(missing_ok=True)
        (tmp_path / ".writer").write_text("{}")
        return original(path)

    original = save_module.record_of
    monkeypatch.setattr(save_module, "record_of", taken_over)
    with pytest.raises(CheckpointError, match="was taken by another run while this one was saving"):
        fleet.save_checkpoint(tmp_path, step=2, number=2)
    assert newest_first(tmp_path) == ["step-0000000001"]


@pytest.mark.usefixtures("alone")
def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / ".writer").symlink_to(tmp_path / "victim")
    with pytest.raises(CheckpointError, match="rank 0 could not write"):
        fleet.save_checkpoint(tmp_path / "runs", step=1, number=1)
    assert (tmp_path / "victim").read_text() == "precious"


def _start_twice(rank: int, folder: str, times: int) -> list[str]:
    """Each rank is a run of its own, as a job that is queued twice."""
    told = []
    for number in range(times):
        os.environ[writer.RUN_ID] = f"run{rank}"
        fleet.barrier_worker()
        path = Path(folder) / str(number)
        try:
            path.mkdir(exist_ok=True)
            writer.become_writer(path)
            told.append("writes")
        except CheckpointError as error:
            told.append(str(error))
        fleet.barrier_worker()
        writer.release_all()
    os.environ.pop(writer.RUN_ID, None)
    return told


@pytest.mark.parametrize("times", [5, pytest.param(50, marks=pytest.mark.campaign)])
def test_of_two_starts_at_once_one_writes_and_the_other_is_refused(times: int, tmp_path: Path) -> None:
    for pair in zip(*run_ranks(_start_twice, 2, str(tmp_path), times), strict=True):
        assert sorted(told == "writes" for told in pair) == [False, True], pair
        assert "is being written by another run" in "".join(pair)


def _signs_late(path: str, pipe: Connection) -> None:
    """Lock the file, and write its name only when told."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.lockf(handle, fcntl.LOCK_EX)
    pipe.send("locked")
    pipe.recv()
    writer._sign(handle, replace(writer.this_writer(), run="late"))
    pipe.send("signed")
    pipe.recv()


@pytest.mark.usefixtures("alone")
def test_a_run_that_has_locked_the_folder_and_not_signed_yet_is_named_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = CONTEXT.Pipe()
    process = start_process(_signs_late, str(tmp_path / writer.NAME), theirs)
    assert mine.poll(TIME_LIMIT_S) and mine.recv() == "locked"

    def let_it_sign(seconds: float) -> None:
        mine.send("sign")
        assert mine.poll(TIME_LIMIT_S) and mine.recv() == "signed"

    monkeypatch.setattr(writer.time, "sleep", let_it_sign)
    with pytest.raises(CheckpointError, match="is being written by another run: run late "):
        writer.become_writer(tmp_path)
    process.kill()
    process.join()


def _a_whole_run(folder: str, run: str, pipe: Connection) -> None:
    """Save three times, as soon as told, and keep the last two; then stay until told to end."""
    os.environ[writer.RUN_ID] = run
    os.environ["FLEETX_DEVICE"] = "cpu"
    torch.manual_seed(1)
    numbers = torch.randn(20_000)
    pipe.send("ready")
    pipe.recv()

    def save_all() -> None:
        for step in range(1, 4):
            fleet.save_checkpoint(folder, step=step, keep=2, numbers=numbers + step)

    pipe.send(raised(save_all))
    pipe.recv()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("times", [2, pytest.param(50, marks=pytest.mark.campaign)])
def test_of_two_runs_started_at_once_one_is_refused_and_all_saves_of_the_other_are_there(times: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    numbers = torch.randn(20_000)
    for number in range(times):
        folder, pipes, processes = tmp_path / str(number), [], []
        for run in ("first", "second"):
            mine, theirs = CONTEXT.Pipe()
            processes.append(start_process(_a_whole_run, str(folder), run, theirs))
            pipes.append(mine)
        for word in ("ready", None):
            told = [pipe.recv() for pipe in pipes if pipe.poll(TIME_LIMIT_S)]
            if word is not None:
                assert told == [word, word]
                for pipe in pipes:
                    pipe.send("begin")
        assert sorted(words == "nothing raised" for words in told) == [False, True], told
        refusal = next(words for words in told if words != "nothing raised")
        assert "is being written by another run: run " in refusal
        assert newest_first(folder) == ["step-0000000003", "step-0000000002"]
        found = fleet.load_checkpoint(folder, numbers=None)
        assert found is not None and found.step == 3 and torch.equal(found.values["numbers"], numbers + 3)
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send("end")
            process.join(TIME_LIMIT_S)
        assert not list(folder.glob(".saving-*")), "nothing of the other run"


# --- a full disk --------------------------------------------------------------------------------------------------------


def _with_little_room(monkeypatch: pytest.MonkeyPatch, directory: Path, *, room: int) -> None:
    """A disk on which so many complete checkpoints fit, and no part of another."""
    original = folder_module.write_tensors

    def write(path: Path, *args: Any, **more: Any) -> None:
        if len(newest_first(directory)) >= room:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path, *args, **more)

    monkeypatch.setattr(folder_module, "write_tensors", write)


@pytest.mark.usefixtures("alone")
def test_a_full_disk_is_answered_by_deleting_what_the_save_would_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        fleet.save_checkpoint(tmp_path, step=step, number=step)
    _with_little_room(monkeypatch, tmp_path, room=3)
    fleet.save_checkpoint(tmp_path, step=4, keep=3, number=4)
    assert newest_first(tmp_path) == [f"step-{step:010d}" for step in (4, 3, 2)]


@pytest.mark.usefixtures("alone")
def test_a_full_disk_never_costs_the_only_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.save_checkpoint(tmp_path, step=1, number=1)
    _with_little_room(monkeypatch, tmp_path, room=1)
    with pytest.raises(CheckpointError, match="No space left"):
        fleet.save_checkpoint(tmp_path, step=2, keep=1, number=2)
    assert [name for name in os.listdir(tmp_path) if name != ".writer"] == ["step-0000000001"]


@pytest.mark.usefixtures("alone")
def test_room_that_can_be_foreseen_to_lack_is_made_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        fleet.save_checkpoint(tmp_path, step=step, number=torch.zeros(40_000))
    real = shutil.disk_usage(tmp_path)
    free = {"total": 600_000}  # three checkpoints of 160 kB, and another needs 230 kB to begin with
    monkeypatch.setattr(
        save_module.shutil,
        "disk_usage",
        lambda path: real._replace(free=free["total"] - 160_000 * len(newest_first(tmp_path))),
    )
    with pytest.raises(CheckpointError, match="no room .* Nothing was written; the checkpoints that are there are untouched"):
        fleet.save_checkpoint(tmp_path, step=4, keep=3, number=torch.zeros(400_000))
    assert len(newest_first(tmp_path)) == 3
    fleet.save_checkpoint(tmp_path, step=4, keep=3, number=torch.zeros(40_000))
    assert newest_first(tmp_path) == [f"step-{step:010d}" for step in (4, 3, 2)]


def _save_on_a_full_disk(rank: int, folder: str, in_background: bool, on_save_error: str) -> Any:
    def fail(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    original = save_module.record_of
    if rank == 1:
        save_module.record_of = fail  # type: ignore[assignment]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FleetWarning)
            saving = fleet.save_checkpoint(folder, step=1, async_save=in_background, on_save_error=on_save_error, number=rank)
            told = raised(saving.wait)
            save_module.record_of = original
            later = fleet.save_checkpoint(folder, step=2, on_save_error=on_save_error, number=rank).wait().name
        return told, str(saving.error), [str(one.message) for one in caught], later
    finally:
        save_module.record_of = original


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "async"])
def test_a_run_may_go_on_without_a_checkpoint(in_background: bool, tmp_path: Path) -> None:
    error = f"rank 1 could not write: {FULL}"
    warning = f"a checkpoint was not saved: {error} Training goes on without it."
    ranks = run_ranks(_save_on_a_full_disk, 2, str(tmp_path), in_background, "warn")
    for rank, (told, kept, warned, later) in enumerate(ranks):
        assert kept == error and later == "step-0000000002"
        assert told.startswith("CheckpointError: ")
        assert warned == ([warning] if rank == 0 and not in_background else [])


def _passing_failure(rank: int, folder: str, failures: int) -> Any:
    original, left = save_module.record_of, [failures]

    def fail(path: Path) -> Any:
        if rank == 1 and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return original(path)

    save_module.record_of = fail
    save_module.RETRY_SECONDS, before = (0.01, 0.01), save_module.RETRY_SECONDS
    try:
        return raised(lambda: fleet.save_checkpoint(folder, step=1, number=rank))
    finally:
        save_module.record_of, save_module.RETRY_SECONDS = original, before


@pytest.mark.parametrize(("failures", "told"), [(2, "nothing raised"), (3, "CheckpointError: rank 1 could not write: [Errno 5]")])
def test_storage_that_comes_back_is_tried_again(failures: int, told: str, tmp_path: Path) -> None:
    assert all(one.startswith(told) for one in run_ranks(_passing_failure, 2, str(tmp_path), failures))
    assert newest_first(tmp_path) == (["step-0000000001"] if failures == 2 else [])


@pytest.mark.usefixtures("alone")
def test_another_value_of_on_save_error_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='on_save_error is \'ignore\'; it must be "raise" or "warn"'):
        fleet.save_checkpoint(tmp_path, step=1, on_save_error="ignore", number=1)


# --- written by all, read once per node ---------------------------------------------------------------------------------


def _save_large(rank: int, folder: str) -> Any:
    from fleetx.checkpoint import load as load_module

    snapshot.SHARD_BYTES, before = 2**10, snapshot.SHARD_BYTES
    verified: list[str] = []
    original = load_module.verify

    def verify(path: Path, manifest: Any, name: str) -> None:
        verified.append(name)
        original(path, manifest, name)

    load_module.verify = verify
    try:
        torch.manual_seed(1)
        state = {f"t{number}": torch.randn(5000 + number) for number in range(12)}
        fleet.save_checkpoint(folder, step=1, tensors={**state, "mine": torch.full((3,), float(rank))})
        loaded = fleet.load_checkpoint(folder, tensors=None)
    finally:
        snapshot.SHARD_BYTES, load_module.verify = before, original
    assert loaded is not None
    found = loaded.values["tensors"]
    return all(torch.equal(found[key], value) for key, value in state.items()), found["mine"].tolist(), verified


def test_common_state_is_written_by_all_ranks_and_hashed_once_on_a_node(tmp_path: Path) -> None:
    ranks = run_ranks(_save_large, 3, str(tmp_path))
    assert [(same, mine) for same, mine, _ in ranks] == [(True, [float(rank)] * 3) for rank in range(3)]
    path = tmp_path / "step-0000000001"
    names = [f"common{shard}.safetensors" for shard in ("", "-00001", "-00002")]
    sizes = [(path / name).stat().st_size for name in names]
    assert max(sizes) < 2 * min(sizes)
    hashed = sorted(name for *_, verified in ranks for name in verified if name.startswith("common"))
    assert hashed == sorted(path.name for path in path.iterdir() if path.name.startswith("common")), "each once"


def _damaged_part(rank: int, folder: str) -> str:
    return raised(lambda: fleet.load_checkpoint(folder, tensors=None))


def test_a_damaged_part_is_found_by_one_rank_and_refused_by_all(tmp_path: Path) -> None:
    run_ranks(_save_large, 3, str(tmp_path))
    with open(tmp_path / "step-0000000001" / "common-00002.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    for told in run_ranks(_damaged_part, 3, str(tmp_path)):
        assert "common-00002.safetensors is damaged: its checksum does not match" in told


def _load_on_two(rank: int, folder: str) -> Any:
    loaded = fleet.load_checkpoint(folder, new_world_size=True, number=None)
    return None if loaded is None else loaded.values["number"]["a"].sum().item()


def _save_equal_large(rank: int, folder: str) -> None:
    snapshot.SHARD_BYTES, before = 2**10, snapshot.SHARD_BYTES
    try:
        fleet.save_checkpoint(folder, step=1, number={"a": torch.ones(500), "b": torch.ones(500)})
    finally:
        snapshot.SHARD_BYTES = before


def test_parts_of_three_ranks_are_loaded_by_two(tmp_path: Path) -> None:
    run_ranks(_save_equal_large, 3, str(tmp_path))
    assert run_ranks(_load_on_two, 2, str(tmp_path)) == [500.0, 500.0]


# --- a reader that is overtaken -----------------------------------------------------------------------------------------


def _writes_on(folder: str, pipe: Connection) -> None:
    os.environ["FLEETX_DEVICE"] = "cpu"
    step = 1
    while not pipe.poll():
        fleet.save_checkpoint(folder, step=step, keep=1, number=step, tensor=torch.full((1000,), float(step)))
        if step == 1:
            pipe.send("begun")
        step += 1


@pytest.mark.usefixtures("alone")
def test_a_reader_beside_a_writer_that_keeps_one_always_finds_a_whole_checkpoint(tmp_path: Path) -> None:
    mine, theirs = CONTEXT.Pipe()
    process = start_process(_writes_on, str(tmp_path), theirs)
    try:
        assert mine.poll(TIME_LIMIT_S) and mine.recv() == "begun"
        for _ in range(30):
            loaded = fleet.load_checkpoint(tmp_path, number=None, tensor=None)
            assert loaded is not None and loaded.values["tensor"].unique().tolist() == [loaded.step]
    finally:
        process.kill()
        process.join()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("moment", ["while it is verified", "before it is opened"])
def test_a_checkpoint_deleted_under_the_reader_is_replaced_by_the_one_that_came(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fleetx.checkpoint import load as load_module

    fleet.save_checkpoint(tmp_path, step=1, number=1)
    original = load_module.read_manifest
    calls = []

    def overtaken(path: Path) -> Any:
        calls.append(path)
        if len(calls) == (1 if moment == "while it is verified" else 2):
            fleet.save_checkpoint(tmp_path, step=2, keep=1, number=2)
        return original(path)

    monkeypatch.setattr(load_module, "read_manifest", overtaken)
    loaded = fleet.load_checkpoint(tmp_path, number=None)
    assert loaded is not None and (loaded.step, loaded.values["number"]) == (2, 2)
