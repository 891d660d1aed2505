"""One run of the user's command by `hvdkit run`, in a process of its own, and its end."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.faults import start_folders
from hvdkit.system.owned_folders import OwnedFolder, temporary
from hvdkit.system.plain_files import parse_json, read_json
from hvdkit.system.processes import ProcessGroup, python_command
from hvdkit.training import trial
from hvdkit.training.trial import TrialPlan

#: In a command, it stands for the batch size.
PLACEHOLDER = "{batch_size}"

_USAGE_STATUS = 2
_OF_RUN = "hvdkit run: "
_POLL_SECONDS = 0.1
# For the ranks to end after SIGTERM.
_GRACE_SECONDS = 15.0
_SHOWN_LINES = 40

# The last lines of a rank that had too little memory.
_OUT_OF_MEMORY = re.compile(
    r"\bMemoryError\b"
    r"|OutOfMemoryError"
    r"|\b(?:CUDA|HIP|XPU|MPS)\b.*out of memory"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|std::bad_alloc"
    r"|ResourceExhaustedError|OOM when allocating|RESOURCE_EXHAUSTED: Out of memory"
    r"|CU(?:DNN|BLAS|FFT)_STATUS_ALLOC_FAILED"
    r"|\[Errno 12\] Cannot allocate memory"
    r"|is killed by signal: Killed"
)
# With a limit of memory, there is no memory for the stack of a new thread.
_NO_THREAD = re.compile(r"can't start new thread|Thread creation failed|pthread_create failed")


@dataclass(frozen=True)
class Result:
    """The end of a run.

    Attributes:
        seconds: the time of the run.
        reports: the reports of ranks, see `hvdkit.training.trial.end`. Empty if the command ended
            by itself.
        out_of_memory: which rank had too little memory, and how it ended; empty if none had.
    """

    seconds: float
    reports: Sequence[Mapping[str, Any]] = field(default=())
    out_of_memory: str = ""

    @property
    def first_report(self) -> Mapping[str, Any] | None:
        """The report of rank 0; None without one."""
        return next((each for each in self.reports if each["rank"] == 0), None)

    def peak(self, name: str = "peak_bytes") -> int:
        """Return the largest number of bytes of a rank; 0 if unknown."""
        return max((int(each.get(name, 0)) for each in self.reports), default=0)


class Runner:
    """Runs the user's command.

    Args:
        arguments: those of `hvdkit run`, before the command.
        command: the command of every rank.
        python: the path of Python on all hosts.
        timeout: seconds after which a run is ended.
        memory: the limit of each rank, in bytes; 0 for none.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        command: Sequence[str],
        python: str,
        timeout: float,
        memory: int = 0,
    ) -> None:
        self._arguments = arguments
        self._command = command
        self._python = python
        self._memory = memory
        self._timeout = timeout

    def run(
        self,
        plan: TrialPlan,
        batch_size: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Result:
        """Run the command until its trial ends.

        Args:
            plan: what to measure.
            batch_size: the batch size for the command; None for none.
            variables: further variables of the ranks.

        Raises:
            UsageError: the arguments of `hvdkit run` are wrong.
            HvdkitError: the job failed, but not for lack of memory, or it took too long.
        """
        command = list(self._command)
        env = {**os.environ, **(variables or {}), trial.VARIABLE: plan.to_json()}
        if batch_size is not None:
            command = [word.replace(PLACEHOLDER, str(batch_size)) for word in command]
            env[trial.BATCH_VARIABLE] = str(batch_size)
        limited = [self._python, "-P", "-m", "hvdkit.tune.limited", str(self._memory), *command]
        began = time.monotonic()
        owned = OwnedFolder(temporary(), "hvdkit-tune-")
        try:
            words = [*self._arguments, "--output-dir", str(owned.path), "--", *limited]
            status, text = self._launch(words, env, owned.path)
            seconds = time.monotonic() - began
            logs = owned.path / start_folders.LATEST
            if status == 0:
                return Result(seconds, _reports(logs))
            if reason := _out_of_memory(logs, bool(self._memory)):
                return Result(seconds, out_of_memory=reason)
            rank_failed = (logs / start_folders.ERROR).exists()
        finally:
            owned.remove()
        if status == _USAGE_STATUS and not rank_failed:
            raise UsageError(text)
        raise HvdkitError(
            f"the command failed (exit status {status}), and not for lack of memory:\n{text}"
        )

    def _launch(
        self, words: Sequence[str], env: Mapping[str, str], folder: Path
    ) -> tuple[int, str]:
        """Run `hvdkit run`. Return its status, and its messages."""
        group = ProcessGroup()
        messages = folder / "messages"
        try:
            with messages.open("wb") as stderr, open(os.devnull, "wb") as stdout:
                process = group.start(
                    python_command("-m", "hvdkit", "run", *words),
                    env,
                    stdout=stdout,
                    stderr=stderr,
                    dies_with_us=True,
                )
            deadline = time.monotonic() + self._timeout
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise HvdkitError(
                        f"a run has not ended within {self._timeout:g} s (--timeout): measure "
                        f"fewer steps, or let the command end by itself.\n{_report(messages)}"
                    )
                time.sleep(_POLL_SECONDS)
        finally:
            for _ in group.terminate(_GRACE_SECONDS):
                time.sleep(_POLL_SECONDS)
        return process.returncode, _report(messages)


def _report(messages: Path) -> str:
    """Return the last message of `hvdkit run`; the last lines of the ranks without one."""
    text = messages.read_text(encoding="utf-8", errors="replace")
    _, found, report = text.rpartition(_OF_RUN)
    return "\n".join((report if found else text).splitlines()[-_SHOWN_LINES:])


def _reports(logs: Path) -> list[dict[str, Any]]:
    """Return the reports of all ranks."""
    found = []
    for path in sorted(logs.glob("rank.*.log")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(trial.MARK):
                with contextlib.suppress(ValueError):
                    found.append(parse_json(line.removeprefix(trial.MARK)))
    return found


def _out_of_memory(logs: Path, limited: bool) -> str:
    """Return which rank had too little memory, and how it ended; empty if another thing failed."""
    try:
        failure = read_json(logs / start_folders.ERROR)
    except (OSError, ValueError):
        return ""
    where = f"rank {failure['rank']} on {failure['host']}"
    if failure["signal"] == "SIGKILL":
        return f"{where}: killed by SIGKILL"
    lines = [*failure["traceback"], *failure["last_lines"]]
    for pattern in (_OUT_OF_MEMORY, *([_NO_THREAD] if limited else [])):
        # The last match: a traceback ends with the exception.
        for line in reversed(lines):
            if pattern.search(line):
                return f"{where}: {line.strip()[:200]}"
    return ""
