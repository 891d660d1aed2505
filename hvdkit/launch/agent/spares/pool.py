"""The spares of a host: decide when to start them, and which rank gets which spare."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hvdkit.errors import HvdkitError
from hvdkit.launch.agent.keeper import KeptGroup, wait_for
from hvdkit.launch.agent.spares.command import recognise
from hvdkit.launch.agent.spares.spare import Spare
from hvdkit.runtime.loaded_modules import MODULES, file_name, read_by_imports
from hvdkit.system.plain_files import read_json
from hvdkit.system.processes import StartedProcess

#: Seconds after the last report of a rank's modules, so that the job trains before spares start.
_SETTLE_SECONDS = 5.0
#: The most seconds for a spare to import its modules, beside ranks that use all processors.
_IMPORT_SECONDS = 600.0
#: Seconds for all spares to begin with their commands.
_START_SECONDS = 2.0
_WAIT_SECONDS = 0.2
#: Bytes that must be available for each spare that is started.
_MEMORY = 1_000_000_000


@dataclass(frozen=True)
class Slot:
    """A rank of this host, as it was started or will be started.

    Attributes:
        rank: its number.
        cpus: the CPUs that it is bound to.
    """

    rank: int
    environment: Mapping[str, str]
    cpus: Sequence[int]


@dataclass(frozen=True)
class _Report:
    """The imports of a rank.

    Attributes:
        groups: the groups of `hvdkit.runtime.loaded_modules`.
        at: when this was read (`time.monotonic`).
    """

    groups: Sequence[Mapping[str, Any]]
    at: float


class SparePool:
    """The spares of the ranks of one start on a host. They can become ranks of the next start.

    Args:
        slots: the ranks that get spares, once they have reported their modules.

    Attributes:
        group: the group for all ranks of the next start.
    """

    def __init__(
        self, command: Sequence[str] = (), directory: str = "/", slots: Sequence[Slot] = ()
    ) -> None:
        self.group = KeptGroup()
        self._command, self._directory = command, directory
        self._slots = {slot.rank: slot for slot in slots}
        self._spares: dict[int, Spare] = {}
        self._reports: dict[int, _Report] = {}

    def step(self, folder: Path) -> None:
        """Read the reports in `folder`, and start or update at most one spare."""
        now = time.monotonic()
        self._read_reports(folder, now)
        for rank, spare in list(self._spares.items()):
            late = not spare.ready and now > spare.loads[-1] + _IMPORT_SECONDS
            if spare.process.poll() is not None or late:
                self._spares.pop(rank).kill()
                del self._slots[rank]
        # One after another, so that they take little from the ranks.
        newest = max((report.at for report in self._reports.values()), default=now)
        if now < newest + _SETTLE_SECONDS or not all(s.ready for s in self._spares.values()):
            return
        for rank, report in sorted(self._reports.items()):
            if (slot := self._slots.get(rank)) is None:
                continue
            done = len(self._spares[rank].loads) if rank in self._spares else 0
            if done < len(report.groups):
                self._load(slot, report.groups[done])
                return

    def claim(
        self, wanted: Sequence[Slot], waiting: Callable[[], None] = lambda: None
    ) -> dict[int, StartedProcess]:
        """Start ranks with the spares that fit and are ready, and end the other spares.

        Args:
            wanted: the ranks of this start.
            waiting: called several times per second while spares begin with their commands.

        Returns rank -> its process, which was a spare. The caller starts the other ranks.
        """
        candidates = [(slot, [slot.rank]) for slot in wanted]
        if self._are_alike():
            candidates += [(slot, list(self._spares)) for slot in wanted]
        chosen: dict[int, Spare] = {}
        for slot, numbers in candidates:
            left = [number for number in numbers if number in self._spares]
            fitting = [n for n in left if self._spares[n].fits(slot.environment, slot.cpus)]
            if fitting and slot.rank not in chosen:
                chosen[slot.rank] = self._spares.pop(fitting[0])
                chosen[slot.rank].start(slot.environment)
        deadline = time.monotonic() + _START_SECONDS
        while (seconds := deadline - time.monotonic()) > 0 and (
            pending := [
                spare.socket.fileno()
                for spare in chosen.values()
                if not spare.started and spare.process.poll() is None
            ]
        ):
            wait_for(pending, min(seconds, _WAIT_SECONDS))
            waiting()
        self.end()
        started: dict[int, StartedProcess] = {}
        for rank, spare in chosen.items():
            if spare.started:
                spare.close()
                started[rank] = spare.process
            else:
                spare.kill()
        return started

    def end(self) -> None:
        """End all spares."""
        for spare in self._spares.values():
            spare.kill()
        self._spares.clear()
        self._slots.clear()

    def _are_alike(self) -> bool:
        """Return whether a rank may get the spare of another one.

        The script may import other modules on each rank, or set other variables before.
        """
        reports = [report.groups for report in self._reports.values()]
        if len(reports) > 1:
            return all(report == reports[0] for report in reports)
        # A host with one rank: the script may have set variables to a value of this rank.
        return not any(
            group["variables"] != {n: v for n, v in slot.environment.items() if read_by_imports(n)}
            for rank, report in self._reports.items()
            for group in report.groups
            if (slot := self._slots.get(rank)) is not None
        )

    def _read_reports(self, folder: Path, now: float) -> None:
        for rank in self._slots:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found = read_json(folder / file_name(rank))
                # A script can write anything to this file, so accept only these modules.
                groups: list[Mapping[str, Any]] = [
                    {name: dict(group[name]) for name in ("modules", "variables")}
                    for group in found["imports"]
                ]
                known = all(set(group["modules"]) <= set(MODULES) for group in groups)
                before = self._reports.get(rank)
                if known and (before is None or groups != before.groups):
                    self._reports[rank] = _Report(groups, now)

    def _load(self, slot: Slot, group: Mapping[str, Any]) -> None:
        """Let the spare of a rank import modules. Start it first if there is none."""
        if slot.rank not in self._spares:
            python = recognise(self._command, self._directory, slot.environment)
            if python is None or psutil.virtual_memory().available < _MEMORY:
                del self._slots[slot.rank]
                return
            try:
                self._spares[slot.rank] = Spare(
                    self.group, self._command, python, self._directory, slot.environment, slot.cpus
                )
            except (HvdkitError, OSError):
                del self._slots[slot.rank]
                return
        # The script may also have deleted variables of the rank.
        others = {n: value for n, value in slot.environment.items() if not read_by_imports(n)}
        self._spares[slot.rank].load(group["modules"], others | group["variables"])
