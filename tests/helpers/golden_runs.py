"""The runs whose checkpoints are kept in tests/golden: how each begins, is stopped, loaded, trained on, and fingerprinted.

Only public names of FleetX are used: these runs must be the same however its modules are arranged. The net and its data need no
function whose last bit depends on the processor, other than in training itself.
"""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fleetx import errors, fleet

FOLDER = Path(__file__).parents[1] / "golden" / "checkpoints"
VALUES = Path(__file__).parents[1] / "golden" / "values"
SIZE = 2
STOP_AFTER = 11
"""Inside a window of three, and inside an epoch: nothing is at a convenient place."""
MICRO_STEPS = 23
FEATURES, WIDTH, CLASSES, ROWS = 6, 8, 4, 70

TOLERANCE = 1e-5
"""Relative and absolute, where the processor or torch computes other last bits than those that wrote the checkpoint."""
TOLERANCE_16_BITS = 5e-3
"""Where numbers are rounded to 8 or 11 bits on their way, a last bit of float32 may become one of these."""
SIXTEEN_BITS = ("amp", "bf16_allreduce", "fp16_allreduce")

OVERFLOWING = {"init_loss_scaling": 2.0**40, "decr_ratio": 2.0**-30, "decr_every_n_nan_or_inf": 1, "incr_every_n_steps": 3}
"""The first update overflows; then the scale is 1024, and doubles after every three updates."""
RAMPING = {"rampup_begin_step": 1, "rampup_step": 12, "sparsity": [0.5, 0.75, 0.9], "min_numel": 20}
DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}
MERGED = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3}}

CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "scalars": {
        **MERGED,
        "noise_scale_steps": 1,
        "local_buffers": ["seen"],
        "find_unused_parameters": True,
        "on_nan_inf": "skip",
        "desync_check_steps": 2,
    },
    "adaptive_localsgd": {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 2, **DILOCO}},
    "amp": {"amp": True, "amp_configs": {"dtype": "float16", **OVERFLOWING}},
    "bf16_allreduce": {"bf16_allreduce": True},
    "clip_norm": {"clip_norm": True, "clip_norm_configs": {"max_norm": 0.25}},
    "dgc": {"dgc": True, "dgc_configs": {**RAMPING, "clip_norm": 2.0}},
    "fp16_allreduce": {"fp16_allreduce": True},
    "gradient_merge": MERGED,
    "lamb": {"lamb": True, "lamb_configs": {"lamb_weight_decay": 0.1, "exclude_from_weight_decay": ["last"]}},
    "lars": {"lars": True, "lars_configs": {"lars_coeff": 0.1, "lars_weight_decay": 0.01, "epsilon": 1e-6}},
    "localsgd": {"localsgd": True, "localsgd_configs": {"k_steps": 3, "begin_step": 2, "overlap_steps": 1, **DILOCO}},
    "powersgd": {"powersgd": True, "powersgd_configs": {"begin_step": 2, "rank": 2, "min_compression": 1.0}},
    "recompute": {"recompute": True, "recompute_configs": {"checkpoints": ["blocks.*"]}},
    "sync_batch_norm": {"sync_batch_norm": True},
    # Five combinations, which together have every switch in them.
    "adaptive_localsgd+lamb+gradient_merge": {
        **MERGED,
        "adaptive_localsgd": True,
        "adaptive_localsgd_configs": {"init_k_steps": 2, "average_state": True, "formula": "fleet"},
        "lamb": True,
    },
    "amp+clip_norm+lamb+fp16_allreduce": {
        "amp": True,
        "amp_configs": {"dtype": "bfloat16", "custom_black_list": ["last"]},
        "clip_norm": True,
        "lamb": True,
        "fp16_allreduce": True,
    },
    "amp+gradient_merge+dgc": {
        **MERGED,
        "amp": True,
        "amp_configs": {"dtype": "float16", **OVERFLOWING},
        "dgc": True,
        "dgc_configs": {**RAMPING, "rampup_step": 4},
    },
    "lars+localsgd+recompute": {
        "lars": True,
        "lars_configs": {"lars_coeff": 0.1},
        "localsgd": True,
        "localsgd_configs": {"k_steps": 4, "average_state": True, "wire_dtype": "bfloat16"},
        "recompute": True,
    },
    "powersgd+sync_batch_norm+clip_norm+gradient_merge": {
        **MERGED,
        "gradient_merge_configs": {"k_steps": 3, "avg": False},
        "powersgd": True,
        "powersgd_configs": {"begin_step": 1, "rank": 1, "min_compression": 1.0},
        "sync_batch_norm": True,
        "clip_norm": True,
        "clip_norm_configs": {"max_norm": 0.5},
    },
}
"""What to write. What is checked is what lies in the folder. `auto` is missing: it chooses by the clock, and trains by these."""


def strategy_for(name: str) -> fleet.DistributedStrategy:
    return fleet.DistributedStrategy(fuse_grad_size_in_MB=0.0003, **CASES[name])  # several buckets


def stored_strategy(name: str) -> fleet.DistributedStrategy:
    """As it was written beside the checkpoint."""
    return fleet.DistributedStrategy.load(FOLDER / name / "strategy.yaml")


def tolerance_of(strategy: fleet.DistributedStrategy) -> float:
    rounded = any(getattr(strategy, name) for name in SIXTEEN_BITS)
    averages = [settings for name, settings in strategy.to_dict().items() if name.endswith("localsgd_configs")]
    rounded = rounded or any(settings["wire_dtype"] != "float32" for settings in averages)
    return TOLERANCE_16_BITS if rounded else TOLERANCE


# --- the net, and what it learns ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.linear(x)).relu()
        return out * (torch.rand(out.shape) < 0.9)  # torch's own dropout draws other numbers on other processors


class Net(nn.Module):
    """Registered in another order than it runs, with repeated blocks, BatchNorm, tied weights and a buffer not in state_dict.

    No biases before BatchNorm: their gradient is rounding noise, which Adam would blow up."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, CLASSES)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.first = nn.Linear(FEATURES, WIDTH, bias=False)
        self.twin = nn.Linear(WIDTH, WIDTH)
        self.twin.weight = self.middle.weight
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.pace = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.pace
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.last(self.twin(self.middle(hidden).relu()).relu())
        return out


def data() -> TensorDataset:
    """Whole eighths, and which of the first four features is the largest: the same on every processor."""
    numbers = torch.arange(ROWS * FEATURES).view(ROWS, FEATURES)
    x = ((numbers * numbers + 7 * numbers) % 29 - 14) / 8.0
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def optimizer_for(strategy: fleet.DistributedStrategy, groups: Any) -> torch.optim.Optimizer:
    """One whose place the strategy may take."""
    if strategy.lars or strategy.dgc:
        return torch.optim.SGD(groups, lr=0.2, momentum=0.9)
    if strategy.lamb:
        return torch.optim.Adam(groups, lr=0.03)
    return torch.optim.AdamW(groups, lr=0.03)


class Run:
    """All that a training script holds."""

    def __init__(self, rank: int, strategy: fleet.DistributedStrategy, *, seed: int) -> None:
        random.seed(seed)  # the same on all ranks, which keeps checkpoints small; torch's own are not
        np.random.seed(seed)
        torch.manual_seed(seed + rank)
        dataset = data()
        self.sampler = fleet.sampler(dataset, seed=5)
        self.loader = DataLoader(dataset, 4, sampler=self.sampler, drop_last=True)
        model = Net()
        model.pace += rank if strategy.local_buffers else 0.0
        groups = [{"params": [model.last.weight]}, {"params": [p for n, p in model.named_parameters() if n != "last.weight"]}]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", errors.FleetWarning)  # 16 bits are slow on many CPUs
            self.model, self.optimizer = fleet.distribute(model, optimizer_for(strategy, groups), strategy)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5, 14], gamma=0.7)
        self.ema = torch.optim.swa_utils.AveragedModel(model)
        self.weighs = not strategy.gradient_merge or strategy.gradient_merge_configs["avg"]  # a sum has no weights
        self.losses: list[float] = []
        self.told: list[str] = []
        """Of each micro-step of this run."""
        self.done = 0

    def objects(self) -> dict[str, Any]:
        named = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return named | {"sampler": self.sampler, "ema": self.ema}

    def train(self, until: int) -> None:
        while self.done < until:
            for x, y in self.loader:
                noise = 0.1 * random.random() + 0.1 * np.random.rand()
                weight = len(x) + self.done % 3 if self.weighs else None
                report = self.optimizer.minimize(F.cross_entropy(self.model(x + noise), y), weight=weight)
                if report.due:
                    self.scheduler.step()
                    self.ema.update_parameters(self.model)
                self.losses.append(report.loss or 0.0)
                self.told.append(words_of(report))
                self.done += 1
                if self.done == until:
                    return

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        model = {**self.model.state_dict(), "seen": self.model.seen}
        state = self.optimizer.state_dict()["state"]
        optimizer = {f"{number}/{key}": torch.as_tensor(value) for number, of in state.items() for key, value in of.items()}
        return {"model": model, "optimizer": optimizer, "ema": dict(self.ema.state_dict())}

    def marks(self) -> dict[str, Any]:
        """A fingerprint of each thing that training has changed."""
        marks: dict[str, Any] = {what: fingerprint(tensors) for what, tensors in self.tensors().items()}
        marks["rates"] = [group["lr"] for group in self.optimizer.param_groups]
        marks["sampler"] = {"epoch": self.sampler.epoch, "remaining": self.sampler.remaining}
        marks["losses"] = list(self.losses)
        return marks

    def rows(self) -> dict[str, Any]:
        """All numbers of the model and of the optimizer's state, each in one row."""
        found = {what: self.tensors()[what] for what in ("model", "optimizer")}
        return {what: torch.cat([t.detach().float().flatten() for t in of.values()]).numpy() for what, of in found.items() if of}


def words_of(report: Any) -> str:
    """What a micro-step has told: counters, scales and norms that are in no state dict."""
    facts = ("step", "micro_steps", "updated", "skipped", "averaged", "bytes_dense", "loss_scale", "period")
    measured = ("grad_norm", "noise_scale", "density", "residual_norm")
    return ", ".join(f"{name} {value}" for name in facts + measured if (value := getattr(report, name)) not in (None, False))


def draws() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(1).item()]


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def undisturbed(rank: int, name: str) -> dict[str, Any]:
    """Train as if nothing had been."""
    run = Run(rank, strategy_for(name), seed=1)
    run.train(MICRO_STEPS)
    return {**run.marks(), "told": run.told[STOP_AFTER:], "draws": draws()}


def stopped(rank: int, name: str, folder: str) -> None:
    """Train until the stop, and save."""
    run = Run(rank, strategy_for(name), seed=1)
    run.train(STOP_AFTER)
    fleet.save_checkpoint(folder, step=STOP_AFTER, done=run.done, losses=run.losses, **run.objects())


def resumed(rank: int, name: str) -> dict[str, Any]:
    """Load what lies in the folder, and train on: what was loaded, what it has become, and by which arithmetic."""
    run = Run(rank, stored_strategy(name), seed=77)  # a new run's own random numbers must not matter
    found = fleet.load_checkpoint(FOLDER / name, done=0, losses=[], **run.objects())
    assert found is not None
    run.done, run.losses = found.values["done"], found.values["losses"]
    loaded = {"step": found.step, **run.marks()}
    run.train(MICRO_STEPS)
    continued = {**run.marks(), "told": run.told, "draws": draws()}
    return {"loaded": loaded, "continued": continued, "rows": run.rows(), "arithmetic": arithmetic()}


# --- what was expected, and by which arithmetic --------------------------------------------------------------------------------


def arithmetic() -> dict[str, str]:
    """What decides on last bits: torch's version, what it uses of the processor, and what plain torch then computes."""
    return {
        "torch": torch.__version__.partition("+")[0],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "plain_torch": _plain_run(),
    }


def _plain_run() -> str:
    """A fingerprint of some steps without FleetX: processors of one name may still differ in the kernels that are chosen."""
    torch.manual_seed(0)
    x, y = data()[:8]
    trained: list[Tensor] = []
    for kind, settings in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {})):
        for dtype in (None, torch.bfloat16, torch.float16):
            model = Net()
            optimizer = kind(model.parameters(), lr=0.01, **settings)
            for _ in range(3):
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    loss = F.cross_entropy(model(x).float(), y)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            factors, _ = torch.linalg.qr(model.middle.weight.detach()[:, :2])
            trained += [*(p.detach() for p in model.parameters()), factors]
    return fingerprint({str(number): tensor for number, tensor in enumerate(trained)})[:16]


def write_expected(name: str, ranks: Iterable[Mapping[str, Any]]) -> None:
    """Keep what the ranks of `resumed` have returned."""
    found = list(ranks)
    kept = {
        "written_with": found[0]["arithmetic"],
        "ranks": [{what: of[what] for what in ("loaded", "continued")} for of in found],
    }
    (FOLDER / name / "expected.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    rows = {f"rank{rank}/{what}": row for rank, of in enumerate(found) for what, row in of["rows"].items()}
    first = {key: key.replace("rank1", "rank0") for key in rows}
    kept_rows = {key: row for key, row in rows.items() if key == first[key] or (row != rows[first[key]]).any()}
    save_file(kept_rows, FOLDER / name / "expected.safetensors")


def read_expected(name: str) -> tuple[dict[str, str], list[dict[str, Any]], list[dict[str, Any]]]:
    """The arithmetic it was written with; what each rank had loaded and became; and its numbers, those of rank 0 where equal."""
    kept = json.loads((FOLDER / name / "expected.json").read_text(encoding="utf-8"))
    stored = load_file(FOLDER / name / "expected.safetensors")
    whats = [key.partition("/")[2] for key in stored if key.startswith("rank0/")]
    rows = [{what: stored.get(f"rank{rank}/{what}", stored[f"rank0/{what}"]) for what in whats} for rank in range(SIZE)]
    return kept["written_with"], kept["ranks"], rows


# --- everything else that a checkpoint holds ------------------------------------------------------------------------------


def generators(seed: int) -> dict[str, Any]:
    kinds = {"of_torch": torch.Generator().manual_seed(seed), "of_numpy": np.random.default_rng(seed)}
    return {**kinds, "of_python": random.Random(seed)}


def draw(found: Mapping[str, Any]) -> list[float]:
    return [torch.rand(1, generator=found["of_torch"]).item(), found["of_numpy"].random(), found["of_python"].random()]


def values() -> dict[str, Any]:
    """One of each kind that can be saved."""
    return {
        "plain": {"none": None, "yes": True, "number": -3, "large": 7**900, "text": "é\n", "list": [0.1, float("inf"), -0.0]},
        "keys": {1: "one", "1": "text", ("a", 2): "tuple", "$tensor": "no tensor"},
        "sequences": [(1, 2), {3}, frozenset({4}), deque([5, 6], maxlen=2), torch.Size([7, 8])],
        "mappings": [OrderedDict(b=1, a=2), Counter("abca"), defaultdict(int, {"a": 1})],
        "leaves": [b"\x00bytes", 1 + 2j, torch.bfloat16, torch.device("cpu"), np.float16(0.5), np.arange(6.0).reshape(2, 3)],
        "tensors": [torch.arange(4).to(kind) for kind in (torch.uint8, torch.int64, torch.bfloat16, torch.complex64)],
        "empty": [torch.zeros(0, 3), [], {}, ()],
    }


def save_values(rank: int, folder: str) -> None:
    held = generators(3)
    draw(held)
    fleet.save_checkpoint(folder, step=1, rank=rank, **held, **values())


def load_values(rank: int) -> tuple[int, dict[str, str], list[float]]:
    """Its rank as it was saved, the values as text, and the next draw of each generator."""
    held = generators(99)
    found = fleet.load_checkpoint(VALUES, rank=None, **held, **dict.fromkeys(values()))
    assert found is not None
    return found.values.pop("rank"), {name: text_of(value) for name, value in found.values.items()}, draw(held)


def text_of(value: Any) -> str:
    """As Python writes it, with the types of arrays and tensors."""
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(text_of, value))})"
    return f"{value!r} {getattr(value, 'dtype', '')}"
