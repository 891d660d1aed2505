import json
import os

import pytest

from hvdkit.errors import UsageError
from hvdkit.launch.control import environment
from hvdkit.launch.hosts import allocation
from hvdkit.launch.hosts.allocation import batch_hosts
from hvdkit.launch.hosts.hosts import Host

ENV = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "a[1-3],b07",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_CPUS_PER_NODE": "8(x3),4",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", ["node1"]),
        ("a[1-3,5],b07", ["a1", "a2", "a3", "a5", "b07"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("gpu-[1,3].cluster,login_1", ["gpu-1.cluster", "gpu-3.cluster", "login_1"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
    ],
)
def test_node_lists(text, expected):
    assert allocation.expand_nodes(text) == expected


@pytest.mark.parametrize("text", ["", "a[", "a[1-]", "a[x]", "a b", "a]1[", "$(reboot)"])
def test_invalid_node_lists(text):
    with pytest.raises(UsageError, match="node list"):
        allocation.expand_nodes(text)


def test_numbers_per_node():
    numbers = {"4": [4], "2(x3),1": [2, 2, 2, 1], "1,2(x2)": [1, 2, 2]}
    assert {text: allocation.expand_counts(text, "TASKS") for text in numbers} == numbers
    with pytest.raises(UsageError, match="TASKS is .2.x3,1.: expected"):
        allocation.expand_counts("2(x3,1", "TASKS")


def test_an_allocation():
    given = allocation.read(ENV)
    assert given.hosts == [Host("a1", 2), Host("a2", 2), Host("a3", 2), Host("b07", 1)]
    assert [given.cpus[host] for host in given.hosts] == [8, 8, 8, 4]
    assert given.cpus_per_task is None
    assert not given.inside_step


def test_the_allocation_inside_a_step():
    step = {
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NODELIST": "a3,b07",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PTY_PORT": "1234",
    }
    given = allocation.read(ENV | step)
    assert given.hosts == [Host("a3", 1), Host("b07", 1)]
    assert list(given.cpus.values()) == [8, 4]
    assert given.inside_step
    # salloc's shell on the first node has the variables of a step with one task.
    interactive = step | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "a1"}
    assert len(allocation.read(ENV | interactive).hosts) == 4


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "there is no allocation here"),
        ({"SLURM_JOB_ID": "7"}, "SLURM_JOB_NODELIST is not"),
        # salloc sets no SLURM_JOB_NODELIST then. sbatch sets that of the first component.
        ({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"}, "heterogeneous, with 2 components"),
        (ENV | {"SLURM_HET_SIZE": "2"}, "heterogeneous, with 2 components"),
        (
            ENV | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"},
            "has started hvdkit run 4 times",
        ),
        (ENV | {"SLURM_TASKS_PER_NODE": "2(x3)"}, "has 4 nodes, but .* is for 3"),
    ],
)
def test_invalid_allocations(env, expected):
    with pytest.raises(UsageError, match=expected):
        allocation.read(env)


def test_more_ranks_than_tasks():
    with pytest.raises(UsageError, match=r"-np is 8.* has 7 tasks \(a1:2, .*--ntasks=8"):
        allocation.check_size(allocation.read(ENV), 8)


# The formats of the systems' manuals; LSF with a launch node.
PBS = "cn0101.cluster\ncn0101.cluster\ncn0102.cluster\ncn0102.cluster\n"
LSF = "batch3 1 h41n08 42 h41n09 42"
SGE = """node17.local 4 gpu.q@node17.local UNDEFINED
node18.local 2 gpu.q@node18.local UNDEFINED
"""


@pytest.mark.parametrize(
    ("variable", "content", "hosts"),
    [
        ("PBS_NODEFILE", PBS, [Host("cn0101.cluster", 2), Host("cn0102.cluster", 2)]),
        ("LSB_MCPU_HOSTS", "", [Host("batch3", 1), Host("h41n08", 42), Host("h41n09", 42)]),
        ("PE_HOSTFILE", SGE, [Host("node17.local", 4), Host("node18.local", 2)]),
    ],
)
def test_the_hosts_of_other_batch_systems(tmp_path, variable, content, hosts):
    (tmp_path / "nodes").write_text(content)
    assert batch_hosts({variable: str(tmp_path / "nodes") if content else LSF}) == (variable, hosts)
    assert batch_hosts({"SLURM_JOB_ID": "1"}) is None


def test_an_empty_list_of_hosts_is_an_error(tmp_path):
    """A run on this machine instead would use a login node."""
    (tmp_path / "nodes").write_text("\n")
    with pytest.raises(UsageError, match=r"nodes has no hosts: expected those of a job of PBS"):
        batch_hosts({"PBS_NODEFILE": str(tmp_path / "nodes")})


# The format of Flux's RFC 20.
FLUX = {
    "version": 1,
    "execution": {
        "R_lite": [
            {"rank": "0-1", "children": {"core": "0-3", "gpu": "0-1"}},
            {"rank": "2", "children": {"core": "0-7"}},
        ],
        "nodelist": ["fluke[6-7]", "big1"],
    },
}


@pytest.mark.parametrize("fails", [False, True])
def test_the_hosts_of_flux(tmp_path, monkeypatch, fails):
    """The program stands for Flux, which is not installed here."""
    program = tmp_path / "flux"
    text = "echo 'flux: no broker' >&2; exit 1" if fails else f"echo '{json.dumps(FLUX)}'"
    program.write_text(f'#!/bin/sh\n[ "$*" = "resource R" ] || exit 2\n{text}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if fails:
        with pytest.raises(UsageError, match="FLUX_URI=local:///run/flux cannot be read"):
            batch_hosts({"FLUX_URI": "local:///run/flux"})
        return
    found = batch_hosts({"FLUX_URI": "local:///run/flux"})
    hosts = [Host("fluke6", 2), Host("fluke7", 2), Host("big1", 8)]
    assert found == ("FLUX_URI", hosts)
    assert environment.forwarded({"FLUX_URI": "local:///run/flux", "A": "1"}) == {"A": "1"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("PBS_NODEFILE", "/gone"), ("LSB_MCPU_HOSTS", "a 1 b"), ("LSB_MCPU_HOSTS", "a x")],
)
def test_malformed_hosts(name, value):
    with pytest.raises(UsageError, match=f"{name}={value} cannot be read"):
        batch_hosts({name: value})


def test_a_host_that_ssh_would_use_as_an_option(tmp_path):
    """An ssh that does not check the next word, its host, would run the command."""
    option = "-oProxyCommand=touch${IFS}found"
    (tmp_path / "nodes").write_text(f"{option}\n")
    (tmp_path / "sge").write_text(f"{option} 1 queue UNDEFINED\n")
    for env in (
        {"PBS_NODEFILE": str(tmp_path / "nodes")},
        {"PE_HOSTFILE": str(tmp_path / "sge")},
        {"LSB_MCPU_HOSTS": f"{option} 1"},
    ):
        with pytest.raises(UsageError, match="is not the name or the address of a host"):
            batch_hosts(env)
    with pytest.raises(UsageError, match="-G is not the name or the address of a host"):
        Host("-G", 1)
