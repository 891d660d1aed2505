"""Run `hvdkit bench`, and find the processes that it leaves."""

import os
import subprocess
import sys
import uuid

import psutil

_SECONDS = 240

#: The environment variable by which a test knows its processes.
MARK = "HVDKIT_TEST_MARK"

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def command(*arguments):
    return [sys.executable, "-m", "hvdkit", "bench", *arguments]


def bench(*arguments, **env):
    """Run a benchmark to its end, and check that it leaves no process."""
    mark = str(uuid.uuid4())
    done = subprocess.run(
        command(*arguments),
        env=os.environ | ENVIRONMENT | {MARK: mark} | env,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert not processes(mark)
    return done


def start(mark, *arguments):
    return subprocess.Popen(
        command(*arguments),
        env=os.environ | ENVIRONMENT | {MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes(mark):
    """Return the processes of a test."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
