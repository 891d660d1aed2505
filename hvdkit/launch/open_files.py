"""The limit on open files (`ulimit -n`), which large jobs exceed: 1,024 by default on many systems.

A limit has a soft value, which counts, and a hard one, up to which a process may raise it.
"""

from __future__ import annotations

import resource
from contextlib import suppress

# For libraries, data files and worker processes.
_OWN_OF_RANK = 1024
_OWN_OF_LAUNCHER = 512


def of_rank(size: int) -> int:
    """Return the descriptors that a rank of a job of `size` ranks needs.

    Gloo has a connection with each other rank, and listens for each while it connects.
    """
    return _OWN_OF_RANK + 3 * size


def of_launcher(size: int, hosts: int) -> int:
    """Return the descriptors that the launcher needs.

    It has pipes to an agent on each host; and for each rank a file and connections to the
    rendezvous.
    """
    return _OWN_OF_LAUNCHER + 3 * size + 4 * hosts


def largest() -> int:
    """Return what this process may raise its limit to."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _number(hard)


def allow(needed: int) -> int:
    """Raise this process's limit to `needed` where it is lower, or as far as possible.

    Processes that it starts inherit the limit.

    Returns:
        The limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _number(soft) < needed:
        soft = min(needed, _number(hard))
        with suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _number(soft)


def _number(limit: int) -> int:
    """Return a limit where infinity is a large number."""
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit
