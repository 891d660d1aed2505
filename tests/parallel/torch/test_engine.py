"""What the engine's fixes change, seen from PyTorch. On a stock Horovod most of this fails."""

import json
import sys

import horovod.torch
import numpy as np
import pytest
import torch

from tests.parallel.rank_pool import Configuration, start_ranks_of

SMALLEST = 2.0**-24  # of the numbers above 0 that float16 has


def same_on_all_ranks(seed):
    return np.random.default_rng(seed)


def test_float16_sum_of_the_smallest_value_and_one(hvd):
    for length in (*range(1, 21), 1000):
        # In turn, so that the smaller one is now what is added, now what is added to.
        smallest_on_first = torch.arange(length) % 2 == 0
        own = torch.zeros(length, dtype=torch.float16)
        if hvd.rank() < 2:
            own[:] = 1
            own[smallest_on_first if hvd.rank() == 0 else ~smallest_on_first] = SMALLEST
        total = hvd.allreduce(own, op=hvd.Sum, name=f"smallest and one {length}")
        assert total.tolist() == [1.0] * length


def test_float16_sum_is_exact_where_float16_is(hvd):
    rng = same_on_all_ranks(1)
    # Whole numbers below 2048 on a scale per element, the smallest included: no sum is rounded,
    # in whatever order the ranks' numbers are added.
    scales = 2.0 ** rng.integers(-24, 5, 1003)
    numbers = rng.integers(-500, 501, (hvd.size(), 1003)) * scales
    total = hvd.allreduce(torch.tensor(numbers[hvd.rank()]).half(), op=hvd.Sum, name="exact sum")
    np.testing.assert_array_equal(total.numpy(), numbers.sum(axis=0).astype(np.float16))


def test_float16_average_and_scaling_round_as_float32_does(hvd):
    rng = same_on_all_ranks(2)
    numbers = (rng.integers(-500, 501, (hvd.size(), 1003)) * 2.0**-24).astype(np.float16)
    own = torch.tensor(numbers[hvd.rank()])
    total = numbers.astype(np.float32).sum(axis=0)
    mean = hvd.allreduce(own, op=hvd.Average, name="mean of the smallest")
    np.testing.assert_array_equal(mean.numpy(), (total / hvd.size()).astype(np.float16))
    scaled = hvd.allreduce(
        own, op=hvd.Sum, prescale_factor=4096.0, postscale_factor=0.125, name="scaled"
    )
    np.testing.assert_array_equal(scaled.numpy(), (total * 512).astype(np.float16))


def test_float16_product_is_exact_where_float16_is(hvd):
    rng = same_on_all_ranks(3)
    numbers = rng.choice([-1, 1, 2, 3, 5], (hvd.size(), 1003)) * 2.0 ** rng.integers(
        -5, 2, (hvd.size(), 1003)
    )
    own = torch.tensor(numbers[hvd.rank()]).half()
    product = hvd.allreduce(own, op=hvd.Product, name="exact product")
    np.testing.assert_array_equal(product.numpy(), numbers.prod(axis=0).astype(np.float16))


@pytest.mark.parametrize("name", ["Min", "Max"])
def test_float16_minimum_and_maximum(hvd, name):
    # Any bits but NaN: subnormal numbers and infinities, too.
    bits = same_on_all_ranks(4).integers(0, 65536, (hvd.size(), 1003), dtype=np.uint16)
    bits[(bits & 0x7FFF) > 0x7C00] &= 0xFC00
    bits[(bits & 0x7FFF) == 0] |= 1  # either zero would be right
    numbers = bits.view(np.float16)
    result = hvd.allreduce(torch.tensor(numbers[hvd.rank()]), op=getattr(hvd, name), name=name)
    expected = {"Min": numbers.min(axis=0), "Max": numbers.max(axis=0)}[name]
    np.testing.assert_array_equal(result.numpy(), expected)


def test_float16_adasum_is_that_of_float32(hvd):
    if not hvd.mpi_enabled():
        pytest.skip("Horovod has Adasum for CPUs over MPI alone")
    rng = np.random.default_rng(5 + hvd.rank())
    common = same_on_all_ranks(5).normal(size=4099)
    # Gradients of ranks have something in common; their sizes differ by 2^12 within a tensor.
    gradient = (common + rng.normal(size=4099)) * 2.0 ** -(np.arange(4099) % 12)
    own = torch.tensor(gradient).half()
    half = hvd.allreduce(own, op=hvd.Adasum, name="adasum of float16")
    full = hvd.allreduce(own.float(), op=hvd.Adasum, name="adasum of float32")
    # One rounding for each doubling of the number of ranks, none of them larger than 2^-11 of
    # what was added.
    torch.testing.assert_close(half.float(), full, rtol=2.0**-9, atol=2.0**-9)
    ranks_sum = hvd.allreduce(own.float(), op=hvd.Sum, name="neither sum nor mean")
    for other in (ranks_sum, ranks_sum / hvd.size()):
        assert (full - other).abs().max() > 0.05


def test_horovods_optimizer_takes_set_to_none(hvd):
    for op in (horovod.torch.Average, horovod.torch.Adasum):
        model = torch.nn.Linear(3, 2)
        optimizer = horovod.torch.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=[(f"{op}.{name}", p) for name, p in model.named_parameters()],
            op=op,
        )
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.zero_grad(set_to_none=False)
        assert [p.grad.abs().sum().item() for p in model.parameters()] == [0, 0]
        optimizer.zero_grad(set_to_none=True)
        assert [p.grad for p in model.parameters()] == [None, None]
    assert hvd.size() > 1


FUSED = """
import sys
import torch
import horovod.torch as hvd

hvd.init()
names = [f"{kind}.{i}" for i in range(4) for kind in ("plain", "hvdkit")]
# The first time the ranks negotiate each name, later they find it in their cache.
for step in range(4):
    hvd.barrier()
    handles = [hvd.allreduce_async(torch.full((7,), float(i)), op=hvd.Sum, name=name)
               for i, name in enumerate(names)]
    for i, handle in enumerate(handles):
        assert hvd.synchronize(handle).tolist() == [i * hvd.size()] * 7
hvd.shutdown()
"""


def test_hvdkit_names_are_never_fused(tmp_path):
    timeline = tmp_path / "timeline.json"
    group = start_ranks_of(
        Configuration("torch", "gloo", 2),
        [sys.executable, "-c", FUSED],
        # So long a cycle that what is submitted together meets in one.
        {"HOROVOD_TIMELINE": str(timeline), "HOROVOD_CYCLE_TIME": "300"},
    )
    group.wait(timeout=90)
    copied = tensors_copied_into_the_fusion_buffer(timeline.read_text())
    assert {name for name in copied if "plain" in name} == {
        f"allreduce.plain.{i}" for i in range(4)
    }
    assert not {name for name in copied if "hvdkit" in name}


def tensors_copied_into_the_fusion_buffer(timeline):
    # Horovod leaves the list open.
    events = json.loads(timeline.rstrip().rstrip(",").removesuffix("]") + "]")
    tensors = {e["pid"]: e["args"].get("name") for e in events if e.get("name") == "process_name"}
    return {tensors[e["pid"]] for e in events if e.get("name") == "MEMCPY_IN_FUSION_BUFFER"}
