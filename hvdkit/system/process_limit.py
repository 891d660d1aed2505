"""Say which limit prevents new processes and threads, which the system reports without a name."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from hvdkit.errors import HvdkitError
from hvdkit.system import cgroups


def is_reached(error: BaseException) -> bool:
    """Return whether an error of a new process or thread has this cause."""
    if isinstance(error, OSError):
        return error.errno == errno.EAGAIN
    return isinstance(error, RuntimeError) and "start new thread" in str(error)


def describe() -> str:
    """Return the limits of this process, and what to do."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = ["no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}"]
    for folder in cgroups.folders("pids"):
        limit = cgroups.number(folder, "pids.max")
        used = cgroups.number(folder, "pids.current")
        if limit is not None and used is not None:
            limits.append(f"pids.max in {folder}: {limit:,}, of which {used:,} are used")
    return (
        f"this user may start no more processes and threads there (`ulimit -u`: "
        f"{'; '.join(limits)}). Raise the limit, or end other processes"
    )


@contextmanager
def explained() -> Iterator[None]:
    """Context that raises an HvdkitError with the limits if a process or thread cannot start."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if not is_reached(error):
            raise
        raise HvdkitError(describe()) from error
