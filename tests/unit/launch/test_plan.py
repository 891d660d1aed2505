from random import Random

import pytest

from hvdkit.errors import UsageError
from hvdkit.launch.control.plan import make_plan
from hvdkit.launch.hosts.hosts import Host


def places(hosts, size):
    plan = make_plan(["train"], "/", hosts, size)
    return [
        (p.rank, p.host.name, p.local_rank, p.local_size, p.cross_rank, p.cross_size)
        for p in plan.places
    ]


def test_hosts_with_different_slots():
    assert places([Host("a", 1), Host("b", 3), Host("c", 2)], 6) == [
        (0, "a", 0, 1, 0, 3),
        (1, "b", 0, 3, 1, 3),
        (2, "b", 1, 3, 0, 2),
        (3, "b", 2, 3, 0, 1),
        (4, "c", 0, 2, 2, 3),
        (5, "c", 1, 2, 1, 2),
    ]


def test_hosts_are_filled_in_order():
    plan = make_plan(["train"], "/", [Host("a", 2), Host("b", 2), Host("c", 2)], 3)
    assert [host.name for host in plan.hosts] == ["a", "b"]
    assert [place.rank for place in plan.on(Host("a", 2))] == [0, 1]
    assert plan.places[2].local_size == 1


def test_the_plan_is_that_of_horovod():
    runner = pytest.importorskip("horovod.runner.common.util.hosts")
    hosts = [Host("a", 3), Host("b", 1), Host("c", 4), Host("d", 2)]
    for size in range(1, 11):
        theirs = runner.get_host_assignments(
            [runner.HostInfo(host.name, host.slots) for host in hosts], size, size
        )
        assert places(hosts, size) == [
            (s.rank, s.hostname, s.local_rank, s.local_size, s.cross_rank, s.cross_size)
            for s in theirs
        ]


@pytest.mark.parametrize(
    ("command", "size", "expected"),
    [
        ([], 1, "no command to run"),
        (["x"], 0, "-np is 0; expected at least 1"),
        (["x"], 4, r"-np is 4, but the hosts have 3 slots \(a:1, b:2\)"),
    ],
)
def test_invalid_plans(command, size, expected):
    with pytest.raises(UsageError, match=expected):
        make_plan(command, "/", [Host("a", 1), Host("b", 2)], size)


def test_places_are_those_of_horovod_on_any_hosts():
    random = Random(1)
    for _ in range(50):
        counts = [random.randint(1, 5) for _ in range(random.randint(1, 12))]
        hosts = [Host(f"h{number}", count) for number, count in enumerate(counts)]
        plan = make_plan(["x"], "/", hosts, sum(counts))
        for p in plan.places:
            with_one = [number for number, count in enumerate(counts) if count > p.local_rank]
            node = hosts.index(p.host)
            assert (p.cross_rank, p.cross_size) == (with_one.index(node), len(with_one))
            assert plan.node(p.host) == node
        assert [place for host in plan.hosts for place in plan.on(host)] == plan.places
