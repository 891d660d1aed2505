"""Elastic states and samplers of PyTorch, in a job whose ranks stay."""

import pytest
import torch


def test_the_objects_of_a_state_are_sent_as_other_objects(hvd):
    """Horovod's function takes a minute for 400 MB, and names collectives after types."""
    for kind in (hvd.elastic.ObjectState, hvd.elastic.TorchState):
        assert kind(epoch=0)._bcast_object is hvd.broadcast_object


def test_a_state_is_restored_twice(hvd):
    """The optimizer changes the tensors that it has loaded."""
    model = torch.nn.Linear(3, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    state.sync()

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        momentum = [each["momentum_buffer"] for each in optimizer.state.values()]
        return [tensor.clone() for tensor in (*model.parameters(), *momentum)]

    step()
    state.save()
    first = step()
    for _ in range(2):
        state.restore()
        for again, before in zip(step(), first, strict=True):
            assert torch.equal(again, before)


def test_objects(hvd):
    state = hvd.elastic.ObjectState(step=hvd.rank(), names=["a"])
    state.sync()
    assert (state.step, state.names) == (0, ["a"])
    state.step = 5
    state.restore()
    assert state.step == 0
    state.step = 6
    # Not an elastic job: nothing is stored, and no host can change.
    state.commit()
    state.step = 7
    state.restore()
    assert state.step == 6


@pytest.mark.parametrize("left", [0, 1, 3, 5, 8])
def test_a_sampler_with_few_samples_left(hvd, left):
    sampler = hvd.elastic.ElasticSampler(range(20), shuffle=False)
    sampler.load_state_dict({"epoch": 0, "processed_num": 20 - left})
    own = list(sampler)
    assert len(own) == len(sampler) == -(-left // hvd.size())
    everywhere = {sample for samples in hvd.allgather_object(own) for sample in samples}
    assert everywhere == set(range(20 - left, 20))
