"""Asynchronous execution: late gradients, streams, CUDA graphs, and memory over many steps.

A GPU runs kernels after the call that starts them has returned. A read that does not wait for them
gives wrong values only when they are late, so these tests make them late on purpose. The other
modules with the marker `device` test what does not depend on time.
"""

import copy
import functools
import gc
import os
import random
import time
from itertools import pairwise

import psutil
import pytest
import torch
from torch import nn

from hvdkit.agreement.collectives import SINGLE_RANK_COLLECTIVES
from hvdkit.errors import UsageError
from tests.ranks.torch.oracle import (
    DEVICE,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    relative_distance,
    sgd,
    small_model,
    whole_batch,
    wrapped,
)

pytestmark = pytest.mark.device

ON_GPU = DEVICE.type == "cuda"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="streams and CUDA graphs exist on a GPU only")

#: Largest relative error of the weights after a few steps.
BOUNDS = {"none": 1e-12, "fp16": 2e-3, "bf16": 2e-2}


def delay(milliseconds):
    """Delay all later work on the current stream of a GPU, or in this thread on a CPU."""
    if ON_GPU:
        # Clock cycles, at about 1.5 GHz.
        torch.cuda._sleep(int(1.5e6 * milliseconds))
    else:
        time.sleep(milliseconds / 1000)


def weights_after_training(hvd, compression):
    """Train models of three dtypes side by side; return all weights as float64 on the CPU."""
    models = [small_model(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    optimizers = [
        hvd.DistributedOptimizer(sgd(model.parameters()), compression=compression, bucket_bytes=200)
        for model in models
    ]
    for step in range(6):
        for model in models:
            x = batch_of(hvd.rank(), step, model[0].weight.dtype)
            loss_of(model, x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for model in models:
        assert_same_on_all_ranks(hvd, model)
    flat = [p.detach().double().flatten() for model in models for p in model.parameters()]
    return torch.cat(flat).cpu()


@pytest.mark.parametrize(
    "compression", ["none", "fp16", pytest.param("bf16", marks=pytest.mark.long)]
)
def test_late_packing_and_unpacking_change_no_bit(hvd, compression):
    from hvdkit.torch.reduction.backend import TorchMemory

    lateness = random.Random(hvd.rank())

    def late(method):
        @functools.wraps(method)
        def run(*args, **kwargs):
            delay(3 * lateness.random())
            return method(*args, **kwargs)

        return run

    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        in_time = weights_after_training(hvd, compression)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("in_place", "pack", "unpack"):
                patch.setattr(TorchMemory, name, late(getattr(TorchMemory, name)))
            delayed = weights_after_training(hvd, compression)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert in_time.isfinite().all()
    assert torch.equal(in_time, delayed)


def train_beside_reference(hvd, model, reference, compression, backward, steps=5):
    """Train `model` on all ranks with `backward(x)`, and `reference` in one process; compare."""
    optimizer = wrapped(hvd, model, compression=compression)
    plain = sgd(reference.parameters())
    for step in range(steps):
        backward(batch_of(hvd.rank(), step))
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        loss_of(reference, whole_batch(hvd, step)).backward()
        plain.step()
    assert relative_distance(model, reference) < BOUNDS[compression]
    assert_same_on_all_ranks(hvd, model)


@needs_gpu
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_backward_on_one_stream_and_the_step_on_another(hvd, compression):
    model = small_model()
    side = torch.cuda.Stream()

    def backward(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            delay(10)
            loss_of(model, x).backward()
        torch.cuda.current_stream().wait_stream(side)

    train_beside_reference(hvd, model, copy.deepcopy(model), compression, backward)


@needs_gpu
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_a_whole_step_on_a_side_stream(hvd, compression):
    model = small_model()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def backward(x):
        delay(10)
        loss_of(model, x).backward()

    with torch.cuda.stream(side):
        train_beside_reference(hvd, model, copy.deepcopy(model), compression, backward)
    torch.cuda.current_stream().wait_stream(side)


class Late(torch.autograd.Function):
    """The identity. Its backward is late on its stream."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        delay(20)
        return gradient.clone()


class TwoStreams(nn.Module):
    """The sum of two layers, the second of which runs on a stream of its own."""

    side = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(5, 2), nn.Linear(5, 2)
        self.to(DEVICE, torch.float64)

    def forward(self, x):
        left = self.left(x)
        if self.side is None:
            return left + self.right(x)
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            # The backward pass comes here first: the gradients of `right` are queued behind the
            # delay when those of `left`, in the same bucket, are complete.
            right = Late.apply(self.right(x))
        current.wait_stream(self.side)
        return left + right


@needs_gpu
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_gradients_of_one_bucket_from_two_streams(hvd, compression):
    model, reference = TwoStreams(), TwoStreams()
    model.side = torch.cuda.Stream()
    train_beside_reference(
        hvd, model, reference, compression, lambda x: loss_of(model, x).backward()
    )


@needs_gpu
@pytest.mark.parametrize("where", ["default stream", "side stream", "another stream"])
def test_a_result_is_complete_on_the_stream_that_waits(hvd, where):
    calling = torch.cuda.current_stream() if where == "default stream" else torch.cuda.Stream()
    waiting = torch.cuda.Stream() if where == "another stream" else calling
    for number in range(5):
        with torch.cuda.stream(calling):
            x = torch.ones(1 << 25, device=DEVICE)
            delay(10)
            x += 1
            # The engine multiplies on a stream of its own.
            handle = hvd.allreduce_async_(
                x, op=hvd.Sum, postscale_factor=3.0, name=f"{where}.{number}"
            )
        with torch.cuda.stream(waiting):
            result = hvd.synchronize(handle).clone()
        waiting.synchronize()
        expected = torch.full_like(result, 6.0 * hvd.size())
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


@needs_gpu
def test_the_host_does_not_wait_for_the_gpu(hvd):
    if os.environ.get("HOROVOD_ENABLE_ASYNC_COMPLETION") != "1" or not hvd.nccl_built():
        pytest.skip("the host waits for NCCL, or copies through host memory")
    x = torch.ones(1000, device=DEVICE)
    hvd.allreduce_(x, op=hvd.Sum, name="first")  # connects NCCL
    torch.cuda.synchronize()
    end = torch.cuda.Event()
    delay(1000)
    hvd.allreduce_(x, op=hvd.Sum, name="second")
    end.record()
    assert not end.query()
    torch.cuda.synchronize()


@needs_gpu
def test_a_step_in_a_captured_graph_is_refused(hvd):
    if hvd.size() == 1 and not os.environ.get(SINGLE_RANK_COLLECTIVES):
        pytest.skip("one rank reduces nothing: there is nothing to refuse")
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    x = batch_of(hvd.rank(), 0)

    def step():
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    # PyTorch asks for some steps on a side stream before a capture.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(UsageError, match="make_graphed_callables"):
        step()
    # The job can train on.
    trained, reference = small_model(), small_model()
    train_beside_reference(
        hvd, trained, reference, "none", lambda x: loss_of(trained, x).backward()
    )


@needs_gpu
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_a_model_made_of_captured_graphs(hvd, compression):
    model = small_model()
    reference = copy.deepcopy(model)
    graphed = torch.cuda.make_graphed_callables(model, (batch_of(hvd.rank(), 0),))
    train_beside_reference(
        hvd, model, reference, compression, lambda x: loss_of(graphed, x).backward()
    )


@pytest.mark.device(ranks=2)
def test_sync_batch_norm(hvd):
    def model_with(norm):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), norm(7), nn.Tanh(), nn.Linear(7, 2)).to(DEVICE)

    model, reference = model_with(hvd.SyncBatchNorm), model_with(nn.BatchNorm1d)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    plain = sgd(reference.parameters())
    for step in range(10):
        everyone = [batch_of(rank, step, torch.float32) for rank in range(hvd.size())]
        for m, o, x in ((model, optimizer, everyone[hvd.rank()]), (reference, plain, everyone)):
            o.zero_grad()
            loss_of(m, torch.cat(x) if isinstance(x, list) else x).backward()
            o.step()
    assert relative_distance(model, reference) < 1e-4
    torch.testing.assert_close(model[1].running_var, reference[1].running_var, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        model[1].running_mean, reference[1].running_mean, rtol=1e-4, atol=1e-5
    )


def memory_in_use():
    """Return the bytes of the GPU's tensors (or of this process) and the number of objects."""
    gc.collect()
    if not ON_GPU:
        return psutil.Process().memory_info().rss, len(gc.get_objects())
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), len(gc.get_objects())


STEPS = [1000] if ON_GPU else [100, pytest.param(1000, marks=pytest.mark.long)]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_memory_stays_flat(hvd, compression, steps):
    torch.manual_seed(0)
    # Gradients of 200 KB: a buffer lost in each step is 6 MB in each third of the fewest steps.
    model = nn.Sequential(nn.Linear(5, 220), nn.Tanh(), nn.Linear(220, 220), nn.Linear(220, 2))
    model.to(DEVICE)
    optimizer = wrapped(hvd, model, compression=compression)
    x = batch_of(0, 0, torch.float32)

    def train(number):
        for _ in range(number):
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(10)
    used = [memory_in_use()]
    for _ in range(3):
        train(steps // 3)
        used.append(memory_in_use())
    memory, objects = (
        [after - before for before, after in pairwise(values)] for values in zip(*used, strict=True)
    )
    # A leak grows in every third; the allocator of a CPU and caches grow in one of them. A buffer
    # lost in each step is twice this limit.
    assert min(memory) <= (0 if ON_GPU else 30_000 * steps), memory
    assert min(objects) < steps // 6, objects
