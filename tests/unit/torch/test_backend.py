"""Packing of gradients that a script has put in unusual places."""

import torch


def memory_of(*parameters):
    from hvdkit.reduction import bucketing
    from hvdkit.torch.reduction.memory import TorchMemory, spec

    (bucket,) = bucketing.plan([spec(f"p{i}", p) for i, p in enumerate(parameters)]).buckets
    return TorchMemory(bucket, [parameters[i] for i in bucket.parameters])


def in_bucket(hvd):
    """Return two parameters whose gradients, 1 and 2, are in the bucket, and the memory."""
    first, second = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    memory = memory_of(first, second)
    first.grad, second.grad = torch.full((4,), 1.0), torch.full((4,), 2.0)
    memory.in_place(1.0)
    return first, second, memory


def test_a_gradient_may_move_to_another_parameter(hvd):
    for source, target in ((0, 1), (1, 0)):
        *parameters, memory = in_bucket(hvd)
        parameters[target].grad = parameters[source].grad
        parameters[source].grad = None
        memory.in_place(1.0)
        assert parameters[target].grad.tolist() == [source + 1.0] * 4
        assert parameters[source].grad.tolist() == [0.0] * 4


def test_gradients_may_be_exchanged(hvd):
    first, second, memory = in_bucket(hvd)
    first.grad, second.grad = second.grad, first.grad
    memory.in_place(0.5)
    assert first.grad.tolist() == [1.0] * 4
    assert second.grad.tolist() == [0.5] * 4


def test_some_gradients_of_float16_are_in_the_bucket(hvd):
    first, second = (torch.nn.Parameter(torch.zeros(40, dtype=torch.float16)) for _ in range(2))
    memory = memory_of(first, second)
    values = torch.linspace(-3, 3, 40).half()
    first.grad, second.grad = values.clone(), values.clone()
    memory.in_place(1.0)
    second.grad = values.clone()
    memory.in_place(1 / 3)
    expected = (values.float() / 3).half()
    assert torch.equal(first.grad, expected)
    assert torch.equal(second.grad, expected)
