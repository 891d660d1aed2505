"""Several hosts on one machine: network namespaces, each with its own name, address and /etc/hosts.

Needs root and iproute2; `missing` returns what is missing. The names of all devices and namespaces
contain the process id, so that runs do not collide. They are removed on exit; those of a killed run
are removed by the next run.

Example:
    with hosts(2) as cluster:
        first = cluster.hosts[0]
        subprocess.run(first.command(["hostname"]), timeout=10, check=True)
"""

import contextlib
import fcntl
import ipaddress
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

#: The default name of a host's network interface.
INTERFACE = "eth0"

#: The prefix of all names. The name of an interface has at most 15 characters.
_PREFIX = "hvd"

_ETC = Path("/etc/netns")
_SECONDS = 30
_count = itertools.count()

# `ip netns exec` sets the network and /etc/hosts of a process, but not its host name.
_NAMED = 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"'


@dataclass(frozen=True)
class Host:
    """One host: its name, address, network namespace and interface."""

    name: str
    address: str
    namespace: str
    interface: str = INTERFACE

    @property
    def address6(self) -> str:
        """Its IPv6 address on the same network."""
        return "fd68:7664::" + self.address.rpartition(".")[2]

    def has_address6(self) -> bool:
        """Return whether the host has `address6`. This machine may not support IPv6."""
        return self.address6 in _ip_or_nothing("-n", self.namespace, "-6", "address", "show")

    def processes(self) -> set[int]:
        """Return the ids of the processes on this host."""
        return {int(pid) for pid in _ip_or_nothing("netns", "pids", self.namespace).split()}

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on this host."""
        ip = shutil.which("ip", path=_path()) or "ip"
        inside = [ip, "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*inside, "sh", "-c", _NAMED, self.name, *command]


@dataclass(frozen=True)
class Cluster:
    """Hosts on one network. `address` is this machine's address on it."""

    address: str
    hosts: Sequence[Host]


def missing_program(programs: Iterable[str], packages: str) -> str | None:
    """Return how to install the first missing one of `programs`; None if all are installed."""
    for program in programs:
        if shutil.which(program, path=_path()) is None:
            return f"no {program} here: apt-get install {packages}"
    return None


def missing() -> str | None:
    """Return why this machine cannot have hosts; None if it can."""
    if os.geteuid() != 0:
        return "several hosts need network namespaces, and those need root"
    if reason := missing_program(("ip", "tc", "unshare"), "iproute2 util-linux"):
        return f"several hosts need programs: {reason}"
    # A container's root may lack capabilities, so try.
    probe = f"{_PREFIX}{os.getpid():x}probe"
    try:
        _ip("netns", "add", probe)
        _ip("-n", probe, "link", "add", "probe", "type", "bridge")
        _ip("netns", "exec", probe, "true")
    except RuntimeError as error:
        return f"this machine cannot make network namespaces: {error}"
    finally:
        _ip_or_nothing("netns", "delete", probe)
    return None


@contextlib.contextmanager
def hosts(
    count: int, *, own_name_is_local: bool = True, interfaces: Sequence[str] = (INTERFACE,)
) -> Iterator[Cluster]:
    """Make `count` hosts on a new network, which can reach each other and this machine.

    Args:
        count: the number of hosts.
        own_name_is_local: whether a host's name resolves to 127.0.1.1 on that host, as on Debian.
            If False, it resolves to the host's address there, as on all other hosts.
        interfaces: the names of the hosts' network interfaces, repeated if there are more hosts.
    """
    name = f"{_PREFIX}{os.getpid():x}-{next(_count)}"
    try:
        with _locked():
            _remove_leftovers()
            network = _unused_network()
            _ip("link", "add", name, "type", "bridge")
            _ip("address", "add", f"{network[1]}/{network.prefixlen}", "dev", name)
            _ip("link", "set", name, "up")
        names = itertools.islice(itertools.cycle(interfaces), count)
        made = [
            Host(f"host{i}", str(network[i + 2]), f"{name}-{i}", interface)
            for i, interface in enumerate(names)
        ]
        for host in made:
            _write_etc(host, made, "127.0.1.1" if own_name_is_local else host.address)
            _ip("netns", "add", host.namespace)
            inside = ("peer", "name", host.interface, "netns", host.namespace)
            _ip("link", "add", host.namespace, "type", "veth", *inside)
            _ip("link", "set", host.namespace, "master", name, "up")
            address = (
                "address",
                "add",
                f"{host.address}/{network.prefixlen}",
                "dev",
                host.interface,
            )
            _ip("-n", host.namespace, *address)
            # `nodad` skips the detection of duplicates. Fails on a machine without IPv6.
            second = ("add", f"{host.address6}/64", "dev", host.interface, "nodad")
            _ip_or_nothing("-n", host.namespace, "address", *second)
            for interface in ("lo", host.interface):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        yield Cluster(str(network[1]), made)
    finally:
        _remove(name)


def limit_rate(host: Host, rate: str) -> None:
    """Limit the link of `host` to `rate`, in the format of `tc`, in each direction."""
    limit_sending(host, rate)
    # Packets to the host leave through this machine's end of the link.
    _run("tc", "qdisc", "add", "dev", host.namespace, "root", *_bucket(rate))


def limit_sending(host: Host, rate: str) -> None:
    """Limit what `host` sends to `rate`, in the format of `tc`."""
    link = ("dev", host.interface, "root")
    _run("tc", "-n", host.namespace, "qdisc", "add", *link, *_bucket(rate))


def _bucket(rate: str) -> tuple[str, ...]:
    return ("tbf", "rate", rate, "burst", "256kb", "latency", "20ms")


def _write_etc(host: Host, all_hosts: Sequence[Host], own: str) -> None:
    folder = _ETC / host.namespace
    folder.mkdir(parents=True)
    others = [f"{other.address} {other.name}" for other in all_hosts if other is not host]
    lines = ["127.0.0.1 localhost", f"{own} {host.name}", *others]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    # There is no name server: 127.0.0.1 refuses connections at once.
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")


def _unused_network() -> ipaddress.IPv4Network:
    """Return a private network to which this machine has no route but the default route.

    The network does not contain this machine's name servers.
    """
    routes = json.loads(_ip("-4", "-json", "route", "show", "table", "all"))
    taken = [
        ipaddress.IPv4Network(route["dst"], strict=False)
        for route in routes
        if route["dst"] != "default"
    ]
    with contextlib.suppress(FileNotFoundError):
        for line in Path("/etc/resolv.conf").read_text().splitlines():
            match line.split():
                case ["nameserver", address] if ":" not in address:
                    taken.append(ipaddress.IPv4Network(address))
    # From the top of the range, as other programs use private networks from the bottom.
    for third in range(255, -1, -1):
        network = ipaddress.IPv4Network(f"10.255.{third}.0/24")
        if not any(network.overlaps(other) for other in taken):
            return network
    raise RuntimeError("all of 10.255.0.0/16 is in use on this machine")


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Prevent two runs from choosing the same network."""
    # Not in /tmp, where another user could hold the lock, or put a link to a file of root.
    # And no flock(2): whoever may read the file could hold it.
    with open("/run/hvdkit-hosts.lock", "w") as lock:
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another run has locked {lock.name} for more than {_SECONDS} s: end it"
                    ) from None
                time.sleep(0.05)
        yield


def _remove_leftovers() -> None:
    links = json.loads(_ip("-json", "link", "show", "type", "bridge"))
    for name in (link["ifname"] for link in links if link):
        pid, _, number = name.removeprefix(_PREFIX).partition("-")
        with contextlib.suppress(ValueError):
            if name.startswith(_PREFIX) and number and not psutil.pid_exists(int(pid, 16)):
                _remove(name)


def _remove(name: str) -> None:
    """Remove the hosts and the network of the bridge `name`, and end their processes."""
    # List the namespaces that exist: the setup may have stopped half-way.
    namespaces = {path.name for path in _ETC.glob(f"{name}-*")}
    namespaces |= {path.name for path in Path("/run/netns").glob(f"{name}-*")}
    for namespace in sorted(namespaces):
        for pid in _ip_or_nothing("netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        # Otherwise this end of the pair would exist until the killed processes have ended.
        _ip_or_nothing("link", "delete", namespace)
        _ip_or_nothing("netns", "delete", namespace)
        shutil.rmtree(_ETC / namespace, ignore_errors=True)
    with contextlib.suppress(OSError):
        _ETC.rmdir()
    _ip_or_nothing("link", "delete", name)


def _path() -> str:
    """Return PATH with Debian's folders of `ip`, which root's PATH may lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": _path()},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _ip_or_nothing(*arguments: str) -> str:
    """Run `ip`, and ignore errors."""
    try:
        return _ip(*arguments)
    except RuntimeError:
        return ""
