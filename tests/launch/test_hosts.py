import threading
from pathlib import Path

import pytest

from hvdkit.errors import UsageError
from hvdkit.launch.hosts import Host, are_local, is_local, parse_hosts, read_hostfile


def test_hosts_with_and_without_slots():
    assert parse_hosts("a:2, me@b-1.example.org:4,10.0.0.3,[fe80::1]:2") == [
        Host("a", 2),
        Host("me@b-1.example.org", 4),
        Host("10.0.0.3", 1),
        Host("[fe80::1]", 2),
    ]


def test_the_address_of_a_host_is_without_its_user():
    assert Host("me@b", 1).address == "b"
    assert Host("[fe80::1]", 1).address == "fe80::1"


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
        ("a:" + "9" * 5000, "host a has 9{200}… slots; expected at most 100,000$"),
        ("some text that is no host" * 1000, "is not a host; expected HOST or HOST:SLOTS$"),
        ("a:1,b:1,a:2", "a is named twice"),
        (" , ", "no hosts in it"),
    ],
)
def test_invalid_hosts(text, expected):
    with pytest.raises(UsageError, match=expected):
        parse_hosts(text)


def test_a_hostfile_of_horovod_or_open_mpi(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\na slots=2\n\nb:4   # the big one\nc\nd slots=1 max_slots=8\n")
    assert read_hostfile(path) == [Host("a", 2), Host("b", 4), Host("c", 1), Host("d", 1)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a\nb cores=4\n", "line 2: 'b cores=4' is not `HOST slots=N`"),
        ("a slots=two\n", "line 1: slots=two: expected a number"),
        ("a 4\n", "line 1: 'a 4' is not"),
        ("# none\n", "no hosts in it; expected one host per line, such as: host0 slots=2"),
    ],
)
def test_errors_in_a_hostfile_name_the_line(tmp_path, content, expected):
    path = tmp_path / "hosts"
    path.write_text(content)
    with pytest.raises(UsageError, match=expected):
        read_hostfile(path)


def test_a_hostfile_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a slots=2\r\n", encoding="utf-8-sig")
    assert read_hostfile(path) == [Host("a", 2)]


def test_a_hostfile_that_is_not_text(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(b"a\xff\n")
    with pytest.raises(UsageError, match=r"line 1: 'a\\\\xff' is not a host"):
        read_hostfile(path)


def test_a_missing_hostfile():
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


@pytest.mark.parametrize("name", ["node1..cluster", "n" * 70])
def test_a_name_that_cannot_be_a_host(name):
    assert not is_local(Host(name, 1))


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
