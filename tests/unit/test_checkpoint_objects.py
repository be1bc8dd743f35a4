"""What people save: every torch optimizer and scheduler goes on as if it had never stopped; what does not fit changes nothing."""

from __future__ import annotations

import copy
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers

from fleetx import fleet
from fleetx.checkpoint.load import Reader
from fleetx.errors import CheckpointError, ConfigError, FleetWarning
from tests.helpers.models import batch, mlp

pytestmark = pytest.mark.usefixtures("alone")
STEPS, STOP_AFTER = 12, 5

Optimizer = torch.optim.Optimizer


def train(model: nn.Module, optimizer: Optimizer, scheduler: Any, steps: range) -> list[list[float]]:
    """The learning rates (and momenta) of every step."""
    settings = []
    for step in steps:
        x, y = batch(step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)  # type: ignore[arg-type]
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step(loss.item() + step % 2)
        elif scheduler is not None:
            scheduler.step()
        settings.append([group.get(key, 0.0) for group in optimizer.param_groups for key in ("lr", "momentum")])
    return settings


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --- optimizers ---------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_optimizer_goes_on_as_if_it_had_never_stopped(name: str, tmp_path: Path) -> None:
    whole = mlp()
    train(whole, OPTIMIZERS[name](list(whole.parameters())), None, range(STEPS))

    model = mlp()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    train(model, optimizer, None, range(STOP_AFTER))
    fleet.save_checkpoint(tmp_path, step=STOP_AFTER, model=model, optimizer=optimizer)

    resumed = mlp()
    optimizer = OPTIMIZERS[name](list(resumed.parameters()))
    assert fleet.load_checkpoint(tmp_path, model=resumed, optimizer=optimizer) == (STOP_AFTER, {})
    train(resumed, optimizer, None, range(STOP_AFTER, STEPS))
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)


def test_state_kept_wider_than_its_parameter_is_put_back_as_wide(tmp_path: Path) -> None:
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = torch.full((2, 2), 1 + 2.0**-20)
    fleet.save_checkpoint(tmp_path, step=1, optimizer=optimizer)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fleet.load_checkpoint(tmp_path, optimizer=fresh)
    torch.testing.assert_close(fresh.state[model.weight]["momentum_buffer"], torch.full((2, 2), 1 + 2.0**-20), rtol=0, atol=0)


def test_an_optimizer_is_loaded_before_its_scheduler_is_built(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedulers.StepLR(optimizer, 3)
    fleet.save_checkpoint(tmp_path, step=1, optimizer=optimizer)
    fresh = torch.optim.SGD(model.parameters(), lr=0.5)
    fleet.load_checkpoint(tmp_path, optimizer=fresh)
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["initial_lr"]) == (0.1, 0.1)


# --- schedulers ---------------------------------------------------------------------------------------------------------


class Decay:
    """A callable with a state, which LambdaLR saves."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return float(0.9**self.calls)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR with a state": lambda o: schedulers.LambdaLR(o, Decay()),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 1 - epoch / 100),
    "StepLR": lambda o: schedulers.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 2, 6, 9], 0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 7),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, 1.0, 9),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 10, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2, 2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.3, total_steps=STEPS + 1),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3),
    "CyclicLR with a function": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, scale_fn=lambda x: 0.5**x, scale_mode="cycle"),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=8),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 4), schedulers.ExponentialLR(o, 0.8), schedulers.MultiStepLR(o, [1])], [4, 8]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 6), schedulers.MultiStepLR(o, [3, 8]), schedulers.ExponentialLR(o, 0.9)], o
    ),
}


@pytest.mark.parametrize("stop_after", [0, 1, STOP_AFTER, 8])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_gives_the_learning_rates_of_a_run_that_never_stopped(name: str, stop_after: int, tmp_path: Path) -> None:
    def script() -> tuple[nn.Module, Optimizer, Any]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    whole = train(*script(), range(STEPS))
    assert len({tuple(row) for row in whole}) > 1
    model, optimizer, scheduler = script()
    train(model, optimizer, scheduler, range(stop_after))
    fleet.save_checkpoint(tmp_path, step=stop_after, model=model, optimizer=optimizer, scheduler=scheduler)
    model, optimizer, scheduler = script()
    fleet.load_checkpoint(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    assert train(model, optimizer, scheduler, range(stop_after, STEPS)) == whole[stop_after:]


def test_a_scheduler_goes_on_with_the_very_groups_it_was_built_on(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.save_checkpoint(tmp_path, step=1, optimizer=optimizer)
    group = optimizer.param_groups[0]
    group["lr"] = 0.7
    fleet.load_checkpoint(tmp_path, optimizer=optimizer)
    assert optimizer.param_groups[0] is group and group["lr"] == 0.1


# --- other things that have a state -------------------------------------------------------------------------------------


def test_generators_go_on_with_the_numbers_that_would_have_come(tmp_path: Path) -> None:
    def fresh(seed: int) -> dict[str, Any]:
        mt = np.random.Generator(np.random.MT19937(seed))
        return {"a": torch.Generator().manual_seed(seed), "b": np.random.default_rng(seed), "c": random.Random(seed), "d": mt}

    def draw(made: dict[str, Any]) -> list[float]:
        return [torch.rand(1, generator=made["a"]).item(), made["b"].random(), made["c"].gauss(0, 1), made["d"].random()]

    first = fresh(1)
    draw(first)
    fleet.save_checkpoint(tmp_path, step=1, **first)
    expected = draw(first)
    again = fresh(2)
    fleet.load_checkpoint(tmp_path, **again)
    assert draw(again) == expected


def test_the_shared_generators_of_python_numpy_and_torch_go_on_too(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.gauss(0, 1), np.random.standard_normal(), torch.rand(1).item()]

    draw()  # leaves half of a pair of normal numbers in Python's and NumPy's
    fleet.save_checkpoint(tmp_path, step=1, number=1)
    expected = [draw(), draw()]
    fleet.load_checkpoint(tmp_path, number=None)
    assert [draw(), draw()] == expected


def test_a_gradient_scaler_and_an_average_of_the_model_are_objects_like_others(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ema = torch.optim.swa_utils.AveragedModel(mlp())
    ema.update_parameters(mlp())
    fleet.save_checkpoint(tmp_path, step=1, scaler=scaler, ema=ema)
    other, fresh = torch.amp.GradScaler("cpu", init_scale=2.0), torch.optim.swa_utils.AveragedModel(mlp())
    fleet.load_checkpoint(tmp_path, scaler=other, ema=fresh)
    assert other.state_dict() == scaler.state_dict() and int(fresh.n_averaged) == 1


def test_buffers_that_a_state_dict_leaves_out_come_back(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("calls", torch.tensor(7.0), persistent=False)
    fleet.save_checkpoint(tmp_path, step=1, model=model)
    model.calls.zero_()  # type: ignore[operator]
    fleet.load_checkpoint(tmp_path, model=model)
    assert float(model.calls) == 7  # type: ignore[arg-type]


def test_tied_weights_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(100, 50), nn.Linear(50, 100, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    path = fleet.save_checkpoint(tmp_path, step=1, model=model).wait()
    assert 20_000 < (path / "common.safetensors").stat().st_size < 30_000  # 100 * 50 * 4 bytes, and the random states
    saved, fresh = model.embedding.weight.detach().clone(), Tied()
    fleet.load_checkpoint(tmp_path, model=fresh)
    torch.testing.assert_close(fresh.head.weight.detach(), saved, rtol=0, atol=0)
    assert fresh.head.weight is fresh.embedding.weight


def test_a_compiled_model_and_a_plain_one_load_each_others_checkpoints(tmp_path: Path) -> None:
    plain = mlp()
    compiled = torch.compile(mlp(), backend="eager")
    model, _ = fleet.distribute(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1))
    fleet.save_checkpoint(tmp_path / "a", step=1, model=model)
    fleet.load_checkpoint(tmp_path / "a", model=plain)
    fleet.save_checkpoint(tmp_path / "b", step=1, model=plain)
    fleet.load_checkpoint(tmp_path / "b", model=model)


def test_a_value_that_is_a_tensor_comes_back_independent_of_the_file(tmp_path: Path) -> None:
    path = fleet.save_checkpoint(tmp_path, step=1, histogram=torch.arange(4.0)).wait()
    loaded = fleet.load_checkpoint(tmp_path, histogram=None)
    for file in path.iterdir():
        file.unlink()
    assert loaded is not None
    loaded.values["histogram"] += 1
    assert loaded.values["histogram"].tolist() == [1, 2, 3, 4]


# --- refusals: one sentence, and nothing changed ------------------------------------------------------------------------


def make(width: int = 4, kind: type[Optimizer] = torch.optim.SGD) -> dict[str, Any]:
    torch.manual_seed(width)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    if kind is torch.optim.SGD:
        optimizer.param_groups[0]["momentum"] = 0.9
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "scheduler": schedulers.StepLR(optimizer, 3), "best": 0.5}


def reversed_optimizer() -> Optimizer:
    optimizer = torch.optim.SGD(list(make()["model"].parameters())[::-1], lr=0.1)
    schedulers.StepLR(optimizer, 3)
    return optimizer


def other(**changes: Any) -> Callable[[], dict[str, Any]]:
    return lambda: make() | {name: made() if callable(made) else made for name, made in changes.items()}


CASES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "other shapes": (lambda: make(5), r"`model`: .* of a model with other shapes: 0.weight \(4, 3\) instead of \(5, 3\)"),
    "other keys": (other(model=lambda: nn.Linear(3, 4)), "`model`: .* of another model. Not in it: weight, bias; not in this"),
    "other numbers": (other(model=lambda: make()["model"].double()), "0.weight torch.float32 instead of torch.float64"),
    "other optimizer": (lambda: make(kind=torch.optim.Adam), "`optimizer`: .* by another kind of optimizer than Adam"),
    "fewer parameters": (
        other(optimizer=lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)),
        r"groups of \[4\] parameters, this one of \[1\]",
    ),
    "parameters in another order": (
        other(optimizer=reversed_optimizer),
        r"`optimizer`: .*: momentum_buffer of parameter 0 \(4, 3\) instead of \(4,\)",
    ),
    "other scheduler": (
        other(scheduler=lambda: schedulers.ExponentialLR(make()["optimizer"], 0.9)),
        "`scheduler`: .* by another kind of scheduler than ExponentialLR: only one of them has step_size",
    ),
    "unknown name": (lambda: {"modle": make()["model"]}, "holds no `modle`. Did you mean `model`\\? It holds: model, optimizer"),
    "missing": (lambda: make() | {"ema": make()["model"]}, "holds no `ema`.* It holds: model, optimizer, scheduler, best"),
    "a model for a value": (lambda: {"best": make()["model"]}, "`best` was saved as a value, and is to be loaded into a model"),
    "a value for a model": (lambda: {"model": None}, "`model` was saved as a model, and is to be loaded into a value"),
    "an optimizer for a model": (lambda: {"model": make()["optimizer"]}, "`model` was saved as a model, .* an optimizer"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_refused_in_one_sentence_and_nothing_is_changed(case: str, tmp_path: Path) -> None:
    fleet.save_checkpoint(tmp_path, step=1, **make())
    objects, message = CASES[case][0](), CASES[case][1]
    states = [value.state_dict() for value in objects.values() if hasattr(value, "state_dict")]
    before, random_before = copy.deepcopy(states), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=message):
        fleet.load_checkpoint(tmp_path, **objects)
    assert repr([value.state_dict() for value in objects.values() if hasattr(value, "state_dict")]) == repr(before)
    torch.testing.assert_close(torch.get_rng_state(), random_before, rtol=0, atol=0)


def test_an_object_that_is_not_asked_for_is_warned_of_and_the_others_are_loaded(tmp_path: Path) -> None:
    saved = make()
    fleet.save_checkpoint(tmp_path, step=1, **saved)
    fresh = make()["model"].requires_grad_(False)
    fresh[0].weight.zero_()
    with pytest.warns(
        FleetWarning, match="also holds optimizer, scheduler, which load_checkpoint was not given: not loaded"
    ) as told:
        loaded = fleet.load_checkpoint(tmp_path, model=fresh)
    assert loaded is not None and loaded.values == {"best": 0.5}
    assert told[0].filename == __file__
    torch.testing.assert_close(fresh[0].weight, saved["model"][0].weight.detach(), rtol=0, atol=0)


def test_an_object_that_is_not_asked_for_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.save_checkpoint(tmp_path, step=1, model=mlp(), ema=mlp(), number=3, histogram=torch.ones(3))
    fetch, read = Reader._fetch, []
    monkeypatch.setattr(Reader, "_fetch", lambda reader, key: read.append(key) or fetch(reader, key))
    with pytest.warns(FleetWarning, match="also holds model"):
        loaded = fleet.load_checkpoint(tmp_path, ema=mlp())
    assert loaded is not None and loaded.values["number"] == 3 and loaded.values["histogram"].tolist() == [1, 1, 1]
    assert {key.split("/")[0] for key in read} == {"ema", "histogram", "(random numbers)"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": -1, "x": 1}, "step is -1; it must be an integer of at least 0"),
        ({"step": 1.0, "x": 1}, "step is 1.0"),
        ({"step": True, "x": 1}, "step is True"),
        ({"step": 1, "keep": 0, "x": 1}, "keep is 0; it must be an integer of at least 1"),
        ({"step": 1}, "was given nothing to save"),
    ],
)
def test_a_save_that_makes_no_sense_is_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        fleet.save_checkpoint(tmp_path, **arguments)
    assert os.listdir(tmp_path) == []


def test_a_value_that_holds_itself_is_refused_by_name(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match="`history` cannot be saved: RecursionError"):
        fleet.save_checkpoint(tmp_path, step=1, history=endless)
    assert os.listdir(tmp_path) == []


# --- where --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_relative_and_absolute_names_are_of_one_folder(in_folder: Path) -> None:
    assert fleet.save_checkpoint("runs/a", step=1, n=1).wait() == in_folder / "runs/a/step-0000000001"
    assert fleet.load_checkpoint(in_folder / "runs" / "b" / ".." / "a", n=None) == (1, {"n": 1})
    assert fleet.load_checkpoint(Path("runs/a"), n=None) == (1, {"n": 1})


def test_a_save_in_the_background_goes_where_it_was_asked_to_when_the_script_changes_its_folder(in_folder: Path) -> None:
    (in_folder / "elsewhere").mkdir()
    saving = fleet.save_checkpoint("runs", step=1, async_save=True, n=torch.zeros(10**6))
    os.chdir("elsewhere")
    assert saving.wait() == in_folder / "runs" / "step-0000000001"
    assert os.listdir() == []


def test_a_name_that_is_too_long_is_told_as_the_system_tells_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rank 0 could not write: .*File name too long"):
        fleet.save_checkpoint(tmp_path / ("x" * 300), step=1, n=1)
    with pytest.raises(CheckpointError, match="rank 0 cannot read .*File name too long"):
        fleet.load_checkpoint(tmp_path / ("x" * 300), n=1)


def test_all_files_may_be_read_by_those_who_may_read_others_of_this_user(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        path = fleet.save_checkpoint(tmp_path, step=1, model=mlp()).wait()
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o644}


def test_objects_may_have_any_name(tmp_path: Path) -> None:
    names = ["x" * 5000, "with/slash", "with space", "größe", "__metadata__", "$tensor"]
    fleet.save_checkpoint(tmp_path, step=1, **{name: torch.full((1,), float(i)) for i, name in enumerate(names)})
    loaded = fleet.load_checkpoint(tmp_path, **dict.fromkeys(names))
    assert loaded is not None
    assert {name: value.item() for name, value in loaded.values.items()} == {name: i for i, name in enumerate(names)}


def test_adams_state_is_not_taken_for_adamws_though_it_looks_the_same(tmp_path: Path) -> None:
    fleet.save_checkpoint(tmp_path, step=1, **make(kind=torch.optim.Adam))
    with pytest.raises(CheckpointError, match="by another kind of optimizer than AdamW: by Adam"):
        fleet.load_checkpoint(tmp_path, **make(kind=torch.optim.AdamW))


def test_a_new_run_in_the_folder_of_a_longer_one_is_warned_once(tmp_path: Path) -> None:
    fleet.save_checkpoint(tmp_path, step=90, best=1.0)
    with pytest.warns(FleetWarning, match="holds step-0000000090, later than the step 10 that is saved now") as told:
        fleet.save_checkpoint(tmp_path, step=10, best=0.1)
    assert told[0].filename == __file__
    fleet.save_checkpoint(tmp_path, step=20, best=0.2)
