"""Right uses of the typed names, of which no type checker may complain; each also runs (tests/unit/test_types.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import fleetx as X
from fleetx import fleet
from fleetx.strategies import (
    DGC,
    Amp,
    Auto,
    BF16AllReduce,
    ClipNorm,
    GradientMerge,
    Lamb,
    Lars,
    LocalSGD,
    Muon,
    PowerSGD,
    Recompute,
)

if TYPE_CHECKING:
    from fleetx.strategies import DGCSettings, LocalSGDSettings

# Keywords
fleet.DistributedStrategy()
fleet.DistributedStrategy(amp=True, recompute=True, gradient_merge=True)
fleet.DistributedStrategy(localsgd={"k_steps": 4, "wire_dtype": "bfloat16"})
fleet.DistributedStrategy(dgc=DGC(sparsity=[0.75, 0.999]))
fleet.DistributedStrategy(lars=True, lars_configs={"lars_coeff": 0.001, "exclude_from_weight_decay": ["norm"]})
fleet.DistributedStrategy(lars=Lars(epsilon=0, exclude_from_weight_decay=("norm", "bias")), fuse_grad_size_in_MB=16)
fleet.DistributedStrategy(recompute=Recompute(budget="20GB"))
fleet.DistributedStrategy(recompute={"budget": 20_000_000_000, "checkpoints": ["layer1.*"]})
fleet.DistributedStrategy(auto=Auto(risk="lossy", memory="20GiB", global_batch=None))
fleet.DistributedStrategy(bf16_allreduce=BF16AllReduce(), on_nan_inf="skip")
fleet.DistributedStrategy(amp=Amp(dtype="float16", init_loss_scaling=1024))
fleet.DistributedStrategy(powersgd=PowerSGD(rank=8), clip_norm=False)
X.DistributedStrategy(find_unused_parameters=True, local_buffers=["hidden"])

# Attributes
strategy = fleet.DistributedStrategy()
strategy.lars = True
strategy.lars_configs = {"lars_coeff": 0.001, "lars_weight_decay": 0.0005}
strategy.lars_configs["epsilon"] = 1e-9
strategy.clip_norm = ClipNorm(max_norm=0.5)
strategy.gradient_merge = {"k_steps": 2}
strategy.dgc = False
strategy.desync_check_steps = 0
is_on: bool = strategy.lars
coefficient: float = strategy.lars_configs["lars_coeff"]
excluded = len(strategy.lars_configs["exclude_from_weight_decay"])

# Settings as a dict of their own, and parts
sparse: DGCSettings = {"sparsity": [0.999], "clip_norm": None}
fleet.DistributedStrategy(dgc=sparse)
local: LocalSGDSettings = {"k_steps": 4, "outer_nesterov": True}
fleet.DistributedStrategy(localsgd=local)
k_steps: int = GradientMerge(k_steps=4).k_steps
momentum: float = LocalSGD(outer_momentum=0.9, outer_lr=0.7).outer_momentum
steps: int = Muon(ns_dtype="float32").ns_steps
decay: list[str] = Lamb(always_adapt=True).exclude_from_weight_decay

# What the strategy is for
model = torch.nn.Linear(4, 2)
model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy())
report = optimizer.minimize(model(torch.ones(3, 4)).sum(), weight=3.0)
due: bool = report.due
again: fleet.DistributedStrategy = fleet.DistributedStrategy.from_yaml(strategy.to_yaml())
rank: int = fleet.worker_index() + X.fleet.worker_num()
lars: torch.optim.Optimizer = X.optim.Lars(model.parameters(), lr=0.1, momentum=0.9)
muon: torch.optim.Optimizer = X.optim.Muon(model.parameters(), 0.1, 0.95, True, 5, 0.1)
