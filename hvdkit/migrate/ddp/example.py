"""The code around the example of each rule for DDP scripts."""

#: The beginning of a small DDP script. It defines the names that the examples use.
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
