"""Save, stop, load, continue: the same bits as a run that never stopped. Every part, in mid-cycle, on 2 and 4 ranks."""

from __future__ import annotations

import hashlib
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fleetx import fleet
from fleetx.engine.slots import Slot
from fleetx.engine.window import Window
from fleetx.errors import FleetWarning
from fleetx.strategies import catalogue
from tests.helpers.fitting import fitting
from tests.helpers.harness import run_ranks
from tests.helpers.models import batch

PARTS = catalogue()
AVAILABLE = [name for name in PARTS if name != "auto"]
"""`auto` trains by the parts that it has chosen, which are all here."""
MICRO_STEPS = 23
STOP_AFTER = 11
"""Inside the fourth window of three, and inside an epoch: nothing is at a convenient place."""


class Tangled(nn.Module):
    """Registered in another order than it runs, with BatchNorm, dropout, tied weights and a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 4)
        self.middle = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.first = nn.Linear(8, 16)
        self.twin = nn.Linear(16, 16)
        self.twin.weight = self.middle.weight
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.norm(self.first(x)).relu()
        return self.last(self.dropout(self.twin(self.middle(hidden).relu())))


def _strategy(name: str | None) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 3})
    strategy.fuse_grad_size_in_MB = 0.0005  # several buckets
    if name is not None:
        setattr(strategy, name, True)
    if name == "amp":
        # The first update overflows; then the scale is 1024, and doubles after every two updates.
        shrink = {"init_loss_scaling": 2.0**40, "decr_ratio": 2.0**-30, "decr_every_n_nan_or_inf": 1}
        strategy.amp_configs = {"dtype": "float16", "incr_every_n_steps": 2, **shrink}
    if name == "localsgd":  # a round is under way when the run stops
        outer = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}
        strategy.localsgd_configs = {"k_steps": 2, "overlap_steps": 1, "wire_dtype": "bfloat16", **outer}
    if name == "dgc":  # in mid-ramp, and of tensors as small as these
        strategy.dgc_configs = {"rampup_begin_step": 1, "rampup_step": 6, "sparsity": [0.5, 0.9], "min_numel": 20}
    if name == "powersgd":
        strategy.powersgd_configs = {"begin_step": 1, "rank": 1, "min_compression": 1.0}
    if name == "adaptive_localsgd":
        strategy.adaptive_localsgd_configs = {"init_k_steps": 2}
    return strategy


class Run:
    """All that a training script holds."""

    def __init__(self, rank: int, name: str | None, *, seed: int) -> None:
        torch.manual_seed(seed + rank)  # what the resumed run starts with must not matter
        random.seed(seed + rank)
        np.random.seed(seed + rank)
        data = TensorDataset(*batch(0, rows=70))
        self.sampler = fleet.sampler(data, seed=5)
        self.loader = DataLoader(data, 4, sampler=self.sampler, drop_last=True)
        model = Tangled()
        groups = [{"params": [model.last.weight]}, {"params": [p for n, p in model.named_parameters() if n != "last.weight"]}]
        optimizer = fitting([name] if name else [], groups, lambda groups: torch.optim.AdamW(groups, lr=0.01))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FleetWarning)  # 16 bits are slow on this CPU
            self.model, self.optimizer = fleet.distribute(model, optimizer, _strategy(name))
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5])
        self.ema = torch.optim.swa_utils.AveragedModel(model)
        self.losses: list[float] = []
        self.done = 0

    def objects(self) -> dict[str, Any]:
        named = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return named | {"sampler": self.sampler, "ema": self.ema}

    def train(self, until: int) -> None:
        while self.done < until:
            for x, y in self.loader:
                noise = 0.1 * random.random() + 0.1 * np.random.rand()
                report = self.optimizer.minimize(F.cross_entropy(self.model(x + noise), y), weight=len(x) + self.done % 3)
                if report.due:
                    self.scheduler.step()
                    self.ema.update_parameters(self.model)
                self.losses.append(report.loss or 0.0)
                self.done += 1
                if self.done == until:
                    return

    def everything(self) -> dict[str, str]:
        """A fingerprint of each thing that training has changed."""
        tensors = {f"model/{k}": v for k, v in self.model.state_dict().items()} | {"calls": self.model.calls}
        tensors |= {f"ema/{k}": v for k, v in self.ema.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{number}/{k}": torch.as_tensor(v) for k, v in state.items()}
        marks = {k: hashlib.sha256(v.detach().contiguous().numpy().tobytes()).hexdigest() for k, v in tensors.items()}
        marks["groups"] = repr([{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups])
        marks["scheduler"] = repr(sorted(self.scheduler.state_dict().items()))
        marks["sampler"] = repr(self.sampler.state_dict())
        marks["losses"] = repr(self.losses[STOP_AFTER:])
        marks["random"] = repr([random.random(), np.random.rand(), torch.rand(1).item()])
        return marks


def _whole(rank: int, name: str | None) -> dict[str, str]:
    run = Run(rank, name, seed=1)
    run.train(MICRO_STEPS)
    return run.everything()


def _first_half(rank: int, name: str | None, folder: str, in_background: bool) -> None:
    run = Run(rank, name, seed=1)
    run.train(STOP_AFTER)
    assert run.optimizer.pipeline.window.micro_steps == STOP_AFTER % 3
    assert len(run.optimizer.pipeline.buckets) >= 4
    saving = fleet.save_checkpoint(
        folder, step=STOP_AFTER, async_save=in_background, done=run.done, losses=run.losses, **run.objects()
    )
    if in_background:
        run.train(MICRO_STEPS)  # what is saved is what was then, whatever happens meanwhile
    saving.wait()


def _second_half(rank: int, name: str | None, folder: str, until: int) -> dict[str, str]:
    run = Run(rank, name, seed=77)
    loaded = fleet.load_checkpoint(folder, done=0, losses=[], **run.objects())
    assert loaded is not None
    run.done, run.losses = loaded.values["done"], loaded.values["losses"]
    run.train(until)
    if until < MICRO_STEPS:
        fleet.save_checkpoint(folder, step=until, done=run.done, losses=run.losses, **run.objects())
    return run.everything()


def _differences(ours: list[dict[str, str]], theirs: list[dict[str, str]]) -> list[str]:
    return [f"rank {r}: {k}" for r, (a, b) in enumerate(zip(ours, theirs, strict=True)) for k in a | b if a.get(k) != b.get(k)]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", [None, *AVAILABLE])
def test_a_resumed_run_ends_with_the_bits_of_an_undisturbed_one(name: str | None, size: int, tmp_path: Path) -> None:
    undisturbed = run_ranks(_whole, size, name)
    run_ranks(_first_half, size, name, str(tmp_path), size == 4)
    resumed = run_ranks(_second_half, size, name, str(tmp_path), MICRO_STEPS)
    assert _differences(resumed, undisturbed) == []
    trains_alone = name is not None and Slot.AVERAGE in PARTS[name]().claims()
    assert len({repr(marks["model/first.weight"]) for marks in resumed}) == (size if trains_alone else 1)


def test_a_second_resume_is_as_exact_as_the_first(tmp_path: Path) -> None:
    undisturbed = run_ranks(_whole, 2, None)
    run_ranks(_first_half, 2, None, str(tmp_path), False)
    run_ranks(_second_half, 2, None, str(tmp_path), STOP_AFTER + 2)
    resumed = run_ranks(_second_half, 2, None, str(tmp_path), MICRO_STEPS)
    assert _differences(resumed, undisturbed) == []


def _without(rank: int, folder: str, what: str) -> dict[str, str]:
    """Resume with one thing left as a new run has it."""
    run = Run(rank, "amp", seed=77)
    loaded = fleet.load_checkpoint(folder, done=0, losses=[], **run.objects())
    assert loaded is not None
    run.done, run.losses = loaded.values["done"], loaded.values["losses"]
    new, pipeline = Run(rank, "amp", seed=1), run.optimizer.pipeline
    if what == "the window":
        pipeline.window = Window()
        pipeline.buckets.zero()
    elif what == "the window's losses":
        pipeline.window.losses.clear()
    elif what == "the window's weights":
        pipeline.window.weights[:] = [1.0] * len(pipeline.window.weights)
    elif what == "the loss scale":
        pipeline.stages.backward.load_state_dict(new.optimizer.pipeline.stages.backward.state_dict())
    elif what == "the usual weight":
        pipeline.weighing.usual *= 2.0**30  # a power of two: it matters once it overflows
    elif what == "the common buffers":
        pipeline.buckets.tail.resume(new.optimizer.pipeline.buckets.tail.common())
    elif what == "the moments":
        run.optimizer.state.clear()
    elif what == "a hidden buffer":
        run.model.calls.zero_()
    elif what == "the scheduler":
        run.scheduler.load_state_dict(new.scheduler.state_dict())
    elif what == "the sampler":
        run.sampler.load_state_dict(new.sampler.state_dict())
    elif what == "random numbers":
        run.sampler.when_resumed(lambda: None)
        torch.manual_seed(rank)
    run.train(MICRO_STEPS)
    return run.everything()


LEFT_OUT = [
    "the window",
    "the window's losses",
    "the window's weights",
    "the loss scale",
    "the usual weight",
    "the common buffers",
    "the moments",
    "a hidden buffer",
    "the scheduler",
    "the sampler",
    "random numbers",
]


@pytest.fixture(scope="module")
def half_a_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, str]]]:
    folder = str(tmp_path_factory.mktemp("half"))
    run_ranks(_first_half, 2, "amp", folder, False)
    return folder, run_ranks(_whole, 2, "amp")


@pytest.mark.parametrize("what", ["nothing", *LEFT_OUT])
def test_whatever_is_left_out_is_seen(what: str, half_a_run: tuple[str, list[dict[str, str]]]) -> None:
    """The tests above could be blind: each thing that is saved is left out in turn, and they must notice."""
    folder, undisturbed = half_a_run
    resumed = run_ranks(_without, 2, folder, what)
    assert bool(_differences(resumed, undisturbed)) == (what != "nothing")
