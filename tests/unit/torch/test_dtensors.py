"""DTensors on simulated ranks, which are threads. FSDP2, in `tests/ranks`, needs processes."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn

from hvdkit.reduction.accumulation import Window
from hvdkit.reduction.compression import NoCompression
from hvdkit.reduction.plan import Reduction
from hvdkit.torch.reduction import passes
from hvdkit.torch.reduction.coordination import Coordinator
from hvdkit.torch.reduction.settings import Settings
from hvdkit.torch.wrapping import wrap
from tests.ranks.torch.oracle import batch_of, loss_of, sgd, small_model
from tests.simulated.backend import SimulatedBackend
from tests.simulated.ranks import on_ranks


@pytest.fixture(scope="module")
def mesh():
    # Slow. Simulated ranks do not wait long for each other.
    import torch.distributed.tensor
    from torch.distributed.device_mesh import init_device_mesh

    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # its imports set environment variables
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("model",))
    distributed.destroy_process_group()


def sharded(model, mesh):
    """Make the parameters of a model DTensors, and return a function for its inputs."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    def split(_, layer, where):
        for name, p in list(layer.named_parameters(recurse=False)):
            part = distribute_tensor(p.data, where, [Shard(0) if p.dim() > 1 else Replicate()])
            layer.register_parameter(name, nn.Parameter(part))

    distribute_module(model, mesh, split)
    return lambda x: distribute_tensor(x, mesh, [Replicate()])


def wrapped(collectives, model, window, average=True, max_grad_norm=None):
    rank = collectives.__dict__
    settings = Settings(
        optimizer="SGD",
        reduction=replace(Reduction(NoCompression(), bucket_bytes=64), average=average),
        frozen={},
        process_set=SimpleNamespace(process_set_id=0),
        check_parameters=False,
        max_grad_norm=max_grad_norm,
    )
    return wrap(
        sgd(model.parameters()),
        settings,
        window,
        {p: name for name, p in model.named_parameters()},
        collectives=collectives,
        coordinator=rank.setdefault("coordinator", Coordinator(collectives)),
        siblings=rank.setdefault("reducers", passes.Reducers()),
        make_backend=SimulatedBackend,
    )


def train(mesh, steps=2, windows=1, passes_per_step=1, zero="optimizer", **how):
    """Train on two simulated ranks, and compare with one process."""
    original = small_model()  # before the threads: the seed is global

    def run(collectives):
        model, reference = copy.deepcopy(original), copy.deepcopy(original)
        given = sharded(model, mesh)
        optimizer = wrapped(collectives, model, Window(windows), **how)
        plain = sgd(reference.parameters())
        ranks = 2 if how.get("average", True) else 1
        for step in range(steps):
            for batch in range(windows):
                for _ in range(passes_per_step):
                    number = 10 * step + batch
                    for rank in range(2):
                        loss = loss_of(reference, batch_of(rank, number))
                        (loss / ranks / windows).backward()
                    loss = loss_of(model, given(batch_of(collectives.rank, number)))
                    getattr(loss, "full_tensor", lambda own=loss: own)().backward()
                optimizer.step()
            if (norm := how.get("max_grad_norm")) is not None:
                nn.utils.clip_grad_norm_(reference.parameters(), norm)
            plain.step()
            plain.zero_grad()
            {"optimizer": optimizer, "model": model}[zero].zero_grad()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q, rtol=1e-12, atol=1e-12)

    on_ranks(2, run)


@pytest.mark.parametrize(
    "how",
    [
        {"passes_per_step": 2},
        {"zero": "model"},
        {"windows": 2},
        {"max_grad_norm": 0.1},
        {"average": False},
    ],
    ids=str,
)
def test_training_is_that_of_one_process(mesh, how):
    train(mesh, **how)


@pytest.mark.parametrize("how", [{"average": False}, {"max_grad_norm": 0.1}])
def test_two_passes_whose_sum_cannot_be_separated(mesh, how):
    train(mesh, passes_per_step=2, **how)
