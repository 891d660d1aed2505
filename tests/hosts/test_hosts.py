"""The hosts of `hvdkit.bench.namespaces`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdkit.bench.namespaces import INTERFACE


def run(host, *command):
    done = subprocess.run(
        host.command(command), capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.strip()


def left(mark):
    """Return the interfaces and namespaces with `mark` in their names."""
    folders = ("/sys/class/net", "/run/netns", "/etc/netns")
    found = [path.name for folder in folders for path in Path(folder).glob("*")]
    return [name for name in found if mark in name]


def test_each_host_has_its_own_name_and_address(make_hosts):
    with make_hosts(2) as cluster:
        for host in cluster.hosts:
            assert run(host, "hostname") == host.name
            assert f" {host.address}/" in run(host, "ip", "-brief", "address", "show", INTERFACE)
            # Debian's default, with which a job may bind to the wrong interface.
            assert run(host, "getent", "ahostsv4", host.name).startswith("127.0.1.1 ")
        first, second = cluster.hosts
        assert run(first, "getent", "ahostsv4", second.name).startswith(f"{second.address} ")
        assert os.uname().nodename not in (first.name, second.name)


def test_nothing_is_left_of_hosts(make_hosts):
    mark = f"hvd{os.getpid():x}-"
    with make_hosts(2) as cluster:
        assert {host.namespace for host in cluster.hosts} < set(left(mark))
        sleep = cluster.hosts[0].command(["sh", "-c", "echo there; exec sleep 60"])
        stubborn = subprocess.Popen(sleep, stdout=subprocess.PIPE, text=True)
        assert stubborn.stdout.readline() == "there\n"
    stubborn.stdout.close()
    assert stubborn.wait(timeout=600) == -signal.SIGKILL
    assert not left(mark)
    with pytest.raises(ZeroDivisionError), make_hosts(1):
        raise ZeroDivisionError
    assert not left(mark)


def test_the_next_run_removes_the_hosts_of_a_killed_run(make_hosts):
    code = (
        "import time; from hvdkit.bench.namespaces import hosts\n"
        "with hosts(1):\n    print('made', flush=True); time.sleep(60)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert killed.stdout.readline() == "made\n"
        mark = f"hvd{killed.pid:x}-"
        with make_hosts(1):
            assert left(mark), "a run that is alive keeps its hosts"
    finally:
        killed.kill()
        killed.wait(timeout=600)
        killed.stdout.close()
    assert left(mark)
    began = time.monotonic()
    with make_hosts(1):
        assert not left(mark)
    assert time.monotonic() - began < 20
