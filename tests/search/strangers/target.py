"""A rank that trains for some seconds, and writes the times of each step.

hvdkit run -np 2 python target.py FOLDER SECONDS
"""

import os
import sys
import time
from pathlib import Path

import torch

import hvdkit.torch as hvd

folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), 0.001), model.named_parameters()
)
(folder / f"pid.{hvd.rank()}").write_text(str(os.getpid()))
deadline = time.monotonic() + seconds
step = 0
going = True
with (folder / f"steps.{hvd.rank()}").open("w") as steps:
    while going:
        wall, cpu = time.time(), time.process_time()
        model(torch.rand(64, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        steps.write(f"{wall} {time.time() - wall} {time.process_time() - cpu}\n")
        time.sleep(0.002)
        if step % 50 == 0:
            # All ranks end after the same step.
            left = hvd.allreduce(torch.tensor([deadline - time.monotonic()]), name="left")
            going = left.item() > 0
print("trained", step, sum(p.sum().item() for p in model.parameters()), flush=True)
