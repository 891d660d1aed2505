"""Train a small network with PyTorch: hvdkit run -np 2 python examples/torch_minimal.py"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd

hvd.init()

# The same data on every rank: is a point inside the circle?
points = torch.rand(4096, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
labels = (points.norm(dim=1) < 0.8).long()
train, test = TensorDataset(points[:3072], labels[:3072]), (points[3072:], labels[3072:])
sampler = hvd.DistributedSampler(train)  # each rank gets its share
loader = DataLoader(train, batch_size=64, sampler=sampler)

model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for epoch in range(10):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()  # reduces the gradients
        optimizer.step()

# Each rank tests its share; the sums over all ranks give the exact accuracy.
mine = slice(hvd.rank(), None, hvd.size())
correct = (model(test[0][mine]).argmax(dim=1) == test[1][mine]).sum()
totals = hvd.allreduce(torch.stack([correct, torch.tensor(len(test[1][mine]))]), op=hvd.Sum)
if hvd.rank() == 0:
    print(f"accuracy={totals[0] / totals[1]:.3f} on {hvd.size()} ranks")
hvd.shutdown()
