"""Choose the network of a job's ranks, and the interface of each host on this network.

Interfaces are chosen by their subnet, because `eth0` of one host may be `ens3` of another.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, ip_address

import psutil

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch.control.start_error import StartError, StartUsageError


@dataclass(frozen=True)
class Interface:
    """One address of a network interface.

    Attributes:
        name: the name of the interface on the host.
        prefix: the length of the subnet's prefix, in bits.
        speed: the speed in Mbit/s; 0 if unknown.
        mtu: the largest packet, in bytes.
    """

    name: str
    address: str
    prefix: int
    speed: int = 0
    mtu: int = 0

    @property
    def network(self) -> IPv4Network:
        return IPv4Interface(f"{self.address}/{self.prefix}").network


#: The interface of a job on this machine only.
LOOPBACK = Interface("lo", "127.0.0.1", 8)


def own_interfaces() -> list[Interface]:
    """Return this machine's interfaces that are up and have an IPv4 address.

    Loopback and link-local addresses are left out. Horovod's rendezvous client does not support
    IPv6.
    """
    stats = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        if name not in stats or not stats[name].isup:
            continue
        for entry in addresses:
            if entry.family != socket.AF_INET or not entry.netmask:
                continue
            address = IPv4Address(entry.address)
            if address.is_loopback or address.is_link_local:
                continue
            prefix = int(IPv4Address(entry.netmask)).bit_count()
            speed, mtu = stats[name].speed, stats[name].mtu
            found.append(Interface(name, str(address), prefix, speed, mtu))
    return found


def reached_address(address: str, own: Sequence[Interface]) -> str | None:
    """Return the IPv4 address of the interface that has `address`.

    Args:
        address: an address of this machine, IPv4 or IPv6.
        own: this machine's interfaces.

    Returns:
        None if that interface has no IPv4 address.
    """
    parsed = ip_address(address.partition("%")[0])
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    if isinstance(parsed, IPv4Address):
        return str(parsed)
    reached = {
        name
        for name, addresses in psutil.net_if_addrs().items()
        for entry in addresses
        if entry.family == socket.AF_INET6
        and IPv6Address(entry.address.partition("%")[0]) == parsed
    }
    return next((interface.address for interface in own if interface.name in reached), None)


def free_port(address: str) -> int:
    """Return a port that is free now at an address of this machine."""
    with socket.create_server((address, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def source_address(target: str) -> str | None:
    """Return this machine's source address for packets to `target`; None without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # sends nothing, only looks up the route
        except OSError:
            return None
        return str(probe.getsockname()[0])


@dataclass(frozen=True)
class HostNetwork:
    """The network of a host.

    Attributes:
        reached_at: the host's IPv4 address at which the launcher reaches it, for example over ssh;
            None for the launcher's own machine, or if unknown.
    """

    interfaces: Sequence[Interface]
    reached_at: str | None = None


def choose_interfaces(
    hosts: Mapping[str, HostNetwork], network: str | None = None
) -> dict[str, Interface]:
    """Return the interface for each host's ranks.

    By default all interfaces are on one subnet that all hosts share: the subnet of ssh if it is
    shared, otherwise the fastest. If the hosts share no subnet, each host
    gets the interface to which ssh connected.

    Args:
        hosts: name -> the network of the host.
        network: the user's choice: a subnet (`10.0.0.0/8`), an interface name that all hosts
            have, or `HOST=INTERFACE,…`.

    Raises:
        UsageError: `network` is none of these, or a host has no such interface.
        StartError: a host has no IPv4 address, or no network connects the hosts.
    """
    without = [name for name, host in hosts.items() if not host.interfaces]
    if without:
        raise StartError(
            f"{', '.join(without)} has no IPv4 address that other hosts could reach, but Horovod's "
            f"ranks connect over IPv4 only. Give the hosts IPv4 addresses on the network that they "
            f"share. Private addresses are enough",
            without,
        )
    if network is not None:
        return _by_option(hosts, network)
    if shared := _shared_networks(hosts):
        best = max(shared, key=lambda net: (_reached_over(hosts, net), _slowest(hosts, net)))
        return {name: _on(host, best)[0] for name, host in hosts.items()}
    return _by_reached_address(hosts)


def faster_network(
    hosts: Mapping[str, HostNetwork], chosen: Mapping[str, Interface]
) -> tuple[IPv4Network, int, int] | None:
    """Return a subnet that all hosts share and that is faster than the chosen one.

    Args:
        hosts: name -> the network of the host.
        chosen: name -> the interface of the host's ranks.

    Returns:
        The faster subnet, its speed and the speed of the chosen subnet, in Mbit/s. None if there is
        no faster subnet, or if the speeds are not known.
    """
    speed = min(interface.speed for interface in chosen.values())
    best = max(_shared_networks(hosts), key=lambda net: _slowest(hosts, net), default=None)
    if best is None or speed == 0 or _slowest(hosts, best) <= speed:
        return None
    return best, _slowest(hosts, best), speed


def _by_option(hosts: Mapping[str, HostNetwork], network: str) -> dict[str, Interface]:
    try:
        subnet: IPv4Network | None = IPv4Network(network, strict=False)
    except ValueError:
        subnet = None
    by_host = dict(part.split("=", 1) for part in network.split(",") if "=" in part)
    unknown = sorted(by_host.keys() - hosts.keys())
    # A restart may leave out a host that has an interface here. A wrong name lacks another host.
    if unknown and hosts.keys() - by_host.keys():
        raise UsageError(
            f"--network {network}: {unknown[0]} has no ranks; the hosts are {', '.join(hosts)}"
        )
    matching = {
        name: [
            each
            for each in host.interfaces
            if (
                IPv4Address(each.address) in subnet
                if subnet is not None
                else each.name == (by_host.get(name) if by_host else network)
            )
        ]
        for name, host in hosts.items()
    }
    if without := [name for name, found in matching.items() if not found]:
        raise StartUsageError(
            f"--network {network}: {without[0]} has no such interface; it has "
            f"{_listed(hosts[without[0]])}. Expected a subnet (10.0.0.0/8), a name, or "
            f"HOST=NAME,HOST=NAME.",
            without,
        )
    return {name: found[0] for name, found in matching.items()}


def _on(host: HostNetwork, network: IPv4Network) -> list[Interface]:
    return [interface for interface in host.interfaces if interface.network == network]


def _shared_networks(hosts: Mapping[str, HostNetwork]) -> list[IPv4Network]:
    first = next(iter(hosts.values()))
    shared = []
    for network in dict.fromkeys(interface.network for interface in first.interfaces):
        addresses = [i.address for host in hosts.values() for i in _on(host, network)[:1]]
        # Docker's bridge has the same subnet on every host, but does not connect them. It also has
        # the same address on every host, so a repeated address excludes a subnet.
        if len(set(addresses)) == len(hosts):
            shared.append(network)
    return shared


def _reached_over(hosts: Mapping[str, HostNetwork], network: IPv4Network) -> bool:
    return any(
        host.reached_at is not None and IPv4Address(host.reached_at) in network
        for host in hosts.values()
    )


def _slowest(hosts: Mapping[str, HostNetwork], network: IPv4Network) -> int:
    return min(_on(host, network)[0].speed for host in hosts.values())


def _by_reached_address(hosts: Mapping[str, HostNetwork]) -> dict[str, Interface]:
    others = [host.reached_at for host in hosts.values() if host.reached_at is not None]
    own = next(filter(None, map(source_address, others)), None)
    chosen = {
        name: interface
        for name, host in hosts.items()
        for interface in host.interfaces
        if interface.address == (host.reached_at or own)
    }
    without = [name for name in hosts if name not in chosen]
    if without:
        lists = "; ".join(f"{name}: {_listed(host)}" for name, host in hosts.items())
        raise StartError(
            f"no network connects the hosts, as far as hvdkit can see ({lists}). If there is "
            "one, give --network with a subnet, such as 10.0.0.0/8, or an interface for each "
            "host: --network HOST=INTERFACE,HOST=INTERFACE",
            without,
        )
    return chosen


def _listed(host: HostNetwork) -> str:
    return ", ".join(f"{i.name} {i.address}/{i.prefix}" for i in host.interfaces) or "none"


def rendezvous_address(chosen: Mapping[str, Interface], own: Sequence[Interface]) -> str:
    """Return this machine's address on the ranks' network."""
    addresses = {interface.address for interface in own}
    networks = {interface.network for interface in chosen.values()}
    for interface in own:
        if interface.network in networks:
            return interface.address
    for interface in chosen.values():
        # This machine is not on the ranks' network, for example a login node. Use its address on
        # the route to the ranks.
        source = source_address(interface.address)
        if source in addresses:
            return str(source)
    raise HvdkitError(
        f"this machine has no route to the ranks' addresses "
        f"{', '.join(i.address for i in chosen.values())}; start the job from one of the hosts, or "
        "choose another --network"
    )
