"""A distributed model saved, pickled or copied whole is the plain module it was: its pickle names nothing of fleetx."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import importlib
import io
import os
import pickle
import pickletools
import subprocess
import sys
import textwrap
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.applications import Bert_base, Resnet20
from fleetx.engine.modules.patching import PatchedForward, patch_of
from fleetx.errors import FleetWarning
from tests.helpers.harness import run_ranks
from tests.helpers.models import batch, flat_state

USERS_MODULE = """
import torch
from torch import nn

def double(module, args, out):
    return 2 * out

def add_nothing(module, args, kwargs):
    return args, kwargs

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return torch.relu(self.norm(self.inner(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(8, 4)
        self.head.register_forward_hook(double)
        self.register_forward_pre_hook(add_nothing, with_kwargs=True)

    def forward(self, x):
        return self.head(self.blocks(x))

    def loss(self, batch):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

class Sparing(Net):
    # State of its own, nested: what it got from torch, and what it knows itself.
    def __init__(self):
        super().__init__()
        self.cache = {"large": [1] * 1000}

    def __getstate__(self):
        state = super().__getstate__()
        del state["cache"]
        return {"version": 2, "module": state}

    def __setstate__(self, state):
        super().__setstate__(state["module"])
        self.cache = {}

class Rebuilt(Net):
    def __reduce__(self):
        return type(self), (), self.__dict__
"""
NAMES = ["Net", "Block", "Sparing", "Rebuilt", "double", "add_nothing"]

RECOMPUTE: dict[str, Any] = {"recompute": True, "recompute_configs": {"checkpoints": ["blocks.*"]}}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "amp": {"amp": True, "amp_configs": {"dtype": "bfloat16", "custom_black_list": ["head"]}},
    "recompute": RECOMPUTE,
    "budget": {"recompute": True, "recompute_configs": {"budget": "1GB"}},
    "sync_batch_norm": {"sync_batch_norm": True},
    "all of them": {"amp": True, "amp_configs": {"dtype": "float16"}, "sync_batch_norm": True, **RECOMPUTE},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "users_module.py").write_text(USERS_MODULE)
    return tmp_path


@contextlib.contextmanager
def users_module(folder: Path) -> Iterator[Any]:
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("users_module")
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("users_module", None)


def saved(model: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return buffer.getvalue()


def globals_of(pickled: bytes) -> set[str]:
    """Every class and function that the pickle would import."""
    if zipfile.is_zipfile(io.BytesIO(pickled)):
        with zipfile.ZipFile(io.BytesIO(pickled)) as archive:
            pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    found, texts = set(), [""]
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL":
            found.add(argument.replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":
            found.add(".".join(texts[-2:]))
        elif isinstance(argument, str):
            texts.append(argument)
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            texts.append("(a memo)")
    return found


def pickled_forms(model: nn.Module) -> dict[str, set[str]]:
    # Protocol 2: a name is written out wherever it is used, so that none hides behind a memo.
    return {"torch.save": globals_of(saved(model)), "pickle": globals_of(pickle.dumps(model, protocol=2))}


def distributed(model: nn.Module, settings: dict[str, Any]) -> tuple[nn.Module, Any]:
    warnings.simplefilter("ignore", FleetWarning)  # 16 bits are slow on many CPUs
    strategy = fleet.DistributedStrategy(**settings)
    budget = {"sample": batch(0)} if "budget" in settings.get("recompute_configs", {}) else {}
    return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, **budget)


def step(model: nn.Module, optimizer: Any, index: int) -> Any:
    x, y = batch(index)
    return optimizer.minimize(F.cross_entropy(model(x), y))


def has_patches(model: nn.Module) -> bool:
    return any(patch_of(module) is not None for module in model.modules())


# --- what is in the file ----------------------------------------------------------------------------------------------


def _globals_before_and_after(rank: int, folder: Path, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    with users_module(folder) as users:
        model = getattr(users, name)()
        before = pickled_forms(model)
        model, optimizer = distributed(model, settings)
        with fleet.Monitor(folder / f"run-{rank}", show=False, tensorboard=False) as watch:
            at_once = pickled_forms(model)
            for index in range(2):
                watch.log(step(model, optimizer, 2 * index + rank))
            trained = pickled_forms(model)
        return {"before": before, "at once": at_once, "trained": trained}


@pytest.mark.parametrize("name", ["Net", "Sparing", "Rebuilt"])
@pytest.mark.parametrize("case", SETTINGS)
def test_a_pickle_names_what_it_named_before_distribute(folder: Path, case: str, name: str) -> None:
    for seen in run_ranks(_globals_before_and_after, 2, folder, name, SETTINGS[case]):
        assert seen["at once"] == seen["before"] and seen["trained"] == seen["before"]
        assert {"users_module.double", "users_module.add_nothing"} <= seen["before"]["torch.save"]


def _globals_in_ddp(rank: int, folder: Path) -> tuple[set[str], set[str]]:
    with users_module(folder) as users:
        model = nn.parallel.DistributedDataParallel(users.Net())
        before = globals_of(saved(model))
        model, _ = distributed(model, SETTINGS["amp"])
        return before, globals_of(saved(model))


def test_a_model_in_ddp_too(folder: Path) -> None:
    for before, after in run_ranks(_globals_in_ddp, 2, folder):
        assert before == after


# --- where it is loaded ------------------------------------------------------------------------------------------------


def _saved_and_trained_on(rank: int, folder: Path, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    with users_module(folder) as users:
        model, optimizer = distributed(getattr(users, name)(), settings)
        step(model, optimizer, rank)
        if rank == 0:
            (folder / "whole.pt").write_bytes(saved(model))
            (folder / "whole.pickle").write_bytes(pickle.dumps(model))
            plain = getattr(users, name)().eval()
            plain.load_state_dict(model.state_dict())
            torch.save(plain(batch(9)[0]).detach(), folder / "expected.pt")
        patched = has_patches(model)
        step(model, optimizer, 2 + rank)
        return {"patched": patched, "state": flat_state(model)}


def _trained(rank: int, folder: Path, name: str, settings: dict[str, Any]) -> Tensor:
    with users_module(folder) as users:
        model, optimizer = distributed(getattr(users, name)(), settings)
        step(model, optimizer, rank)
        step(model, optimizer, 2 + rank)
        return flat_state(model)


LOADING = """
import pickle, sys
sys.modules["fleetx"] = None  # an import of it, or of anything in it, fails
import torch, users_module
from collections import OrderedDict
from torch import nn

expected, x = torch.load("expected.pt"), torch.load("x.pt")
torch.serialization.add_safe_globals([nn.Linear, nn.BatchNorm1d, nn.Sequential, *(getattr(users_module, n) for n in NAMES)])
safe = torch.load("whole.pt", weights_only=WEIGHTS_ONLY)
with open("whole.pickle", "rb") as file:
    unpickled = pickle.load(file)
for model in (safe, unpickled):
    assert type(model) is getattr(users_module, NAME)
    assert "forward" not in vars(model) and len(model._forward_pre_hooks) == len(model.head._forward_hooks) == 1
    torch.testing.assert_close(model.eval()(x), expected, rtol=0, atol=0)
"""


@pytest.mark.parametrize("name", ["Net", *(pytest.param(name, marks=pytest.mark.campaign) for name in ("Sparing", "Rebuilt"))])
def test_it_loads_where_fleetx_cannot_be_imported_and_the_run_goes_on(folder: Path, name: str) -> None:
    settings = SETTINGS["amp"] | RECOMPUTE | {"sync_batch_norm": True}
    ranks = run_ranks(_saved_and_trained_on, 2, folder, name, settings)
    torch.save(batch(9)[0], folder / "x.pt")
    weights_only = name != "Rebuilt"  # torch calls no `__reduce__` of others there
    head = f"NAMES, NAME, WEIGHTS_ONLY = {NAMES}, {name!r}, {weights_only}\n"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(LOADING)], cwd=folder, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    without = run_ranks(_trained, 2, folder, name, settings)
    for mine, theirs in zip(ranks, without, strict=True):
        assert mine["patched"]
        torch.testing.assert_close(mine["state"], theirs, rtol=0, atol=0)


# --- copies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
def test_a_copy_has_the_users_hooks_and_none_of_ours(folder: Path, how: Any) -> None:
    with users_module(folder) as users:
        model, _ = distributed(users.Net(), SETTINGS["all of them"])
        with fleet.Monitor(folder / "run", show=False, tensorboard=False):
            hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
            twin = how(model)
            assert type(twin) is users.Net and "forward" not in vars(twin)
            assert list(twin._forward_pre_hooks.values()) == [users.add_nothing]
            assert set(twin._forward_pre_hooks_with_kwargs) == set(twin._forward_pre_hooks)
            assert not twin._forward_hooks and not twin._forward_hooks_always_called
            assert has_patches(model) and len(model._forward_pre_hooks) == 3
            assert hooks == [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]


@pytest.mark.usefixtures("alone")
def test_a_forward_that_the_user_had_set_on_the_model_is_in_its_copy() -> None:
    model = nn.Linear(8, 4)
    model.forward = _of_zeros.__get__(model)  # type: ignore[method-assign]
    model, _ = distributed(model, SETTINGS["amp"] | {"amp_configs": {"dtype": "bfloat16"}})
    twin = copy.deepcopy(model)
    assert not has_patches(twin) and twin.forward.__func__ is _of_zeros and twin.forward.__self__ is twin


def _of_zeros(self: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(torch.zeros_like(x), self.weight, self.bias)


@pytest.mark.usefixtures("alone")
def test_a_forward_kept_under_another_name_is_copied_as_the_copys_own(folder: Path) -> None:
    with users_module(folder) as users:
        model, _ = distributed(users.Net(), SETTINGS["amp"])
        model.before = model.forward
        twin = copy.deepcopy(model)
        assert twin.before.__self__ is twin and not isinstance(twin.before, PatchedForward)
        assert not any("fleetx" in name for name in globals_of(saved(model)))


@pytest.mark.usefixtures("alone")
def test_a_reducer_that_the_user_had_registered_is_still_asked(folder: Path) -> None:
    with users_module(folder) as users:
        copyreg.pickle(users.Net, lambda model: (users.Net, (), {"training": False}))
        try:
            model, _ = distributed(users.Net(), SETTINGS["amp"])
            assert not copy.deepcopy(model).training
        finally:
            del copyreg.dispatch_table[users.Net]


# --- models that are compiled, and our own --------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone", "fresh_compiler")
@pytest.mark.parametrize("how", ["torch.compile(model)", "model.compile()"])
def test_a_compiled_model_is_saved_as_it_was_before_distribute(folder: Path, how: str) -> None:
    with users_module(folder) as users:
        model: Any = users.Net()
        if how == "model.compile()":
            model.compile(backend="eager")
        else:
            model = torch.compile(model, backend="eager")
        before = globals_of(saved(model))
        model, _ = distributed(model, SETTINGS["amp"] | {"amp_configs": {"dtype": "bfloat16"}})
        assert globals_of(saved(model)) == before


def small_bert() -> nn.Module:
    return Bert_base(hidden=32, layers=2, heads=2, vocab_size=100)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("make", [Resnet20, small_bert])
def test_our_own_models_are_saved_as_before_distribute(make: Any) -> None:
    model = make()
    before = globals_of(saved(model))
    model, _ = distributed(model, {"amp": True, "recompute": True, "amp_configs": {"dtype": "bfloat16"}})
    assert globals_of(saved(model)) == before
    assert not any(name.startswith("fleetx.") and not name.startswith("fleetx.applications.") for name in before)
