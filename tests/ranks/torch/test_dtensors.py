"""DTensors: hvdkit reduces over the ranks that have the same part of a parameter.

The model of all ranks is compared with one process, which has the whole model and all data.
"""

import contextlib
import copy
import os
import uuid

import pytest
import torch
from torch import distributed, nn

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.reduction.step_errors import PassesDiffer

SIZE, HEADS = 8, 4


@contextlib.contextmanager
def device_mesh(hvd):
    """Make a mesh of 2 x 2 ranks, over a process group, for the duration of a block."""
    if hvd.size() != 4:
        pytest.skip("needs four ranks")
    from torch.distributed.device_mesh import init_device_mesh  # slow

    from hvdkit.torch.process_sets import find_or_add

    path = hvd.broadcast_object(os.path.join(os.environ["TMPDIR"], f"store-{uuid.uuid4()}"))
    store = distributed.FileStore(path, hvd.size())
    distributed.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        # The sets that hvdkit has added stay. Other tests of these ranks add the same.
        for each in find_or_add([[0, 2], [1, 3]]):
            hvd.remove_process_set(each)
    finally:
        distributed.destroy_process_group()


class Block(nn.Module):
    """A block of a transformer: attention and an MLP, each after a norm."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.q, self.k, self.v, self.out = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.up, self.down = nn.Linear(SIZE, 12), nn.Linear(12, SIZE)

    def forward(self, x):
        q, k, v = (
            layer(self.first(x)).unflatten(-1, (-1, SIZE // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        attention = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attention.transpose(1, 2).flatten(-2))
        return x + self.down(self.up(self.second(x)).tanh())


def block():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).double()


def parallelize(model, mesh, kind):
    """Make the parameters of a model of `Block` DTensors."""
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer, mesh=mesh["model"])
        fully_shard(model, mesh=mesh["model"])
        return
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    plan |= {name: RowwiseParallel() for name in ("out", "down")}
    if kind == "sequence":
        sharded, whole = Shard(1), Replicate()
        plan |= {name: SequenceParallel() for name in ("first", "second")}
        for name in ("q", "k", "v", "up"):
            plan[name] = ColwiseParallel(input_layouts=sharded)
        for name in ("out", "down"):
            plan[name] = RowwiseParallel(output_layouts=sharded)
    for layer in model:
        parallelize_module(layer, mesh["model"], plan)
    if kind == "sequence":
        parallelize_module(
            model,
            mesh["model"],
            {
                "0": PrepareModuleInput(
                    input_layouts=whole, desired_input_layouts=sharded, use_local_output=True
                ),
                "1": PrepareModuleOutput(output_layouts=sharded, desired_output_layouts=whole),
            },
        )


def batch(number, step):
    generator = torch.Generator().manual_seed(100 * step + number)
    x = torch.randn(3, 4, SIZE, generator=generator, dtype=torch.float64)
    return 5 * x - 1 if number == 1 else x


def loss_of(model, x):
    return (model(x) - x.sin()).square().mean()


def assert_whole_close(model, reference, tolerance):
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        torch.testing.assert_close(
            whole, q, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


TOLERANCES = {"none": 1e-9, "fp16": 2e-3}


@pytest.mark.parametrize("clip", ["", "setting", "call"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("wire", ["none", "fp16"])
@pytest.mark.parametrize("kind", ["tensor", "sequence", "fsdp"])
def test_training_is_that_of_one_process(hvd, kind, wire, passes, clip):
    with device_mesh(hvd) as mesh:
        model = block()
        reference = copy.deepcopy(model)
        parallelize(model, mesh, kind)
        for part in (model, reference):
            part[0].q.weight.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()),
            model.named_parameters(),
            compression=wire,
            accumulation_steps=passes,
            bucket_bytes=500,
            max_grad_norm=0.5 if clip == "setting" else None,
        )
        assert optimizer.process_set.ranks == [hvd.rank() % 2, hvd.rank() % 2 + 2]
        plain = sgd(reference.parameters())
        data, ranks = hvd.rank() // 2, 2
        # With FSDP2, each rank has data of its own.
        if kind == "fsdp":
            data, ranks = hvd.rank(), 4
        for step in range(4):
            plain.zero_grad()
            for each in range(passes):
                for rank in range(ranks):
                    loss = loss_of(reference, batch(rank, 10 * step + each))
                    (loss / ranks / passes).backward()
                loss_of(model, batch(data, 10 * step + each)).backward()
                if clip == "call":
                    norm = hvd.clip_grad_norm_(optimizer, 0.5)
                optimizer.step()
                optimizer.zero_grad()
            if clip:
                expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
                norm = optimizer.grad_norm if clip == "setting" else norm
                assert float(norm) == pytest.approx(float(expected), rel=TOLERANCES[wire])
            plain.step()
        assert_whole_close(model, reference, TOLERANCES[wire])


def train(hvd, model, passes):
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    if passes:
        model(batch(0, 0)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("at", ["pass", "step"])
def test_plain_parameters_on_some_ranks_are_an_error_on_all(hvd, at):
    with device_mesh(hvd) as mesh:
        model = block()
        if hvd.rank() // 2:
            parallelize(model, mesh, "tensor")
        with pytest.raises(PassesDiffer, match="in hvd.DistributedOptimizer, whose parameters are"):
            train(hvd, model, passes=at == "pass")


def test_ranks_with_other_placements_are_an_error_on_all(hvd):
    with device_mesh(hvd) as mesh:
        model = block()
        parallelize(model, mesh, "sequence" if hvd.rank() // 2 else "tensor")
        with pytest.raises(RankMismatchError, match="Replicate"):
            hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
