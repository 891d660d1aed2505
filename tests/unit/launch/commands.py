"""Commands that the tests run, as a user does, and waits for what they do."""

import contextlib
import subprocess
import sys
import time

#: The messages of `hvdkit run` in this process during a test (`conftest`).
SAID = []
#: The beginning of the code of a rank.
RANK = "import os, signal, sys, time; rank = int(os.environ['HOROVOD_RANK']);"


def execute(command, **options):
    """Run a command to its end. Return its status and its output."""
    options = {"capture_output": True, "text": True, "timeout": 600, "check": False} | options
    return subprocess.run(command, **options)


def hvdkit(*words, **options):
    """Run `hvdkit` to its end."""
    return execute([sys.executable, "-m", "hvdkit", *map(str, words)], **options)


def run(*words, **options):
    """Run `hvdkit run` to its end."""
    return hvdkit("run", *words, **options)


def output_of(code, *arguments, **options):
    """Run Python code, which must succeed. Return its output."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return execute(command, capture_output=False, stdout=-1, **options | {"check": True}).stdout


def python(code):
    """Return the command of a rank."""
    return (sys.executable, "-c", RANK + code)


@contextlib.contextmanager
def started(*words, **options):
    """Context with a running `hvdkit run`. Kill it at the end."""
    with started_command(sys.executable, "-m", "hvdkit", "run", *words, **options) as job:
        yield job


@contextlib.contextmanager
def started_command(*command, **options):
    """Context with a running command. Kill it at the end."""
    options = {"stdout": -1, "stderr": -1, "text": True} | options
    with subprocess.Popen([*map(str, command)], **options) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(done, seconds=120.0):
    """Wait until a function returns true, and return its value. Fail after some seconds."""
    deadline = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < deadline, done
        time.sleep(0.02)
    return found
