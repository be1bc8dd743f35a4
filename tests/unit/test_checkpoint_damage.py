"""A checkpoint is loaded only if every byte is right. Anything else is refused by the file's name, and the one before is used."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.checkpoint.load import find
from fleetx.dist import world
from fleetx.errors import CheckpointError, FleetWarning

pytestmark = pytest.mark.usefixtures("alone")
MANIFEST = "MANIFEST.json"
FILES = ("MANIFEST.json", "common.json", "common.safetensors")
PREVIOUS, NEWEST = 10, 20


class Script:
    """What a small training script holds, with numbers that tell the step they were saved at."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 30])

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    @torch.no_grad()
    def be_at(self, step: int) -> None:
        for param in self.model.parameters():
            param.fill_(step)
            self.optimizer.state[param]["momentum_buffer"] = torch.full_like(param, -step)
        self.optimizer.param_groups[0]["lr"] = 1 / step
        self.scheduler.last_epoch = step
        torch.manual_seed(step)
        random.seed(step)

    def numbers(self) -> list[Any]:
        momenta = [self.optimizer.state[p]["momentum_buffer"] for p in self.model.parameters()]
        tensors: list[Tensor] = [*self.model.parameters(), *momenta]
        return [*(t.tolist() for t in tensors), self.optimizer.param_groups[0]["lr"], self.scheduler.last_epoch]


def numbers_at(step: int) -> list[Any]:
    matrix, row = [[float(step)] * 3] * 2, [float(step)] * 2
    return [matrix, row, [[-float(step)] * 3] * 2, [-float(step)] * 2, 1 / step, step]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints, of a few kB each."""
    script = Script()
    for step in (PREVIOUS, NEWEST):
        script.be_at(step)
        fleet.save_checkpoint(tmp_path, step=step, best=step / 4, **script.objects())
    assert sorted(p.name for p in newest(tmp_path).iterdir()) == sorted(FILES)
    return tmp_path


def newest(folder: Path) -> Path:
    return folder / f"step-{NEWEST:010d}"


def previous(folder: Path) -> Path:
    return folder / f"step-{PREVIOUS:010d}"


def load(folder: Path) -> tuple[int, list[Any], Any, str]:
    """The step, the numbers, the value, and what was warned of."""
    script = Script()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", FleetWarning)
        loaded = fleet.load_checkpoint(folder, best=None, **script.objects())
    assert loaded is not None
    return loaded.step, script.numbers(), loaded.values["best"], "; ".join(str(w.message) for w in told)


def assert_refused(folder: Path, file: str) -> str:
    """The newest is refused by the name of this file, and the one before comes back with its very values."""
    step, numbers, best, told = load(folder)
    assert (step, numbers, best) == (PREVIOUS, numbers_at(PREVIOUS), PREVIOUS / 4), told
    assert f"{newest(folder)}: {file} " in told and f"Using {previous(folder)} instead" in told
    return told


def write_manifest(path: Path, **changes: Any) -> None:
    """A manifest that vouches for itself, as one written by hand would be."""
    body = json.loads((path / MANIFEST).read_text())["manifest"] | changes
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (path / MANIFEST).write_text(json.dumps({"manifest": body, "sha256": digest}, indent=1, sort_keys=True) + "\n")


# --- flips and truncations ----------------------------------------------------------------------------------------------


def test_an_undamaged_checkpoint_is_loaded_without_a_word(folder: Path) -> None:
    assert load(folder) == (NEWEST, numbers_at(NEWEST), NEWEST / 4, "")


@pytest.mark.parametrize("flips", [100, pytest.param(2_000, marks=pytest.mark.campaign)])
def test_each_flipped_bit_is_refused_and_the_previous_checkpoint_is_loaded(flips: int, folder: Path) -> None:
    chance, sizes = random.Random(7), {name: (newest(folder) / name).stat().st_size for name in FILES}
    places = [(name, place) for name in FILES for place in range(sizes[name])]
    for name, place in chance.sample(places, flips):
        with open(newest(folder) / name, "r+b", buffering=0) as file:
            (was,) = os.pread(file.fileno(), 1, place)
            os.pwrite(file.fileno(), bytes([was ^ (1 << chance.randrange(8))]), place)
            assert_refused(folder, name)
            os.pwrite(file.fileno(), bytes([was]), place)
    assert load(folder)[0] == NEWEST


def test_every_byte_of_the_manifest_counts(folder: Path) -> None:
    raw = bytearray((newest(folder) / MANIFEST).read_bytes())
    for place in range(len(raw)):
        raw[place] ^= 1
        (newest(folder) / MANIFEST).write_bytes(raw)
        assert_refused(folder, MANIFEST)
        raw[place] ^= 1


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_refused(folder: Path, name: str) -> None:
    shutil.rmtree(previous(folder))  # nothing to fall back to: that is the next test
    path = newest(folder) / name
    for size in reversed(range(path.stat().st_size)):
        os.truncate(path, size)
        assert refusal(folder).startswith(f"no checkpoint in {folder} is whole. {newest(folder)}: {name} "), size
    assert path.stat().st_size == 0


@pytest.mark.parametrize("name", FILES)
def test_after_a_truncation_the_previous_checkpoint_is_loaded(folder: Path, name: str) -> None:
    path = newest(folder) / name
    for size in reversed(range(0, path.stat().st_size, 40)):
        os.truncate(path, size)
        assert_refused(folder, name)


def refusal(folder: Path) -> str:
    """What load_checkpoint says before it looks at the objects."""
    with pytest.raises(CheckpointError) as refused:
        find(folder, world.current().comm)
    return str(refused.value)


def test_a_manifest_that_says_the_same_in_other_bytes_is_refused(folder: Path) -> None:
    text = (newest(folder) / MANIFEST).read_text()
    for other in (text + "\n", text.replace(" ", "\t", 1), json.dumps(json.loads(text))):
        assert json.loads(other) == json.loads(text)
        (newest(folder) / MANIFEST).write_text(other)
        assert_refused(folder, MANIFEST)


@pytest.mark.parametrize("name", FILES)
def test_bytes_added_at_the_end_are_refused(folder: Path, name: str) -> None:
    with (newest(folder) / name).open("ab") as file:
        file.write(b"\0")
    assert_refused(folder, name)


# --- files that are not the right ones ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused(folder: Path, name: str) -> None:
    (newest(folder) / name).unlink()
    assert "cannot be read: No such file" in assert_refused(folder, name)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_checkpoint_is_refused(folder: Path, name: str) -> None:
    shutil.copy(previous(folder) / name, newest(folder) / name)
    step, numbers, *_, told = load(folder)
    assert (step, numbers) == (PREVIOUS, numbers_at(PREVIOUS))
    assert str(newest(folder)) in told


def test_the_manifest_of_another_step_is_refused_even_where_all_files_are_alike(tmp_path: Path) -> None:
    script = Script()
    script.be_at(5)
    for step in (PREVIOUS, NEWEST):
        fleet.save_checkpoint(tmp_path, step=step, best=PREVIOUS / 4, **script.objects())
    assert (newest(tmp_path) / "common.safetensors").read_bytes() == (previous(tmp_path) / "common.safetensors").read_bytes()
    shutil.copy(previous(tmp_path) / MANIFEST, newest(tmp_path) / MANIFEST)
    step, *_, told = load(tmp_path)
    assert step == PREVIOUS and f"{MANIFEST} is of step {PREVIOUS}, which is not that of its folder" in told


def test_a_folder_renamed_to_a_later_step_is_refused(folder: Path) -> None:
    """Otherwise an old checkpoint would go before newer ones, and the run would silently lose what lies between."""
    previous(folder).rename(folder / "step-0000000099")
    step, numbers, _, told = load(folder)
    assert (step, numbers) == (NEWEST, numbers_at(NEWEST))
    assert f"{folder / 'step-0000000099'}: {MANIFEST} is of step {PREVIOUS}" in told


def test_an_extra_file_does_no_harm(folder: Path) -> None:
    (newest(folder) / "notes.txt").write_text("mine")
    (newest(folder) / "rank-00000.json").write_text("not listed, so not read")
    assert load(folder) == (NEWEST, numbers_at(NEWEST), NEWEST / 4, "")


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_the_very_same_bytes_is_refused(folder: Path, name: str) -> None:
    path = newest(folder) / name
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")
    assert "is not a plain file" in assert_refused(folder, name)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", FILES)
def test_a_folder_or_a_pipe_in_place_of_a_file_is_refused(folder: Path, name: str, make: Any) -> None:
    (newest(folder) / name).unlink()
    make(newest(folder) / name)
    assert "is not a plain file" in assert_refused(folder, name)


def test_files_and_folders_of_other_names_are_not_looked_at(folder: Path) -> None:
    for name in ("step-99", "step-00000000x9", "step-0000000099.tmp", ".saving-99-0123", "notes"):
        (folder / name).mkdir()
    (folder / "step-0000000099").write_text("a file, not a folder")
    assert load(folder) == (NEWEST, numbers_at(NEWEST), NEWEST / 4, "")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_may_not_be_read_is_refused(folder: Path, name: str) -> None:
    (newest(folder) / name).chmod(0)
    assert "cannot be read: Permission denied" in assert_refused(folder, name)


# --- manifests written by other programs -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "..", ".", "", "a/../../x"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(folder: Path, name: str) -> None:
    write_manifest(newest(folder), files={name: {"bytes": 1, "sha256": "0" * 64}})
    assert "names a file outside its folder" in assert_refused(folder, MANIFEST)


def test_a_manifest_of_a_later_format_is_refused_with_its_number(folder: Path) -> None:
    write_manifest(newest(folder), format=3)
    assert "has format 3; this version reads formats 1 to 2" in assert_refused(folder, MANIFEST)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "{",
        "7",
        '{"manifest": 1, "sha256": 2}',
        '{"manifest": {"files": []}, "sha256": ""}',
        "[" * 100_000,
        "\udcff",
    ],
    ids=["empty", "null", "list", "object", "half", "number", "wrong types", "no files", "deep", "not utf-8"],
)
def test_a_manifest_that_is_none_is_refused(folder: Path, text: str) -> None:
    (newest(folder) / MANIFEST).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "is not a manifest" in assert_refused(folder, MANIFEST)


@pytest.mark.parametrize("step", [float("inf"), float("nan"), "ten", None, [1]], ids=str)
def test_a_manifest_whose_step_is_no_number_is_refused(folder: Path, step: Any) -> None:
    write_manifest(newest(folder), step=step)
    assert_refused(folder, MANIFEST)


# --- nothing left to use ------------------------------------------------------------------------------------------------


def test_when_all_are_damaged_the_error_names_each_and_nothing_was_changed(folder: Path) -> None:
    """Not None: that would mean a first start, and the run would silently begin again."""
    for path, name in ((newest(folder), "common.json"), (previous(folder), MANIFEST)):
        os.truncate(path / name, 0)
    script = Script()
    script.be_at(3)
    with pytest.raises(CheckpointError) as refused:
        fleet.load_checkpoint(folder, best=None, **script.objects())
    assert f"no checkpoint in {folder} is whole" in str(refused.value)
    assert f"{newest(folder)}: common.json has 0 bytes" in str(refused.value)
    assert f"{previous(folder)}: {MANIFEST} is not a manifest" in str(refused.value)
    assert script.numbers() == numbers_at(3)


def test_a_first_start_gives_none(tmp_path: Path) -> None:
    assert fleet.load_checkpoint(tmp_path, best=None) is None
    assert fleet.load_checkpoint(tmp_path / "not" / "there", best=None) is None


def test_a_file_in_place_of_the_directory_is_an_error_and_no_first_start(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(CheckpointError, match="rank 0 cannot read .*runs: Not a directory"):
        fleet.load_checkpoint(tmp_path / "runs", best=None)
    with pytest.raises(CheckpointError, match="rank 0 could not write: .*File exists: .*runs"):
        fleet.save_checkpoint(tmp_path / "runs", step=1, best=1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_that_may_not_be_read_is_an_error_and_no_first_start(folder: Path) -> None:
    folder.chmod(0)
    try:
        with pytest.raises(CheckpointError, match="cannot read .*: Permission denied"):
            fleet.load_checkpoint(folder, best=None)
        with pytest.raises(CheckpointError, match="Permission denied"):
            fleet.save_checkpoint(folder, step=99, best=1)
    finally:
        folder.chmod(0o700)


# --- what is kept -------------------------------------------------------------------------------------------------------


def saved_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".writer")


def test_a_save_after_falling_back_behind_a_damaged_checkpoint_is_not_the_one_that_is_deleted(folder: Path) -> None:
    os.truncate(newest(folder) / "common.json", 0)
    with pytest.warns(FleetWarning, match="common.json has 0 bytes"), pytest.warns(FleetWarning, match="also holds model"):
        assert fleet.load_checkpoint(folder, best=None) is not None
    for step in (12, 14):
        fleet.save_checkpoint(folder, step=step, keep=1, best=step)
        assert saved_steps(folder) == [f"step-{step:010d}", newest(folder).name]
    with pytest.warns(FleetWarning, match="common.json has 0 bytes"):
        loaded = fleet.load_checkpoint(folder, best=None)
    assert loaded is not None and loaded.values == {"best": 14}


def test_the_last_of_many_saves_of_one_step_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    for number in range(6):
        path = fleet.save_checkpoint(tmp_path, step=7, keep=2, number=number).wait()
        assert path.is_dir()
        loaded = fleet.load_checkpoint(tmp_path, number=None)
        assert loaded is not None and (loaded.step, loaded.values["number"]) == (7, number)
    assert saved_steps(tmp_path) == ["step-0000000007.4", "step-0000000007.5"]


def test_only_the_last_of_many_steps_are_kept(tmp_path: Path) -> None:
    for step in range(8):
        fleet.save_checkpoint(tmp_path, step=step, number=step)
    assert saved_steps(tmp_path) == ["step-0000000005", "step-0000000006", "step-0000000007"]


def test_steps_of_more_than_ten_digits_come_in_their_order(tmp_path: Path) -> None:
    for step in (9_999_999_999, 10_000_000_000, 123_456_789_012_345):
        fleet.save_checkpoint(tmp_path, step=step, keep=2, number=1)
        loaded = fleet.load_checkpoint(tmp_path, number=None)
        assert loaded is not None and loaded.step == step
    assert saved_steps(tmp_path) == ["step-10000000000", "step-123456789012345"]
