"""Start elastic jobs, change their hosts, and read what their ranks print."""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hvdkit.launch.agent.host_folders import PREFIX
from tests.ranks.rank_pool import REPOSITORY

#: Seconds for one event: a machine that runs other tests starts PyTorch slowly.
SECONDS = 90.0
#: Seconds between two batches, so that a job does not end before the event of a test.
PAUSE = 0.7
#: Launchers.
HVDKIT = (sys.executable, "-m", "hvdkit", "run", "--elastic")
#: Without the imports of all frameworks, which only tell what Horovod was built for: 10 s.
_HOROVODRUN = """
from horovod.common import util
util._check_extension_lambda = lambda *_: True
from horovod.runner.launch import run_commandline
run_commandline()
"""
HOROVODRUN = (sys.executable, "-c", _HOROVODRUN, "--gloo", "--network-interfaces", "lo")
_SCRIPT = "#!/bin/sh\ncat hosts.txt\n"


def abandoned_folders() -> set[Path]:
    """Return the folders for commits on this machine that belong to no running agent."""
    parents = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    found = set()
    for folder in (path for parent in parents for path in parent.glob(f"{PREFIX}*")):
        # An error: an agent holds the lock, or has just deleted the folder.
        with contextlib.suppress(OSError), (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.add(folder)
    return found


class ElasticJob:
    """A job of `hvdkit run --elastic` in a folder. A context manager that ends it.

    With the launcher `HOROVODRUN`, it is an elastic job of Horovod's own launcher.

    Args:
        folder: the working directory, with the script `train.py`.
        hosts: what the discovery script prints.
        options: further options of the launcher.
        prefix: a command that runs `hvdkit run` somewhere else.
        env: variables for the job.
        command: the command of a rank; default: the script `train.py`.
        launcher: the command of the launcher.
    """

    def __init__(
        self,
        folder: Path,
        hosts: str,
        *options: str,
        prefix: Sequence[str] = (),
        env: dict[str, str] | None = None,
        command: Sequence[str] = (sys.executable, "train.py"),
        launcher: Sequence[str] = HVDKIT,
    ) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._stores_commits = launcher is not HOROVODRUN
        self._folders = abandoned_folders()
        self.set_hosts(hosts)
        self.set_pause(PAUSE)
        self.set_script(_SCRIPT)
        variables = {name: value for name, value in os.environ.items() if name != "PWD"}
        self.process = subprocess.Popen(
            [*prefix, *launcher, "--host-discovery-script", "./hosts.sh", *options, *command],
            cwd=folder,
            env=variables | {"PYTHONPATH": str(REPOSITORY)} | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ElasticJob:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            time.sleep(0.6)  # otherwise, the second one counts as the first
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait(timeout=20)
        self._reader.join(timeout=20)
        assert self.process.stdout
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    @property
    def text(self) -> str:
        """Everything that was printed until now."""
        return "\n".join(self.lines)

    def set_hosts(self, hosts: str) -> None:
        """Set what the discovery script prints."""
        draft = self.folder / "hosts.draft"
        draft.write_text(hosts.replace(",", "\n") + "\n")
        draft.replace(self.folder / "hosts.txt")

    def set_script(self, text: str) -> None:
        """Set the discovery script, `hosts.sh`."""
        draft = self.folder / "hosts.sh.draft"
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(self.folder / "hosts.sh")

    def set_pause(self, seconds: float) -> None:
        """Set the seconds between two batches."""
        draft = self.folder / "pause.draft"
        draft.write_text(str(seconds))
        draft.replace(self.folder / "pause")

    def wait_for(self, pattern: str, seconds: float = SECONDS) -> re.Match[str]:
        """Read lines until one matches, and return the match."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                message = f"no line {pattern!r} within {seconds:g} s:\n{self.text}"
                raise AssertionError(message) from None
            assert line is not None, f"the job ended without a line {pattern!r}:\n{self.text}"
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match

    def finish(self, seconds: float = SECONDS) -> int:
        """Read to the end, check that no commit is left, and return the exit status."""
        self.set_pause(0)
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                message = f"it did not end within {seconds:g} s:\n{self.text}"
                raise AssertionError(message) from None
            if line is None:
                break
            self.lines.append(line)
        status = self.process.wait(timeout=20)
        if self._stores_commits:
            assert not abandoned_folders() - self._folders
        return status
