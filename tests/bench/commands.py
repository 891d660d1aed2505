"""Run `hvdkit bench`, and check that it leaves nothing behind."""

import os
import subprocess
import sys

import psutil

from hvdkit.bench.control import TOKEN_VARIABLE

_SECONDS = 240

#: Variables of the test's own job must not reach the benchmark.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def command(*arguments):
    return [sys.executable, "-m", "hvdkit", "bench", *arguments]


def bench(*arguments, **env):
    """Run a benchmark to its end."""
    done = subprocess.run(
        command(*arguments),
        env=os.environ | ENVIRONMENT | env,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert not ranks_left()
    return done


def start(*arguments):
    return subprocess.Popen(
        command(*arguments),
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ranks_left():
    """Return the processes of benchmarks' ranks."""
    found = []
    for process in psutil.process_iter():
        try:
            if TOKEN_VARIABLE in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
