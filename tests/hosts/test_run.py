"""`hvdkit run` on several hosts over ssh, and its failures."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from hvdkit.faults.command import why
from tests.hosts import ssh_servers
from tests.hosts.launches import BOTH, Launches, describe, python, wait_for
from tests.ranks.rank_pool import REPOSITORY, Configuration, skip_where_unsupported
from tests.unit.launch.commands import execute, wait_until


@pytest.fixture
def refusing(launches):
    """Let the second host refuse all ssh keys."""
    keys = launches.access.authorized_keys["host1"]
    content = keys.read_text()
    keys.write_text("")
    yield
    keys.write_text(content)


@pytest.mark.long
def test_four_hosts(make_hosts, tmp_path):
    """The last host drops connections while another one is logging in."""
    skip_where_unsupported(Configuration("torch", "gloo", 4))
    if (missing := ssh_servers.missing()) is not None:
        pytest.skip(missing)
    code = (
        "import torch, hvdkit.torch as hvd; hvd.init();"
        "print(hvd.rank(), hvd.cross_rank(), float(hvd.allreduce(torch.ones(()), op=hvd.Sum)))"
    )
    with (
        make_hosts(4, interfaces=("eth0", "ens3", "lan", "enp1s0")) as cluster,
        ssh_servers.ssh_servers(cluster, tmp_path, settings={"host3": "MaxStartups 1"}) as access,
    ):
        job = Launches(cluster, access, tmp_path)
        names = ",".join(f"host{number}:1" for number in range(4))
        done = job.run("-H", names, sys.executable, "-c", code)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [f"[{r}] {r} {r} 4.0" for r in range(4)]
        # All through the last host, which refuses some of these connections.
        names = [name for host in cluster.hosts[1:3] for name in (host.name, host.address)]
        done = job.run("-H", ",".join(names), "--ssh-arg=-Jhost3", "hostname")
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 4
        assert "MaxStartups" in (tmp_path / "host3" / "log").read_text()


@pytest.mark.long
def test_hosts_that_do_not_reach_each_other(make_hosts, tmp_path):
    missing = ssh_servers.missing()
    if missing is not None:
        pytest.skip(missing)
    code = "import hvdkit.torch as hvd; hvd.init(); print(hvd.size(), 'ranks', flush=True)"
    limit = ("-x", "HOROVOD_GLOO_TIMEOUT_SECONDS=5", "--start-timeout", "20")
    arguments = ("--no-preflight", *limit, "--output-dir", str(tmp_path / "logs"))
    with make_hosts(3) as cluster, ssh_servers.ssh_servers(cluster, tmp_path) as access:
        _, first, second = cluster.hosts
        for host, other in (first, second), (second, first):
            nobody = ("lladdr", "02:00:00:00:00:01", "dev", host.interface, "nud", "permanent")
            command = ("ip", "-n", host.namespace, "neigh", "replace", other.address, *nobody)
            subprocess.run(command, timeout=10, check=True)
        job = Launches(cluster, access, tmp_path)
        where = ("-H", "host1:1,host2:1", *python(code))
        once = job.run(*arguments, *where)
        done = job.run(*arguments, "--restarts", "1", "--min-np", "1", *where)
    broken = f"host1 to host2 ({second.address}): no answer"
    assert once.returncode != 0
    assert f"Connections that fail now: {broken}" in once.stderr
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0] 1 ranks"
    assert f"Connections that fail now: {broken}" in done.stderr
    assert "left out, because connections to other hosts fail: host2" in done.stderr
    assert f"After the failure, connections between the hosts failed: {broken}" in why(
        min((tmp_path / "logs").glob("*-*"))
    )


@pytest.mark.parametrize("version", [4, 6])
def test_hosts_may_have_different_numbers_of_ranks(launches, version):
    """Over IPv6, ssh reaches the second host. The ranks use IPv4."""
    host = launches.cluster.hosts[1]
    if version == 6 and not host.has_address6():
        pytest.skip("this machine has no IPv6")
    code = (
        "names = ('RANK', 'LOCAL_RANK', 'LOCAL_SIZE', 'CROSS_RANK', 'CROSS_SIZE', 'GLOO_IFACE');"
        "print(*(os.environ['HOROVOD_' + name] for name in names))"
    )
    name = "host1" if version == 4 else f"[{host.address6}]"
    done = launches.run("-H", f"{name}:2,host0:1", *python(code))
    assert done.returncode == 0, done.stderr
    lines = ["[0] 0 0 2 0 2 ens3", "[1] 1 1 2 0 1 ens3", "[2] 2 0 1 1 2 eth0"]
    assert sorted(done.stdout.splitlines()) == lines


def test_the_rendezvous_listens_only_on_the_network_of_the_job(launches):
    code = "print(*[l.split()[1] for l in open('/proc/net/tcp') if l.split()[3] == '0A'])"
    done = launches.run(*BOTH, *python(code))
    first = next(line for line in done.stdout.splitlines() if line.startswith("[0]"))
    own = launches.cluster.hosts[0].address
    hexadecimal = "".join(f"{int(part):02X}" for part in reversed(own.split(".")))
    addresses = {entry.partition(":")[0] for entry in first.split()[1:]}
    assert addresses == {hexadecimal}


def test_a_dry_run_names_addresses_and_starts_nothing(launches):
    done = launches.run(*BOTH, "--dry-run", "-x", "MINE=secret", "touch", "made")
    assert done.returncode == 0, done.stderr
    for host in launches.cluster.hosts:
        assert f"{host.interface} {host.address}" in done.stdout
    assert "secret" not in done.stdout
    assert not (REPOSITORY / "made").exists()


def test_a_host_that_refuses_ssh(launches, refusing):
    done = launches.run(*BOTH, "true")
    assert done.returncode == 1
    assert "1 of 2 hosts cannot take part; nothing was started" in done.stderr
    assert "host1: it does not accept a login without a password" in done.stderr
    assert re.search("ssh-copy-id .*host1", done.stderr)
    done = doctor(launches)
    assert done.returncode == 1
    assert "1 of 2 hosts answer without a password" in done.stdout
    assert "-> it does not accept a login without a password" in done.stdout
    assert "(host0)" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # An unused address of the network: ssh would wait for ten seconds.
        ("-H host0:1,{unused}:1 --start-timeout 1 true", "{unused}: did not answer within 1 s"),
        ("{python} {script}", "host1: no file {script}"),
        ("--python /no/python true", "host1: there is no executable Python at /no/python"),
    ],
)
def test_a_host_that_cannot_take_part(launches, words, expected):
    names = {"unused": f"{launches.cluster.address.rpartition('.')[0]}.250"}
    names |= {"python": sys.executable, "script": launches.folder / "only_here" / "train.py"}
    words = words.format(**names).split()
    done = launches.run(*(() if "-H" in words else BOTH), *words)
    assert done.returncode == 1
    assert expected.format(**names) in done.stderr
    assert "no file" not in expected or "host0:" not in done.stderr
    assert "trained" not in done.stdout


@pytest.mark.parametrize(
    # After a batch system's signal the job can be requeued: nothing is lost.
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGUSR1, 75)],
)
def test_a_signal_before_any_rank_was_started(launches, start, number, status):
    # A host that does not answer, behind a proxy that never connects.
    job = start(*BOTH, "--ssh-arg=-oProxyCommand=sleep 60", *python("print('up')"))
    wait_until(lambda: any(describe(pid) == ["sleep", "60"] for pid in launches.processes()), 30)
    job.send_signal(number)
    out, err = job.communicate(timeout=600)
    assert (job.returncode, out) == (status, "")
    assert err == f"hvdkit run: {number.name}; the job ends.\n"


def test_a_rank_that_never_registers_is_named(launches):
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    code = (
        "print('thinking') if rank else None; time.sleep(60) if rank else None;"
        "import hvdkit.torch as hvd; hvd.init()"
    )
    # The agents must start in this time, too.
    done = launches.run(*BOTH, "--start-timeout", "8", *python(code))
    assert done.returncode == 1
    assert "rank 1 on host1 did not register within 8 s of the first rank" in done.stderr
    assert "  thinking" in done.stderr


def test_a_job_is_restarted_when_an_agent_is_lost(launches, start, tmp_path):
    marker = tmp_path / "second"
    code = f"again = os.path.exists({str(marker)!r}); print('up', agent); again or time.sleep(60)"
    job = start(*BOTH, "--restarts", "1", "--min-np", "1", *python(code))
    pids = {}
    while len(pids) < 2:
        rank, _, pid = job.stdout.readline().split()
        pids[rank] = int(pid)
    marker.touch()
    os.kill(pids["[1]"], signal.SIGKILL)
    out, err = job.communicate(timeout=600)
    assert job.returncode == 0, err
    assert "lost host1" in err
    assert "restart 1 of 1" in err
    # The host itself answers.
    assert out.count("up") == 2


@contextlib.contextmanager
def link_down(launches):
    """Context in which the second host has no network."""
    second = launches.cluster.hosts[1]
    link = ["ip", "-n", second.namespace, "link", "set", second.interface]
    subprocess.run([*link, "down"], timeout=20, check=True)
    try:
        yield second
    finally:
        subprocess.run([*link, "up"], timeout=20, check=True)


def wait_for_no_rank(host):
    """Wait until no rank runs `time.sleep(300)` on a host."""

    def has_ended(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            return "time.sleep(300)" not in " ".join(psutil.Process(pid).cmdline())
        return True

    wait_until(lambda: all(map(has_ended, host.processes())), 60)


def test_a_job_is_restarted_without_a_lost_host(launches, start):
    code = (
        "size = int(os.environ['HOROVOD_SIZE']); print('size', size); size > 1 and time.sleep(300)"
    )
    options = ("--restarts", "1", "--min-np", "1", "--host-timeout", "3")
    job = start(*BOTH, *options, *python(code))
    wait_for(job, "[0] size 2", "[1] size 2")
    with link_down(launches) as second:
        out, err = job.communicate(timeout=600)
        assert job.returncode == 0, err
        assert "left out, because the connection was lost: host1" in err
        assert "1 rank instead of 2" in err
        assert "[0] size 1" in out
        wait_for_no_rank(second)


def doctor(launches, *arguments):
    command = launches.command("--hosts", "host0,host1", *arguments, verb="doctor")
    return execute(command, cwd=REPOSITORY)


def test_doctor_examines_the_hosts(launches):
    done = doctor(launches, "--bandwidth", "--json")
    findings = json.loads(done.stdout)["findings"]
    found = {f["name"]: f["found"] for f in findings}
    # Without an engine, which these tests do not need, doctor reports an error.
    errors = {f["name"] for f in findings if f["status"] == "error"}
    assert errors == ({"horovod"} if found["horovod"].startswith("none") else set()), done.stdout
    assert done.returncode == bool(errors)
    assert found["ssh"] == "2 of 2 hosts answer without a password"
    assert found["Python"].endswith("(both hosts)")
    assert "eth0 (host0); ens3 (host1)" in found["network"]
    assert found["TCP"] == "every host reaches every other and the launcher (4 connections)"
    assert found["hostnames"].startswith("every host resolves its own name")
    assert "Gbit/s from host0 to host1" in found["bandwidth"]
    launches.check_nothing_is_left(5)


@pytest.fixture
def firewall(launches):
    """Let the first host refuse connections from the second."""
    if shutil.which("iptables") is None:
        pytest.skip("no iptables here: apt-get install iptables")
    first, second = launches.cluster.hosts
    rule = ["INPUT", "-s", second.address, "-p", "tcp", "--syn", "-j", "REJECT"]
    subprocess.run(first.command(["iptables", "-A", *rule]), timeout=20, check=True)
    yield
    subprocess.run(first.command(["iptables", "-D", *rule]), timeout=20, check=True)


def test_a_start_that_cannot_succeed_is_stopped_by_the_preflight(launches, firewall):
    done = launches.run(*BOTH, "true")
    assert done.returncode == 1
    assert "the hosts are not ready; nothing was started" in done.stderr
    assert "TCP: 2 of 4 connections fail: host1 to host0" in done.stderr
    assert "host1 to the launcher" in done.stderr
    assert launches.run(*BOTH, "--no-preflight", "true").returncode == 0
