"""int8: errors, the gradients that it leaves to bfloat16, and what cannot be combined with it."""

import functools
import sys
from unittest import mock

import pytest
import torch
from torch import nn

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import UsageError
from tests.ranks.rank_pool import Configuration, start_ranks_of
from tests.ranks.torch.int8_oracle import bound
from tests.ranks.torch.oracle import (
    DEVICE,
    assert_raised_on_all_ranks,
    gradient_maker,
    on_all_ranks,
)
from tests.ranks.torch.test_compression import ADVERSARIES, LENGTH

pytestmark = pytest.mark.device


def every_gradient(*_):
    return False


def by_alltoall(test):
    """Let PyTorch encode the blocks, as on a GPU. The ranks of these tests share memory."""

    @functools.wraps(test)
    def run(*arguments, **options):
        from hvdkit.torch import runtime

        with mock.patch.object(runtime.host_collectives, "sends_int8", return_value=False):
            return test(*arguments, **options)

    return run


def reduced(hvd, gradient, **options):
    """Return one parameter's reduced gradient."""
    parameter = nn.Parameter(torch.zeros_like(gradient))
    options = {"compression": hvd.Int8(as_bf16=every_gradient)} | options
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0), **options)
    gradient_maker([parameter], [gradient]).backward()
    optimizer.step()
    return parameter.grad


@pytest.mark.parametrize("adversary", ADVERSARIES)
@by_alltoall
def test_error_of_the_mean_is_bounded(hvd, adversary):
    for step in range(3):
        gradient = ADVERSARIES[adversary](hvd.rank(), step, hvd.size()).float().to(DEVICE)
        everyone = hvd.allgather(gradient[None], name="own")
        mean = reduced(hvd, gradient)
        error = (mean.double() - everyone.double().mean(0)).abs()
        all_zero = adversary == "all at zero" or (
            adversary == "one rank at zero" and hvd.size() == 1
        )
        assert error.any() or all_zero, "nothing was rounded"
        assert (error <= bound(everyone)).all(), float((error / bound(everyone)).nan_to_num().max())
        assert len(set(hvd.allgather_object(mean.cpu().numpy().tobytes()))) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@by_alltoall
def test_other_dtypes_are_rounded_once_more(hvd, dtype):
    gradient = ADVERSARIES["ordinary"](hvd.rank(), 0, hvd.size()).to(DEVICE, dtype)
    everyone = hvd.allgather(gradient.double()[None], name="own")
    mean = reduced(hvd, gradient)
    assert mean.dtype == dtype
    rounding = torch.finfo(dtype).eps * everyone.abs().amax(0)
    error = (mean.double() - everyone.mean(0)).abs()
    assert (error <= bound(everyone) + rounding).all()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@by_alltoall
def test_a_number_that_is_not_finite_spreads_over_its_block_on_all_ranks(hvd, value):
    gradient = torch.ones(LENGTH, device=DEVICE)
    if hvd.rank() == hvd.size() - 1:
        gradient[700] = value
    mean = reduced(hvd, gradient)
    assert mean[512:768].isnan().all()
    assert torch.cat([mean[:512], mean[768:]]).eq(1).all()


def formats(optimizer):
    """Return the names of each bucket's parameters and of its wire format."""
    (part,) = optimizer.reducer.gradients.parts
    synchronizer = part.synchronizer
    plan = synchronizer.plan
    return {
        frozenset(plan.specs[i].name for i in bucket.parameters): codec.name
        for bucket, codec in zip(plan.buckets, synchronizer._buckets.codecs, strict=True)
    }


def test_small_gradients_and_vectors_are_sent_as_bfloat16(hvd):
    model = nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(3, 5, 3))
    model.to(DEVICE)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression="int8"
    )
    sum(p.sum() for p in model.parameters()).backward()
    assert formats(optimizer) == {
        frozenset(["0.weight"]): "int8 blocks",
        frozenset(["0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]): "bf16",
    }


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the same on every device")
def test_ranks_with_different_rules_get_an_error(hvd):
    parameter = nn.Parameter(torch.zeros(5000, device=DEVICE))
    compression = hvd.Int8(as_bf16=lambda name, shape: hvd.rank() == 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.1), [("weight", parameter)], compression=compression
    )
    with pytest.raises(RankMismatchError) as caught:
        parameter.sum().backward()
    assert "sent as int8" in str(caught.value)
    assert "rank 1: gradient 0 is 'weight', float32 [5000], sent as bf16" in str(caught.value)
    assert_raised_on_all_ranks(hvd, caught)
    del optimizer


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the same on every device")
def test_a_single_tensor_cannot_be_int8(hvd):
    with pytest.raises(UsageError, match=r"Compression\.int8 was given for a single tensor") as e:
        hvd.allreduce(torch.ones(5000), compression=hvd.Compression.int8)
    assert_raised_on_all_ranks(hvd, e)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the same on every device")
def test_adasum_cannot_be_int8(hvd):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(100, 100))], lr=0.1)
    # Horovod has Adasum over MPI only.
    message = "compression is int8 and op is" if hvd.mpi_enabled() else "over MPI only"
    with pytest.raises(UsageError, match=message) as e:
        hvd.DistributedOptimizer(optimizer, compression="int8", op=hvd.Adasum)
    assert_raised_on_all_ranks(hvd, e)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the same on every device")
def test_the_name_of_horovods_style(hvd):
    parameter = nn.Parameter(torch.zeros(100, 100))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.1), compression=hvd.Compression.int8
    )
    parameter.sum().backward()
    assert list(formats(optimizer).values()) == ["int8 blocks"]
    assert set(on_all_ranks(hvd, parameter.grad.sum().item())) == {10000.0}


ENGINE = """
import torch
from horovod.torch import mpi_ops
import hvdkit.torch as hvd
from hvdkit.torch import runtime
from tests.ranks.torch.int8_oracle import check_engine

hvd.init()
assert runtime.host_collectives.flat_reason() == "rank 0 has HVDKIT_COLLECTIVES=flat"
check_engine(hvd)
print("ok", flush=True)
hvd.shutdown()
"""


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the engine's own sums are for the CPU")
@pytest.mark.parametrize("controller", ["gloo", pytest.param("mpi", marks=pytest.mark.long)])
def test_the_engine_sends_blocks_between_ranks_without_shared_memory(controller):
    group = start_ranks_of(
        Configuration("torch", controller, 3),
        [sys.executable, "-c", ENGINE],
        {"HVDKIT_COLLECTIVES": "flat"},
    )
    assert [result.output for result in group.wait(timeout=60)] == ["ok\n"] * 3
