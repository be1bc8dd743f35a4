"""Deep gradient compression for slow links: a thousandth of each gradient is sent (seed: several strategies, combination 2).

fleetrun examples/resnet50_dgc.py --steps 20
fleetrun examples/resnet50_dgc.py --steps 20 --dgc false --powersgd --powersgd.begin_step 2      # low-rank factors instead
"""

import torch

import fleetx as X
from fleetx import fleet
from seed_loop import own_flags, train

strategy = fleet.DistributedStrategy()
strategy.dgc = True
strategy.dgc_configs = {
    "rampup_begin_step": 2,
    "rampup_step": 6,
    "sparsity": [0.984375, 0.996, 0.999],
}

parser = own_flags()
configs = X.parse_train_configs(defaults={"lr": 0.002, "data": "digits", "strategy": strategy}, parser=parser)
steps = parser.parse_args(configs.rest).steps
fleet.init()

model = X.applications.Resnet50(num_classes=10, image_size=32)
loader = model.get_train_dataloader(configs.data, batch_size=configs.batch_size)

optimizer = torch.optim.SGD(model.parameters(), lr=configs.lr, momentum=configs.momentum)
model, optimizer = fleet.distribute(model, optimizer, configs.strategy)

train(model, optimizer, loader, configs, steps)
