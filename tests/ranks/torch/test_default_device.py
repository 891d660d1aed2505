"""A script may call `torch.set_default_device`, for example with "cuda".

Here the default is the meta device, whose tensors have no content: a tensor that hvdkit or Horovod
makes on the default device fails.
"""

import pytest
import torch
from torch import nn

from tests.ranks.folders import shared_folder
from tests.ranks.torch.oracle import assert_same_on_all_ranks


def model_and_data(hvd):
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(5, 7, device="cpu"), nn.Linear(7, 2, device="cpu"))
    return model, torch.ones(3, 5, device="cpu") * (hvd.rank() + 1)


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "int8"])
def test_training(hvd, compression):
    with torch.device("meta"):
        model, x = model_and_data(hvd)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), compression=compression, check_interval=1
        )
        for _ in range(4):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_on_all_ranks(hvd, model)


def test_sparse_gradients(hvd):
    with torch.device("meta"):
        embedding = nn.Embedding(6, 3, sparse=True, device="cpu")
        hvd.broadcast_parameters(embedding.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=0.1))
        for step in range(3):
            words = torch.tensor([step, hvd.rank()], device="cpu")
            embedding(words).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_on_all_ranks(hvd, embedding)


def test_objects_and_uneven_data(hvd):
    with torch.device("meta"):
        assert hvd.broadcast_object({"a": hvd.rank()}, root_rank=0) == {"a": 0}
        assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
        received, splits = hvd.alltoall(
            torch.arange(2 * hvd.size(), device="cpu"),
            splits=torch.full((hvd.size(),), 2, dtype=torch.int32, device="cpu"),
        )
        assert splits.tolist() == [2] * hvd.size()
        assert received.tolist() == [2 * hvd.rank(), 2 * hvd.rank() + 1] * hvd.size()
        batches = hvd.equal_batches([0] * (hvd.rank() + 2))
        assert len(list(batches)) == 2
        hvd.join()


def test_a_checkpoint_and_a_commit(hvd):
    with shared_folder(hvd) as folder, torch.device("meta"):
        model, x = model_and_data(hvd)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        before = model[0].weight.detach().clone()
        with hvd.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
            checkpointer.save(1, wait=True)
            with torch.no_grad():
                model[0].weight.zero_()
            checkpointer.restore()
        assert torch.equal(model[0].weight, before)
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
        state.commit()
        with torch.no_grad():
            model[0].weight.zero_()
        state.restore()
        assert torch.equal(model[0].weight, before)
