"""Gradients that a module of PyTorch reduces are not reduced a second time."""

import contextlib
import os
import uuid

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hvdkit.errors import UsageError


@contextlib.contextmanager
def process_group(hvd):
    path = hvd.broadcast_object(os.path.join(os.environ["TMPDIR"], f"store-{uuid.uuid4()}"))
    store = distributed.FileStore(path, hvd.size())
    distributed.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    try:
        yield
    finally:
        hvd.barrier()
        distributed.destroy_process_group()


def test_parameters_of_ddp_are_refused(hvd):
    with process_group(hvd):
        model = nn.Sequential(DistributedDataParallel(nn.Linear(2, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match=r"'0\.module\.weight' belongs to a Distributed"):
            hvd.DistributedOptimizer(optimizer, model.named_parameters())


def test_parameters_of_fsdp_are_refused(hvd):
    from torch.distributed.fsdp import FullyShardedDataParallel  # slow: it imports SymPy

    with process_group(hvd):
        model = FullyShardedDataParallel(nn.Linear(2, 1), device_id=torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match="belongs to a FullyShardedDataParallel module"):
            hvd.DistributedOptimizer(optimizer, model.named_parameters())


def test_a_model_that_ddp_gets_after_the_optimizer_is_refused(hvd):
    with process_group(hvd):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        outer = DistributedDataParallel(model)
        with pytest.raises(UsageError, match="reduce them a second time"):
            outer(torch.ones(1, 2)).sum().backward()
        hvd.barrier()
        del optimizer


def test_other_parameters_are_accepted(hvd):
    with process_group(hvd):
        other = DistributedDataParallel(nn.Linear(2, 1))
        model = nn.Linear(2, 1)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        model(torch.full((1, 2), float(hvd.rank()))).sum().backward()
        assert model.weight.grad.tolist() == [[0.5, 0.5]]
        assert other.module.weight.grad is None


def test_a_module_that_is_no_longer_used_does_not_count(hvd):
    with process_group(hvd):
        model = nn.Linear(2, 1)
        outer = DistributedDataParallel(model)
        outer.itself = [outer]  # a reference cycle
        del outer
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hvd.DistributedOptimizer(optimizer, model.named_parameters())


@pytest.mark.parametrize("kind", ["FSDP2", "tensor parallel"])
def test_dtensors_over_all_ranks_are_refused(hvd, kind):
    # Slow imports.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with process_group(hvd):
        model = nn.Sequential(nn.Linear(2, 4))
        mesh = init_device_mesh("cpu", (hvd.size(),))
        if kind == "FSDP2":
            fully_shard(model, mesh=mesh)
        else:
            parallelize_module(model, mesh, {"0": ColwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for call in (
            lambda: hvd.DistributedOptimizer(optimizer, model.named_parameters()),
            lambda: hvd.broadcast_parameters(model.state_dict(), root_rank=0),
            lambda: hvd.broadcast_optimizer_state(optimizer, root_rank=0),
        ):
            with pytest.raises(UsageError, match="no other rank has the same part"):
                call()
        for call in (
            lambda: hvd.allreduce(model[0].weight),
            lambda: hvd.broadcast_(model[0].bias.detach(), 0),
            lambda: hvd.grouped_allreduce([torch.ones(1), model[0].bias.detach()]),
        ):
            with pytest.raises(UsageError, match=r" is a [\w.]*DTensor"):
                call()
