"""The hosts of a job, parsed from `-H` or a hostfile, and their slots."""

from __future__ import annotations

import ipaddress
import queue
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdkit.errors import UsageError
from hvdkit.faults.names import shortened as few
from hvdkit.system.plain_files import read_named

# A name or an address, with an optional user for ssh. It must not begin with a dash, because ssh
# would parse it as an option.
_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+\])")


# The most slots of a host, which is also the most ranks of a job.
_MOST_SLOTS = 100_000
# The most characters of a user's text in an error.
_SHOWN = 200

# The settings of Open MPI's hostfiles for the slots of a host, and for the most ranks on it.
_SLOTS = ("slots", "cpu", "count")
_MOST = {f"{unit}-max" for unit in _SLOTS} | {f"max-{unit}" for unit in _SLOTS}

_NAMED_TWICE = "is named twice; name it once, with all its slots"

_NAME_SECONDS = 10.0
_NAMES_AT_ONCE = 64


@dataclass(frozen=True)
class Host:
    """A host for ranks.

    Attributes:
        name: the name or address that the user gave, with an optional `user@` for ssh.
        slots: the largest number of ranks on it.
        local: whether the host is this machine; None if not yet known.

    Raises:
        UsageError: the name is not that of a host. For example, ssh would use a name with a dash at
            its beginning as an option.
    """

    name: str
    slots: int
    local: bool | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"{shortened(self.name)} is not the name or the address of a host, with an "
                f"optional USER@ before it"
            )

    @property
    def address(self) -> str:
        """The name or address alone, without the user or brackets."""
        return self.name.rpartition("@")[2].strip("[]")


def parse_hosts(text: str, source: str = "-H") -> list[Host]:
    """Return the hosts of `-H`: `host1:4,host2:4`. The default is one slot.

    Args:
        source: where they are from, for errors.

    Raises:
        UsageError: a part is not a host, or a host is named twice.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    where = f"{source} {shortened(text)}"
    return _checked(
        [_parse(part, where) for part in parts], where, "HOST:SLOTS, separated by commas"
    )


def parse_lines(text: str, source: str, slots: int = 1) -> list[Host]:
    """Return the hosts of a text with a line `HOST:SLOTS` or `HOST` for each; may be empty.

    Args:
        source: where they are from, for errors.
        slots: the slots of a host without a number.

    Raises:
        UsageError: a line is not a host, or a host is named twice.
    """
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    found = [_parse(line, f"{source}, line {number}", slots) for number, line in lines if line]
    return _checked(found, source, "a line HOST:SLOTS for each") if found else []


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts of a file. `#` begins a comment, and `host` alone is one slot.

    The lines are those of Open MPI (`host slots=4 max-slots=8`), MPICH and Horovod (`host:4`), or
    PBS (`host`, a line for each slot). If a host has several lines, their slots are added.

    Raises:
        UsageError: the file cannot be read, a line is not a host, or a later line of a host has a
            setting, which Open MPI refuses, too.
    """
    try:
        lines = read_named(path, "backslashreplace").splitlines()
    except OSError as error:
        raise UsageError(f"--hostfile {path}: {error.strerror}") from error
    found: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where = f"{path}, line {number}"
        host, has_setting = _parse_line(text, where)
        before = found.get(host.name)
        if before is not None and has_setting:
            raise UsageError(f"{where}: {host.name} {_NAMED_TWICE}")
        slots = host.slots + (0 if before is None else before.slots)
        found[host.name] = Host(host.name, slots)
    return _checked(list(found.values()), str(path), "one host per line, such as: host0 slots=2")


def _parse_line(line: str, where: str) -> tuple[Host, bool]:
    """Return the host of a line of a hostfile, and whether a setting gives its slots."""
    name, *words = re.sub(r"\s*=\s*", "=", line).split()
    settings = {}
    for word in words:
        setting, _, value = word.partition("=")
        settings[setting.replace("_", "-")] = value
        if not (setting in _SLOTS or setting.replace("_", "-") in _MOST):
            raise UsageError(
                f"{where}: {shortened(word)!r} is not expected. A line is `HOST`, `HOST:N` or "
                f"`HOST slots=N max-slots=N`. A user is part of the host (USER@HOST), and a port "
                f"belongs to ~/.ssh/config"
            )
        if not (value.isascii() and value.isdigit()):
            raise UsageError(f"{where}: {shortened(word)!r}: expected a number, as in slots=2")
    # Open MPI uses the limit if it is the only number.
    given = [settings[each] for each in (*_SLOTS, *sorted(_MOST)) if each in settings]
    return _parse(f"{name}:{given[0]}" if given else name, where), bool(given)


def _parse(text: str, where: str, default: int = 1) -> Host:
    match = re.fullmatch(rf"({_NAME.pattern})(?::([0-9]+))?", text)
    if match is None:
        # A bare IPv6 address cannot be told from an address with slots.
        brackets = ". An IPv6 address needs brackets: [ADDRESS]:SLOTS" if "::" in text else ""
        raise UsageError(
            f"{where}: {shortened(text)!r} is not a host; expected HOST or HOST:SLOTS{brackets}"
        )
    digits = (match[2] or str(default)).lstrip("0") or "0"
    # Python does not convert thousands of digits.
    slots = int(digits) if len(digits) <= len(str(_MOST_SLOTS)) else _MOST_SLOTS + 1
    if slots > _MOST_SLOTS:
        raise UsageError(
            f"{where}: host {match[1]} has {shortened(digits)} slots; expected at most "
            f"{_MOST_SLOTS:,}"
        )
    if slots < 1:
        raise UsageError(
            f"{where}: host {match[1]} has 0 slots; expected at least 1. Give it slots or remove it"
        )
    return Host(match[1], slots)


def shortened(text: str) -> str:
    """Return a text for an error, cut if it is long."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _checked(found: list[Host], where: str, expected: str) -> list[Host]:
    names = Counter(host.name for host in found)
    twice = sorted(name for name, number in names.items() if number > 1)
    if twice:
        raise UsageError(f"{where}: {', '.join(twice)} {_NAMED_TWICE}")
    if not found:
        raise UsageError(f"{where}: no hosts in it; expected {expected}")
    return found


def own_addresses() -> set[str]:
    """Return the addresses of this machine's interfaces."""
    return {
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def _resolve(name: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):  # UnicodeError: a part of the name is empty or too long
        return set()  # the name may be an alias of ssh's configuration


def is_local(
    host: Host,
    *,
    own: Callable[[], set[str]] = own_addresses,
    resolve: Callable[[str], set[str]] = _resolve,
) -> bool:
    """Return whether `host` is this machine, which needs no ssh."""
    name = host.address
    if name == "localhost" or name.lower() == socket.gethostname().lower():
        return True
    addresses = {address.partition("%")[0] for address in resolve(name)}
    others = {address for address in addresses if not ipaddress.ip_address(address).is_loopback}
    # One common address does not suffice: Docker's bridge has the same address on every machine.
    # The network may not use the IPv6 addresses of its names.
    of_ipv4 = {address for address in others if ipaddress.ip_address(address).version == 4}
    return bool(addresses) and (of_ipv4 or others) <= own()


def are_local(
    hosts: Sequence[Host],
    *,
    timeout: float = _NAME_SECONDS,
    look_up: Callable[[Host], bool] = is_local,
) -> dict[Host, bool]:
    """Return host -> whether it is this machine. Names are looked up in parallel.

    A host whose name does not resolve within `timeout` seconds counts as another machine: it may be
    an alias of ssh's configuration.
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

    # Daemon threads, because a name lookup cannot be interrupted.
    threads = [threading.Thread(target=work, daemon=True) for _ in hosts[:_NAMES_AT_ONCE]]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {host: found.get(host, False) for host in hosts}


def total_slots(hosts: Sequence[Host]) -> int:
    return sum(host.slots for host in hosts)


def describe_slots(hosts: Sequence[Host]) -> str:
    """Return a text such as `host1:4, host2:4 and 3 more`."""
    return few([f"{host.name}:{host.slots}" for host in hosts], 8)


def name_slots(number: int) -> str:
    """Return a text such as `1 slot` or `2 slots`."""
    return f"{number} slot{'' if number == 1 else 's'}"
