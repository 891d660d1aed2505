"""Let a rank report its end to its agent: an unhandled exception, `sys.exit`, the script's end.

`sitecustomize` of this folder imports the module in each Python that a rank starts first, also if
the script does not import hvdkit. It uses only the standard library. The report is a JSON file in
the folder of HVDKIT_RECORD_DIR, as torchelastic's error files are
(`torch/distributed/elastic/multiprocessing/errors`):

    rank      the rank
    time      when it happened (`time.monotonic`, which all processes of a host share)
    how       "exception", "exit" (`sys.exit`) or "end" (the script has run to its end)
    error     the class and the first line of the exception, as Python prints them; "" for none.
              After `sys.exit`: of the exception that the script was handling
    traceback the lines of the traceback; none after `sys.exit`
    kind      the kind of the error, from its class and the place where it was raised: "own", "peer"
              (another rank has ended, or does not answer), "start" (`hvd.init()` has failed),
              "refused" (Horovod does not run any more, or does not know the process set) or
              "connection" (some other connection); "" without an error
    chained   whether the exception has another one as its cause
    status    the exit status of an orderly end (`hvdkit.runtime.script_end`), already reported
              before Python waits for threads; null for others

A process that a signal, `os._exit` or a crash ends leaves no report. After a crash, `faulthandler`
leaves the stack in a second file. If the command of the rank starts another Python, the report of
the earlier one does not count, and is removed.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Bytes and lines of a report. An agent reads no more.
_MOST_LINES, _FIRST_LINES, _LONGEST = 200, 40, 1000
# The classes of errors of a collective: of the engine, and of TensorFlow for those of the engine.
_ENGINE = (
    "horovod.common.exceptions.HorovodInternalError",
    "tensorflow.python.framework.errors_impl.OpError",
)
#: One class has all errors of the engine. These are the engine's words, and those of the libraries
# that it uses, for another rank that has ended or does not answer.
LOST_PEER = (
    *("Horovod has been shut down", "collective in shared memory", "collective over the network"),
    *("gloo/transport/", "by peer", "Broken pipe", "ncclRemoteError", "remote process exited"),
)
# The classes of torch.distributed for its connections.
_PEER_MODULES = ("torch.distributed.", "torch._C._distributed_c10d.")


class _Reporter:
    """Writes the report of this process. Processes that are forked from it write none."""

    def __init__(self, folder: str, rank: int) -> None:
        self._rank = rank
        self._process = os.getpid()
        self._file = os.path.join(folder, f"end-{rank}-{self._process}.json")
        # The exception that the script was handling when it called `sys.exit`.
        self._handled: Any = None
        self._reported: Any = None
        # The last exception that the running program has only printed.
        self._printed: Any = None
        self._before, self._exit = sys.excepthook, sys.exit
        # The status of an orderly end.
        self._status: Any = None

    def install(self, crash_file: str) -> None:
        sys.excepthook = self._on_exception
        sys.exit = _like_sys_exit(self._on_exit)
        # Registered first, so called last: the functions of the script may take long.
        atexit.register(self._on_end)
        try:
            import faulthandler

            if not faulthandler.is_enabled():
                # faulthandler keeps the file open.
                faulthandler.enable(open(crash_file, "wb", buffering=0))  # noqa: SIM115
        except (ImportError, OSError, ValueError):
            pass

    def note_end_with(self, status: int) -> None:
        import contextlib
        import threading

        is_registered, self._status = self._status is not None, status
        # Unlike functions of `atexit`, these run before Python waits for threads. Each runs before
        # those that were registered earlier, such as the one that waits for ThreadPoolExecutor.
        register = getattr(threading, "_register_atexit", None)
        if register is not None and not is_registered:
            with contextlib.suppress(RuntimeError):  # the script has already ended
                register(self._on_script_end)

    def _on_script_end(self) -> None:
        if _last() is None:
            self._write("end", None)

    def _on_exception(self, kind: Any, error: Any, traceback: Any) -> None:
        # Not if the program calls this function for an exception that it has handled.
        if error is not None and error is _last():
            # A library, or a console in the program, has printed the exception.
            if _script_runs():
                self._printed = error
            elif not isinstance(error, KeyboardInterrupt):
                self._write("exception", error)
        self._before(kind, error, traceback)
        if _lacks_input(error):
            sys.stderr.write(
                f"The standard input of a rank is empty. `hvdkit run --debug-rank {self._rank}` "
                f"connects rank {self._rank} to the terminal\n"
            )

    def _on_exit(self, status: Any = None, /) -> None:
        self._handled = sys.exc_info()[1]
        self._exit(status)

    def _on_end(self) -> None:
        # A program may have replaced the function for exceptions. Python notes them before.
        last = _last()
        if last is not None and last is self._reported:
            return
        if isinstance(last, KeyboardInterrupt):
            return
        if last is not None and last is not self._printed:
            self._write("exception", last)
        elif self._handled is not None:
            self._write("exit", self._handled)
        else:
            self._write("end", None)

    def _write(self, how: str, error: Any) -> None:
        if os.getpid() != self._process:
            return
        self._reported = error
        try:
            import json
            import time

            content = {"rank": self._rank, "time": time.monotonic(), "how": how}
            content["status"] = None if how == "exception" else self._status
            try:
                content.update(_described(error, with_traceback=how == "exception"))
            except BaseException:  # no memory, or an exception that cannot be printed
                content.update(error=type(error).__name__, traceback=[], kind="own", chained=False)
            draft = self._file + ".new"
            # No link: if the folder was deleted, another user may have made it again.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            opened = os.open(draft, flags, 0o600)
            with open(opened, "w", encoding="utf-8", errors="backslashreplace") as file:
                json.dump(content, file)
            os.replace(draft, self._file)
        except BaseException:
            pass  # a full disk, for example: the exit status remains


def _last() -> Any:
    """Return the last exception that was not handled, which Python notes first; None for none."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def _lacks_input(error: Any) -> bool:
    """Return whether `breakpoint()` or `input()` has failed because there is no terminal."""
    name, text = type(error).__name__, str(error)
    if name != "BdbQuit" and (name, text) != ("EOFError", "EOF when reading a line"):
        return False
    return os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev


def _script_runs() -> bool:
    """Return whether the script has not ended: its code is the first of the stack."""
    frame: Any = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name == "<module>" or frame.f_globals.get("__name__") == "runpy"


def _like_sys_exit(function: Any) -> Any:
    """Return a function that can be sent to another process, which then calls its own `sys.exit`.

    For example, `multiprocessing.Process(target=sys.exit)` sends it.
    """

    def exit(status: Any = None, /) -> None:
        function(status)

    exit.__module__, exit.__qualname__, exit.__doc__ = "sys", "exit", sys.exit.__doc__
    return exit


def _described(error: Any, with_traceback: bool) -> dict:
    if error is None:
        return {"error": "", "traceback": [], "kind": "", "chained": False}
    import traceback

    lines = []
    if with_traceback:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        lines = [line[:_LONGEST] for line in text.splitlines()]
        if len(lines) > _MOST_LINES:
            lines[_FIRST_LINES : len(lines) - (_MOST_LINES - _FIRST_LINES)] = ["  ..."]
    last = traceback.format_exception_only(type(error), error)
    name = getattr(type(error), "__qualname__", type(error).__name__)
    first = next((line for line in reversed(last) if name in line), last[-1])
    return {
        "error": (first.splitlines() or [""])[0][:_LONGEST],
        "traceback": lines,
        "kind": _kind(error),
        "chained": _follows(error) is not None,
    }


def _follows(error: Any) -> Any:
    """Return the exception that has led to `error`; None for none."""
    if error.__cause__ is not None:
        return error.__cause__
    return None if error.__suppress_context__ else error.__context__


def _kind(error: Any, most: int = 50) -> str:
    """Return the kind of an exception, or of the first of its causes of another kind."""
    while error is not None and most:
        members = getattr(error, "exceptions", None)
        if isinstance(members, tuple) and members:  # an exception group
            kinds = {_kind(member, most - 1) for member in members}
            found = kinds.pop() if len(kinds) == 1 else "own"
        else:
            found = _own_kind(error)
        if found != "own":
            return found
        # Also if the script hides it from the traceback, with `from None`.
        error, most = error.__cause__ or error.__context__, most - 1
    return "own"


def _own_kind(error: Any) -> str:
    names = [f"{each.__module__}.{each.__qualname__}" for each in type(error).__mro__]
    text = str(error)
    if any(name in names for name in _ENGINE):
        # Not each of them is about a peer: Horovod wraps any RuntimeError of a wait, also one of a
        # handler of a signal.
        return "peer" if any(words in text for words in LOST_PEER) else "own"
    if any(name.startswith(_PEER_MODULES) for name in names):
        return "peer"
    module, function = _place(error)
    if isinstance(error, RuntimeError) and "gloo/transport/" in text:
        return "peer"  # Gloo's source file in which it was raised
    if isinstance(error, ValueError) and module.startswith("horovod."):
        return "start" if function == "init" else "refused"
    return "connection" if isinstance(error, ConnectionError) else "own"


def _place(error: Any) -> tuple:
    """Return the module and the function that have raised an exception."""
    place = error.__traceback__
    if place is None:
        return "", ""
    while place.tb_next is not None:
        place = place.tb_next
    frame = place.tb_frame
    return str(frame.f_globals.get("__name__", "")), frame.f_code.co_name


# The reporter of this process, if it is a rank of `hvdkit run`.
_reporter: Any = None


def note_end_with(status: int) -> None:
    """Report an exit status when the script ends, see `hvdkit.runtime.script_end`."""
    if _reporter is not None:
        _reporter.note_end_with(status)


def install() -> None:
    """Let this process report its end, if it is a rank of `hvdkit run`."""
    folder, rank = os.environ.get("HVDKIT_RECORD_DIR"), os.environ.get("HVDKIT_REPORT_RANK")
    if folder and rank and rank.isdigit() and os.path.isdir(folder):
        try:
            for name in os.listdir(folder):
                # Of a Python that the command of the rank has started before.
                if name.startswith(f"end-{rank}-"):
                    os.unlink(os.path.join(folder, name))
        except OSError:
            pass
        global _reporter
        _reporter = _Reporter(folder, int(rank))
        _reporter.install(os.path.join(folder, f"crash-{rank}-{os.getpid()}"))
