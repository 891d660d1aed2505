"""A rank that leaves a daemon, which tries to escape: python escaping.py PATH END [IGNORES].

It is as `daemon(3)` makes it, without the environment of the job, and may ignore signals. It writes
its pid to a file PATH.PID of its own. END is "end", "fail", "stay" or "exit": what the rank does
afterwards.
"""

import glob
import os
import sys
import time

_IGNORE = "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 10, 15)]"
_STAY = "open(f'{sys.argv[1]}.{os.getpid()}', 'w').close(); time.sleep(600)"


def escape(path: str, ignores: bool) -> None:
    """Become a daemon."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.closerange(3, 256)
    os.chdir("/")
    code = f"import os, signal, sys, time; {ignores and _IGNORE}; {_STAY}"
    os.execve(sys.executable, [sys.executable, "-c", code, path], {})


def main() -> None:
    path, end, *ignores = sys.argv[1:]
    if (child := os.fork()) == 0:
        escape(path, bool(ignores))
    os.waitpid(child, 0)
    deadline = time.monotonic() + 60
    while not glob.glob(f"{path}.*"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    print("up", os.getpid(), flush=True)
    if end == "stay":
        time.sleep(600)
    if end == "exit":
        os._exit(0)
    sys.exit(end == "fail")


if __name__ == "__main__":
    main()
