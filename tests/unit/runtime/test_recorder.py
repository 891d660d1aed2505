"""The recorder's signal."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hvdkit.runtime.recorder import FOLDER_VARIABLE, Recorder

CATCHES = 1 << (signal.SIGUSR2 - 1)


def catches(process: int) -> bool:
    """Return whether a process has a handler of SIGUSR2."""
    status = Path(f"/proc/{process}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(line.split()[1], 16) & CATCHES)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and calls on_exit of glibc")
def test_a_signal_after_the_end_of_python_keeps_the_exit_status(tmp_path):
    """The engine's thread still runs when Python has ended, and sends the signal."""
    script = textwrap.dedent(
        """
        import ctypes, sys
        from pathlib import Path
        from hvdkit.runtime.recorder import Recorder

        recorder = Recorder(ctypes.CDLL(None))
        for name in ("first", "second"):
            assert recorder._register(Path(sys.argv[1], name)) >= 0
        libc = ctypes.CDLL(None)
        libc.on_exit(libc.sleep, None)  # sleep for as many seconds as the exit status
        print("registered", flush=True)
        sys.stdin.readline()
        sys.exit(20)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "registered\n"
            assert catches(process.pid)
            process.stdin.write("\n")
            process.stdin.flush()
            deadline = time.monotonic() + 15
            while catches(process.pid) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not catches(process.pid)
            process.send_signal(signal.SIGUSR2)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)  # the signal has not ended the process
        finally:
            process.kill()


class Engine:
    """An engine that writes no records."""

    def horovod_hvdkit_write_records(self, *arguments):
        pass


def test_records_of_an_earlier_job_are_deleted(tmp_path, monkeypatch):
    """They would be combined with the records of this job, and give a false verdict."""
    for name in ("rank-0.json", "rank-1.json", "rank-7.json", "rank-notes.json"):
        (tmp_path / name).touch()
    environ = {FOLDER_VARIABLE: str(tmp_path)}
    first, second = Recorder(Engine()), Recorder(Engine())
    for recorder in (first, second):
        monkeypatch.setattr(recorder, "_register", lambda path: -1)
    second.watch(1, 2, 0.0, environ)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("rank-0.json", "rank-7.json", "rank-notes.json")
    ]
    first.watch(0, 2, 0.0, environ)
    assert [p.name for p in tmp_path.iterdir()] == ["rank-notes.json"]
    # Elastic training initializes Horovod again, after a failure that has left a record.
    (tmp_path / "rank-0.json").touch()
    first.watch(0, 2, 0.0, environ)
    assert (tmp_path / "rank-0.json").exists()
