"""Gradient merge: a batch four times larger in the same memory (seed: Gradient Merge).

fleetrun examples/resnet50_gradient_merge.py --steps 20
fleetrun examples/resnet50_gradient_merge.py --steps 20 --gradient_merge.k_steps 8
"""

import torch

import fleetx as X
from fleetx import fleet
from seed_loop import own_flags, train

strategy = fleet.DistributedStrategy()
strategy.gradient_merge = True
strategy.gradient_merge_configs = {"k_steps": 4, "avg": True}

parser = own_flags()
configs = X.parse_train_configs(defaults={"lr": 0.01, "data": "digits", "strategy": strategy}, parser=parser)
steps = parser.parse_args(configs.rest).steps
fleet.init()

model = X.applications.Resnet50(num_classes=10, image_size=32)
loader = model.get_train_dataloader(configs.data, batch_size=configs.batch_size)

optimizer = torch.optim.SGD(model.parameters(), lr=configs.lr, momentum=configs.momentum)
model, optimizer = fleet.distribute(model, optimizer, configs.strategy)

train(model, optimizer, loader, configs, steps)
