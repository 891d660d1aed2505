"""Sums in the memory of one host: its memory, and faults. The drawn collectives have the sums."""

import gc
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from horovod.torch import mpi_ops

from hvdkit.ranks import RanksFailed
from tests.ranks.rank_pool import Configuration, start_ranks_of


def open_arenas() -> list[Path]:
    # `os.listdir` has closed its own file when it returns.
    files = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return [f for f in files if f.is_symlink() and "memfd:hvdkit " in os.readlink(f)]


def arena() -> tuple[int, int, int]:
    """Return begin and end of the rank's own shared memory, and the bytes allocated in it."""
    (own,) = open_arenas()  # those of other ranks are mapped, but not kept open
    facts = own.stat()
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(rf"(\w+)-(\w+) .* {facts.st_ino} +/memfd:hvdkit ", line)
        if found:
            return int(found[1], 16), int(found[2], 16), facts.st_blocks * 512
    raise AssertionError("the shared memory is not mapped")


def empty(size, dtype):
    from hvdkit.torch import shared_memory

    return shared_memory.empty(size, dtype)


def is_shared(tensor):
    begin, end, _ = arena()
    return begin <= tensor.data_ptr() < end


def reduce_all(tensor, name, op=mpi_ops.Sum):
    return mpi_ops.synchronize(mpi_ops.allreduce_async_(tensor, name=f"hvdkit.{name}", op=op))


def test_ranks_of_one_host_are_connected(hvd):
    from hvdkit.torch import runtime

    assert runtime.host_collectives.flat_reason() == ""
    assert is_shared(empty(1000, torch.float32))


def test_all_ranks_have_the_same_bits(hvd):
    generator = torch.Generator().manual_seed(hvd.rank())
    tensor = empty(100_003, torch.float32)
    tensor.copy_(torch.randn(100_003, generator=generator))
    tensor[::1000] = float("nan") if hvd.rank() == 1 else float("inf")
    reduce_all(tensor, "bits")
    assert len({bytes(content) for content in hvd.allgather_object(tensor.numpy().tobytes())}) == 1


def test_parts_of_a_bucket_and_tensors_that_are_not_in_place(hvd):
    bucket = empty(9000, torch.float32)
    part = bucket[1001:5003]
    part.fill_(hvd.rank() + 1.0)
    result = mpi_ops.synchronize(mpi_ops.allreduce_async(part, name="hvdkit.copy", op=hvd.Sum))
    assert part.eq(hvd.rank() + 1.0).all(), "the input of an allreduce does not change"
    assert result.eq(sum(range(hvd.size() + 1))).all()
    bucket.zero_()
    part.fill_(1.0)
    reduce_all(part, "part")
    assert bucket.sum().item() == hvd.size() * len(part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_that_have_joined_count_as_zeros(hvd, dtype):
    tensor = empty(3000, dtype)
    for number in range(hvd.rank() + 1):
        tensor.fill_(1.0)
        reduce_all(tensor, f"joined {number} {dtype}")
        assert tensor.eq(hvd.size() - number).all()
    hvd.join()


def test_memory_is_returned(hvd):
    gc.collect()
    before = arena()[2]
    tensor = empty(10_000_000, torch.float32)
    view = tensor[5:10].fill_(3.0)
    assert arena()[2] >= before + 40_000_000
    del tensor
    assert view.tolist() == [3.0] * 5
    assert arena()[2] >= before + 40_000_000
    del view
    gc.collect()
    assert arena()[2] <= before
    assert empty(1_000_000, torch.float32).eq(0).all(), "memory of others is not seen"


def test_a_forked_child_cannot_change_a_bucket(hvd):
    tensor = empty(10_000, torch.float32).fill_(1.0)
    child = os.fork()
    if child == 0:
        try:
            seen = tensor[:100].eq(1.0).all().item()
            tensor.fill_(2.0)
            changed = tensor[:100].eq(2.0).all().item()
            os._exit(0 if seen and changed else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert tensor.eq(1.0).all()
    reduce_all(tensor, "after a fork")
    assert tensor.eq(hvd.size()).all()


def test_a_child_of_a_forked_child_has_the_files_and_the_memory_of_its_parent(hvd):
    tensor = empty(10_000, torch.float32).fill_(1.0)
    child = os.fork()
    if child == 0:
        try:
            tensor.fill_(2.0)
            # They get the numbers of the files that the fork has closed.
            files = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
            grandchild = os.fork()
            if grandchild == 0:
                for file in files:
                    os.fstat(file)
                os._exit(0 if tensor.eq(2.0).all() else 1)
            os._exit(os.waitpid(grandchild, 0)[1] != 0)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    reduce_all(tensor, "after two forks")
    assert tensor.eq(hvd.size()).all()


def test_buckets_of_an_optimizer_are_shared(hvd):
    model = torch.nn.Linear(300, 300)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
    assert is_shared(model.weight.grad)


SCRIPT = """
import os, resource, signal, sys, time
import torch
from horovod.torch import mpi_ops
import hvdkit.torch as hvd
from hvdkit.torch import runtime, shared_memory

def reduce(tensor):
    handle = mpi_ops.allreduce_async_(tensor, name="hvdkit.x", op=hvd.Sum)
    return mpi_ops.synchronize(handle)

def one_sum():
    hvd.init()
    reason = runtime.host_collectives.flat_reason()  # before another rank may end: that shuts down
    tensor = reduce(shared_memory.empty(5000, torch.float32).fill_(1.0))
    print("sum", tensor[0].item(), reason, flush=True)
"""

LITTLE_ADDRESS_SPACE = """
if int(os.environ["HOROVOD_RANK"]) == 1:
    resource.setrlimit(resource.RLIMIT_AS, (60 << 30, 60 << 30))
one_sum()
"""

OFTEN = """
one_sum()
tensor = shared_memory.empty(5_000_000, torch.float32)
if hvd.rank() == 1:
    # While the other threads reduce.
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), getattr(signal, sys.argv[2])))
began = time.monotonic()
try:
    while True:
        last = time.monotonic()
        reduce(tensor.fill_(1.0))
        assert tensor[:: 1000].eq(hvd.size()).all()
except hvd.HorovodInternalError as error:
    print(f"ended after {time.monotonic() - last:.2f} s: {error}", flush=True)
    time.sleep(2)  # mpirun ends the other ranks as soon as one has failed
    sys.exit(1)
"""


OTHER_COLLECTIVES = """
hvd.init()
tensor = torch.ones(2_000_000)
calls = {
    "allgather": lambda: mpi_ops.allgather(tensor, name="gather"),
    "min": lambda: mpi_ops.allreduce(tensor, op=hvd.Min, name="min"),
    "broadcast": lambda: mpi_ops.broadcast(tensor, 0, name="broadcast"),
}
if hvd.rank() == 1:
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
try:
    while True:
        last = time.monotonic()
        calls[sys.argv[1]]()
except hvd.HorovodInternalError as error:
    print(f"ended after {time.monotonic() - last:.2f} s: {error}", flush=True)
    hvd.shutdown()
    time.sleep(40)  # the others must not depend on the end of this process
"""

LITTLE_MEMORY = """
hvd.init()
mine, other = torch.full((20_000_000,), 1.0), torch.full((20_000_000,), 2.0)
hvd.barrier()
if hvd.rank() == 1:
    used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (50 << 20), resource.RLIM_INFINITY))
handles = {
    "gather": mpi_ops.allgather_async(mine, name="gather"),
    "sum": mpi_ops.allreduce_async_(other, name="sum", op=hvd.Sum),
}
for name, handle in handles.items():
    began = time.monotonic()
    try:
        result = mpi_ops.synchronize(handle)
        print(name, "returned", result[0].item(), result[-1].item(), flush=True)
    except hvd.HorovodInternalError as error:
        print(f"{name} failed after {time.monotonic() - began:.2f} s: {error}", flush=True)
hvd.shutdown()
"""

SUSPENDED = """
import subprocess
one_sum()
tensor = shared_memory.empty(5_000_000, torch.float32)
ranks = " ".join(map(str, hvd.allgather_object(os.getpid())))
if hvd.rank() == 0:
    suspend = f"sleep 0.5; kill -STOP {ranks}; sleep 4; kill -CONT {ranks}"
    subprocess.Popen(["sh", "-c", suspend])
end = time.monotonic() + 6
while hvd.allreduce(torch.tensor(float(time.monotonic() < end)), op=hvd.Sum) == hvd.size():
    reduce(tensor.fill_(1.0))
    assert tensor[:: 1000].eq(hvd.size()).all()
print("ended", flush=True)
"""


def run(code, *arguments, ranks=2, controller="gloo", **env):
    command = [sys.executable, "-c", SCRIPT + code, *arguments]
    return start_ranks_of(Configuration("torch", controller, ranks), command, env)


@pytest.mark.parametrize(
    ("code", "env", "reason"),
    [
        ("one_sum()", {"HVDKIT_COLLECTIVES": "flat"}, "rank 0 has HVDKIT_COLLECTIVES=flat"),
        pytest.param(
            LITTLE_ADDRESS_SPACE, {}, "rank 1 has no shared memory", marks=pytest.mark.long
        ),
    ],
    ids=["requested", "address-space"],
)
def test_flat_collectives(code, env, reason):
    for result in run(code, **env).wait(timeout=60):
        assert f"sum 2.0 {reason}" in result.output


def times_of_the_end(group, ranks, died, timeout=60):
    """Return how long the last reduction of each other rank took, in seconds."""
    with pytest.raises(RanksFailed) as caught:
        group.wait(timeout=timeout, failure_grace=30)
    assert not caught.value.timed_out
    outputs = {rank: caught.value.results[rank].output for rank in range(ranks) if rank != died}
    found = {rank: re.search(r"ended after ([\d.]+) s", text) for rank, text in outputs.items()}
    assert all(found.values()), outputs
    return [float(match[1]) for match in found.values()]


@pytest.mark.parametrize(
    "after", [0.01, *[pytest.param(k / 49, marks=pytest.mark.long) for k in range(1, 50)]]
)
def test_a_rank_dies_during_a_sum(after):
    times = times_of_the_end(run(OFTEN, str(after), "SIGKILL", ranks=3), 3, died=1)
    assert max(times) < 5


@pytest.mark.parametrize("call", ["broadcast", "allgather", "min"])
@pytest.mark.long
def test_a_rank_dies_during_another_collective(call):
    """Ranks far from it in the ring notice that others have shut down."""
    group = run(OTHER_COLLECTIVES, call, ranks=4)
    with pytest.raises(RanksFailed) as caught:
        group.wait(timeout=60, failure_grace=8)
    for rank in (0, 2, 3):
        output = caught.value.results[rank].output
        found = re.search(r"ended after ([\d.]+) s", output)
        assert found, f"rank {rank}: {output}"
        assert float(found[1]) < 5


@pytest.mark.long
def test_a_rank_is_stopped_during_a_sum():
    group = run(OFTEN, "0.3", "SIGSTOP", ranks=3, HOROVOD_GLOO_TIMEOUT_SECONDS="6")
    assert max(times_of_the_end(group, 3, died=1)) < 15


def test_a_rank_without_memory_for_a_result():
    """Its next tensor is not taken for the one that it could not gather."""
    for rank, result in enumerate(run(LITTLE_MEMORY).wait(timeout=60)):
        for name in ("gather", "sum"):
            found = re.search(rf"{name} failed after ([\d.]+) s: (.*)", result.output)
            assert found, result.output
            assert float(found[1]) < 10
            assert (name, rank) == ("gather", 1) or "rank 1 has failed" in found[2]


@pytest.mark.long
def test_a_suspended_job_continues():
    """Over MPI, because Gloo's own connections time out."""
    group = run(SUSPENDED, controller="mpi", HOROVOD_GLOO_TIMEOUT_SECONDS="2")
    assert all("ended" in result.output for result in group.wait(timeout=60))
