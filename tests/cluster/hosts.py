"""Several hosts on one machine: network namespaces, each with its own name, address and /etc/hosts.

Needs root and iproute2; `missing` says what is not there. What is made carries the process's id in
its name, so that two runs do not meet, and goes away on the way out; what a killed run left behind
goes away when the next one begins.

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
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

#: What the network interface is called on a host, unless `hosts` is told otherwise.
INTERFACE = "eth0"

#: Begins the names of all that is made here; an interface's name has room for 15 characters.
_PREFIX = "hvd"

_ETC = Path("/etc/netns")
_SECONDS = 30
_count = itertools.count()

# `ip netns exec` gives a process the network and the /etc/hosts of a namespace, not a name.
_NAMED = 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"'


@dataclass(frozen=True)
class Host:
    """One host: its name, its address and interface, and the network namespace that it is."""

    name: str
    address: str
    namespace: str
    interface: str = INTERFACE

    @property
    def address6(self) -> str:
        """An IPv6 address of its own on the same network."""
        return "fd68:7664::" + self.address.rpartition(".")[2]

    def has_address6(self) -> bool:
        """Return whether it has that address: this machine may be without IPv6."""
        return self.address6 in _quietly("-n", self.namespace, "-6", "address", "show")

    def processes(self) -> set[int]:
        """The ids of the processes that run on this host."""
        return {int(pid) for pid in _quietly("netns", "pids", self.namespace).split()}

    def command(self, command: Sequence[str]) -> list[str]:
        """`command` as it has to be started here in order to run on this host."""
        ip = shutil.which("ip", path=_path()) or "ip"
        inside = [ip, "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*inside, "sh", "-c", _NAMED, self.name, *command]


@dataclass(frozen=True)
class Cluster:
    """Hosts on one network. `address` is this machine's own on it, reachable from all of them."""

    address: str
    hosts: Sequence[Host]


def lacking(programs: Iterable[str], packages: str) -> str | None:
    """What to do about the first of `programs` that is not here; None where all are."""
    for program in programs:
        if shutil.which(program) is None:
            return f"no {program} here: apt-get install {packages}"
    return None


def missing() -> str | None:
    """Why there can be no hosts here; None where there can."""
    if os.geteuid() != 0:
        return "several hosts need network namespaces, and those need root"
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(program, path=_path()) is None:
            return f"several hosts need the program {program}: apt-get install {package}"
    # A container's root may lack the capabilities: only trying tells.
    probe = f"{_PREFIX}{os.getpid():x}probe"
    try:
        _ip("netns", "add", probe)
        _ip("-n", probe, "link", "add", "probe", "type", "bridge")
        _ip("netns", "exec", probe, "true")
    except RuntimeError as error:
        return f"this machine makes no network namespaces: {error}"
    finally:
        _quietly("netns", "delete", probe)
    return None


@contextlib.contextmanager
def hosts(
    count: int, *, own_name_is_local: bool = True, interfaces: Sequence[str] = (INTERFACE,)
) -> Iterator[Cluster]:
    """Make `count` hosts, on a network of their own, that can reach each other and this machine.

    Each is set up as Debian's installer does it: its own name resolves to 127.0.1.1, or, unless
    `own_name_is_local`, to its address. The other hosts' names resolve to their addresses.
    `interfaces` are the names of their network interfaces, given out in turn.
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
            # At once, without a search for others that have it; where this machine has no IPv6,
            # hosts have none.
            second = ("add", f"{host.address6}/64", "dev", host.interface, "nodad")
            _quietly("-n", host.namespace, "address", *second)
            for interface in ("lo", host.interface):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        yield Cluster(str(network[1]), made)
    finally:
        _remove(name)


def limit_rate(host: Host, rate: str) -> None:
    """Let the link of `host` carry no more than `rate`, as `tc` writes it, in each direction."""
    bucket = ("tbf", "rate", rate, "burst", "256kb", "latency", "20ms")
    _run("tc", "-n", host.namespace, "qdisc", "add", "dev", host.interface, "root", *bucket)
    # What is sent to the host leaves through this machine's end of the link.
    _run("tc", "qdisc", "add", "dev", host.namespace, "root", *bucket)


def _write_etc(host: Host, all_hosts: Sequence[Host], own: str) -> None:
    folder = _ETC / host.namespace
    folder.mkdir(parents=True)
    others = [f"{other.address} {other.name}" for other in all_hosts if other is not host]
    lines = ["127.0.0.1 localhost", f"{own} {host.name}", *others]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    # No server of names is on this network: one that refuses is found missing at once.
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")


def _unused_network() -> ipaddress.IPv4Network:
    """A private network that this machine has no route to, other than its default one.

    Nor one that its servers of names are on, which it may well reach by that.
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
    # From the top of the range: what hands out private networks begins at the bottom.
    for third in range(255, -1, -1):
        network = ipaddress.IPv4Network(f"10.255.{third}.0/24")
        if not any(network.overlaps(other) for other in taken):
            return network
    raise RuntimeError("all of 10.255.0.0/16 is in use on this machine")


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Two runs must not find the same network unused."""
    with open(Path(tempfile.gettempdir()) / "hvdkit-test-hosts.lock", "w") as lock:
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another run has held {lock.name} for too long") from None
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
    """Remove the hosts and the network of the bridge `name`, and end what still runs on them."""
    # By what is there, not by what was meant to be: making them may have stopped half-way.
    namespaces = {path.name for path in _ETC.glob(f"{name}-*")}
    namespaces |= {path.name for path in Path("/run/netns").glob(f"{name}-*")}
    for namespace in sorted(namespaces):
        for pid in _quietly("netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        # Its end of the pair would live on while a process that was just killed is still ending.
        _quietly("link", "delete", namespace)
        _quietly("netns", "delete", namespace)
        shutil.rmtree(_ETC / namespace, ignore_errors=True)
    with contextlib.suppress(OSError):
        _ETC.rmdir()
    _quietly("link", "delete", name)


def _path() -> str:
    """PATH, and where Debian keeps `ip`: root's own PATH may lack it."""
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


def _quietly(*arguments: str) -> str:
    """`ip`, where what it is about may well not exist."""
    try:
        return _ip(*arguments)
    except RuntimeError:
        return ""
