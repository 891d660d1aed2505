"""Read the report that a rank leaves of its own end (`launch/hook/_hvdkit_self_report.py`)."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.plain_files import parse_json, read_text

#: The report of a rank, and the stack of its crash: the rank, and the number of the process.
REPORT, CRASH = "end-{}-{}.json", "crash-{}-{}"
_REPORT = re.compile(REPORT.format(r"(\d+)", r"\d+"))
#: The engine's words for another rank that has ended or does not answer, as in the rank's hook.
LOST_PEER = (
    *("Horovod has been shut down", "collective in shared memory", "collective over the network"),
    *("gloo/transport/", "by peer", "Broken pipe", "ncclRemoteError", "remote process exited"),
)
# Bytes. A rank can write anything.
_MOST_BYTES = 1 << 19
_MOST_LINES = 200
_STARTED: Mapping[str, Any] = {
    "how": "start",
    "error": "",
    "kind": "",
    "chained": False,
    "traceback": [],
}
_LONGEST = 1000


@dataclass(frozen=True)
class RankReport:
    """The report of a rank on its own end.

    Attributes:
        how: "exception" (not handled), "exit" (`sys.exit`), "end" (the script has run to its end,
            or has raised SystemExit itself) or "start" (the command of the rank has started another
            Python, and the report before does not count).
        error: the class and the first line of the exception; "" for none. After `sys.exit`: of the
            exception that the script was handling.
        kind: "own", "peer", "start", "refused" or "connection", as `_hvdkit_self_report` says; ""
            without an error.
        chained: whether another exception has led to it.
        traceback: its lines; none after `sys.exit`.
        time: when the rank has written it (`time.monotonic` of its host); 0 if it is not known.
    """

    how: str
    error: str = ""
    kind: str = ""
    chained: bool = False
    traceback: tuple[str, ...] = ()
    time: float = 0.0

    @classmethod
    def of(cls, content: Any) -> RankReport:
        """Return the report in the content of a file or message.

        Raises:
            ValueError, KeyError or TypeError: it is not a report.
        """
        lines = [str(line)[:_LONGEST] for line in content["traceback"]]
        return cls(
            str(content["how"]),
            str(content["error"])[:_LONGEST],
            str(content["kind"]),
            bool(content["chained"]),
            tuple(lines[-_MOST_LINES:]),
            float(content.get("time", 0.0)),
        )


class RankReports:
    """The reports that the ranks of one host write to a folder."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def new(self, folder: Path) -> Iterator[tuple[int, float, Mapping[str, Any]]]:
        """Yield the reports since the last call: rank, age in seconds, and content."""
        files = {file.name: file for file in folder.glob(REPORT.format("*", "*"))}
        ranks = {name.split("-")[1] for name in files}
        for name in self._seen.keys() - files.keys():
            del self._seen[name]
            if (rank := name.split("-")[1]) not in ranks:
                yield int(rank), 0.0, _STARTED
        for file in sorted(files.values()):
            # After an error the next call reads the file again.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
                stamp = file.stat().st_mtime_ns
                match = _REPORT.fullmatch(file.name)
                if self._seen.get(file.name) == stamp or match is None:
                    continue
                content = parse_json(read_text(file, _MOST_BYTES))
                RankReport.of(content)
                age = max(0.0, time.monotonic() - float(content["time"]))
                self._seen[file.name] = stamp
                yield int(match[1]), age, content


def crash_stack(folder: Path, rank: int) -> list[str]:
    """Return the lines that faulthandler has written when a rank crashed; empty for none."""
    for file in sorted(folder.glob(CRASH.format(rank, "*"))):
        with contextlib.suppress(OSError):
            if lines := read_text(file, _MOST_BYTES).splitlines():
                return [line[:_LONGEST] for line in lines[:_MOST_LINES]]
    return []
