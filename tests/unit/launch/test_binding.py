import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.launch.agent.binding import assign, show_list, topology
from hvdkit.launch.hosts.allocation import expand_ranges
from tests.unit.launch.commands import run

#: Real machines -> the CPUs of each NUMA node, and the distance between a core's two threads.
RECORDED = {
    # Two AMD EPYC 7763, two threads per core.
    "epyc": (["0-63,128-191", "64-127,192-255"], 128),
    # Two Intel Xeon Gold 6248, whose sockets have alternating CPU numbers.
    "xeon": ([",".join(map(str, range(n, 80, 2))) for n in range(2)], 40),
    # One socket in four nodes (NPS4), without threads.
    "nps4": (["0-15", "16-31", "32-47", "48-63"], 0),
    # A virtual machine whose kernel shows no nodes.
    "flat": ([], 0),
}


@pytest.fixture
def system(tmp_path):
    def make(name):
        nodes, distance = RECORDED[name]
        for number, cpus in enumerate(nodes):
            (tmp_path / f"node/node{number}").mkdir(parents=True)
            (tmp_path / f"node/node{number}/cpulist").write_text(f"{cpus}\n")
            for cpu in expand_ranges(cpus) if distance else ():
                folder = tmp_path / f"cpu/cpu{cpu}/topology"
                folder.mkdir(parents=True)
                first = cpu % distance
                (folder / "thread_siblings_list").write_text(f"{first},{first + distance}\n")
        return tmp_path

    return make


def shown(system, ranks, usable):
    return [show_list(cpus) for cpus in assign(topology(usable, system), ranks)]


@pytest.mark.parametrize(
    ("name", "ranks", "usable", "expected"),
    [
        ("epyc", 1, range(256), ["0-63,128-191"]),
        ("epyc", 2, range(256), ["0-63,128-191", "64-127,192-255"]),
        (
            "epyc",
            4,
            range(256),
            ["0-31,128-159", "32-63,160-191", "64-95,192-223", "96-127,224-255"],
        ),
        # A part of the machine, as a batch system may assign.
        ("epyc", 2, [*range(8), *range(128, 136)], ["0-3,128-131", "4-7,132-135"]),
        ("epyc", 3, range(62, 66), ["62", "63", "64-65"]),
        ("xeon", 2, range(80), [show_list(range(0, 80, 2)), show_list(range(1, 80, 2))]),
        ("nps4", 3, range(64), ["0-15", "16-31", "32-47"]),
        ("nps4", 8, range(64), [f"{n}-{n + 7}" for n in range(0, 64, 8)]),
        ("flat", 2, range(5), ["0-1", "2-4"]),
        ("flat", 3, range(2), ["0-1"] * 3),
    ],
)
def test_recorded_machines(system, name, ranks, usable, expected):
    assert shown(system(name), ranks, set(usable)) == expected


NODES = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(
    lambda sizes: [
        [[100 * node + 2 * core, 100 * node + 2 * core + 1] for core in range(size)]
        for node, size in enumerate(sizes)
    ]
)


@given(nodes=NODES, ranks=st.integers(1, 20))
def test_each_rank_is_on_one_node_with_whole_cores_of_its_own(nodes, ranks):
    bound = assign(nodes, ranks)
    assert len(bound) == ranks
    for cpus in bound:
        assert cpus
        assert len({cpu // 100 for cpu in cpus}) == 1
        assert {cpu // 2 * 2 for cpu in cpus} | {cpu // 2 * 2 + 1 for cpu in cpus} == set(cpus)
    if ranks <= sum(map(len, nodes)):
        everyone = [cpu for cpus in bound for cpu in cpus]
        assert len(everyone) == len(set(everyone))


@given(numbers=st.sets(st.integers(0, 300), min_size=1))
def test_lists_of_the_kernel(numbers):
    assert expand_ranges(show_list(numbers)) == sorted(numbers)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_ranks_are_bound_here():
    code = "import os; print(sorted(os.sched_getaffinity(0)))"

    def lines(*words):
        return sorted(run("-np", "2", *words).stdout.splitlines())

    expected = [sorted(cpus) for cpus in assign(topology(), 2)]
    bound = [f"[{rank}] {cpus}" for rank, cpus in enumerate(expected)]
    assert lines("--bind", sys.executable, "-c", code) == bound
    dry = lines("--bind", "--dry-run", "true")
    assert f"    rank 1 on CPUs {show_list(expected[1])}" in dry
