"""Let `auto` choose the strategies from measurements, and explain the choice (seed: several strategies, and automatic ones).

fleetrun examples/auto.py --steps 20
fleetrun examples/auto.py --steps 20 --auto.risk schedule
"""

import torch

import fleetx as X
from fleetx import fleet
from seed_loop import own_flags, train

strategy = fleet.DistributedStrategy()
strategy.auto = True

parser = own_flags()
configs = X.parse_train_configs(defaults={"lr": 0.001, "data": "digits", "strategy": strategy}, parser=parser)
steps = parser.parse_args(configs.rest).steps
fleet.init()

model = X.applications.Resnet50(num_classes=10, image_size=32)
loader = model.get_train_dataloader(configs.data, batch_size=configs.batch_size)

optimizer = torch.optim.SGD(model.parameters(), lr=configs.lr, momentum=configs.momentum)
model, optimizer = fleet.distribute(model, optimizer, configs.strategy, sample=next(iter(loader)))

train(model, optimizer, loader, configs, steps)
