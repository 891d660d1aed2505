import socket
from types import SimpleNamespace

import psutil
import pytest

from hvdkit.errors import UsageError
from hvdkit.launch.control.network import (
    HostNetwork,
    Interface,
    choose_interfaces,
    faster_network,
    reached_address,
    rendezvous_address,
)
from hvdkit.launch.control.start_error import StartError

DOCKER = Interface("docker0", "172.17.0.1", 16)


def host(*interfaces, reached_at=None):
    return HostNetwork([DOCKER, *interfaces], reached_at)


SLOW = {
    "a": host(Interface("eth0", "10.0.0.1", 24, 1000), Interface("ib0", "10.9.0.1", 16, 100000)),
    "b": host(Interface("ens3", "10.0.0.2", 24, 1000), Interface("ib0", "10.9.0.2", 16, 100000)),
}


ETH0 = Interface("eth0", "10.0.0.1", 24)
LAN = Interface("lan", "192.168.1.5", 24)
SUBNETS = {n: host(Interface(f"eth{n}", f"10.0.{n}.1", 24), reached_at=f"10.0.{n}.1") for n in "12"}


@pytest.mark.parametrize(
    ("hosts", "network", "expected"),
    [
        # The interfaces on a shared subnet, whatever their names.
        ({"a": host(ETH0), "b": host(LAN, Interface("ens3", "10.0.0.2", 24))}, None, "eth0 ens3"),
        # The subnet of ssh is chosen among several, and without ssh the fastest one.
        (SLOW | {"b": HostNetwork(SLOW["b"].interfaces, "10.0.0.2")}, None, "eth0 ens3"),
        (SLOW, None, "ib0 ib0"),
        # Hosts on different subnets use the network of ssh.
        (SUBNETS, None, "eth1 eth2"),
        # The user's choice by subnet, name or host, also in a restart without host c.
        (SLOW, "10.0.0.0/8", "eth0 ens3"),
        (SLOW, "ib0", "ib0 ib0"),
        (SLOW, "a=ib0,b=ens3", "ib0 ens3"),
        (SLOW, "a=ib0,b=ens3,c=eth0", "ib0 ens3"),
    ],
)
def test_the_interfaces_of_the_ranks(hosts, network, expected):
    chosen = choose_interfaces(hosts, network)
    assert list(chosen) == list(hosts)
    assert " ".join(interface.name for interface in chosen.values()) == expected


def test_ssh_over_ipv6(monkeypatch):
    def entry(address, family=socket.AF_INET6):
        return SimpleNamespace(family=family, address=address)

    entries = {
        "eth0": [entry("10.0.0.2", socket.AF_INET), entry("fd00::2"), entry("fe80::1%eth0")],
        "eth1": [entry("fd01::2")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    own = [Interface("eth0", "10.0.0.2", 24)]
    assert reached_address("fd00::2", own) == "10.0.0.2"
    assert reached_address("fe80::1%eth0", own) == "10.0.0.2"
    assert reached_address("::ffff:10.0.0.2", own) == "10.0.0.2"
    assert reached_address("10.0.0.2", own) == "10.0.0.2"
    assert reached_address("fd01::2", own) is None


@pytest.mark.parametrize(
    ("b", "expected"),
    [
        (HostNetwork([], None), "b has no IPv4 address that other hosts could reach"),
        (host(Interface("eth0", "10.0.2.1", 24), reached_at="192.168.1.1"),
         "no network connects the hosts(.|\n)*--network"),
    ],
)  # fmt: skip
def test_hosts_without_a_common_network(b, expected):
    with pytest.raises(StartError, match=expected) as caught:
        choose_interfaces({"a": host(ETH0, reached_at="10.0.0.1"), "b": b})
    assert caught.value.hosts == ["b"]


@pytest.mark.parametrize(
    ("network", "expected", "without"),
    [
        (
            "192.168.0.0/16",
            "a has no such interface; it has docker0 172.17.0.1/16, eth0 10.0.0.1",
            ["a", "b"],
        ),
        ("eth0", "b has no such interface", ["b"]),
        ("a=eth0", "b has no such interface", ["b"]),
        ("a=eth0,c=eth0", "c has no ranks; the hosts are a, b", None),
    ],
)
def test_a_network_that_a_host_does_not_have(network, expected, without):
    with pytest.raises(UsageError, match=expected) as caught:
        choose_interfaces(SLOW, network)
    assert getattr(caught.value, "hosts", None) == without


def test_a_faster_network_than_the_one_that_ssh_uses():
    def both(n, slow, fast):
        interfaces = (
            Interface("eth0", f"10.0.0.{n}", 24, slow),
            Interface("ib0", f"10.9.0.{n}", 24, fast),
        )
        return host(*interfaces, reached_at=f"10.0.0.{n}")

    hosts = {"a": both(1, 1000, 100_000), "b": both(2, 1000, 40_000)}
    chosen = choose_interfaces(hosts)
    assert {interface.name for interface in chosen.values()} == {"eth0"}
    faster, its_speed, speed = faster_network(hosts, chosen)
    assert (str(faster), its_speed, speed) == ("10.9.0.0/24", 40_000, 1000)
    # Slower on one host; or the speed of eth0 is unknown.
    hosts = {"a": both(1, 1000, 100_000), "b": both(2, 1000, 100)}
    assert faster_network(hosts, choose_interfaces(hosts)) is None
    hosts = {"a": both(1, 0, 100_000), "b": both(2, 1000, 100_000)}
    assert faster_network(hosts, choose_interfaces(hosts)) is None


def test_the_rendezvous_is_on_the_ranks_network():
    chosen = {"a": Interface("eth0", "10.0.0.1", 24)}
    own = [Interface("wlan0", "192.168.1.9", 24), Interface("eth1", "10.0.0.7", 24)]
    assert rendezvous_address(chosen, own) == "10.0.0.7"
