"""What tests use, imported once: ranks and other processes of tests are forked from one that has imported this file.

Importing torch takes seconds, the first optimizer as much again, and so does the first compiled model. The process that
forks has no thread and no process group.
What ranks print goes nowhere: pytest's capture ends with each test, and they go on.
"""

import gc
import os

import torch
import torch._dynamo.backends.inductor
import torch._inductor.compile_fx
import torch.utils.data

import fleetx.applications  # noqa: F401
from fleetx.strategies import catalogue

os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
catalogue()
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
gc.collect()
gc.freeze()  # each of many collections would go through all of torch
