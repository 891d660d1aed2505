"""The report that a rank leaves of its own end (`hvdkit/launch/agent/hook/`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdkit.system.plain_files import whole

#: The report of a rank, and the stack of its crash: the rank, and the number of the process.
REPORT, CRASH = "end-{}-{}.json", "crash-{}-{}"
#: Bytes. A rank can write anything.
LONGEST = 1 << 19
_MOST_LINES = 200
#: The content of a report if the command of the rank has started another Python.
STARTED: Mapping[str, Any] = {
    "how": "start",
    "error": "",
    "kind": "",
    "chained": False,
    "traceback": [],
}
_LONGEST_LINE = 1000


@dataclass(frozen=True)
class RankReport:
    """The report of a rank on its own end.

    Attributes:
        how: "exception" (not handled), "exit" (`sys.exit`), "end" (the script has run to its end,
            or has raised SystemExit itself) or "start" (the command of the rank has started another
            Python, and the report before does not count).
        error: the class and the first line of the exception; "" for none. After `sys.exit`: of the
            exception that the script was handling.
        kind: `reported` of a `hvdkit.launch.ending.failure.Kind`, as `_hvdkit_self_report` chooses
            it; "" without an error.
        chained: whether another exception has led to it.
        traceback: its lines; none after `sys.exit`.
        status: the exit status with which the script makes an orderly end, although the process may
            still run; None for others.
        time: when the rank has written it (`time.monotonic` of its host); 0 if it is not known.
    """

    how: str
    error: str = ""
    kind: str = ""
    chained: bool = False
    traceback: tuple[str, ...] = ()
    time: float = 0.0
    status: int | None = None

    @classmethod
    def of(cls, content: Any) -> RankReport:
        """Return the report in the content of a file or message.

        Raises:
            ValueError, KeyError or TypeError: it is not a report.
        """
        lines = [str(line)[:_LONGEST_LINE] for line in content["traceback"]]
        return cls(
            str(content["how"]),
            str(content["error"])[:_LONGEST_LINE],
            str(content["kind"]),
            bool(content["chained"]),
            tuple(lines[-_MOST_LINES:]),
            float(content.get("time", 0.0)),
            None if content.get("status") is None else whole(content["status"]),
        )
