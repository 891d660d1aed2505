"""A rank that leaves a process behind, which tries to escape: python escaping.py ACTIONS PATH END.

ACTIONS are words of `ACTIONS`, joined by "+". The process writes its pid to a file PATH.PID of its
own. END is "end", "fail", "stay" or "exit": what the rank does afterwards.
"""

import contextlib
import glob
import os
import sys
import time

_STAY = (
    "import os, signal, sys, time; {ignore}open(f'{{sys.argv[1]}}.{{os.getpid()}}', 'w').close()"
)
_IGNORE = "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 10, 15)]; "


def _leave_parent() -> None:
    if os.fork():
        os._exit(0)


def _leave_session() -> None:
    with contextlib.suppress(PermissionError):  # it has done so already
        os.setsid()


def _close() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.closerange(3, 256)


#: What a process may do to escape.
ACTIONS = {
    "session": _leave_session,
    "fork": _leave_parent,
    "close": _close,
    "clean": lambda: None,  # the program is started without an environment
    "ignore": lambda: None,  # it ignores signals
    "stop": lambda: None,  # it is stopped
    "chdir": lambda: os.chdir("/"),
}


def escape(actions: list[str], path: str) -> None:
    """Become a process that has done these things."""
    for action in actions:
        ACTIONS[action]()
    code = _STAY.format(ignore=_IGNORE if "ignore" in actions else "")
    code += "; os.kill(os.getpid(), signal.SIGSTOP)" if "stop" in actions else ""
    code += "; time.sleep(600)"
    environment = {} if "clean" in actions else dict(os.environ)
    os.execve(sys.executable, [sys.executable, "-c", code, path], environment)


def main() -> None:
    actions, path, end = sys.argv[1].split("+"), sys.argv[2], sys.argv[3]
    if (child := os.fork()) == 0:
        escape([action for action in actions if action], path)
    deadline = time.monotonic() + 60
    while not glob.glob(f"{path}.*"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    print("up", os.getpid(), flush=True)
    if "fork" in actions:
        os.waitpid(child, 0)
    if end == "stay":
        time.sleep(600)
    if end == "exit":
        os._exit(0)
    sys.exit(end == "fail")


if __name__ == "__main__":
    main()
