"""What is asked of every legal set of strategies, on real ranks. Each check returns sentences on what is wrong; none: it holds.

learns      the loss falls, all ranks end with the same weights, recompute changes no bit of the set without it, and 16 bits (amp,
            16-bit all-reduce) end near the set without them
neutral     parts that are set to do nothing leave the set without them as it is
resumes     a run that is stopped in the middle of a merge window and of a period, and loaded again, ends with the bits of one
            that was not
survives    an overflow on one rank: no rank's weights are lost, all ranks end with the same ones, and the loss still falls
"""

from __future__ import annotations

import contextlib
import io
import itertools
import tempfile
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.engine.modules import compiling
from fleetx.errors import FleetWarning
from tests.helpers.combination_sets import ACTIVE, PARTS, Names, neutral_settings, without_rounding
from tests.helpers.fitting import compile_by_torchs_kernels
from tests.helpers.models import learnable_images

MICRO_STEPS = 24
STOP_AFTER = 13
"""Inside a window of two and a period of three updates, with and without merging."""
BAD_STEP = 9
ON_OVERFLOW = "skip"
BATCHES = 4
LEARNS = 0.9
"""At most this share of the first losses is left in the last ones."""
NEAR = 0.25
"""Of the first losses: how far those of 16 bits may end from those of 32."""

Settings = Mapping[str, Mapping[str, Any]]
Outcome = tuple[list[float], list[Tensor]]
"""Losses, and the whole state of the model as all ranks together have it."""


class Net(nn.Module):
    """Repeated blocks with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_block(1, 8), _block(8, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return out


def _block(inputs: int, outputs: int) -> nn.Sequential:
    """No bias before BatchNorm: its gradient is rounding noise, which Adam would blow up to full steps."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.Dropout(0.05))


def strategy_of(names: Collection[str], settings: Settings) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy(on_nan_inf=ON_OVERFLOW)
    if "compile" in names:
        compile_by_torchs_kernels()
    for name in names:
        setattr(strategy, name, True)
        if settings.get(name):
            setattr(strategy, f"{name}_configs", dict(settings[name]))
    return strategy


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "SGD for another": lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.02),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02),
}


def optimizer_for(names: Names) -> str:
    """Of what the parts ask for; each at a rate that suits them."""
    wanted = [kind for name in names for kind in PARTS[name].inner[:1]]
    if torch.optim.SGD in wanted:
        return "SGD for another"
    return "Adam" if torch.optim.Adam in wanted else "AdamW" if torch.optim.AdamW in wanted else "SGD"


_codes: dict[str, list[types.CodeType]] = {}
"""Pieces of code that torch's compiler keeps graphs with, by the strategies of the runs that use them."""


@contextlib.contextmanager
def graphs_of_equal_runs(names: Names, settings: Settings) -> Iterator[None]:
    """Let runs of one model with the same strategies share their graphs in this process: compiling is most of such a run."""
    if "compile" not in names:
        yield
        return
    codes, places = _codes.setdefault(repr((names, [settings.get(name) for name in names])), []), itertools.count()
    make = compiling._own_code

    def own_code() -> types.CodeType:
        place = next(places)
        if place == len(codes):
            codes.append(make())
        return codes[place]

    with mock.patch.object(compiling, "_own_code", own_code):
        yield


class Run:
    """All that a script holds."""

    def __init__(self, rank: int, names: Names, settings: Settings, inner: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.rank, model = rank, Net()
        optimizer = OPTIMIZERS[inner](model.parameters())
        with graphs_of_equal_runs(names, settings):
            self.model, self.optimizer = fleet.distribute(model, optimizer, strategy_of(names, settings))
        torch.manual_seed(100 + seed + rank)
        self.done = 0
        self.losses: list[float] = []

    def train(self, until: int = MICRO_STEPS, *, bad: bool = False) -> Run:
        for micro in range(self.done, until):
            x, y = learnable_images(2 * (micro % BATCHES) + self.rank)
            loss = F.cross_entropy(self.model(x), y)
            self.losses.append(loss.item())
            self.optimizer.minimize(loss * float("inf") if bad and micro == BAD_STEP and self.rank == 1 else loss)
        self.done = until
        return self

    def outcome(self) -> Outcome:
        with self.optimizer.averaged():
            return self.losses, [tensor.detach().clone() for tensor in self.model.state_dict().values()]


_known: dict[str, Outcome] = {}
"""Runs of this process by what they are of: many sets are compared with the same ones. All ranks ask in the same order."""


@dataclass(frozen=True)
class Case:
    """A set of strategies around one of torch's optimizers."""

    names: Names
    inner: str = ""

    @property
    def optimizer(self) -> str:
        return self.inner or optimizer_for(self.names)

    def __str__(self) -> str:
        return " + ".join(self.names) + (f" ({self.inner})" if self.inner else "")

    def outcome(self, rank: int, names: Names | None = None, settings: Settings = ACTIVE, *, bad: bool = False) -> Outcome:
        """Of this set, or of other names around the same optimizer."""
        names = self.names if names is None else names
        key = repr((rank, names, [settings.get(name) for name in names], self.optimizer, bad))
        if key not in _known:
            _known[key] = Run(rank, names, settings, self.optimizer).train(bad=bad).outcome()
        return _known[key]


def minus(names: Names, left_out: Collection[str]) -> Names:
    return tuple(name for name in names if name not in left_out)


def differing(ours: Outcome, theirs: Outcome, tolerance: float) -> bool:
    return not all(
        torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance) for a, b in zip(ours[1], theirs[1], strict=True)
    )


def still(losses: list[float]) -> float:
    """The share of the first losses that is left."""
    return sum(losses[-BATCHES:]) / sum(losses[:BATCHES])


def learns(rank: int, case: Case) -> list[str]:
    ours, wrong = case.outcome(rank), []
    if not still(ours[0]) < LEARNS:
        wrong.append(f"{still(ours[0]):.2f} of the loss is left")
    if "recompute" in case.names:
        stored = case.outcome(rank, minus(case.names, ["recompute"]))
        if ours[0] != stored[0] or differing(ours, stored, 0.0):
            wrong.append("recompute changes bits")
    exact = without_rounding(case.names)
    if exact != case.names:
        gap = abs(still(ours[0]) - still(case.outcome(rank, exact)[0]))
        wrong += [f"16 bits end {gap:.2f} of the first loss away from 32"] if gap > NEAR else []
    return wrong


def neutral(rank: int, case: Case) -> list[str]:
    settings = neutral_settings(case.names, is_linear=case.optimizer != "Adam")
    if not settings:
        return []
    ours = case.outcome(rank, settings={**ACTIVE, **settings})
    theirs = case.outcome(rank, minus(case.names, settings))
    # In 16 bits a sum in another order may round the other way.
    tolerance = 1e-6 if without_rounding(case.names) == case.names else 1e-3
    return [f"{', '.join(settings)}, set to do nothing, change the weights"] if differing(ours, theirs, tolerance) else []


def resumes(rank: int, case: Case, folder: str) -> list[str]:
    whole = case.outcome(rank)
    first = Run(rank, case.names, ACTIVE, case.optimizer).train(STOP_AFTER)
    fleet.save_checkpoint(folder, step=STOP_AFTER, model=first.model, optimizer=first.optimizer)
    second = Run(rank, case.names, ACTIVE, case.optimizer, seed=7)
    loaded = fleet.load_checkpoint(folder, model=second.model, optimizer=second.optimizer)
    if loaded is None:
        return ["nothing was found to resume from"]
    second.done, second.losses = STOP_AFTER, first.losses
    ours = second.train().outcome()
    return ["a resumed run ends with other bits"] if ours[0] != whole[0] or differing(ours, whole, 0.0) else []


def survives(rank: int, case: Case) -> list[str]:
    losses, state = case.outcome(rank, bad=True)
    wrong = [] if all(bool(tensor.isfinite().all()) for tensor in state) else ["weights are lost after an overflow"]
    return wrong + ([] if still(losses) < LEARNS else [f"after an overflow {still(losses):.2f} of the loss is left"])


def checked(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """All of it on this rank, and the weights to be compared with other ranks'."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", FleetWarning)  # 16 bits are slow on many CPUs; an update is skipped
        wrong = [*learns(rank, case), *neutral(rank, case), *resumes(rank, case, folder), *survives(rank, case)]
        return {"wrong": wrong, "ends": [case.outcome(rank, bad=bad)[1] for bad in (False, True)]}


def verdict(case: Case, run_ranks: Callable[..., list[dict[str, Any]]], size: int = 2) -> list[str]:
    """What is wrong with a legal set; nothing, if all is well."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(checked, size, case, str(Path(folder)))
    wrong = [f"rank {rank}: {text}" for rank, found in enumerate(ranks) for text in found["wrong"]]
    for what, ends in zip(("training", "an overflow"), zip(*(found["ends"] for found in ranks), strict=True), strict=True):
        if any(not torch.equal(a, b) for other in ends[1:] for a, b in zip(ends[0], other, strict=True)):
            wrong.append(f"after {what} the ranks' weights differ")
    return wrong
