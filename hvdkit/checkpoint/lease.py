"""Leases: which process writes, and whether it is still alive.

A writer's lease has a number that grows every few seconds. The writer is dead if its process on
this host has ended, or if the lease does not change for some time. Only changes are looked at, and
timed by the reader's monotonic clock: clocks are never compared.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdkit.checkpoint.errors import CheckpointError, WriterConflict

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lease:
    """The process that writes.

    Attributes:
        token: of the writer, never used twice.
        host: its name, for people.
        machine: equal where process numbers mean the same processes: the running kernel and its
            namespace of processes.
        pid: the process.
        started: when it was started, in the kernel's ticks: numbers of processes are used again.
    """

    token: str
    host: str
    machine: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> Lease:
        """Make a new one, for this process."""
        return cls(
            token=secrets.token_hex(8),
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=_started(os.getpid()) or 0,
        )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Lease:
        """Read what `fields` has given.

        Raises:
            KeyError, TypeError, ValueError: it is not that.
        """
        return cls(
            token=str(fields["token"]),
            host=str(fields["host"]),
            machine=str(fields["machine"]),
            pid=int(fields["pid"]),
            started=int(fields["started"]),
        )

    @classmethod
    def parse(cls, content: bytes | None) -> Lease | None:
        """Read what `to_bytes` has given. None if there is none, or only a part of one."""
        try:
            return cls.from_fields(json.loads(content or b""))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def fields(self) -> dict[str, Any]:
        """The lease as JSON has it."""
        return asdict(self)

    def to_bytes(self, beat: int) -> bytes:
        """The lease and the number that grows."""
        return json.dumps({**self.fields(), "beat": beat}).encode()

    def expect_own_process(self, place: str) -> None:
        """Check that this process has made the lease.

        Raises:
            CheckpointError: a process did that was forked into this one.
        """
        if os.getpid() != self.pid:
            raise CheckpointError(
                f"{place} was opened for writing by {self}, and not by its child {os.getpid()}; "
                "write from the process that has opened it."
            )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def conflict(place: str, writer: Lease | None) -> WriterConflict:
    """The error for a second writer."""
    return WriterConflict(
        f"{writer or 'another process'} is writing checkpoints to {place}; expected only this "
        "one. Stop it, or give another folder."
    )


def taken_over(place: str, own: Lease, writer: Lease | None, patience: float) -> WriterConflict:
    """The error for a writer that another one has replaced."""
    return WriterConflict(
        f"{writer or 'another process'} has taken over {place} from this process ({own}), which "
        f"had given no sign of life for {patience:.0f} s or more, or whose lease was removed. Let "
        "only one of them go on."
    )


def wait_for_death(
    place: str,
    own: Lease,
    writer: Lease | None,
    read: Callable[[], bytes | None],
    patience: float,
) -> None:
    """Return when a writer is surely dead.

    Args:
        place: what it writes to, for errors.
        own: this process.
        writer: None if its lease is not readable.
        read: gives its lease as it is now; None if it is gone.
        patience: seconds without a change after which it is dead.

    Raises:
        WriterConflict: it is alive.
    """
    content = read()
    if content is None:
        return
    if writer is not None and writer.machine == own.machine:
        # A lease of this process without a writer is one that could not be removed.
        if writer.pid != own.pid and _started(writer.pid) == writer.started:
            raise conflict(place, writer)
        return
    _log.info(
        "%s was last written to by %s; waiting %.0f s for a sign of life.",
        *(place, writer or "an unknown process", patience),
    )
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        time.sleep(min(1.0, patience / 10))
        now = read()
        if now is None:
            return
        if now != content:
            raise conflict(place, Lease.parse(now))


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int | None:
    """When a process of this machine was started, in ticks; None if it is not running."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses and may contain anything.
    fields = content.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
