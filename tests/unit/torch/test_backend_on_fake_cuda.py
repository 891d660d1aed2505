"""Packing, casting and unpacking on CUDA tensors that have no memory.

PyTorch's fake tensors carry a shape, a dtype and a device, but no values. On a machine without a
GPU they find operations on two devices, wrong shapes and dtypes, and reads that make the host wait
for the GPU: the latter raise an error, because there is no value to read. Kernels, streams and
values need a real GPU: `scripts/check_gpu synchronizer`.
"""

import itertools
import math
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from hvdkit.errors import UsageError
from hvdkit.reduction import bucketing

_plan = bucketing.plan

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Calls(TorchFunctionMode):
    """Count calls to PyTorch, and replace the ones that fake CUDA tensors cannot do.

    Attributes:
        filled: tensors made by `torch.full`.
    """

    def __init__(self):
        super().__init__()
        self.filled = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # The Python methods of these two need a device guard for CUDA, which a CPU build lacks.
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, **kwargs)
        if func is torch.Tensor.__getitem__ and isinstance(args[1], slice):
            return torch.ops.aten.slice.Tensor(args[0], 0, args[1].start, args[1].stop)
        self.filled += func is torch.full
        return func(*args, **kwargs)


@contextmanager
def readable(answers):
    """Let the host read magnitudes of buffers with `Tensor.tolist`, and no other value.

    Args:
        answers: the largest magnitudes to return in turn; 1 afterwards.

    Yields:
        A list that gets the number of magnitudes in each read.
    """
    answers, reads = list(answers), []

    def tolist(tensor):
        assert tensor.is_cuda
        (count,) = tensor.shape
        reads.append(count)
        return [answers.pop(0) if answers else 1.0] * count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTensor, "tolist", tolist, raising=False)
        yield reads


def parameters_of(dtype):
    """Return parameters of every shape and memory order, which need two buckets of 1 KB."""
    shapes = {
        "no dimension": torch.empty((), device="cuda"),
        "no element": torch.empty(0, 4, device="cuda"),
        "plain": torch.empty(7, 9, device="cuda"),
        "transposed": torch.empty(5, 6, device="cuda").t(),
        "codecs last": torch.empty(2, 3, 4, 4, device="cuda").to(memory_format=torch.channels_last),
        "every second": torch.empty(6, 5, device="cuda")[::2],
        "no gradient": torch.empty(3, device="cuda"),
        "another bucket": torch.empty(300, device="cuda"),
    }
    mixed = [DTYPES[i % len(DTYPES)] for i in range(len(shapes))]
    return {
        name: torch.nn.Parameter(value.to(mixed[i] if dtype == "mixed" else dtype))
        for i, (name, value) in enumerate(shapes.items())
    }


def make_gradients(parameters):
    for name, p in parameters.items():
        p.grad = None if name == "no gradient" else torch.ones_like(p)


@pytest.mark.parametrize("predivide", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [*DTYPES, "mixed"], ids=str)
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_gradients_keep_their_shapes_and_the_host_waits_once_a_step(
    hvd, compression, dtype, predivide
):
    with pytest.MonkeyPatch.context() as monkeypatch:
        check_shapes_and_waits(hvd, monkeypatch, compression, dtype, predivide)


def plan_of_several_ranks(specs, *arguments, order, **options):
    return _plan(specs, *arguments, order=range(len(specs) - 1, -1, -1), **options)


def check_shapes_and_waits(hvd, monkeypatch, compression, dtype, predivide):
    from hvdkit.reduction.plan import Reduction
    from hvdkit.reduction.synchronizer import Synchronizer
    from hvdkit.torch.collectives import TorchCollectives
    from hvdkit.torch.compression import wire_format
    from hvdkit.torch.reduction.backend import TorchBackend
    from hvdkit.torch.reduction.memory import spec

    # The third step's first sum overflows in float16, so it is packed again as float32.
    answers = {2: [math.inf]}
    with FakeTensorMode():
        with Calls():
            parameters = parameters_of(dtype)
        # One rank has no buckets, so plan those of several ranks. It still skips collectives.
        monkeypatch.setattr(bucketing, "plan", plan_of_several_ranks)
        collectives = TorchCollectives(hvd.global_process_set)
        synchronizer = Synchronizer(
            [spec(name, p) for name, p in parameters.items()],
            TorchBackend(list(parameters.values()), collectives),
            collectives,
            Reduction(
                wire_format(compression),
                predivide=None if predivide == 1.0 else predivide,
                bucket_bytes=1000,
            ),
        )
        reads = []
        for step in range(4):
            with Calls() as calls, readable(answers.get(step, ())) as read:
                make_gradients(parameters)
                synchronizer.synchronize()
                synchronizer.complete_deferred()
            reads.append(len(read))
            for name, p in parameters.items():
                assert p.grad.shape == p.shape, name
                assert p.grad.dtype == p.dtype, name
                assert p.grad.device == p.device, name
                if name != "every second":
                    assert p.grad.stride() == p.stride(), name
            # At most one before and one after the collective, and twice as many if it is repeated.
            buckets = 8 if dtype == "mixed" else 2
            assert calls.filled <= 4 * buckets
    if compression != "fp16":
        assert reads == [0, 0, 0, 0]
    else:
        # While a bucket's magnitude is unknown, it is read immediately for each bucket.
        assert reads[1] == 1
        assert reads[0] > 1
        assert reads[2] > 1


def test_a_scale_of_large_tensors_is_one_tensor_for_a_bucket(hvd):
    from hvdkit.reduction import bucketing
    from hvdkit.torch.reduction import casting
    from hvdkit.torch.reduction.memory import TorchMemory, spec

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(), Calls() as calls:
        patch.setattr(casting, "_SMALL", -1)
        parameters = parameters_of(torch.float32)
        make_gradients(parameters)
        specs = [spec(name, p) for name, p in parameters.items()]
        (bucket,) = bucketing.plan(specs).buckets
        memory = TorchMemory(bucket, [list(parameters.values())[i] for i in bucket.parameters])
        wire = memory.pack("float16", 0.3)
        assert (wire.dtype, wire.device.type, wire.shape) == (
            torch.float16,
            "cuda",
            (bucket.elements,),
        )
        assert calls.filled == 1
        memory.unpack(wire, 0.7)
        assert calls.filled == 2


@pytest.mark.parametrize("shape", [(), (0, 4), (50, 30), (2, 3, 4, 4)], ids=str)
def test_the_accelerators_kernel_rounds_once(hvd, shape):
    """Test on the CPU, which has the same operation but normally uses another one."""
    from hvdkit.torch.reduction.casting import _cast_scaled_at_once, _Scale

    values = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if len(shape) == 4:
        values = values.to(memory_format=torch.channels_last)
    for dtype, target_dtype, factor in itertools.product(DTYPES, DTYPES, [2.0**-70, 0.3, 4096.0]):
        source = values.to(dtype)
        target = torch.full_like(source, 9, dtype=target_dtype)
        _cast_scaled_at_once(source, target, _Scale(factor))
        wide = torch.promote_types(dtype, target_dtype)
        expected = (source.to(wide) * torch.tensor(factor, dtype=wide)).to(target_dtype)
        assert target.shape == shape
        assert target.dtype == target_dtype
        assert torch.equal(target, expected), (dtype, target_dtype, factor)


@pytest.mark.parametrize("factor", [2.0**-70, 0.3, 1.0, 4096.0])
def test_kernels_for_many_small_tensors_round_once(hvd, factor):
    from hvdkit.torch.reduction.casting import _cast_scaled_together, _fit

    generator = torch.Generator().manual_seed(0)
    shapes = [(), (0, 4), (50, 30), (2, 3, 4, 4)]
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    pairs = 0
    for dtype, target_dtype in itertools.product(DTYPES, DTYPES):
        sources = [each.to(dtype) for each in values]
        targets = [torch.full_like(each, 9, dtype=target_dtype) for each in values]
        if not _fit(dtype, target_dtype):
            continue
        pairs += 1
        wide = torch.promote_types(torch.promote_types(dtype, target_dtype), torch.float32)
        expected = [(each.to(wide) * factor).to(target_dtype) for each in sources]
        _cast_scaled_together(sources, targets, factor)
        for each, result in zip(expected, targets, strict=True):
            assert torch.equal(result, each), (dtype, target_dtype)
    assert pairs == len(DTYPES) ** 2 - 2  # float16 and bfloat16 hold no values of each other


def test_a_reduction_during_a_capture_is_refused(hvd):
    from hvdkit.agreement.collectives import SINGLE_RANK_COLLECTIVES
    from hvdkit.torch.collectives import TorchCollectives
    from hvdkit.torch.reduction.backend import TorchBackend

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setenv(SINGLE_RANK_COLLECTIVES, "1")
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        parameter = torch.nn.Parameter(torch.empty(3, 2, device="cuda"))
        backend = TorchBackend([parameter], TorchCollectives(hvd.global_process_set))
        with pytest.raises(UsageError, match="make_graphed_callables"):
            backend.sum(torch.empty(6, device="cuda"), "sum", 1.0)
        rows = torch.empty(1, 1, dtype=torch.int64, device="cuda"), torch.empty(1, 2, device="cuda")
        with pytest.raises(UsageError, match="make_graphed_callables"):
            backend.gather(rows, "rows")
