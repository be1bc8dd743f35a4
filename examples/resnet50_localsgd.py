"""Local SGD with an adaptive period: workers average only every few updates (seed: Local SGD for very large batches).

fleetrun examples/resnet50_localsgd.py --steps 20
fleetrun examples/resnet50_localsgd.py --steps 20 --auto false --localsgd.k_steps 4       # a fixed period
"""

import torch

import fleetx as X
from fleetx import fleet
from seed_loop import own_flags, train

strategy = fleet.DistributedStrategy()
strategy.localsgd = True
strategy.auto = True  # with localsgd: the older spelling of adaptive_localsgd
strategy.localsgd_configs = {
    "k_steps": 1,
}

parser = own_flags()
configs = X.parse_train_configs(defaults={"lr": 0.002, "data": "digits", "strategy": strategy}, parser=parser)
steps = parser.parse_args(configs.rest).steps
fleet.init()

model = X.applications.Resnet50(num_classes=10, image_size=32)
loader = model.get_train_dataloader(configs.data, batch_size=configs.batch_size)

optimizer = torch.optim.SGD(model.parameters(), lr=configs.lr)
model, optimizer = fleet.distribute(model, optimizer, configs.strategy)

train(model, optimizer, loader, configs, steps)
