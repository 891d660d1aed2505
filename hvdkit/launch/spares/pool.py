"""The spares of a host: decide when to start them, and which rank gets which spare."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hvdkit.core.loaded_modules import MODULES, file_name, read_by_imports
from hvdkit.errors import HvdkitError
from hvdkit.launch.keeper import KeptGroup
from hvdkit.launch.spares.command import recognise
from hvdkit.launch.spares.spare import Spare
from hvdkit.plain_files import read_json
from hvdkit.processes import StartedProcess

#: Seconds after the last report of a rank's modules, so that the job trains before spares start.
_SETTLE_SECONDS = 5.0
#: The most seconds for a spare to import its modules, at low priority.
_IMPORT_SECONDS = 600.0
#: Seconds for all spares to begin with their commands.
_START_SECONDS = 2.0
#: Bytes that must be available for each spare that is started.
_MEMORY = 1_000_000_000
#: The priority of a spare. Where ranks use all processors, it gets about a tenth of one: with the
#: lowest priority (19), imports would take minutes.
_NICE = 10


@dataclass(frozen=True)
class Slot:
    """A rank of this host, as it was started or will be started.

    Attributes:
        rank: its number.
        environment: its environment.
        cpus: the CPUs that it is bound to.
    """

    rank: int
    environment: Mapping[str, str]
    cpus: Sequence[int]


class SparePool:
    """The spares of one host, for the next start of its ranks."""

    def __init__(self) -> None:
        self._group = KeptGroup()
        self._spares: dict[int, Spare] = {}
        self._slots: list[Slot] = []
        # For each rank, the groups of `hvdkit.core.loaded_modules`.
        self._reports: dict[int, list[Mapping[str, Any]]] = {}
        self._changed_at = float("inf")
        self._command: Sequence[str] = ()
        self._directory = "/"

    def watch(self, command: Sequence[str], directory: str, slots: Sequence[Slot]) -> None:
        """Make a spare for each of these ranks, once they have reported their modules.

        Args:
            command: their command.
            directory: their working directory.
            slots: the ranks.
        """
        self._command, self._directory, self._slots = command, directory, list(slots)
        self._reports, self._changed_at = {}, float("inf")

    def step(self, folder: Path) -> None:
        """Read the reports in `folder`, and start or update at most one spare."""
        now = time.monotonic()
        self._read_reports(folder, now)
        for rank, spare in list(self._spares.items()):
            spare.poll()
            late = not spare.ready and now > spare.loading_since + _IMPORT_SECONDS
            if spare.process.poll() is not None or late:
                self._give_up(rank)
        # One after another, so that they take little from the ranks.
        if now < self._changed_at + _SETTLE_SECONDS or not all(
            spare.ready for spare in self._spares.values()
        ):
            return
        for slot in self._slots:
            groups = self._reports.get(slot.rank)
            if not groups:
                continue
            if slot.rank not in self._spares:
                self._start(slot, groups[0])
                return
            spare = self._spares[slot.rank]
            if spare.loads < len(groups):
                self._load(spare, slot, groups[spare.loads])
                return

    def claim(
        self, wanted: Sequence[Slot], waiting: Callable[[], None] = lambda: None
    ) -> tuple[KeptGroup, dict[int, StartedProcess]]:
        """Start ranks with the spares that fit and are ready, and end the other spares.

        Args:
            wanted: the ranks of this start.
            waiting: called several times per second while spares begin with their commands.

        Returns the group for all ranks of this start, and rank -> its process, which was a spare.
        The caller starts the other ranks without spares.
        """
        started: dict[int, Spare] = {}
        for slot in wanted:
            if self._usable(slot, slot.rank):
                started[slot.rank] = self._spares.pop(slot.rank)
        if self._are_alike():
            for slot in wanted:
                if slot.rank not in started:
                    found = next((n for n in self._spares if self._usable(slot, n)), None)
                    if found is not None:
                        started[slot.rank] = self._spares.pop(found)
        for slot in wanted:
            if slot.rank in started:
                started[slot.rank].start(slot.environment)
        deadline = time.monotonic() + _START_SECONDS
        for rank, spare in list(started.items()):
            if spare.wait_for_start(deadline - time.monotonic(), waiting):
                spare.close()
            else:
                spare.kill()
                del started[rank]
        group = self._group
        self.end()
        self._group = KeptGroup()
        return group, {rank: spare.process for rank, spare in started.items()}

    def end(self) -> None:
        """End all spares."""
        for spare in self._spares.values():
            spare.kill()
        self._spares.clear()
        self._slots = []

    def _are_alike(self) -> bool:
        """Return whether a rank may get the spare of another one.

        The script may import other modules on each rank, or set other variables before.
        """
        reports = list(self._reports.values())
        if len(reports) > 1:
            return all(report == reports[0] for report in reports)
        # A host with one rank: the script may have set variables to a value of this rank.
        return not any(
            group["variables"] != {n: v for n, v in slot.environment.items() if read_by_imports(n)}
            for slot in self._slots
            for group in self._reports.get(slot.rank, ())
        )

    def _usable(self, slot: Slot, number: int) -> bool:
        """Return whether the spare of rank `number` can become the rank of `slot`."""
        spare = self._spares.get(number)
        if spare is None:
            return False
        spare.poll()
        return spare.ready and spare.fits(slot.environment, slot.cpus)

    def _read_reports(self, folder: Path, now: float) -> None:
        for slot in self._slots:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found = read_json(folder / file_name(slot.rank))
                # A script can write anything to this file, so accept only these modules.
                groups: list[Mapping[str, Any]] = [
                    {name: dict(group[name]) for name in ("modules", "variables")}
                    for group in found["imports"]
                ]
                known = all(set(group["modules"]) <= set(MODULES) for group in groups)
                if known and groups != self._reports.get(slot.rank):
                    self._reports[slot.rank] = groups
                    self._changed_at = now

    def _start(self, slot: Slot, group: Mapping[str, Any]) -> None:
        python = recognise(self._command, self._directory, slot.environment)
        if python is None or psutil.virtual_memory().available < _MEMORY:
            self._slots = [each for each in self._slots if each is not slot]
            return
        try:
            spare = Spare(
                self._group, self._command, python, self._directory, slot.environment, slot.cpus
            )
        except (HvdkitError, OSError):
            self._slots = [each for each in self._slots if each is not slot]
            return
        self._spares[slot.rank] = spare
        self._load(spare, slot, group)

    def _load(self, spare: Spare, slot: Slot, group: Mapping[str, Any]) -> None:
        # The script may also have deleted variables of the rank.
        others = {n: value for n, value in slot.environment.items() if not read_by_imports(n)}
        environment = others | group["variables"]
        spare.load(group["modules"], environment, _NICE if _can_undo_nice() else None)

    def _give_up(self, rank: int) -> None:
        """End a spare, and make no other one for this rank until the next start."""
        self._spares.pop(rank).kill()
        self._slots = [slot for slot in self._slots if slot.rank != rank]


@functools.cache
def _can_undo_nice() -> bool:
    """Return whether a process here may lower its priority and raise it again.

    Without root or a limit (`ulimit -e`) that permits it, a rank would stay at low priority.
    """
    undone = []

    def attempt() -> None:
        # On Linux, the priority is that of a thread.
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(before, _NICE))
            os.setpriority(os.PRIO_PROCESS, thread, before)
            undone.append(True)

    thread = threading.Thread(target=attempt)
    try:
        thread.start()
    except RuntimeError:  # this user may start no more threads
        return False
    thread.join()
    return bool(undone)
