"""Signals to the group of a process that has ended: another group may get its number later."""

import os
import queue
import subprocess

import psutil
import pytest

from hvdkit.launch.control.process_connection import ProcessConnection
from hvdkit.launch.hosts.discovery import discover
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.hosts.ssh import Ssh
from hvdkit.system.processes import kill_group, wait_for_end, wait_for_killed


@pytest.fixture
def signalled(monkeypatch):
    """Check that each group that gets a signal still has its first process, maybe as a zombie."""
    groups = []

    def killpg(group, number):
        assert psutil.pid_exists(group)
        groups.append(group)
        real(group, number)

    real = os.killpg
    monkeypatch.setattr(os, "killpg", killpg)
    return groups


def test_a_discovery_script(signalled, tmp_path):
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho host0\n")
    script.chmod(0o755)
    assert discover(script) == [Host("host0", 1)]
    assert len(signalled) == 1
    assert not psutil.pid_exists(signalled[0])


def test_an_ssh_that_has_failed(signalled, tmp_path, monkeypatch):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho no route >&2\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    connection = ProcessConnection(Host("h", 1), False, Ssh(), "python3", queue.Queue())
    # This waits for the end of the process. The launcher may wait for other hosts afterwards.
    assert "no route" in connection.explain()
    connection.disconnect()
    assert len(signalled) == 1
    connection.close(timeout=5)
    assert not psutil.pid_exists(signalled[0])


def test_a_process_that_has_ended_and_one_that_is_killed(signalled):
    process = subprocess.Popen(["sh", "-c", "exit 3"], start_new_session=True)
    assert wait_for_end(process, 10) == wait_for_end(process) == 3
    wait_for_killed(process)
    kill_group(process)
    assert signalled == []
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert wait_for_end(process, 0.1) is None
    kill_group(process)
    assert wait_for_end(process, 10) == -9
    wait_for_killed(process)
    assert process.returncode == -9
