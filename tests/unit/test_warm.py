"""The launcher's side of restarts that fork: what ranks must agree on, and a forked rank's end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleetx.dist.notes import NOTE_KEY
from fleetx.launch.warm import ForkedRank, Forker, agree_on_imports, shared_environment
from fleetx.launch.worker import NOTED, ImportNotes


def note(*imports: str, path: tuple[str, ...] = ("/job",), **environment: str | None) -> dict[str, Any]:
    return {"imports": list(imports), "path": list(path), "environment": environment}


def test_what_all_ranks_import_is_imported_before_the_fork() -> None:
    notes = [note("torch", "fleetx", "torch._dynamo", OMP_NUM_THREADS="4"), note("torch", "torch._dynamo", OMP_NUM_THREADS="4")]
    agreed = agree_on_imports(notes)
    assert agreed is not None
    assert agreed.names == ("torch", "torch._dynamo") and agreed.environment == {"OMP_NUM_THREADS": "4"}


@pytest.mark.parametrize(
    "notes",
    [
        [],
        [note("torch"), None],
        [note("torch", MKL_NUM_THREADS="1"), note("torch", MKL_NUM_THREADS="2")],
        [note("torch", TORCH_LOGS=None), note("torch")],
        [note("torch", path=("/job",)), note("torch", path=("/job", "/other"))],
    ],
)
def test_ranks_that_differ_or_have_not_imported_are_not_forked(notes: list[dict[str, Any] | None]) -> None:
    assert agree_on_imports(notes) is None


def test_each_rank_may_choose_its_gpu_before_it_imports_torch() -> None:
    agreed = agree_on_imports([note("torch", CUDA_VISIBLE_DEVICES=str(rank)) for rank in range(2)])
    assert agreed is not None and agreed.environment == {}


def test_imports_see_the_variables_that_ranks_share_but_no_key_and_no_file_of_an_attempt() -> None:
    common = {"OMP_NUM_THREADS": "1", NOTE_KEY: "k", "FLEETX_PROGRESS_FILE": "/p", "FLEETX_FAILURE_FILE": "/f"}
    ranks = [{**common, "RANK": str(rank)} for rank in range(2)]
    assert shared_environment(ranks) == {"OMP_NUM_THREADS": "1"}
    assert NOTE_KEY not in shared_environment(ranks[:1])


def test_a_note_holds_what_the_script_had_set_when_it_imported_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOVED", "1")
    notes = ImportNotes(str(tmp_path / "note"), NOTED)
    monkeypatch.delenv("REMOVED")
    monkeypatch.setenv("ADDED", "2")
    notes.find_spec("json")
    notes.find_spec("fleetx")  # reads no variable
    monkeypatch.setenv("ADDED_TOO", "3")
    assert not (tmp_path / "note").exists()
    notes.find_spec("torch")
    monkeypatch.setenv("TOO_LATE", "4")
    notes.find_spec("torch._dynamo")
    noted = json.loads((tmp_path / "note").read_text())
    assert noted["imports"] == ["fleetx", "torch", "torch._dynamo"] and noted["path"] == sys.path
    assert noted["environment"] == {"REMOVED": None, "ADDED": "2", "ADDED_TOO": "3"}


@pytest.mark.parametrize(("ending", "code"), [(lambda: os._exit(7), 7), (signal.pause, -signal.SIGTERM)])
def test_a_forked_rank_ends_with_the_code_of_a_process(ending: Any, code: int) -> None:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ending()
    rank = ForkedRank(pid)
    if code < 0:
        assert rank.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.0)
        rank.send_signal(signal.SIGTERM)
    assert rank.wait(60.0) == code == rank.poll()
    rank.send_signal(signal.SIGKILL)  # it has ended: no other process with its id is meant


def test_without_a_process_a_start_says_why_and_leaves_it_to_exec() -> None:
    said: list[str] = []
    forker = Forker([sys.executable, "-c", ""], said.append, is_wanted=True)
    forker.begin_attempt({0: {}})
    assert forker.fork() is None and said == ["the ranks import torch again, without the warm process: there is none"]
    assert Forker([], said.append, is_wanted=False).fork() is None and len(said) == 1
