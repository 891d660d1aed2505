import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hvdkit.diagnostics import ERROR, OK, WARNING
from hvdkit.launch import inspection, preflight, reachability
from hvdkit.launch.hosts import Host
from hvdkit.launch.launcher import Settings
from hvdkit.launch.network import Interface
from hvdkit.launch.outcome import Outcome
from hvdkit.launch.plan import make_plan
from hvdkit.launch.ssh import Ssh
from hvdkit.launch.start_error import StartError

HOSTS = [Host(f"node{n:02}", 1) for n in range(64)]


def facts(**changed):
    return {
        "versions": {"Python": "3.11.7"},
        "own_name": {"name": "x", "address": "10.0.0.1"},
        "shared_memory": 8e9,
        "shared_memory_writable": True,
        "memory": 8e9,
        "disk": 8e9,
        "gpus": ["H100, 570.1"] * 8,
        "open_files": 1 << 20,
    } | changed


class Answers:
    """Replaces agents by fixed answers."""

    def __init__(self, **answers):
        self.hosts = HOSTS[:2]
        self._answers = answers

    def each(self, question, arguments):
        return dict.fromkeys(arguments, self._answers[question])

    def all(self, question, arguments):
        return self.each(question, dict.fromkeys(self.hosts, arguments))


def test_equal_values_of_all_hosts_are_one_short_line():
    (found,) = preflight._compared(preflight._versions({host: facts() for host in HOSTS}))
    assert (found.status, found.found) == (OK, "3.11.7 (all 64 hosts)")


def test_hosts_with_other_values_are_named():
    other = facts(versions={"Python": "3.9.2"})
    found = {host: facts() for host in HOSTS} | dict.fromkeys(HOSTS[10:16], other)
    (diagnostic,) = preflight._compared(preflight._versions(found))
    assert diagnostic.status == ERROR
    assert diagnostic.found == (
        "3.11.7 (node00, node01, node02, node03 and 54 more); "
        "3.9.2 (node10, node11, node12, node13 and 2 more)"
    )


def test_a_package_that_one_host_lacks():
    with_torch = facts(versions={"torch": "2.13.0"})
    found = {HOSTS[0]: with_torch, HOSTS[1]: facts(versions={})}
    (diagnostic,) = preflight._compared(preflight._versions(found))
    assert diagnostic.status == ERROR
    assert "none (node01)" in diagnostic.found


def test_different_mtus_are_a_warning():
    interfaces = {
        HOSTS[0]: Interface("eth0", "10.0.0.1", 24, mtu=9000),
        HOSTS[1]: Interface("eth0", "10.0.0.2", 24, mtu=1500),
    }
    diagnostic = preflight._mtu(interfaces)
    assert diagnostic.status == WARNING
    assert diagnostic.found == "9000 (node00); 1500 (node01)"


def own_names(*names):
    hosts = zip(HOSTS, names, strict=False)
    return {h: facts(own_name={"name": name, "address": "127.0.1.1"}) for h, name in hosts}


def test_equal_host_names_are_a_warning():
    addresses = [Interface("eth0", f"10.0.0.{n}", 24, mtu=1500) for n in range(3)]
    interfaces = dict(zip(HOSTS, addresses, strict=False))
    diagnostic = preflight._own_names(own_names("a", "localhost", "localhost"), interfaces)
    assert diagnostic.status == WARNING
    assert diagnostic.found == "several hosts have the same host name: localhost is node01, node02"
    assert preflight._own_names(own_names("a", "b", "c"), interfaces).status == OK


def test_two_names_of_one_machine_are_a_warning():
    interface = Interface("eth0", "10.0.0.1", 24, mtu=1500)
    diagnostic = preflight._own_names(own_names("a", "a"), dict.fromkeys(HOSTS, interface))
    assert diagnostic.status == WARNING
    assert diagnostic.found == "these are names of one machine: node00, node01"
    assert "name each machine once, with all its slots" in diagnostic.advice


@pytest.mark.parametrize(("skew", "status"), [(0.01, OK), (-60.0, WARNING)])
def test_clocks(skew, status):
    diagnostic = preflight._clocks({HOSTS[0]: 0.0, HOSTS[1]: skew})
    assert diagnostic.status == status
    assert ("node01 -60.0 s" in diagnostic.found) == (status == WARNING)


def test_hosts_with_too_little_memory_are_named():
    found = {HOSTS[0]: facts(), HOSTS[1]: facts(shared_memory=64e6)}
    diagnostic = preflight._amount(found, "shared_memory", "/dev/shm", 10**9, "more")
    assert diagnostic.status == WARNING
    assert diagnostic.found == "at least 0.1 GB (node01); less than 1 GB on node01"


READ_ONLY = """
mount -t tmpfs -o size=4g tmpfs /dev/shm && mount -o remount,ro /dev/shm
exec "$0" -c "from hvdkit import doctor; from hvdkit.launch import inspection, preflight
from hvdkit.launch.hosts import Host
print(preflight._shared_memory({Host('a', 1): inspection.examine('/')}))
print(doctor._shared_memory())"
"""


def test_shared_memory_that_is_read_only(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    command = ["unshare", "--mount", "sh", "-c", READ_ONLY, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    of_hosts, of_doctor = done.stdout.splitlines()
    assert "'warning'" in of_hosts.lower(), done.stderr
    assert "not writable on a" in of_hosts
    assert "not writable" in of_doctor


def test_gpus_are_counted_by_kind():
    assert preflight._gpus({host: facts() for host in HOSTS}).found == (
        "8 x H100, 570.1 (all 64 hosts)"
    )
    fewer = {HOSTS[0]: facts(), HOSTS[1]: facts(gpus=["H100, 570.1"] * 7)}
    assert preflight._gpus(fewer).status == WARNING


def test_blocked_connections():
    interfaces = {h: Interface("eth0", f"10.0.0.{n}", 24) for n, h in enumerate(HOSTS[:2])}
    connect = {"node00": "no answer", "the launcher": ""}
    answers = Answers(listen=1, connect=connect, stop_listening=None)
    (diagnostic,), _ = preflight._connections(answers, interfaces, ("10.0.0.0", 2), bandwidth=False)
    assert diagnostic.status == ERROR
    assert "node01 to node00 (10.0.0.0): no answer" in diagnostic.found
    assert "firewall" in diagnostic.advice


def test_the_error_names_the_hosts_that_a_restart_leaves_out(monkeypatch):
    """Host 1 has another version, and host 3 does not reach host 0."""

    class Differing(Answers):
        def __init__(self, *arguments):
            super().__init__(clock=0.0, listen=1, stop_listening=None)
            self.hosts = HOSTS[:4]

        def each(self, question, arguments):
            if question == "examine":
                torch = ["2.5", "2.6", "2.5", "2.5"]
                return {
                    h: facts(versions={"torch": v}) for h, v in zip(self.hosts, torch, strict=True)
                }
            if question == "connect":
                return {
                    host: {
                        name: "no answer"
                        for name in arguments[host]["targets"]
                        if (host.name, name) == ("node03", "node00")
                    }
                    for host in arguments
                }
            return super().each(question, arguments)

    monkeypatch.setattr(preflight, "Questions", Differing)
    hosts = HOSTS[:4]
    interfaces = {h: Interface("eth0", f"10.0.0.{n}", 24) for n, h in enumerate(hosts)}
    plan = make_plan(["true"], "/", hosts, 4)
    with pytest.raises(StartError, match="the hosts are not ready") as caught:
        preflight.before_start(
            None, interfaces, plan, Settings(Ssh(), "python"), ("10.0.0.0", 1), lambda text: None
        )
    outcome = Outcome.not_started(caught.value)
    assert outcome.unfit(hosts, proven=()) == [hosts[1], hosts[3]]
    # Ranks ran on host 3 before.
    assert outcome.unfit(hosts, proven={"node03"}) == [hosts[0], hosts[1]]


@pytest.mark.parametrize("count", [1, 2, 32, 33, 1000])
def test_hosts_try_to_reach_each_other_in_both_directions_of_the_list(count):
    hosts = [Host(f"node{n}", 1) for n in range(count)]
    tried = reachability.targets_by_host(hosts)
    reached = dict.fromkeys((host.name for host in hosts), 0)
    for host, names in tried.items():
        assert names[-1] == "the launcher"
        assert len(set(names)) == len(names) == min(count, 32)
        assert host.name not in names
        for name in names[:-1]:
            reached[name] += 1
    assert set(reached.values()) == {min(count, 32) - 1}


def test_a_limit_on_open_files_that_a_large_job_exceeds():
    found = {host: facts() for host in HOSTS} | {HOSTS[3]: facts(open_files=4096)}
    assert preflight._open_files(found, 1000).status == OK
    diagnostic = preflight._open_files(found, 2000)
    assert diagnostic.status == WARNING
    assert "each of 2000 ranks may need 7,024" in diagnostic.found
    assert "the limit is 4,096 on node03" in diagnostic.found


def test_connections_and_bandwidth():
    # In a new process, whose threads are counted.
    code = """
import select
import socket
import threading
from hvdkit.launch import inspection

port = inspection.listen("127.0.0.1")
with socket.create_server(("127.0.0.1", 0)) as unused:
    closed = unused.getsockname()[1]
inspection._CONNECT_SECONDS = 0.5
with socket.create_server(("127.0.0.1", 0)) as silent:
    ports = {"open": port, "shut": closed, "silent": silent.getsockname()[1]}
    for size in 0, 9999:
        print(inspection.connect({n: ("127.0.0.1", p, size) for n, p in ports.items()}))
print(inspection.send("127.0.0.1", port, 0.1) > 1e6)
inspection._CONNECT_SECONDS = 10
strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
print(inspection.connect({"open": ("127.0.0.1", port, 9999)}))
print(len(strangers) - len(select.select(strangers, [], [], 10)[0]) < 100)
inspection.stop_listening()
print(inspection.connect({"open": ("127.0.0.1", port, 0)}))
print(threading.active_count())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.splitlines() == [
        "{'open': '', 'shut': 'Connection refused', 'silent': ''}",
        "{'open': '', 'shut': 'Connection refused', "
        "'silent': 'connected, but 9,999 bytes did not arrive'}",
        "True",
        "{'open': ''}",
        "True",
        "{'open': 'Connection refused'}",
        "1",
    ]


def test_a_host_examines_itself(tmp_path):
    found = inspection.examine(str(tmp_path))
    assert found["versions"]["Python"].startswith("3.")
    assert "hvdkit" in found["versions"]
    assert found["disk"] > 0
    assert inspection.examine(str(tmp_path / "gone"))["disk"] is None


LOCAL = make_plan(["true"], "/", [Host("localhost", 1)], 1)


def examine_here(plan=LOCAL):
    """Return name -> diagnostic of the hosts of a plan, from real agents."""
    found = preflight.examine(plan, Settings(Ssh(), sys.executable))
    return {diagnostic.name: diagnostic for diagnostic in found}


ENGINE = """
from importlib import metadata

find = metadata.version

def version(name):
    if name != "horovod":
        return find(name)
    if {version!r} is None:
        raise metadata.PackageNotFoundError(name)
    return {version!r}

metadata.version = version
"""


@pytest.mark.parametrize(
    ("version", "status", "found"),
    [
        ("0.28.1+hvdkit.1", OK, "0.28.1+hvdkit.1 (localhost)"),
        (None, ERROR, "none (localhost)"),
    ],
)
def test_doctor_finds_hosts_without_horovod(tmp_path, monkeypatch, version, status, found):
    (tmp_path / "sitecustomize.py").write_text(ENGINE.format(version=version))
    paths = filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    horovod = examine_here()["horovod"]
    assert (horovod.status, horovod.found) == (status, found)
    assert ("hvdkit build" in horovod.advice) == (status == ERROR)


def test_doctor_reports_what_prevents_a_start(tmp_path, monkeypatch):
    gone = replace(LOCAL, directory=str(tmp_path / "gone"))
    found = examine_here(gone)
    assert found["localhost"].status == ERROR
    assert "no directory" in found["localhost"].advice
    assert "TCP" in found
    monkeypatch.setattr("hvdkit.__version__", "9.9")
    found = examine_here()
    assert found["localhost"].status == ERROR
    assert "but the launcher has 9.9" in found["localhost"].advice
    # The agent may not understand the questions of this launcher.
    assert list(found) == ["ssh", "localhost"]


def test_no_host_listens_any_more_if_one_does_not_answer():
    class Connection:
        def __init__(self, host):
            self.host, self.asked = host, []

        def send(self, kind, question, arguments):
            self.asked.append(question)
            if question == "listen":
                events.append(SimpleNamespace(connection=self, message=answer))

    events, answer = [], {"kind": "answer", "answer": 1234}
    hosts = [Host("host0", 1), Host("host1", 1)]
    agents = SimpleNamespace(
        connections=[Connection(host) for host in hosts],
        next_event=lambda _: events.pop() if events else None,
    )
    interfaces = dict.fromkeys(hosts, Interface("eth0", "10.0.0.1", 24))
    expected = "host0, host1 did not answer the question `connect`"
    with pytest.raises(StartError, match=expected) as caught:
        reachability.broken_connections(agents, interfaces, ("10.0.0.1", 1), 0.1)
    assert caught.value.hosts == ["host0", "host1"]
    for connection in agents.connections:
        assert connection.asked == ["listen", "connect", "stop_listening"]
