import os
import socket
import sys
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hvdkit.console.diagnostics import ERROR, OK, WARNING
from hvdkit.launch.agent import inspection
from hvdkit.launch.control import preflight, reachability
from hvdkit.launch.control.network import Interface
from hvdkit.launch.control.plan import make_plan
from hvdkit.launch.control.prepare import Workers
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.control.start_error import StartError
from hvdkit.launch.ending.outcome import Outcome
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.hosts.ssh import Ssh
from tests.unit.launch.commands import execute, output_of

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


def workers(interfaces, agents=None):
    return Workers(agents, {}, interfaces, "127.0.0.1")


def interfaces(count, mtus=(1500,) * 64):
    return {
        host: Interface("eth0", f"10.0.0.{n}", 24, mtu=mtu)
        for n, (host, mtu) in enumerate(zip(HOSTS[:count], mtus, strict=False))
    }


def own_names(*names):
    hosts = zip(HOSTS, names, strict=False)
    return {h: facts(own_name={"name": name, "address": "127.0.1.1"}) for h, name in hosts}


def versions(*sizes, **named):
    """Return the diagnostic of the versions of hosts, of which some have another one."""
    groups = zip(sizes, named.values(), strict=True)
    given = [each for size, version in groups for each in [version] * size]
    found = {h: facts(versions=version) for h, version in zip(HOSTS, given, strict=False)}
    (diagnostic,) = preflight._compared(preflight._versions(found))
    return diagnostic


ONE_MACHINE = dict.fromkeys(HOSTS, Interface("eth0", "10.0.0.1", 24, mtu=1500))
SMALL = {HOSTS[0]: facts(), HOSTS[1]: facts(shared_memory=64e6)}
FEWER = {HOSTS[0]: facts(), HOSTS[1]: facts(gpus=["H100, 570.1"] * 7)}
FILES = {host: facts() for host in HOSTS} | {HOSTS[3]: facts(open_files=4096)}


@pytest.mark.parametrize(
    ("diagnostic", "status", "found"),
    [
        (versions(64, a={"Python": "3.11.7"}), OK, "3.11.7 (all 64 hosts)"),
        (versions(58, 6, a={"Python": "3.11.7"}, b={"Python": "3.9.2"}), ERROR,
         "3.11.7 (node00, node01, node02, node03 and 54 more); "
         "3.9.2 (node58, node59, node60, node61 and 2 more)"),
        (versions(1, 1, a={"torch": "2.13.0"}, b={}), ERROR, "none (node01)"),
        (preflight._mtu(interfaces(2, [9000, 1500])), WARNING, "9000 (node00); 1500 (node01)"),
        (preflight._own_names(own_names("a", "b", "c"), interfaces(3)), OK, ""),
        (preflight._own_names(own_names("a", "localhost", "localhost"), interfaces(3)), WARNING,
         "several hosts have the same host name: localhost is node01, node02"),
        (preflight._own_names(own_names("a", "a"), ONE_MACHINE), WARNING,
         "these are names of one machine: node00, node01"),
        (preflight._clocks({HOSTS[0]: 0.0, HOSTS[1]: 0.01}), OK, ""),
        (preflight._clocks({HOSTS[0]: 0.0, HOSTS[1]: -60.0}), WARNING, "node01 -60.0 s"),
        (preflight._amount(SMALL, "shared_memory", "/dev/shm", 10**9, "more"), WARNING,
         "at least 0.1 GB (node01); less than 1 GB on node01"),
        (preflight._gpus({host: facts() for host in HOSTS}), OK, "8 x H100, 570.1 (all 64 hosts)"),
        (preflight._gpus(FEWER), WARNING, ""),
        (preflight._open_files(FILES, 1000), OK, ""),
        (preflight._open_files(FILES, 2000), WARNING, "each of 2000 ranks may need 7,024"),
        (preflight._open_files(FILES, 2000), WARNING, "the limit is 4,096 on node03"),
    ],
    ids=str,
)  # fmt: skip
def test_a_diagnostic(diagnostic, status, found):
    assert diagnostic.status == status
    assert found in diagnostic.found
    one_machine = "name each machine once, with all its slots" in (diagnostic.advice or "")
    assert one_machine == ("names of one machine" in found)


READ_ONLY = """
mount -t tmpfs -o size=4g tmpfs /dev/shm && mount -o remount,ro /dev/shm
exec "$0" -c "from hvdkit import doctor
from hvdkit.launch.agent import inspection
from hvdkit.launch.control import preflight
from hvdkit.launch.hosts.hosts import Host
print(preflight._shared_memory({Host('a', 1): inspection.examine('/')}))
print(doctor._shared_memory())"
"""


def test_shared_memory_that_is_read_only(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    done = execute(["unshare", "--mount", "sh", "-c", READ_ONLY, sys.executable])
    of_hosts, of_doctor = done.stdout.splitlines()
    assert "'warning'" in of_hosts.lower(), done.stderr
    assert "not writable on a" in of_hosts
    assert "not writable" in of_doctor


def test_blocked_connections():
    connect = {"node00": "no answer", "the launcher": ""}
    answers = Answers(listen=1, connect=connect, stop_listening=None)
    (diagnostic,), _ = preflight._connections(answers, workers(interfaces(2)), False)
    assert diagnostic.status == ERROR
    assert "node01 to node00 (10.0.0.0): no answer" in diagnostic.found
    assert "firewall" in diagnostic.advice


def test_the_error_names_the_hosts_that_a_restart_leaves_out(monkeypatch):
    """Host 1 has another version, and host 3 does not reach host 0."""

    hosts = HOSTS[:4]

    class Differing(Answers):
        def __init__(self, *arguments):
            super().__init__(clock=0.0, listen=1, stop_listening=None)
            self.hosts = hosts

        def each(self, question, arguments):
            if question == "examine":
                torch = {hosts[1]: "2.6"}
                return {h: facts(versions={"torch": torch.get(h, "2.5")}) for h in hosts}
            if question == "connect":
                fails = {("node03", "node00")}
                return {
                    h: {n: "no answer" for n in arguments[h]["targets"] if (h.name, n) in fails}
                    for h in arguments
                }
            return super().each(question, arguments)

    monkeypatch.setattr(preflight, "Questions", Differing)
    plan, settings = make_plan(["true"], "/", hosts, 4), Settings(Ssh(), "python")
    with pytest.raises(StartError, match="the hosts are not ready") as caught:
        preflight.before_start(workers(interfaces(4)), plan, settings)
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


def test_connections_and_bandwidth():
    # In a new process, whose threads are counted.
    code = """
import select
import socket
import threading
import time
from hvdkit.launch.agent import inspection

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
deadline = time.monotonic() + 10
while threading.active_count() > 1 and time.monotonic() < deadline:
    time.sleep(0.05)
print(threading.active_count())
"""
    assert output_of(code).splitlines() == [
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


WITHOUT_ENGINE = """
from importlib import metadata

find = metadata.version

def version(name):
    if name == "horovod":
        raise metadata.PackageNotFoundError(name)
    return find(name)

metadata.version = version
"""


def test_doctor_finds_hosts_without_horovod(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_ENGINE)
    paths = filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    horovod = examine_here()["horovod"]
    assert (horovod.status, horovod.found) == (ERROR, "none (localhost)")
    assert "hvdkit build" in horovod.advice


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
    here = dict.fromkeys(hosts, Interface("eth0", "10.0.0.1", 24))
    expected = "host0, host1 did not answer the question `connect`"
    with pytest.raises(StartError, match=expected) as caught:
        reachability.broken_connections(workers(here, agents), 0.1)
    assert caught.value.hosts == ["host0", "host1"]
    for connection in agents.connections:
        assert connection.asked == ["listen", "connect", "stop_listening"]


def test_strangers_that_connect_to_the_launcher_do_not_keep_hosts_from_connecting():
    questions = Answers(listen=1, stop_listening=None)
    here = dict.fromkeys(questions.hosts, Interface("lo", "127.0.0.1", 8))
    with ExitStack() as stack:
        targets = stack.enter_context(reachability.listening(questions, workers(here)))
        address = targets[reachability.LAUNCHER]
        for _ in range(50):
            stack.enter_context(socket.create_connection(address, timeout=5))
