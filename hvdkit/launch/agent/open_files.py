"""Raise the limit on open files (`ulimit -n`) for large jobs. Many systems have 1,024 by default.

The soft limit applies. A process may raise its soft limit up to the hard limit.
"""

from __future__ import annotations

import resource
from contextlib import suppress

# For libraries, data files and worker processes.
_OWN_OF_RANK = 1024
_OWN_OF_LAUNCHER = 512


def needed_by_rank(size: int) -> int:
    """Return the number of descriptors that a rank of a job of `size` ranks needs.

    Gloo has a connection to each other rank. While it connects, it also has a listening socket for
    each other rank.
    """
    return _OWN_OF_RANK + 3 * size


def needed_by_launcher(size: int, hosts: int) -> int:
    """Return the number of descriptors that the launcher needs.

    The launcher has pipes to an agent on each host, and two files (of `horovodrun`) and rendezvous
    connections for each rank.
    """
    return _OWN_OF_LAUNCHER + 4 * size + 4 * hosts


def hard_limit() -> int:
    """Return the hard limit of this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _number(hard)


def raise_limit(needed: int) -> int:
    """Raise this process's soft limit to `needed`, or as far as possible, if it is lower.

    Child processes inherit the limit.

    Returns:
        The new soft limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _number(soft) < needed:
        soft = min(needed, _number(hard))
        with suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _number(soft)


def _number(limit: int) -> int:
    """Return a limit, with a large number for infinity."""
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit
