"""`hvdkit run --nodes` on hosts without ssh."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.hosts.launches import HVDKIT, Watched, python, wait_for
from tests.ranks.rank_pool import REPOSITORY, Configuration, skip_where_unsupported
from tests.unit.launch.commands import run

PORT = 29400
KEY = "0123456789abcdef"

REDUCE = """
import os
import torch
import hvdkit.torch as hvd

hvd.init()
total = int(hvd.allreduce(torch.ones(()), op=hvd.Sum))
place = hvd.rank(), hvd.local_rank(), hvd.cross_rank()
print(*place, total, os.environ["OWN"], os.environ.get("HVDKIT_JOB_KEY"), flush=True)
"""
SAVING = """
def stop(*_):
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
time.sleep(60)
"""


class Nodes(Watched):
    """Run `hvdkit run --nodes` on hosts of the cluster."""

    def start(self, node, *arguments, nodes=2, size=None, key=KEY, rank=None, rendezvous=None):
        """Start a node on the host `node`, by default with the same number."""
        place = ("--nodes", str(nodes), "--node-rank", str(node if rank is None else rank))
        place += ("-np", str(size or nodes))
        rendezvous = rendezvous or ("--rdzv", f"{self.cluster.hosts[0].address}:{PORT}")
        run = [*HVDKIT, "run", *place, *rendezvous]
        variables = {name: value for name, value in os.environ.items() if name != "HVDKIT_JOB_KEY"}
        return subprocess.Popen(
            self.cluster.hosts[node].command([*run, *arguments]),
            env=variables | ({"HVDKIT_JOB_KEY": key} if key else {}) | {"OWN": f"own{node}"},
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(scope="module")
def cluster(make_hosts):
    with make_hosts(2, interfaces=("eth0", "ens3")) as cluster:
        yield Nodes(cluster)


@pytest.fixture
def start(cluster):
    with cluster.starting() as begin:
        yield begin


def end(job, timeout=60):
    """Return the job's status and output."""
    stdout, stderr = job.communicate(timeout=timeout)
    return job.returncode, stdout, stderr


@pytest.fixture
def both(start):
    """Return a function that starts both nodes, and waits for a line of each rank."""

    def start_both(*command, line=""):
        jobs = [start(0, *command), start(1, *command)]
        for number in (1, 0) if line else ():
            wait_for(jobs[number], f"[{number}] {line}")
        return jobs

    return start_both


UP = python("print('up', flush=True); time.sleep(60)")


def test_the_same_command_on_each_node(start):
    skip_where_unsupported(Configuration("torch", "gloo", 4))
    command = (sys.executable, "-c", REDUCE)
    second, first = start(1, *command), start(0, *command)
    lines = [f"[{rank}] {rank} 0 {rank} 2 own{rank} None" for rank in range(2)]
    status, stdout, stderr = end(first)
    assert (status, sorted(stdout.splitlines())) == (0, lines), stderr
    status, stdout, stderr = end(second)
    assert (status, stdout.splitlines(), stderr) == (0, lines[1:], "")


def test_a_rendezvous_file_needs_no_key(start, tmp_path):
    file = tmp_path / "job"
    # The file of an earlier job.
    file.write_text('{"addresses": ["10.255.255.250"], "port": 9, "key": "old"}')
    file.chmod(0o600)
    rendezvous = ("--rdzv-file", str(file))
    second = start(1, "hostname", key=None, rendezvous=rendezvous, size=4)
    time.sleep(0.5)
    first = start(0, "hostname", key=None, rendezvous=rendezvous, size=4)
    lines = [f"[{rank}] host{rank // 2}" for rank in range(4)]
    status, stdout, stderr = end(first)
    assert (status, sorted(stdout.splitlines())) == (0, lines), stderr
    assert sorted(end(second)[1].splitlines()) == lines[2:]
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_fails_ends_the_job_on_all_nodes(both):
    first, second = both(*python("time.sleep(60) if rank == 0 else sys.exit('bad sample')"))
    status, _, stderr = end(first)
    assert (status, "rank 1 on host1 failed: exit status 1" in stderr) == (1, True), stderr
    status, _, stderr = end(second)
    assert status == 1
    assert "the job ended with status 1: rank 1 on host1 failed" in stderr


@pytest.mark.parametrize("node", [0, 1])
def test_a_signal_on_any_node_lets_all_ranks_save(both, node):
    jobs = both(*python(SAVING), line="up")
    jobs[node].send_signal(signal.SIGTERM)
    ends = [end(job) for job in jobs]
    assert [status for status, _, _ in ends] == [75, 75], ends
    assert "[0] saved" in ends[0][1]
    assert ends[1][1].count("saved") == 1


FAIL_ONCE = """
marker = os.path.join({folder!r}, str(rank))
again = os.path.exists(marker)
open(marker, "w").close()
print("again" if again else "up", agent, flush=True)
if rank == 1 and not again:
    sys.exit("bad sample")
again or time.sleep(60)
"""


def test_a_job_is_restarted_on_its_nodes(both, tmp_path):
    jobs = both("--restarts", "1", *python(FAIL_ONCE.format(folder=str(tmp_path))))
    (status, out, err), other = end(jobs[0]), end(jobs[1])
    assert status == 0, err
    assert err.count("rank 1 on host1 failed: exit status 1") == 1
    assert "restart 1 of 1" in err
    # The agents stay.
    lines = sorted(out.splitlines())
    assert [line.replace(" again ", " up ") for line in lines[::2]] == lines[1::2]
    assert other[0] == 0
    assert other[1].count("[1] ") == 2


def test_a_job_is_restarted_without_a_lost_node(both):
    size = "size = int(os.environ['HOROVOD_SIZE']); print('size', size, flush=True);"
    command = python(f"{size} print('up', flush=True); size > 1 and time.sleep(60)")
    jobs = both("--restarts", "1", "--min-np", "1", *command, line="up")
    jobs[1].kill()
    status, out, err = end(jobs[0])
    assert status == 0, err
    assert "lost host1" in err
    assert "1 rank instead of 2" in err
    assert "[0] size 1" in out


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_killed_ends_the_job(both, cluster, node):
    code = "subprocess.Popen(['sleep', '60'], start_new_session=True); print('up', flush=True);"
    jobs = both(*python(f"{code} time.sleep(60)"), line="up")
    jobs[node].kill()
    status, _, stderr = end(jobs[1 - node])
    assert status == 1
    assert ("lost node 0" if node == 0 else "lost host1") in stderr
    jobs[node].wait(timeout=600)
    cluster.check_nothing_is_left()


def test_a_node_with_another_key_is_refused(start):
    first = start(0, "--start-timeout", "3", "true")
    status, _, stderr = end(start(1, "true", key="f" * 16))
    assert (status, "do not have the same key" in stderr) == (1, True), stderr
    status, _, stderr = end(first)
    assert status == 1
    assert "node 1 of 2 did not connect to --rdzv" in stderr
    assert "host1 (node 1): it has another key" in stderr


def test_a_node_may_connect_again_while_others_are_missing(start):
    lost = start(1, "true", nodes=3)
    time.sleep(1)
    first = start(0, "sh", "-c", "echo $OWN", nodes=3)
    time.sleep(1.5)
    lost.kill()
    lost.wait(timeout=600)
    others = [start(1, "sh", "-c", "echo $OWN", nodes=3, rank=rank) for rank in (2, 1)]
    status, stdout, stderr = end(first)
    assert (status, len(stdout.splitlines())) == (0, 3), stderr
    assert [end(job)[0] for job in others] == [0, 0]


def test_nodes_with_different_commands(start):
    first, second = start(0, "true"), start(1, "false")
    reason = "host1: its command is `false`, but that of node 0 is `true`"
    assert reason in end(first)[2]
    status, _, stderr = end(second)
    assert (status, reason in stderr) == (1, True), stderr


@pytest.mark.parametrize("node", [0, 1])
def test_a_signal_while_a_node_is_missing(start, node):
    jobs = [start(number, "true", nodes=3) for number in range(2)]
    for line in iter(jobs[0].stderr.readline, ""):
        if "waiting at" in line and "for node 2 of 3" in line:
            break
    jobs[node].send_signal(signal.SIGTERM)
    ends = [end(job) for job in jobs]
    assert [status for status, _, _ in ends] == [75, 75], ends
    assert "node 0 got SIGTERM" in ends[1][2]


def test_a_rendezvous_over_ipv6(start, cluster):
    host = cluster.cluster.hosts[0]
    if not host.has_address6():
        pytest.skip("this machine has no IPv6")
    rendezvous = ("--rdzv", f"[{host.address6}]:{PORT}")
    jobs = [start(node, "hostname", rendezvous=rendezvous) for node in range(2)]
    assert [end(job)[0] for job in jobs] == [0, 0]


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        node = ("--nodes", "2", "--node-rank", "0", "--rdzv", f"localhost:{port}")
        done = run(*node, "true", env=os.environ | {"HVDKIT_JOB_KEY": KEY})
    assert done.returncode == 1
    assert f"this node cannot listen on port {port}: Address already in use" in done.stderr
