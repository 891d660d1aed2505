"""The hosts of a job, as users write them, and how many ranks each takes."""

from __future__ import annotations

import ipaddress
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdkit.errors import UsageError

# A name or an address, perhaps with a user for ssh. Never one that begins with a dash: ssh would
# take it for an option.
_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+\])")


_NAME_SECONDS = 10.0
_NAMES_AT_ONCE = 64


@dataclass(frozen=True)
class Host:
    """A host for ranks.

    Attributes:
        name: as the user wrote it: a name or an address, perhaps with `user@` for ssh.
        slots: the number of ranks that it takes.
        local: whether it is this machine; None where nobody knows yet.
    """

    name: str
    slots: int
    local: bool | None = None

    @property
    def address(self) -> str:
        """The name or address alone, without the user or brackets."""
        return self.name.rpartition("@")[2].strip("[]")


def parse_hosts(text: str) -> list[Host]:
    """Hosts as `-H` takes them: `host1:4,host2:4`; one slot where none are given.

    Raises:
        UsageError: a part is not a host, or a host is named twice.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return _checked((_parse(part, f"-H {text}") for part in parts), f"-H {text}")


def read_hostfile(path: Path) -> list[Host]:
    """Hosts from a file: a line each, `host slots=4` or `host:4`, `#` begins a comment.

    Open MPI's other settings (`max_slots=8`) are read over. `host` alone is one slot.

    Raises:
        UsageError: there is no such file, or a line is not a host.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--hostfile {path}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            where = f"{path}, line {number}"
            settings = dict(word.split("=", 1) for word in words[1:] if "=" in word)
            if len(settings) != len(words) - 1 or not settings.keys() <= {"slots", "max_slots"}:
                raise UsageError(f"{where}: {line.strip()!r} is not `HOST slots=N` or `HOST:N`")
            slots = settings.get("slots")
            found.append(_parse(words[0] if slots is None else f"{words[0]}:{slots}", where))
    return _checked(found, str(path))


def _parse(text: str, where: str) -> Host:
    match = re.fullmatch(rf"({_NAME.pattern})(?::([0-9]+))?", text)
    if match is None:
        raise UsageError(f"{where}: {text!r} is not a host; expected HOST or HOST:SLOTS")
    slots = int(match[2] or 1)
    if slots < 1:
        raise UsageError(f"{where}: host {match[1]} has 0 slots; leave it out, or give it some")
    return Host(match[1], slots)


def _checked(hosts: Iterable[Host], where: str) -> list[Host]:
    found = list(hosts)
    names = [host.name for host in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"{where}: {', '.join(twice)} is named twice; add up its slots")
    if not found:
        raise UsageError(f"{where}: no hosts in it; expected HOST:SLOTS, separated by commas")
    return found


def own_addresses() -> set[str]:
    """The addresses of this machine's interfaces."""
    return {
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def _resolve(name: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    except OSError:
        return set()  # ssh may know it by an alias of its own configuration


def is_local(
    host: Host,
    *,
    own: Callable[[], set[str]] = own_addresses,
    resolve: Callable[[str], set[str]] = _resolve,
) -> bool:
    """Whether `host` is this machine, so that no ssh is needed (and none may be set up)."""
    name = host.address
    if name == "localhost" or name.lower() == socket.gethostname().lower():
        return True
    addresses = resolve(name)
    if addresses and all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses):
        return True
    return bool(addresses & own())


def are_local(
    hosts: Sequence[Host],
    *,
    timeout: float = _NAME_SECONDS,
    look_up: Callable[[Host], bool] = is_local,
) -> dict[Host, bool]:
    """Return which of `hosts` are this machine, all looked up at once.

    A host that no name server has told of after `timeout` seconds counts as another one: ssh may
    know it.
    """
    found: dict[Host, bool] = {}
    waiting: queue.SimpleQueue[Host] = queue.SimpleQueue()
    for host in hosts:
        waiting.put(host)

    def work() -> None:
        with suppress(queue.Empty):
            while True:
                host = waiting.get_nowait()
                found[host] = look_up(host)

    # Daemons, because nothing ends a name server's silence before its own time.
    threads = [threading.Thread(target=work, daemon=True) for _ in hosts[:_NAMES_AT_ONCE]]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {host: found.get(host, False) for host in hosts}


def local_host(slots: int) -> Host:
    """Return this machine as a host that takes `slots` ranks."""
    return Host("localhost", slots)


def total_slots(hosts: Sequence[Host]) -> int:
    return sum(host.slots for host in hosts)
