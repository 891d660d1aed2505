"""The effects of the engine's patches in PyTorch. Most tests fail on stock Horovod."""

import ctypes
import json
import os
import signal
import sys
import threading
import time

import horovod.torch
import numpy as np
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError

from hvdkit.ranks import RanksFailed
from tests.ranks.rank_pool import Configuration, start_ranks_of

SMALLEST = 2.0**-24  # of the numbers above 0 that float16 has


def same_on_all_ranks(seed):
    return np.random.default_rng(seed)


def test_float16_sum_of_the_smallest_value_and_one(hvd):
    for length in (*range(1, 21), 1000):
        # In even elements the smaller number is the first summand, in odd ones the second.
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


@pytest.mark.parametrize("call", ["allreduce_", "broadcast_"])
def test_a_tensor_with_too_many_elements_is_an_error_on_every_rank(hvd, call):
    # The memory is not used before it is read or written, unlike that of zeros.
    tensor = torch.empty(2**31, dtype=torch.float16)
    arguments = {"root_rank": 0} if call == "broadcast_" else {"op": hvd.Max}
    with pytest.raises(HorovodInternalError, match="has 2147483648 elements"):
        getattr(hvd, call)(tensor, name="large", **arguments)


@pytest.mark.long
def test_alltoall_of_more_elements_than_an_int_counts(hvd):
    rows = 2**30 + 1 if hvd.rank() == 0 else 0
    tensor = torch.zeros(rows, 2, dtype=torch.uint8)
    tensor[-1:] = 7
    splits = torch.tensor([0, rows] + [0] * (hvd.size() - 2), dtype=torch.int32)
    result, counts = hvd.alltoall(tensor, splits=splits, name="many elements")
    assert counts.tolist() == [(2**30 + 1) * (hvd.rank() == 1)] + [0] * (hvd.size() - 1)
    if hvd.rank() == 1:
        assert result.shape == (2**30 + 1, 2)
        assert result[-1].tolist() == [7, 7]
        assert not result[:-1:1009].any()


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


def bfloat16(numbers):
    return torch.tensor(np.asarray(numbers, dtype=np.float64)).bfloat16()


def any_numbers(dtype, seed, shape):
    """The same random numbers on all ranks: of any kind except NaN, also subnormal and infinite."""
    infinity = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}[dtype]
    bits = same_on_all_ranks(seed).integers(0, 65536, shape, dtype=np.uint16)
    bits[(bits & 0x7FFF) > infinity] &= 0x8000 | infinity
    bits[(bits & 0x7FFF) == 0] |= 1  # of minimum and maximum either zero would be right
    return torch.tensor(bits.view(np.int16)).view(dtype)


def test_bfloat16_sum_is_exact_where_bfloat16_is(hvd):
    rng = same_on_all_ranks(1)
    # Whole numbers below 256 on a scale per element, from the smallest to nearly the largest.
    scales = 2.0 ** rng.integers(-133, 120, 1003)
    numbers = rng.integers(-60, 61, (hvd.size(), 1003)) * scales
    total = hvd.allreduce(bfloat16(numbers[hvd.rank()]), op=hvd.Sum, name="exact bfloat16 sum")
    assert total.dtype is torch.bfloat16
    np.testing.assert_array_equal(total.double().numpy(), numbers.sum(axis=0))


def test_bfloat16_sum_is_rounded_as_a_float32_sum_is(hvd):
    numbers = any_numbers(torch.bfloat16, 2, (2, 10007))
    numbers[numbers.isinf()] = 1
    own = numbers[hvd.rank()] if hvd.rank() < 2 else torch.zeros(10007, dtype=torch.bfloat16)
    total = hvd.allreduce(own, op=hvd.Sum, name="rounded bfloat16 sum")
    assert torch.equal(total, (numbers[0].float() + numbers[1].float()).bfloat16())


@pytest.mark.parametrize(
    ("dtype", "most", "exponents"),
    [(torch.float16, 500, (-24, -23)), (torch.bfloat16, 60, (-133, 100))],
)
def test_averages_and_scaled_sums_round_as_float32_does(hvd, dtype, most, exponents):
    rng = same_on_all_ranks(3)
    scales = 2.0 ** rng.integers(*exponents, 1003)
    numbers = rng.integers(-most, most + 1, (hvd.size(), 1003)) * scales
    own = torch.tensor(numbers[hvd.rank()]).to(dtype)
    total = torch.tensor(numbers.sum(axis=0)).float()
    mean = hvd.allreduce(own, op=hvd.Average, name=f"mean {dtype}")
    assert torch.equal(mean, (total / hvd.size()).to(dtype))
    scaled = hvd.allreduce(
        own, op=hvd.Sum, prescale_factor=4.0, postscale_factor=1 / 3, name=f"scaled {dtype}"
    )
    assert torch.equal(scaled, (total * 4 * torch.tensor(1 / 3)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Min", "Max", "Product"])
def test_minimum_maximum_and_product_of_16_bits(hvd, name, dtype):
    shape = (hvd.size(), 1003)
    numbers = any_numbers(dtype, 4, shape)
    if name == "Product":  # of four ranks it is exact
        numbers = torch.tensor(same_on_all_ranks(4).choice([-3, -2, -1, 1, 2, 3], shape)).to(dtype)
    result = hvd.allreduce(numbers[hvd.rank()], op=getattr(hvd, name), name=f"{dtype} {name}")
    reduced = {"Min": np.min, "Max": np.max, "Product": np.prod}[name]
    np.testing.assert_array_equal(result.float().numpy(), reduced(numbers.float().numpy(), axis=0))


def test_bfloat16_adasum_is_refused(hvd):
    own = torch.ones(3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="Adasum does not support bfloat16"):
        hvd.allreduce(own, op=hvd.Adasum, name="bfloat16 adasum")
    # Its name can be used again, and the ranks continue.
    total = hvd.allreduce(own, op=hvd.Sum, name="bfloat16 adasum")
    assert total.tolist() == [hvd.size()] * 3


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
import threading
import time
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


FUSED_BFLOAT16 = """
import torch
import horovod.torch as hvd

hvd.init()
kinds = (torch.bfloat16, torch.float16)
for step in range(4):
    hvd.barrier()
    handles = [hvd.allreduce_async(torch.full((n,), n / 8, dtype=kind), op=hvd.Average,
                                   prescale_factor=2.0, name=f"{kind}.{n}")
               for n in range(1, 9) for kind in kinds]
    results = [hvd.synchronize(handle) for handle in handles]
    assert [(x.dtype, x.tolist()) for x in results] == [
        (kind, [n / 4] * n) for n in range(1, 9) for kind in kinds]
hvd.shutdown()
"""


def tensors_copied_by(program, tmp_path, controller="gloo"):
    """Return the names of the tensors in the fusion buffer of ranks that run `program`."""
    timeline = tmp_path / "timeline.json"
    group = start_ranks_of(
        Configuration("torch", controller, 2),
        [sys.executable, "-c", program],
        # A long cycle, in which all tensors that are submitted together are negotiated.
        {"HOROVOD_TIMELINE": str(timeline), "HOROVOD_CYCLE_TIME": "300"},
    )
    group.wait(timeout=90)
    return tensors_copied_into_the_fusion_buffer(timeline.read_text())


def test_hvdkit_names_are_never_fused(tmp_path):
    copied = tensors_copied_by(FUSED, tmp_path)
    assert {name for name in copied if "plain" in name} == {
        f"allreduce.plain.{i}" for i in range(4)
    }
    assert not {name for name in copied if "hvdkit" in name}


COMPRESSOR = """
import torch
import hvdkit.torch as hvd

class Compressor:
    @staticmethod
    def compress(tensor):
        return tensor, None

    @staticmethod
    def decompress(tensor, context):
        return tensor

hvd.init()
model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), Compressor,
    check_parameters=False)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
hvd.shutdown()
"""


@pytest.mark.long
def test_tensors_of_a_compressor_of_the_users_are_fused(tmp_path):
    copied = tensors_copied_by(COMPRESSOR, tmp_path)
    assert len({name for name in copied if "hvdkit_tensors" in name}) == 8


# 4 s of cycles of 100 and of 20 ms; without the patch, of 20 and of 1 ms.
@pytest.mark.parametrize(
    ("cycle_time", "most"), [("20", 80), pytest.param("1", 500, marks=pytest.mark.long)]
)
def test_an_idle_rank_wakes_up_seldom(tmp_path, cycle_time, most):
    timeline = tmp_path / "timeline.json"
    program = "import time, horovod.torch as hvd; hvd.init(); time.sleep(4); hvd.shutdown()"
    group = start_ranks_of(
        Configuration("torch", "gloo", 2),
        [sys.executable, "-c", program],
        {
            "HOROVOD_TIMELINE": str(timeline),
            "HOROVOD_TIMELINE_MARK_CYCLES": "1",
            "HOROVOD_CYCLE_TIME": cycle_time,
        },
    )
    group.wait(timeout=90)
    assert 5 < timeline.read_text().count("CYCLE_START") < most


DIES = """
import os, signal, sys, threading, time
import torch
import horovod.torch as hvd

hvd.init()
buckets = [torch.ones(8_000_000) for i in range(6)]
began = time.monotonic()
try:
    for step in range(10_000):
        handles = [hvd.allreduce_async(x, op=hvd.Sum, name=f"hvdkit.{i}")
                   for i, x in enumerate(buckets)]
        if step == 2 and hvd.rank() == 1:
            time.sleep(float(sys.argv[1]))
            os.kill(os.getpid(), signal.SIGKILL)
        for handle in handles:
            hvd.synchronize(handle)
        began = time.monotonic()
except hvd.HorovodInternalError as error:
    print(f"ended after {time.monotonic() - began:.0f} s:", error, flush=True)
    hvd.shutdown()
    time.sleep(1)
    sys.exit(1)
"""


@pytest.mark.parametrize(
    "after", ["0.02", *(pytest.param(after, marks=pytest.mark.long) for after in ("0", "0.07"))]
)
def test_a_rank_that_dies_amid_buckets_ends_the_job(after):
    group = start_ranks_of(Configuration("torch", "gloo", 4), [sys.executable, "-c", DIES, after])
    with pytest.raises(RanksFailed) as caught:
        group.wait(timeout=80, failure_grace=60)
    assert not caught.value.timed_out
    for rank in (0, 2, 3):
        output = caught.value.results[rank].output
        # Gloo's own timeout is 30 s.
        assert int(output.partition("ended after ")[2].partition(" s:")[0]) < 15, output


def test_a_rank_that_waits_uses_little_cpu_time(hvd):
    if hvd.rank() == 0:
        time.sleep(1.0)
    before = time.thread_time()
    hvd.allreduce(torch.ones(1), name="late")
    assert time.thread_time() - before < 0.3


@pytest.mark.parametrize("controller", ["gloo", pytest.param("mpi", marks=pytest.mark.long)])
def test_bfloat16_tensors_are_fused_with_their_own_kind(tmp_path, controller):
    copied = tensors_copied_by(FUSED_BFLOAT16, tmp_path, controller)
    assert copied == {
        f"allreduce.torch.{k}16.{n}" for n in range(1, 9) for k in ("bfloat", "float")
    }


def tensors_copied_into_the_fusion_buffer(timeline):
    tensors, events = read_timeline(timeline)
    return {tensors[e["pid"]] for e in events if e.get("name") == "MEMCPY_IN_FUSION_BUFFER"}


def read_timeline(timeline):
    """Return a timeline's tensors, number -> name, and its events."""
    # Horovod leaves the list open.
    events = json.loads(timeline.rstrip().rstrip(",").removesuffix("]") + "]")
    tensors = {e["pid"]: e["args"].get("name") for e in events if e.get("name") == "process_name"}
    return tensors, events


def thread_states():
    """Count Python's thread states in this process."""
    python = ctypes.pythonapi
    for name in ("PyInterpreterState_Get", "PyInterpreterState_ThreadHead", "PyThreadState_Next"):
        getattr(python, name).restype = ctypes.c_void_p
    count = 0
    state = python.PyInterpreterState_ThreadHead(ctypes.c_void_p(python.PyInterpreterState_Get()))
    while state is not None:
        count += 1
        state = python.PyThreadState_Next(ctypes.c_void_p(state))
    return count


def test_horovods_thread_keeps_its_python_state(hvd):
    """With a new thread state for each collective, the child of a fork sometimes hangs."""
    hvd.allreduce(torch.zeros(3), op=hvd.Sum, name="freed by Horovod's thread")
    hvd.barrier()
    # `threading` does not count threads that Python has not started, such as Horovod's.
    assert thread_states() > threading.active_count()


def test_a_small_reducescatter_leaves_the_connections_fast(hvd):
    """Gloo makes the sockets' send buffers as small as the tensor. A broadcast then took 29 s."""
    hvd.reducescatter(torch.ones(hvd.size()), op=hvd.Sum, name="small scatter")
    large = torch.full((6_000_000,), float(hvd.rank()))
    began = time.monotonic()
    assert hvd.broadcast(large, root_rank=1, name="after it").eq(1).all()
    assert time.monotonic() - began < 5


def test_a_process_that_a_library_forks_may_end(hvd):
    # Python does not know of this fork, so none of its handlers run.
    # With Python's lock: after an import of FSDP2, static objects of PyTorch need it at the end.
    libc = ctypes.PyDLL(None)
    child = libc.fork()
    if child == 0:
        libc.exit(0)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    total = hvd.allreduce(torch.ones(4), op=hvd.Sum, name="after the end of a forked process")
    assert total.tolist() == [hvd.size()] * 4
    # Connects new sockets, and closes them.
    pair = hvd.add_process_set([0, 1])
    hvd.remove_process_set(pair)
