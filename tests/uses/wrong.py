"""Wrong uses, one in a line after the imports: type checkers find each, and FleetX refuses each when it runs."""

from __future__ import annotations

import torch

import fleetx as X
from fleetx import fleet
from fleetx.engine.optimizer import FleetOptimizer
from fleetx.strategies import DGC, Amp, Auto, FP16AllReduce, GradientMerge, Lars, LocalSGD, PowerSGD, Recompute

strategy, model = fleet.DistributedStrategy(), torch.nn.Linear(4, 2)
# From here on every line is wrong.
fleet.DistributedStrategy(larz=True)
fleet.DistributedStrategy(gradient_marge=True)
fleet.DistributedStrategy(dgc_config={"sparsity": [0.999]})
fleet.DistributedStrategy(lars="yes")
fleet.DistributedStrategy(amp=1)
fleet.DistributedStrategy(dgc=None)
fleet.DistributedStrategy(dgc=Lars())
fleet.DistributedStrategy(dgc=DGC)
fleet.DistributedStrategy(localsgd={"k_step": 4})
fleet.DistributedStrategy(localsgd={"k_steps": "4"})
fleet.DistributedStrategy(localsgd_configs={"wire_dtype": "fp16"})
fleet.DistributedStrategy(dgc={"sparsity": 0.999})
fleet.DistributedStrategy(lars_configs={"exclude_from_weight_decay": "norm"})
fleet.DistributedStrategy(on_nan_inf="ignore")
fleet.DistributedStrategy(fuse_grad_size_in_MB="32MB")
fleet.DistributedStrategy({"amp": True})
strategy.larz = True
strategy.lars = "yes"
strategy.lars_configs = {"coeff": 0.001}
strategy.lars_configs = 0.001
strategy.lars_configs["coeff"] = 0.001
strategy.lars_configs["lars_coeff"] = "0.001"
print(strategy.lars_config)
DGC(sparcity=[0.999])
DGC([0.999])
Amp(dtype="fp16")
Auto(risk="low")
Recompute(budget=2.5)
GradientMerge(k_steps=None)
LocalSGD(outer_nesterov="yes")
PowerSGD(rank=4.0)
FP16AllReduce(rank=4)
fleet.distributed(model)
X.distribute(model)
FleetOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)).minimise(model(torch.ones(1, 4)).sum())
FleetOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)).minimize(model(torch.ones(1, 4)).sum(), wait=3)
