"""The engine on several hosts."""

import os
import sys

from benchmarks.hosts import INTERFACE
from hvdkit.ranks import RankCommand, start_ranks
from hvdkit.rendezvous import RendezvousServer, gloo_environment
from tests.parallel.rank_pool import REPOSITORY, Configuration, skip_where_unsupported

HOSTS, RANKS_PER_HOST = 2, 2
SIZE = HOSTS * RANKS_PER_HOST

PROCESS_SETS = """
import torch
import horovod.torch as hvd

# One set on the second host, one on both hosts.
near, far = hvd.ProcessSet([2, 3]), hvd.ProcessSet([0, 3])
hvd.init(process_sets=[near, far])
place = (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
assert place == (hvd.rank() % 2, 2, hvd.rank() // 2, 2), place
# All ranks take part in the last one, so that no rank ends the job early.
for process_set in (near, far, hvd.global_process_set):
    if process_set.included():
        own = torch.arange(1000.0) + 10.0 ** hvd.rank()
        total = hvd.allreduce(own, op=hvd.Sum, name="sum", process_set=process_set)
        expected = sum(torch.arange(1000.0) + 10.0**rank for rank in process_set.ranks)
        assert torch.equal(total, expected), (process_set, total)
print("reduced over", hvd.size(), "ranks", flush=True)
hvd.shutdown()
"""


def start_on_hosts(cluster, command):
    """Start `command` as the ranks of one job over Gloo, in the order of hosts."""
    server = RendezvousServer(cluster.address)
    places = [(host, i) for host in range(HOSTS) for i in range(RANKS_PER_HOST)]
    return start_ranks(
        [
            RankCommand(
                cluster.hosts[host].command(command),
                os.environ
                | {"OMP_NUM_THREADS": "1"}
                | gloo_environment(
                    rank,
                    SIZE,
                    server.address,
                    server.port,
                    interface=INTERFACE,
                    hostname=cluster.hosts[host].name,
                    local_rank=local_rank,
                    local_size=RANKS_PER_HOST,
                    cross_rank=host,
                    cross_size=HOSTS,
                ),
            )
            for rank, (host, local_rank) in enumerate(places)
        ],
        cwd=REPOSITORY,
        on_stop=[server.close],
    )


def test_process_sets_use_the_chosen_interface(make_hosts):
    skip_where_unsupported(Configuration("torch", "gloo", SIZE))
    with make_hosts(HOSTS) as cluster:
        group = start_on_hosts(cluster, [sys.executable, "-c", PROCESS_SETS])
        results = group.wait(timeout=90)
    assert [result.output for result in results] == [f"reduced over {SIZE} ranks\n"] * SIZE
