"""The places of a benchmark's ranks."""

from hvdkit.bench.places import ClusterHosts
from hvdkit.launch.hosts.hosts import parse_hosts


def test_empty_slots_need_no_memory():
    place = ClusterHosts(job_hosts=parse_hosts("a:64,b:64"), size=2, words=[])
    assert place.most_ranks_per_machine == 2
