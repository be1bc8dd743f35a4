"""save_model: one plain safetensors file with the user's own keys, whole or not there, and one answer on all ranks."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.checkpoint import save
from fleetx.errors import CheckpointError, ConfigError
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch, cnn, flat_state, mlp


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 5), nn.Linear(5, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("top", self.embedding.weight.detach()[:10])  # a view of the weight
        self.register_buffer("hidden", torch.ones(3), persistent=False)


def load_with_plain_torch(path: Path, make: Callable[[], nn.Module]) -> nn.Module:
    state = load_file(path)
    model = make()
    model.load_state_dict(state)
    return model


# --- one process --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("make", [mlp, cnn, Tied])
def test_three_lines_of_plain_torch_load_it(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = make().to(memory_format=torch.channels_last)
    with torch.no_grad():
        for param in model.parameters():
            param += torch.randn_like(param)
    fleet.save_model(tmp_path / "model.safetensors", model)
    found = load_with_plain_torch(tmp_path / "model.safetensors", make)
    torch.testing.assert_close(flat_state(found), flat_state(model), rtol=0, atol=0)
    assert sorted(load_file(tmp_path / "model.safetensors")) == sorted(model.state_dict())
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.usefixtures("alone")
def test_number_types_are_kept(tmp_path: Path) -> None:
    fleet.save_model(tmp_path / "m", mlp().bfloat16())
    assert {tensor.dtype for tensor in load_file(tmp_path / "m").values()} == {torch.bfloat16}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("distributed", [True, False])
def test_a_compiled_model_has_the_keys_of_the_plain_one(distributed: bool, tmp_path: Path) -> None:
    model: Any = torch.compile(mlp(), backend="eager")
    if distributed:
        model, _ = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.save_model(tmp_path / "m", model)
    torch.testing.assert_close(flat_state(load_with_plain_torch(tmp_path / "m", mlp)), flat_state(mlp()), rtol=0, atol=0)


@pytest.mark.usefixtures("alone")
def test_folders_on_the_way_are_made_and_relative_names_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fleet.save_model("out/deep/model.safetensors", mlp())
    assert (tmp_path / "out" / "deep" / "model.safetensors").is_file()


@pytest.mark.usefixtures("alone")
def test_the_longest_name_that_the_system_allows_is_allowed(tmp_path: Path) -> None:
    fleet.save_model(tmp_path / ("m" * 255), mlp())
    assert os.listdir(tmp_path) == ["m" * 255]


@pytest.mark.usefixtures("alone")
def test_the_file_may_be_read_by_those_who_may_read_others_of_this_user(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        fleet.save_model(tmp_path / "m", mlp())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o644


@pytest.mark.usefixtures("alone")
def test_a_file_that_is_replaced_keeps_its_rights(tmp_path: Path) -> None:
    for model in (mlp(), cnn()):
        fleet.save_model(tmp_path / "m", model)
        (tmp_path / "m").chmod(0o640)
    fleet.save_model(tmp_path / "m", mlp())
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o640


@pytest.mark.usefixtures("alone")
def test_what_is_no_tensor_is_refused_by_name(tmp_path: Path) -> None:
    class Extra(nn.Module):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    with pytest.raises(CheckpointError, match="`_extra_state` in the model's state dict is not a tensor"):
        fleet.save_model(tmp_path / "m", Extra())
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("alone")
def test_arguments_of_the_wrong_kind_are_refused_with_the_line_to_write(tmp_path: Path) -> None:
    model = mlp()
    with pytest.raises(ConfigError, match=r"given OrderedDict as the model; write save_model\(path, model, optimizer\)"):
        fleet.save_model(tmp_path / "m", model.state_dict())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"given SGD as the optimizer; give the one that fleet.distribute\(...\) returned"):
        fleet.save_model(tmp_path / "m", model, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]


# --- replaced, or not touched -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_an_error_on_the_way_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.save_model(tmp_path / "m", mlp())
    old = (tmp_path / "m").read_bytes()
    original = save.write_tensors

    def half_way(*args: Any, **options: Any) -> None:
        original(*args, **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save, "write_tensors", half_way)
    with pytest.raises(CheckpointError, match="rank 0 could not write: .*No space left on device"):
        fleet.save_model(tmp_path / "m", cnn())
    assert (tmp_path / "m").read_bytes() == old
    assert os.listdir(tmp_path) == ["m"]


def _die_before_the_rename(rank: int, folder: str) -> int:
    """In a child of this rank, which has no collectives to take part in."""
    child = os.fork()
    if child == 0:
        save.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        try:
            save.write_model(cnn(), Path(folder) / "m")
        finally:
            os._exit(1)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


@pytest.mark.usefixtures("alone")
def test_a_kill_before_the_new_file_is_whole_leaves_the_old_one_and_the_next_save_tidies_up(tmp_path: Path) -> None:
    fleet.save_model(tmp_path / "m", mlp())
    assert run_ranks(_die_before_the_rename, 1, str(tmp_path)) == [signal.SIGKILL]
    assert len(os.listdir(tmp_path)) == 2
    (tmp_path / ".writing-something-else").mkdir()
    torch.testing.assert_close(flat_state(load_with_plain_torch(tmp_path / "m", mlp)), flat_state(mlp()), rtol=0, atol=0)
    fleet.save_model(tmp_path / "m", cnn())
    torch.testing.assert_close(flat_state(load_with_plain_torch(tmp_path / "m", cnn)), flat_state(cnn()), rtol=0, atol=0)
    assert sorted(os.listdir(tmp_path)) == [".writing-something-else", "m"]


# --- several ranks ------------------------------------------------------------------------------------------------------


def pair(micro_steps: int = 1) -> tuple[nn.Module, Any]:
    strategy = fleet.DistributedStrategy(gradient_merge=micro_steps > 1)
    if micro_steps > 1:
        strategy.gradient_merge_configs = {"k_steps": micro_steps}
    model = mlp()
    return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)


def minimize(model: nn.Module, optimizer: Any, index: int) -> None:
    x, y = batch(index)
    optimizer.minimize(F.cross_entropy(model(x), y))


def _save_in_mid_window(rank: int, path: str, with_optimizer: bool) -> tuple[Tensor, Tensor, int]:
    model, optimizer = pair(4)
    for index in range(6):
        minimize(model, optimizer, 2 * index + rank)
    before = flat_state(model)
    fleet.save_model(path, model, optimizer if with_optimizer else None)
    return before, flat_state(model), optimizer.pipeline.window.micro_steps


def test_an_open_merge_window_is_closed_first(tmp_path: Path) -> None:
    for before, after, open_micro_steps in run_ranks(_save_in_mid_window, 2, str(tmp_path / "m"), True):
        assert not torch.equal(before, after) and open_micro_steps == 0
        torch.testing.assert_close(flat_state(load_with_plain_torch(tmp_path / "m", mlp)), after, rtol=0, atol=0)


def test_without_the_optimizer_the_model_is_written_as_it_is(tmp_path: Path) -> None:
    for before, after, open_micro_steps in run_ranks(_save_in_mid_window, 2, str(tmp_path / "m"), False):
        assert torch.equal(before, after) and open_micro_steps == 2
        torch.testing.assert_close(flat_state(load_with_plain_torch(tmp_path / "m", mlp)), after, rtol=0, atol=0)


def _bad_path(rank: int, folder: str, name: str) -> tuple[str, bool]:
    model, optimizer = pair()
    minimize(model, optimizer, rank)
    told = raised(lambda: fleet.save_model(Path(folder) / name, model, optimizer))
    minimize(model, optimizer, rank + 2)  # training goes on
    return told, (Path(folder) / "dir").is_dir()


@pytest.mark.parametrize(
    ("name", "message"), [("dir", "Is a directory"), ("file/m", "Not a directory|File exists"), ("m" * 300, "File name too long")]
)
def test_a_path_that_rank_0_cannot_write_is_an_error_on_all_ranks(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").write_text("x")
    ranks = run_ranks(_bad_path, 2, str(tmp_path), name)
    assert ranks[0] == ranks[1]
    with pytest.raises(AssertionError, match=f"CheckpointError: rank 0 could not write: .*({message})"):
        raise AssertionError(ranks[0][0])
    assert sorted(os.listdir(tmp_path)) == ["dir", "file"] and os.listdir(tmp_path / "dir") == []


def _any_error(rank: int, path: str) -> str:
    class Unwilling(nn.Module):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            raise ZeroDivisionError("mine")

    return raised(lambda: fleet.save_model(path, Unwilling()))


def test_any_error_of_rank_0_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    told = run_ranks(_any_error, 2, str(tmp_path / "m"))
    assert told == ["CheckpointError: rank 0 could not write: ZeroDivisionError: mine"] * 2
