"""The engine on several hosts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.bench.namespaces import INTERFACE, limit_rate, limit_sending
from hvdkit.ranks import RankCommand, RanksFailed, start_ranks
from hvdkit.rendezvous.server import RendezvousServer, gloo_environment
from tests.ranks.rank_pool import REPOSITORY, Configuration, skip_where_unsupported
from tests.ranks.torch import drawn_collectives

PROCESS_SETS = """
import torch
import horovod.torch as hvd

# One set on the second host, and two on both; in the last, the hosts have 1 and 2 ranks.
near, far, uneven = hvd.ProcessSet([2, 3]), hvd.ProcessSet([0, 3]), hvd.ProcessSet([1, 2, 3])
hvd.init(process_sets=[near, far, uneven])
place = (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
assert place == (hvd.rank() % 2, 2, hvd.rank() // 2, 2), place
# All ranks take part in the last one, so that no rank ends the job early.
for process_set in (near, far, uneven, hvd.global_process_set):
    for size in (1_000, 300_000) if process_set.included() else ():
        own = torch.arange(float(size)) + 10.0 ** hvd.rank()
        total = hvd.allreduce(own, op=hvd.Sum, name=f"sum {size}", process_set=process_set)
        expected = sum(torch.arange(float(size)) + 10.0**rank for rank in process_set.ranks)
        assert torch.equal(total, expected), (process_set, total)
print("reduced over", hvd.size(), "ranks", flush=True)
hvd.shutdown()
"""


def start_on_hosts(cluster, command, sizes=(2, 2), key=None, **env):
    """Start `command` as the ranks of one job over Gloo; `sizes` are the ranks of each host.

    Without a key, ranks exchange their addresses as those of Horovod's launcher do.
    """
    server = RendezvousServer(cluster.address, key=key)
    places = [(host, local) for host, size in enumerate(sizes) for local in range(size)]
    return start_ranks(
        [
            RankCommand(
                cluster.hosts[host].command(command),
                os.environ
                | {"OMP_NUM_THREADS": "1"}
                | env
                | gloo_environment(
                    rank,
                    len(places),
                    server.address,
                    server.port,
                    interface=INTERFACE,
                    hostname=cluster.hosts[host].name,
                    local_rank=local_rank,
                    local_size=sizes[host],
                    cross_rank=sum(size > local_rank for size in sizes[:host]),
                    cross_size=sum(size > local_rank for size in sizes),
                    key=key,
                ),
            )
            for rank, (host, local_rank) in enumerate(places)
        ],
        cwd=REPOSITORY,
        on_stop=[server.close],
    )


@pytest.mark.long
def test_process_sets_use_the_chosen_interface(make_hosts):
    skip_where_unsupported(Configuration("torch", "gloo", 4))
    with make_hosts(2) as cluster:
        group = start_on_hosts(cluster, [sys.executable, "-c", PROCESS_SETS])
        results = group.wait(timeout=600)
    assert [result.output for result in results] == ["reduced over 4 ranks\n"] * 4


SCANNED = """
import torch
import horovod.torch as hvd

for start in range(2):
    hvd.init()
    pair = hvd.add_process_set([0, 2])
    for members in (hvd.global_process_set, pair):
        if members.included():
            own = torch.full((1000,), 10.0 ** hvd.rank())
            total = hvd.allreduce(own, op=hvd.Sum, name=str(members.ranks), process_set=members)
            assert total.eq(sum(10.0**rank for rank in members.ranks)).all(), total
    hvd.remove_process_set(pair)
    hvd.shutdown()
print("reduced", flush=True)
"""


def test_strangers_that_connect_to_each_port_do_not_keep_ranks_from_starting(make_hosts):
    skip_where_unsupported(Configuration("torch", "gloo", 4))
    scanner = str(Path(__file__).with_name("port_scanner.py"))
    with make_hosts(1) as cluster:
        command = cluster.hosts[0].command([sys.executable, scanner, "60"])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as scan:
            try:
                assert scan.stdout.readline() == "scans\n"
                group = start_on_hosts(
                    cluster,
                    [sys.executable, "-c", SCANNED],
                    sizes=(3,),
                    key="a key",
                    HOROVOD_DYNAMIC_PROCESS_SETS="1",
                    HOROVOD_GLOO_TIMEOUT_SECONDS="5",
                )
                results = group.wait(timeout=600)
            finally:
                scan.kill()
    assert [result.output for result in results] == ["reduced\n"] * 3


#: Bytes per number: a block of 256 numbers has a scale of 4 bytes.
INT8_BYTES = 260 / 256


def check_sent(outputs, hosts, expected):
    """Check how much each host has sent, with the headers of packets and their acknowledgements.

    Args:
        outputs: of each rank. The last word is what its host has sent, relative to the tensor.
        hosts: the number of hosts.
        expected: the same for a host that sends its tensor once.
    """
    for output in outputs:
        ratio = float(output.split()[-1]) / (2 * (hosts - 1) / hosts * expected)
        assert 0.9 < ratio < 1.1, output


#: The beginning of a program that looks how many bytes its host has sent.
SENT = """
from pathlib import Path

def sent():
    counters = Path("/sys/class/net").glob("e*/statistics/tx_bytes")
    return sum(int(counter.read_text()) for counter in counters)

"""
SUMS = (
    SENT
    + """
import torch
from horovod.torch import mpi_ops
import hvdkit.torch as hvd
from hvdkit.torch import runtime, shared_memory

def reduce(tensor, name="sum", op=hvd.Sum):
    return mpi_ops.synchronize(mpi_ops.allreduce_async_(tensor, name=name, op=op))

def values(size, dtype, rank):
    return ((torch.arange(size) * 7 + rank * 5) % 31).to(dtype)

hvd.init()
assert runtime.host_collectives.flat_reason() == "", runtime.host_collectives.flat_reason()
for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
    for size in (3, 20_000, 33_333, 262_144, 1_500_001):
        expected = sum(values(size, dtype, rank).double() for rank in range(hvd.size()))
        for new in (shared_memory.empty, lambda size, dtype: torch.empty(size, dtype=dtype)):
            tensor = new(size, dtype).copy_(values(size, dtype, hvd.rank()))
            reduce(tensor)
            assert torch.equal(tensor.double(), expected), (dtype, size)
for size in (1000, 100_000):
    for name in ("scaled", "scaled again"):
        tensor = torch.ones(size)
        mpi_ops.synchronize(
            mpi_ops.allreduce_async_(
                tensor, name=name, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0
            )
        )
        assert tensor.eq(2.0 * hvd.size()).all(), (size, tensor[0])
# Shared on some ranks only.
new = shared_memory.empty if hvd.rank() % 2 else lambda size, dtype: torch.empty(size, dtype=dtype)
tensor = new(300_000, torch.float32).fill_(hvd.rank())
assert reduce(tensor, op=hvd.Average).eq((hvd.size() - 1) / 2).all()
torch.manual_seed(hvd.rank())
bits = reduce(shared_memory.empty(500_009, torch.float32).copy_(torch.randn(500_009)))
assert len(set(map(bytes, hvd.allgather_object(bits.numpy().tobytes())))) == 1
for number in range(hvd.rank() + 1):
    tensor = shared_memory.empty(50_000, torch.float32).fill_(1.0)
    assert reduce(tensor, f"joined {number}").eq(hvd.size() - number).all()
hvd.join()
tensor = shared_memory.empty(5_000_000, torch.float32).zero_()
reduce(tensor, "warm")
hvd.barrier()
before = sent()
reduce(tensor, "warm")
hvd.barrier()
print("sent", (sent() - before) / 20e6, flush=True)
hvd.shutdown()
"""
)
INT8 = (
    SENT
    + """
import torch
import hvdkit.torch as hvd
from hvdkit.torch import runtime, shared_memory
from tests.ranks.torch.int8_oracle import check_engine, reduce_in_engine

hvd.init()
assert runtime.host_collectives.sends_int8()
new = lambda size: shared_memory.empty(size, torch.float32)
check_engine(hvd, new)
check_engine(hvd)
for number in range(3):
    assert reduce_in_engine(new(50_000).fill_(1.0)).eq(hvd.size()).all()
if hvd.rank():
    assert reduce_in_engine(new(50_000).fill_(1.0)).eq(hvd.size() - 1).all()
hvd.join()
tensor = new(5_000_000).zero_()
reduce_in_engine(tensor)
hvd.barrier()
before = sent()
reduce_in_engine(tensor)
hvd.barrier()
print("sent", (sent() - before) / 5e6, flush=True)
hvd.shutdown()
"""
)
SCATTER = """
import hvdkit.torch as hvd
from hvdkit.torch import runtime
from tests.ranks.torch.scatter_oracle import check_all
hvd.init()
assert runtime.host_collectives.flat_reason() == ""
check_all(hvd, least=64 << 10)
print("ok", flush=True)
hvd.shutdown()
"""


@pytest.mark.parametrize(
    "sizes",
    [(2, 1), *[pytest.param(s, marks=pytest.mark.long) for s in [(2, 2), (1, 3), (2, 1, 1)]]],
    ids=str,
)
def test_collectives_of_hosts_with_several_ranks(make_hosts, sizes):
    skip_where_unsupported(Configuration("torch", "gloo", 4))
    with make_hosts(len(sizes)) as cluster:
        # One job, because the import of PyTorch takes longer than each of the programs.
        command = [sys.executable, "-c", SUMS + INT8 + SCATTER]
        results = start_on_hosts(cluster, command, sizes).wait(timeout=600)
    sums, int8, scatters = zip(*(result.output.splitlines() for result in results), strict=True)
    check_sent(sums, len(sizes), 1.0)
    check_sent(int8, len(sizes), INT8_BYTES)
    assert set(scatters) == {"ok"}


@pytest.mark.long
def test_int8_between_hosts_with_one_rank(make_hosts):
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    with make_hosts(2) as cluster:
        results = start_on_hosts(cluster, [sys.executable, "-c", INT8], (1, 1)).wait(timeout=600)
    check_sent([result.output for result in results], 2, INT8_BYTES)


def keep_little_in_flight(host):
    """Make the buffers of sockets small, so that most of a message waits in its memory."""
    settings = (
        "for name in tcp_wmem tcp_rmem; do echo 4096 16384 65536 >/proc/sys/net/ipv4/$name; done"
    )
    subprocess.run(host.command(["sh", "-c", settings]), check=True, timeout=30)


@pytest.mark.parametrize(
    ("sizes", "draws", "largest", "collectives"),
    [
        ((1, 1), 40, 4 << 20, ""),
        *[
            pytest.param(sizes, 600, 64 << 20, collectives, marks=pytest.mark.long)
            for sizes, collectives in [
                ((1, 1), ""),
                ((1, 1, 1), ""),
                ((2, 2), ""),
                ((1, 2), ""),
                ((2, 2), "flat"),
                ((3,), "flat"),
            ]
        ],
    ],
    ids=str,
)
def test_drawn_collectives(make_hosts, sizes, draws, largest, collectives):
    """The last host sends more slowly than it receives."""
    skip_where_unsupported(Configuration("torch", "gloo", 4))
    command = [sys.executable, "-m", "tests.ranks.torch.drawn_collectives"]
    arguments = [str(sum(sizes)), str(draws), str(largest)]
    env = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HVDKIT_COLLECTIVES": collectives}
    with make_hosts(len(sizes)) as cluster:
        for host in cluster.hosts:
            keep_little_in_flight(host)
        limit_sending(cluster.hosts[-1], "1gbit")
        group = start_on_hosts(cluster, [*command, *arguments], sizes, **env)
        results = group.wait(timeout=90 + 4 * draws)
    drawn_collectives.check([result.output for result in results], draws)


SCATTERS = """
import torch
import hvdkit.torch as hvd
hvd.init()
part = 3_000_000
wrong = 0
for number in range(60):
    own = torch.full((2 * part,), float(number + hvd.rank()))
    result = hvd.reducescatter(own, op=hvd.Sum, name="part")
    wrong += not result.eq(2.0 * number + 1).all()
print("wrong results:", wrong, flush=True)
hvd.shutdown()
"""


@pytest.mark.long
def test_reducescatter_with_a_slow_network(make_hosts):
    """The result of Gloo's own algorithm is written over data that are not yet sent."""
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    with make_hosts(2) as cluster:
        for host in cluster.hosts:
            limit_rate(host, "1gbit")
        results = start_on_hosts(cluster, [sys.executable, "-c", SCATTERS], (1, 1)).wait(
            timeout=120
        )
    assert {result.output for result in results} == {"wrong results: 0\n"}


DIES = """
import os, signal, sys, time
import torch
from horovod.torch import mpi_ops
import hvdkit.torch as hvd
from hvdkit.torch import shared_memory
hvd.init()
sizes = [5_000_000, 100, 200_000, 30]
tensors = [shared_memory.empty(size, torch.float32) for size in sizes]
if hvd.rank() == 1:
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
error = None
while error is None:
    began = time.monotonic()
    handles = []
    for k, tensor in enumerate(tensors):
        try:
            handles.append(
                mpi_ops.allreduce_async_(tensor.fill_(1.0), name=f"hvdkit.{k}", op=hvd.Sum)
            )
        except hvd.HorovodInternalError as failure:
            error = failure
    for handle, tensor in zip(handles, tensors):
        try:
            mpi_ops.synchronize(handle)
            assert tensor.eq(hvd.size()).all(), "a sum without an error is wrong"
        except hvd.HorovodInternalError as failure:
            error = failure
print(f"ended after {time.monotonic() - began:.2f} s: {error}", flush=True)
sys.exit(1)
"""


@pytest.mark.long
@pytest.mark.parametrize("after", [0.01, 0.1, 0.3])
def test_a_rank_dies_during_a_sum(make_hosts, after):
    with make_hosts(2) as cluster:
        group = start_on_hosts(cluster, [sys.executable, "-c", DIES, str(after)])
        with pytest.raises(RanksFailed) as caught:
            group.wait(timeout=80, failure_grace=60)
    assert not caught.value.timed_out
    for rank in (0, 2, 3):
        output = caught.value.results[rank].output
        found = re.search(r"ended after ([\d.]+) s", output)
        assert found, f"rank {rank}: {output}"
        assert float(found[1]) < 5


SLOW = (
    SENT
    + """
import os, signal, sys, threading, time
import torch
from horovod.torch import mpi_ops
import hvdkit.torch as hvd
from hvdkit.torch import shared_memory

def stop_in_the_sum(before):
    while sent() < before + 2_000_000:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSTOP)

hvd.init()
tensor = shared_memory.empty(int(sys.argv[1]), torch.float32).fill_(1.0)
part = torch.full((int(sys.argv[1]) // 4,), float(hvd.rank()))
if sys.argv[2] == "stop" and hvd.rank() == 2:
    threading.Thread(target=stop_in_the_sum, args=[sent()], daemon=True).start()
began = time.monotonic()
try:
    mpi_ops.synchronize(mpi_ops.allreduce_async_(tensor, name="hvdkit.x", op=hvd.Sum))
    assert tensor.eq(hvd.size()).all()
    assert len(mpi_ops.allgather(part, name="y").unique()) == hvd.size()
    print(f"took {time.monotonic() - began:.1f} s", flush=True)
except hvd.HorovodInternalError as error:
    print(error, flush=True)
    time.sleep(15)  # the others must not depend on the end of this process
    sys.exit(1)
hvd.shutdown()
"""
)


@pytest.mark.long
def test_a_slow_network_is_not_a_silent_rank(make_hosts):
    """A sum and a gather that take longer than the timeout. Rank 1 only waits."""
    with make_hosts(2) as cluster:
        for host in cluster.hosts:
            limit_rate(host, "100mbit")
        command = [sys.executable, "-c", SLOW, str(40_000_000), "continue"]
        env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "4"}
        results = start_on_hosts(cluster, command, (2, 1), **env).wait(timeout=600)
    for result in results:
        assert float(result.output.split()[1]) > 9 + 4, "the network was too fast for this test"


@pytest.mark.long
def test_a_stopped_rank_is_named_on_all_hosts(make_hosts):
    with make_hosts(2) as cluster:
        for host in cluster.hosts:
            limit_rate(host, "100mbit")
        command = [sys.executable, "-c", SLOW, str(20_000_000), "stop"]
        group = start_on_hosts(cluster, command, HOROVOD_GLOO_TIMEOUT_SECONDS="4")
        with pytest.raises(RanksFailed) as caught:
            group.wait(timeout=80, failure_grace=30)
    outputs = [result.output for result in caught.value.results]
    assert "waiting for rank 2: " in outputs[0]
    assert "no message from rank 2, which is on another host, reported by rank 0" in outputs[1]
    assert "rank 2 has not answered for 4 s" in outputs[3]
