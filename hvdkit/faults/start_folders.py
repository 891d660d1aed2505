"""The folder of one start of a job, in the folder of `--output-dir`, and its description.

`hvdkit run --output-dir` writes the description (`start.json`) when the ranks start, and again when
they have ended.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hvdkit.errors import HvdkitError
from hvdkit.system.plain_files import parse_json, rank_number, read_text, seconds, whole

#: The version of a description. Readers refuse a newer one.
VERSION = 1
#: In the folder of a start: its description, and the failure of a rank.
START, ERROR = "start.json", "error.json"
#: In the folder of `--output-dir`: a link to the folder of the newest start.
LATEST = "latest"
# The time of the start, and 2, 3, … for further starts in the same second.
_NAME = re.compile(r"(\d{8}-\d{6})(?:-(\d+))?")


def newest(folder: Path, records: str) -> tuple[Path, str]:
    """Return the folder of the newest start, and a sentence for the user.

    Args:
        folder: a folder of `--output-dir`. If it has no starts, it is the folder of a start itself.
        records: the name of the folder for records.

    Returns:
        The folder, and "". If the newest start has no files but its output: the folder of the
        newest start with a description, if there is one, and a sentence about this.
    """
    starts = list(_starts(folder))
    latest = folder / LATEST
    # A copy of the folder may lack the link.
    first = latest if latest.is_dir() else next(iter(starts), folder)
    if first == folder or any((first / name).exists() for name in (START, ERROR, records)):
        return first, ""
    name = first.resolve().name
    described = next((start for start in starts if (start / START).exists()), first)
    return described, f"The newest start, {name}, has no description ({START}): was the disk full?"


def _starts(folder: Path) -> Iterator[Path]:
    """Yield the folders of starts in a folder, the newest first."""
    found = [
        (match[1], int(match[2] or 1), path)
        for path in folder.glob("*")
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    for *_, path in sorted(found, reverse=True):
        yield path


@dataclass(frozen=True)
class Start:
    """One start of a job. A restart is another start by the same launcher.

    Attributes:
        hosts: host -> its number of ranks, in the order of ranks.
        launcher: identifies the process of `hvdkit run`: its host, process id and start time.
        versions: of hvdkit, Python and Horovod, by name; those of the launcher.
        began: the time of the start, in seconds since 1970.
        ended: the time at which all ranks had ended; None before.
        status: the exit status, see `Outcome`; None before the end.
        reason: the end in one line; empty before the end and after a success.
        failed: whether the job failed by itself. False after a stop on request.
        saved: whether a checkpoint was saved.
        hosts_changed: whether the ranks have ended to be started on other hosts.
        network: the connections between hosts that failed afterwards, in one line; empty if there
            are none, or if they were not tried.
        verdict: whether `reason` is a verdict on a stall, which can be derived from the records.
    """

    command: tuple[str, ...]
    directory: str
    hosts: Mapping[str, int]
    launcher: str
    versions: Mapping[str, str]
    began: float
    ended: float | None = None
    status: int | None = None
    reason: str = ""
    failed: bool = False
    saved: bool = False
    hosts_changed: bool = False
    verdict: bool = False
    network: str = ""
    version: int = field(default=VERSION, repr=False)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return sum(self.hosts.values())

    @property
    def host_of_rank(self) -> list[str]:
        """The host of each rank."""
        return [name for name, count in self.hosts.items() for _ in range(count)]

    @property
    def running(self) -> bool | None:
        """Whether the launcher still runs; None if this cannot be seen from this host."""
        if self.ended is not None:
            return False
        host, pid, _ = self.launcher.rsplit(" ", 2)
        if host != socket.gethostname():
            return None
        try:
            return identify_launcher(psutil.Process(int(pid))) == self.launcher
        except psutil.Error:
            return False

    def to_json(self) -> str:
        """Return the content of the file."""
        return json.dumps(asdict(self), indent=2) + "\n"


def identify_launcher(process: psutil.Process) -> str:
    """Return a text that identifies a process on any host."""
    return f"{socket.gethostname()} {process.pid} {process.create_time():.2f}"


def parse(text: str) -> Start:
    """Return the description in `text`.

    Raises:
        HvdkitError: it is not a description of this version.
    """
    try:
        content: dict[str, Any] = parse_json(text)
        if content["version"] > VERSION:
            raise HvdkitError(
                f"the description of a start (start.json) has version {content['version']}; "
                f"expected at most {VERSION}. Update hvdkit"
            )
        ended, status = content["ended"], content["status"]
        hosts = {str(name): rank_number(count) for name, count in content["hosts"].items()}
        rank_number(sum(hosts.values()))
        host, pid, born = str(content["launcher"]).rsplit(" ", 2)
        if whole(pid) < 0:
            raise ValueError(f"{pid} is not the number of a process")
        return Start(
            command=tuple(str(word) for word in content["command"]),
            directory=str(content["directory"]),
            hosts=hosts,
            launcher=f"{host} {whole(pid)} {seconds(born):.2f}",
            versions={str(name): str(each) for name, each in content["versions"].items()},
            began=seconds(content["began"]),
            ended=None if ended is None else seconds(ended),
            status=None if status is None else whole(status),
            reason=str(content["reason"]),
            failed=bool(content["failed"]),
            saved=bool(content["saved"]),
            hosts_changed=bool(content["hosts_changed"]),
            # Earlier versions did not write these fields.
            verdict=bool(content.get("verdict", False)),
            network=str(content.get("network", "")),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise HvdkitError(f"not the description of a start ({error!r})") from error


def read(path: Path) -> Start | None:
    """Return the description in a file; None without a readable file."""
    try:
        return parse(read_text(path))
    except (OSError, HvdkitError):
        return None
