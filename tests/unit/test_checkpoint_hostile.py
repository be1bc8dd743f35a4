"""A checkpoint that vouches for itself and was not written by this library: nothing in it is run, nothing is half loaded."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from fleetx import fleet
from fleetx.checkpoint.encode import Encoder, decode
from fleetx.checkpoint.hashes import Damaged, Manifest, read_manifest, record_of
from fleetx.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("alone")
RANDOM = "(random numbers)"


def objects() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first, second = schedulers.StepLR(optimizer, 2), schedulers.ExponentialLR(optimizer, 0.5)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": schedulers.SequentialLR(optimizer, [first, second], [4]),
        "python": random.Random(1),
        "numpy": np.random.default_rng(1),
        "torch_generator": torch.Generator(),
    }


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the states in a checkpoint, and write a manifest with the right hashes."""
    path = folder / "step-0000000001"
    tree = json.loads((path / "common.json").read_text())
    change({name: entry["state"] for name, entry in tree["objects"].items()})
    (path / "common.json").write_text(json.dumps(tree))
    files = {name: record_of(path / name) for name in ("common.json", "common.safetensors")}
    (path / "MANIFEST.json").write_text(Manifest(1, 1, files).to_text())


def python_state(state: dict[str, Any]) -> object:
    return state[RANDOM]["python"]["$tuple"].__setitem__(0, 4)


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a function as a number type": (
        lambda state: state["scheduler"].update(last_epoch={"$dtype": "load"}),
        "names 'load' as a number type of torch",
    ),
    "objects as numbers": (
        lambda state: state["scheduler"].update(last_epoch={"$numpy": ["O", "AAAAAAAAAAA="]}),
        "names 'O' as a number type of NumPy",
    ),
    "a private key": (
        lambda state: state["scheduler"].update(_update_lr=1),
        "`scheduler`: .* of SequentialLR has keys that it does not save: _update_lr",
    ),
    "a private key of an inner scheduler": (
        lambda state: state["scheduler"]["_schedulers"][0].update(_initial_step=1),
        "`scheduler`: .* of StepLR has keys that it does not save: _initial_step",
    ),
    "Python's random numbers": (python_state, "no state of the random number generators that they accept: ValueError"),
    "NumPy's random numbers": (
        lambda state: state[RANDOM]["numpy"]["$tuple"].__setitem__(0, "PCG64"),
        "no state of the random number generators that they accept",
    ),
    "torch's random numbers": (
        lambda state: state[RANDOM].update(torch=[1, 2]),
        "no state of the random number generators that they accept: TypeError",
    ),
    "a generator of Python": (lambda state: state["python"]["$tuple"].clear(), "`python`: .* no state of a generator like this"),
    "a generator of NumPy": (lambda state: state["numpy"].update(bit_generator="MT19937"), "`numpy`: .* no state of a generator"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_state_is_refused_before_anything_is_replaced(case: str, tmp_path: Path) -> None:
    change, message = HOSTILE[case]
    saved = objects()
    fleet.save_checkpoint(tmp_path, step=1, **saved)
    rewrite(tmp_path, change)
    mine = objects()
    with torch.no_grad():
        mine["model"].weight.fill_(7)
    before = copy.deepcopy((mine["model"].state_dict(), mine["scheduler"].state_dict(), mine["python"].getstate()))
    numbers = random.getstate(), torch.get_rng_state().tolist()
    with pytest.raises(CheckpointError, match=message):
        fleet.load_checkpoint(tmp_path, **mine)
    after = (mine["model"].state_dict(), mine["scheduler"].state_dict(), mine["python"].getstate())
    assert repr(after) == repr(before)
    assert (random.getstate(), torch.get_rng_state().tolist()) == numbers


def test_what_is_rewritten_without_a_change_is_loaded(tmp_path: Path) -> None:
    """Otherwise the test above would prove nothing."""
    fleet.save_checkpoint(tmp_path, step=1, **objects())
    rewrite(tmp_path, lambda state: None)
    assert fleet.load_checkpoint(tmp_path, **objects()) is not None


class Lazy(schedulers.StepLR):
    """A user's own, which adds an attribute while it runs."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        self._seen = self.last_epoch


def test_a_scheduler_of_the_users_may_have_added_attributes_but_not_in_place_of_a_method(tmp_path: Path) -> None:
    def made() -> Lazy:
        return Lazy(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), 3)

    saved = made()
    saved.optimizer.step()
    saved.step()
    fleet.save_checkpoint(tmp_path, step=1, scheduler=saved)
    loaded = made()
    fleet.load_checkpoint(tmp_path, scheduler=loaded)
    assert loaded._seen == saved._seen == 1
    rewrite(tmp_path, lambda state: state["scheduler"].update(_get_closed_form_lr=1))
    with pytest.raises(CheckpointError, match="keys that it does not save: _get_closed_form_lr"):
        fleet.load_checkpoint(tmp_path, scheduler=made())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_every_number_type_of_torch_comes_back(dtype: torch.dtype) -> None:
    assert decode(Encoder().encode(dtype, "x"), lambda key: torch.zeros(0)) is dtype


def test_a_manifest_of_gigabytes_is_refused_without_reading_it(tmp_path: Path) -> None:
    with open(tmp_path / "MANIFEST.json", "wb") as file:
        file.truncate(6 * 2**30)
    with pytest.raises(Damaged, match="has more than 67108864 bytes"):
        read_manifest(tmp_path)
    assert os.stat(tmp_path / "MANIFEST.json").st_blocks == 0


def test_a_manifest_that_names_parts_of_the_common_state_has_format_2(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    files = {"common-00001.safetensors": record_of(tmp_path / "x")}
    (tmp_path / "MANIFEST.json").write_text(Manifest(1, 2, files).to_text())
    assert json.loads((tmp_path / "MANIFEST.json").read_text())["manifest"]["format"] == 2
    assert read_manifest(tmp_path).files == files
    assert files["common-00001.safetensors"].sha256 == hashlib.sha256(b"abc").hexdigest()
