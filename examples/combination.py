"""Several strategies at once: 16-bit arithmetic, recomputation and LARS (seed: several strategies, and automatic ones).

fleetrun examples/combination.py --steps 20
fleetrun examples/combination.py --steps 20 --amp.dtype float16
"""

import torch

import fleetx as X
from fleetx import fleet
from seed_loop import own_flags, train

model = X.applications.Resnet50(num_classes=10, image_size=32)

strategy = fleet.DistributedStrategy()
strategy.amp = True
strategy.recompute = True
strategy.recompute_configs = {"checkpoints": model.checkpoints}
strategy.lars = True
strategy.lars_configs = {
    "lars_coeff": 0.001,
    "lars_weight_decay": 0.0005,
    "exclude_from_weight_decay": ["batch_norm", ".b_0"],
}

parser = own_flags()
configs = X.parse_train_configs(defaults={"lr": 0.01, "data": "digits", "strategy": strategy}, parser=parser)
steps = parser.parse_args(configs.rest).steps
fleet.init()

loader = model.get_train_dataloader(configs.data, batch_size=configs.batch_size)

optimizer = torch.optim.SGD(model.parameters(), lr=configs.lr, momentum=configs.momentum)
model, optimizer = fleet.distribute(model, optimizer, configs.strategy)

train(model, optimizer, loader, configs, steps)
