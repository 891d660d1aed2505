"""The lock for the hosts of `--two-hosts`."""

import os
import subprocess
import sys

import pytest

from hvdkit.bench import namespaces

OTHER = 65534
#: Hold the lock file as another user, until the end of the input.
HOLD = f"""
import fcntl, os, sys
os.setuid({OTHER})
lock = open(sys.argv[1])
fcntl.flock(lock, fcntl.LOCK_EX)
print("locked", flush=True)
input()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_other_users_cannot_hold_the_lock(monkeypatch):
    monkeypatch.setattr(namespaces, "_SECONDS", 0)
    with namespaces._locked():
        pass
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, "/run/hvdkit-hosts.lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout.readline() == "locked\n"
        with namespaces._locked():
            pass
        holder.communicate("\n")
