"""LARS / LAMB: very large batches that still converge (seed: LARS / LAMB for very large batches).

fleetrun examples/resnet50_lars.py --steps 20
fleetrun examples/resnet50_lars.py --steps 20 --lamb
"""

import torch

import fleetx as X
from fleetx import fleet
from seed_loop import own_flags, train

strategy = fleet.DistributedStrategy()
strategy.lars = True
strategy.lars_configs = {
    "lars_coeff": 0.001,
    "lars_weight_decay": 0.0005,
    "exclude_from_weight_decay": ["batch_norm", ".b_0"],
}

# LARS moves a layer by lr * lars_coeff of its norm, before momentum: with 0.001 it needs a far larger rate than the others.
LR = {"lars": 3.0, "lamb": 0.01, "sgd": 0.1}

parser = own_flags()
configs = X.parse_train_configs(defaults={"lr": LR["lars"], "data": "digits", "strategy": strategy}, parser=parser)
if configs.strategy.lamb or not configs.strategy.lars:  # the user switched the script's LARS off: read again without it
    lr = LR["lamb" if configs.strategy.lamb else "sgd"]
    configs = X.parse_train_configs(defaults={"lr": lr, "data": "digits"}, parser=parser)
steps = parser.parse_args(configs.rest).steps
fleet.init()

model = X.applications.Resnet50(num_classes=10, image_size=32)
loader = model.get_train_dataloader(configs.data, batch_size=configs.batch_size)

if configs.strategy.lamb:
    betas = (configs.beta1, configs.beta2)
    optimizer = torch.optim.Adam(model.parameters(), lr=configs.lr, betas=betas, eps=configs.epsilon)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=configs.lr, momentum=configs.momentum)
model, optimizer = fleet.distribute(model, optimizer, configs.strategy)

train(model, optimizer, loader, configs, steps)
