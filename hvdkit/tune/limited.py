"""Run a command with a limit of memory: `python -m hvdkit.tune.limited BYTES COMMAND...`.

The limit is RLIMIT_DATA: the private memory that a process may write, whether it is in RAM or not.
Memory that ranks share, such as hvdkit's buckets, does not count. (RLIMIT_AS would also count
address space that is only reserved, and would turn hvdkit's shared memory off.)

If the kernel is out of memory, it kills the command rather than the launcher.
"""

import contextlib
import os
import resource
import sys
from pathlib import Path


def main() -> None:
    """Set the limit, and become the command."""
    limit, command = int(sys.argv[1]), sys.argv[2:]
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if limit:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]!r}: {error.strerror}")


if __name__ == "__main__":
    main()
