"""Fit a line to points, different ones on each rank, to test training with these images."""

import torch

import hvdkit.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
points = torch.randn(256, 4)
wanted = points @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]) + 0.25
first = None
for _ in range(100):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(points), wanted)
    loss.backward()
    optimizer.step()
    first = loss.item() if first is None else first
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
everyones = hvd.allgather(weights[None])
assert loss.item() < first / 100, f"loss {first:.4f} -> {loss.item():.4f}"
assert torch.equal(everyones, weights.expand_as(everyones)), "the ranks have different weights"
print(f"rank {hvd.rank()} of {hvd.size()}: loss {first:.4f} -> {loss.item():.6f}, same weights")
