"""The description of one start of a job: `start.json` in its output folder.

`hvdkit run --output-dir` writes it when the ranks start, and again when they have ended.
"""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil

import hvdkit
from hvdkit.engine.describe import installed
from hvdkit.errors import HvdkitError
from hvdkit.launch.outcome import Outcome
from hvdkit.launch.plan import Plan
from hvdkit.plain_files import parse_json, rank_number, seconds, whole

#: The version of the file. Readers refuse a newer one.
VERSION = 1


@dataclass(frozen=True)
class Start:
    """One start of a job. A restart is another start by the same launcher.

    Attributes:
        command: the command of every rank.
        directory: the working directory.
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
    def running(self) -> bool | None:
        """Whether the launcher still runs; None if this cannot be seen from this host."""
        if self.ended is not None:
            return False
        host, pid, _ = self.launcher.rsplit(" ", 2)
        if host != socket.gethostname():
            return None
        try:
            return _launcher(psutil.Process(int(pid))) == self.launcher
        except psutil.Error:
            return False

    @classmethod
    def of(cls, plan: Plan) -> Start:
        """Return the description of a start that begins now."""
        engine = installed()
        versions = {
            "hvdkit": hvdkit.__version__,
            "Python": platform.python_version(),
            "Horovod": "none" if engine is None else engine.version,
        }
        return cls(
            tuple(plan.command),
            plan.directory,
            {host.name: len(plan.on(host)) for host in plan.hosts},
            _launcher(psutil.Process()),
            versions,
            time.time(),
        )

    def end(self, outcome: Outcome) -> Start:
        """Return the description after the end."""
        return replace(
            self,
            ended=time.time(),
            status=outcome.status,
            reason=outcome.reason,
            failed=outcome.restartable and not outcome.hosts_changed,
            saved=outcome.saved,
            hosts_changed=outcome.hosts_changed,
            verdict=outcome.is_verdict,
            network=outcome.network,
        )

    def to_json(self) -> str:
        """Return the content of the file."""
        return json.dumps(asdict(self), indent=2) + "\n"


def _launcher(process: psutil.Process) -> str:
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
