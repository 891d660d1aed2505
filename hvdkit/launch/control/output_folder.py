"""Make a folder in `--output-dir` for each start.

It has the ranks' output, `start.json` (the command, the ranks and the end of the start), and
`events.jsonl` (see `events`). After a failure, it also has `error.json`, which is the interface for
other programs.
"""

from __future__ import annotations

import itertools
import json
import platform
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

import hvdkit
from hvdkit.engine.describe import installed
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.faults.start_folders import ERROR, LATEST, START, Start, identify_launcher
from hvdkit.launch.control import readers
from hvdkit.launch.control.plan import Plan
from hvdkit.launch.ending import events
from hvdkit.launch.ending.outcome import Outcome
from hvdkit.launch.ending.outcome import outcome as outcome_of
from hvdkit.system.plain_files import read_text
from hvdkit.system.whole_files import beside, write


def make(directory: Path) -> Path:
    """Make a folder in `directory` for one start, and return it. Its name is the time (UTC).

    Raises:
        UsageError: the folder cannot be made.
    """
    now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            folder = directory / (now if number == 1 else f"{now}-{number}")
            with suppress(FileExistsError):
                folder.mkdir()
                break
    except OSError as error:
        raise UsageError(f"--output-dir {directory}: {error.strerror}") from error
    with suppress(OSError):  # file systems without links
        new = beside(directory / LATEST)
        new.symlink_to(folder.name)
        new.replace(directory / LATEST)
    return folder


def describe_start(plan: Plan) -> Start:
    """Return the description of a start that begins now."""
    engine = installed()
    versions = {
        "hvdkit": hvdkit.__version__,
        "Python": platform.python_version(),
        "Horovod": "none" if engine is None else engine.version,
    }
    return Start(
        tuple(plan.command),
        plan.directory,
        {host.name: len(plan.on(host)) for host in plan.hosts},
        identify_launcher(psutil.Process()),
        versions,
        time.time(),
    )


def describe_end(start: Start, outcome: Outcome) -> Start:
    """Return the description of a start after its end."""
    return replace(
        start,
        ended=time.time(),
        status=outcome.status,
        reason=outcome.reason,
        failed=outcome.restartable and not outcome.hosts_changed,
        saved=outcome.saved,
        hosts_changed=outcome.hosts_changed,
        verdict=outcome.is_verdict,
        network=outcome.network,
    )


def write_start(folder: Path, start: Start) -> None:
    """Write the description of a start, when it begins and when it ends."""
    _write(folder / START, start.to_json())


def write_error(folder: Path, outcome: Outcome, plan: Plan) -> None:
    """Write the failure of a job to `error.json`.

    The keys are `reason`, `rank`, `host`, `status`, `signal`, `hint`, `suspects`,
    `possible_causes`, `exception`, `traceback` and `last_lines`. `reason` is the whole message for
    the user. The other keys describe the rank that failed first. If the job ended for another
    reason, such as a deadlock or a lost host, they are null or empty.

    `hint` is the probable cause of the signal, such as full memory, or null. `suspects` has all
    ranks that raised the same error, see `failure.suspects`. `possible_causes` is null unless the
    rank failed because it lost a peer. `status` is null after a signal, and `signal` (its name) is
    null without one. Without a Python exception, `exception` is null and `traceback` is empty.
    After a signal, the script may have caught the exception.
    """
    hosts = [place.host.name for place in plan.places]
    _write(folder / ERROR, json.dumps(error_content(outcome, hosts), indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    try:
        write(path, text)
    except OSError as error:  # a full disk must not end the job
        readers.say(f"cannot write {path}: {error.strerror}")


def replayed(folder: Path) -> str | None:
    """Return the reason for the end of a start, computed from the events in its folder.

    None without events.

    Raises:
        HvdkitError: the file is not a list of events of this version.
    """
    file = folder / events.EVENTS
    try:
        plan, happened = events.parse(read_text(file))
    except OSError:
        return None
    except HvdkitError as error:
        raise HvdkitError(f"{file}: {error}. Without the file, the folder can be read") from error
    found = outcome_of(plan, happened)
    tail = () if found.failure is None or found.failure.exception else found.failure.tail
    return " ".join([found.reason, *(f"Its last line of output: {line}" for line in tail[-1:])])


def error_content(outcome: Outcome, hosts: Sequence[str]) -> dict[str, Any]:
    """Return the content of `error.json`, see `write_error`.

    Args:
        hosts: the host of each rank.
    """
    failure = outcome.failure
    signalled = failure is not None and failure.status < 0
    return {
        "reason": outcome.report,
        "rank": failure and failure.rank,
        "host": failure and hosts[failure.rank],
        "status": None if signalled else failure and failure.status,
        "signal": _signal_name(-failure.status) if failure and signalled else None,
        "hint": (failure and failure.hint) or None,
        "suspects": list(outcome.suspects),
        "possible_causes": outcome.possible_causes or None,
        "exception": failure and failure.exception,
        "traceback": failure.traceback if failure else [],
        "last_lines": list(failure.tail) if failure else [],
    }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"  # Python names only some of these
