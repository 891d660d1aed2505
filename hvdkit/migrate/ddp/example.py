"""The script in which the examples of the rules stand."""

#: A small DDP script, in which the rules find their lines.
SETUP = """\
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
ddp_model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
