"""Leases: which process is the writer, and whether it is alive.

The writer increments a number in its lease every few seconds: the heartbeat. A writer on this host
is dead if its process has ended. A writer on another host is dead if its lease has not changed for
some time. The observer measures this time with its own monotonic clock; clocks of different hosts
are never compared.

A number or a token in each step could only stop the older of two writers. Without heartbeats, a job
that is started by mistake would stop the checkpoints of a job that has trained for days.
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
from hvdkit.system.plain_files import parse_json, printable, whole

_log = logging.getLogger(__name__)

#: The longest content of a lease, in bytes.
MAX_BYTES = 4096


@dataclass(frozen=True)
class Lease:
    """Identifies the process that writes.

    Attributes:
        token: identifies the writer; never used twice.
        host: the host's name, for messages.
        machine: identifies the running kernel and its PID namespace. Process IDs of two leases can
            be compared only if `machine` is equal.
        pid: the process ID.
        started: when the process was started, in the kernel's clock ticks. It distinguishes the
            process from a later one with the same ID.
    """

    token: str
    host: str
    machine: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> Lease:
        """Return a new lease for this process."""
        return cls(
            token=secrets.token_hex(8),
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=_started(os.getpid()) or 0,
        )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Lease:
        """Return the lease for a result of `fields`.

        Raises:
            KeyError, TypeError, ValueError: the fields are not valid.
        """
        return cls(
            token=str(fields["token"]),
            host=printable(str(fields["host"]), one_line=True),
            machine=str(fields["machine"]),
            pid=whole(fields["pid"]),
            started=whole(fields["started"]),
        )

    @classmethod
    def parse(cls, content: bytes | None) -> Lease | None:
        """Parse the result of `to_bytes`. Return None if it is missing or incomplete."""
        try:
            return cls.from_fields(parse_json(content or b""))
        except (ValueError, KeyError, TypeError):
            return None

    def fields(self) -> dict[str, Any]:
        """Return the lease as JSON values."""
        return asdict(self)

    def to_bytes(self, beat: int) -> bytes:
        """Return the lease and the number of the heartbeat, as JSON."""
        return json.dumps({**self.fields(), "beat": beat}).encode()

    def expect_own_process(self, place: str) -> None:
        """Check that this process has created the lease.

        Raises:
            CheckpointError: another process created the lease, and this process was forked from it.
        """
        if os.getpid() != self.pid:
            raise CheckpointError(
                f"{place} was opened for writing by {self}; process {os.getpid()} was forked from "
                f"it. Write from the process that has opened it."
            )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def conflict(place: str, writer: Lease | None) -> WriterConflict:
    """Return the error for a second writer."""
    return WriterConflict(
        f"{writer or 'another process'} is writing checkpoints to {place}; expected no other "
        "writer. Stop that process, or give another folder."
    )


def taken_over(place: str, own: Lease, writer: Lease | None, timeout: float) -> WriterConflict:
    """Return the error for a writer that another process has replaced."""
    return WriterConflict(
        f"{writer or 'another process'} has taken over {place} from this process ({own}), which "
        f"had not renewed its lease for {timeout:.0f} s or more, or whose lease was removed. Stop "
        "one of the two processes."
    )


def wait_for_death(
    place: str,
    own: Lease,
    writer: Lease | None,
    read: Callable[[], bytes | None],
    timeout: float,
    *,
    locked: bool = False,
) -> None:
    """Return once a writer is known to be dead.

    Args:
        place: the storage, for errors.
        own: the lease of this process.
        writer: the lease of the writer; None if it is not readable.
        read: returns the current content of the writer's lease; None if it was removed.
        timeout: seconds without a heartbeat after which a writer on another host counts as dead.
        locked: whether this process holds a lock that a live writer on this host would hold.

    Raises:
        WriterConflict: the writer is alive.
    """
    content = read()
    if content is None:
        return
    if writer is not None and writer.machine == own.machine:
        # A lease with this process's ID is from an earlier writer that did not remove it.
        if writer.pid == own.pid or _started(writer.pid) != writer.started:
            return
        # The lease may be in a copy of the writer's folder, where nobody renews it.
        if not locked:
            raise conflict(place, writer)
    _log.info(
        "%s was last written to by %s; waiting %.0f s for a heartbeat.",
        *(place, writer or "an unknown process", timeout),
    )
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        time.sleep(min(1.0, timeout / 10))
        now = read()
        if now is None:
            return
        if now != content:
            raise conflict(place, Lease.parse(now))


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int | None:
    """Return when a process was started, in clock ticks; None if it is not running."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses and may contain anything.
    fields = content.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
