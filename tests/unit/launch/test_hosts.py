import os
import random
import re
import threading
from pathlib import Path

import pytest

from hvdkit.engine.toolchain import which
from hvdkit.errors import UsageError
from hvdkit.launch.control import environment
from hvdkit.launch.hosts.allocation import batch_hosts
from hvdkit.launch.hosts.hosts import Host, are_local, is_local, parse_hosts, read_hostfile
from hvdkit.launch.launchers.nodes.settings import read_key
from hvdkit.mpi.mpirun import identify_mpirun
from hvdkit.system.plain_files import LONGEST
from tests.unit.launch.commands import execute


def test_hosts_with_and_without_slots():
    text = "a:2, me@b-1.example.org:4,10.0.0.3,[fe80::1]:2"
    named = [("a", 2), ("me@b-1.example.org", 4), ("10.0.0.3", 1), ("[fe80::1]", 2)]
    found = parse_hosts(text)
    assert found == [Host(*each) for each in named]
    # The address is without its user.
    assert [host.address for host in found] == ["a", "b-1.example.org", "10.0.0.3", "fe80::1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:x", "'a:x' is not a host"),
        ("a:2:3", "'a:2:3' is not a host"),
        ("fe80::1", r"An IPv6 address needs brackets: \[ADDRESS\]:SLOTS"),
        ("-oProxyCommand=evil", "is not a host"),
        ("a b", "'a b' is not a host"),
        ("a:0", "host a has 0 slots"),
        ("a:100001", "host a has 100001 slots; expected at most 100,000$"),
        ("a:1,b:1,a:2", "a is named twice"),
        (" , ", "no hosts in it"),
    ],
)
def test_invalid_hosts(text, expected):
    with pytest.raises(UsageError, match=expected):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        # A byte order mark, and lines of Windows.
        ("\ufeffa slots=2\r\n", [("a", 2)]),
        # Horovod and MPICH.
        ("# ours\na slots=2\n\nb:4   # the big one\nc\n", [("a", 2), ("b", 4), ("c", 1)]),
        ("a:2\nb:1\na:1\n", [("a", 3), ("b", 1)]),
        # Open MPI. Without slots, it uses their limit.
        ("a slots=1 max_slots=8\nb cpu=3\nc count=2\n", [("a", 1), ("b", 3), ("c", 2)]),
        ("a slots = 2 max-slots=4\nb max-slots=4\n", [("a", 2), ("b", 4)]),
        ("a slots=2\na\n", [("a", 3)]),
        ("b slots-max=4 cpu=2\nc cpu_max=3\n", [("b", 2), ("c", 3)]),
        # PBS: a line for each slot.
        ("n1\nn1\nn2\nn1\nn2\n", [("n1", 3), ("n2", 2)]),
        ("me@n1.example.org\nme@n1.example.org\n", [("me@n1.example.org", 2)]),
    ],
)
def test_a_hostfile_of_another_program(tmp_path, content, expected):
    path = tmp_path / "hosts"
    path.write_text(content)
    assert [(host.name, host.slots) for host in read_hostfile(path)] == expected


@pytest.mark.parametrize("seed", [0, pytest.param(range(1, 100), marks=pytest.mark.long)])
def test_open_mpi_reads_the_same_from_a_hostfile(tmp_path, seed):
    mpirun = which("mpirun")
    if mpirun is None or identify_mpirun(mpirun).major < 5:
        pytest.skip("no Open MPI 5 here")
    for number in [seed] if isinstance(seed, int) else seed:
        path = tmp_path / "hosts"
        path.write_text(drawn_hostfile(random.Random(number)))
        try:
            own = [(host.name, host.slots) for host in read_hostfile(path)]
        except UsageError:
            own = []
        shown = ["--allow-run-as-root", "--do-not-launch", "--display", "allocation"]
        found = execute([mpirun, *shown, "--hostfile", str(path), "-np", "1", "true"])
        nodes = re.findall(r"^    (\S+): slots=(\d+) ", found.stdout, re.MULTILINE)
        # Once for the daemons, and once for the job.
        theirs = [(name, int(slots)) for name, slots in nodes[: len(nodes) // 2]]
        assert own == theirs, f"{path.read_text()}\n{found.stdout}{found.stderr}"


def drawn_hostfile(draw):
    """Return a hostfile of Open MPI, in which the lines of a host may contradict each other."""
    lines = []
    for name in ("a", "b-1", "c", "10.1.2.3"):
        kind = draw.choice(["slots", "limit", "plain", "twice", "absent"])
        unit, joint = draw.choice(["slots", "cpu", "count"]), draw.choice("-_")
        slots = draw.randint(1, 9)
        limit = draw.choice([f"{unit}{joint}max", f"max{joint}{unit}"])
        equals = draw.choice(["=", " = "])
        if kind == "slots":
            words = [f"{unit}{equals}{slots}"]
            words += draw.choice([[], [f"{limit}{equals}{slots + draw.randint(0, 3)}"]])
            lines.append(" ".join([name, *words]) + draw.choice(["", "  # comment"]))
        elif kind == "limit":
            lines.append(f"{name} {limit}{equals}{slots + 1}")
        elif kind == "twice":
            lines += [name, f"{name} slots={slots}"]
        elif kind == "plain":
            # Open MPI gives a host without any number as many slots as it has cores.
            lines += [name] * (slots + 1)
    draw.shuffle(lines)
    return "\n".join([*lines, "last slots=1", draw.choice(["", "# end"]), ""])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a\nb cores=4\n", "line 2: 'cores=4' is not expected. A line is `HOST`, `HOST:N`"),
        ("a slots=\n", "line 1: 'slots=': expected a number"),
        ("a 4\n", "line 1: '4' is not expected"),
        ("a username=me\n", r"'username=me' is not expected.*(USER@HOST)"),
        ("a slots=2\nb\na slots=2\n", "line 3: a is named twice; name it once, with all its"),
        ("rank 0=a slot=1\n", "line 1: '0=a' is not expected"),
        ("# none\n", "no hosts in it; expected one host per line, such as: host0 slots=2"),
        (b"a\xff\n", r"line 1: 'a\\\\xff' is not a host"),
    ],
)
def test_errors_in_a_hostfile_name_the_line(tmp_path, content, expected):
    path = tmp_path / "hosts"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=expected):
        read_hostfile(path)
    with pytest.raises(UsageError, match="--hostfile /gone: No such file"):
        read_hostfile(Path("/gone"))


@pytest.mark.parametrize(
    ("name", "addresses", "expected"),
    [
        ("localhost", set(), True),
        ("me", {"127.0.1.1"}, True),
        ("me", {"10.0.0.1"}, True),
        ("me", {"127.0.1.1", "10.0.0.1", "fe80::1%eth0"}, True),
        ("other", {"10.0.0.2"}, False),
        # Docker's bridge, which has the same address on every machine.
        ("other", {"10.0.0.2", "172.17.0.1"}, False),
        ("other", {"10.0.0.2", "127.0.0.1"}, False),
        ("alias-of-ssh", set(), False),
        # Its IPv6 address is not in use.
        ("me.example", {"10.0.0.1", "2001:db8::1"}, True),
        ("ipv6", {"2001:db8::1"}, False),
    ],
)
def test_local_hosts(name, addresses, expected):
    own = {"10.0.0.1", "127.0.0.1", "172.17.0.1", "fe80::1"}
    found = is_local(Host(name, 1), own=lambda: own, resolve=lambda name: addresses)
    assert found is expected


def test_a_name_that_cannot_be_a_host():
    assert not any(is_local(Host(name, 1)) for name in ("node1..cluster", "n" * 70))


def test_names_are_looked_up_in_parallel_with_a_timeout():
    together = threading.Barrier(21)
    answer = threading.Event()

    def look_up(host):
        if host.name == "silent":
            answer.wait(60)
        else:
            together.wait(60)  # for all others
        return host.name == "here"

    hosts = [Host(name, 1) for name in ("here", *(f"there{n}" for n in range(20)), "silent")]
    found = are_local(hosts, timeout=3, look_up=look_up)
    assert not answer.is_set()
    answer.set()
    assert [host.name for host, local in found.items() if local] == ["here"]
    assert list(found) == hosts


READERS = {
    "--hostfile": read_hostfile,
    "--env-file": environment.read_file,
    "--key-file": lambda path: read_key(path, {}, optional=False),
    "PBS_NODEFILE": lambda path: batch_hosts({"PBS_NODEFILE": str(path)}),
    "PE_HOSTFILE": lambda path: batch_hosts({"PE_HOSTFILE": str(path)}),
}


@pytest.mark.parametrize("name", READERS)
def test_a_named_file_that_would_fill_the_memory(tmp_path, name):
    """Such as a link to /dev/zero."""
    path, link = tmp_path / "long", tmp_path / "link"
    path.touch()
    os.truncate(path, LONGEST + 1)
    link.symlink_to(path)
    with pytest.raises(UsageError, match=f"more than {LONGEST:,} characters"):
        READERS[name](link)
