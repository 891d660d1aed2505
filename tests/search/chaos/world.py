"""The surroundings of jobs: this machine or network namespaces, a small disk, an object store."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdkit.bench.namespaces import Cluster, Host, hosts
from tests.hosts import ssh_servers
from tests.unit.checkpoint import s3_server

CLOCK = "clock.so"
REPOSITORY = Path(__file__).parents[3]
#: The size of the disk for checkpoints. It holds all steps of a few jobs.
_DISK_BYTES = 64_000_000
_SECONDS = 30
_CLONE_NEWNS = 0x20000


@dataclass
class World:
    """The surroundings of jobs.

    Attributes:
        folder: a folder for everything.
        disk: a small disk for checkpoints; the same folder as `folder` without root.
        cluster: hosts with ssh servers; None if this machine cannot have them.
        access: the files for ssh to the hosts.
        store: a proxy before an S3 server.
        elsewhere: a folder or URL of the user for checkpoints; None for none.
    """

    folder: Path
    disk: Path
    cluster: Cluster | None
    access: ssh_servers.Access | None
    store: Any
    elsewhere: str | None = None
    _servers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def temporary(self) -> Path:
        """The folder for temporary files of jobs, TMPDIR."""
        return self.folder / "tmp"

    @property
    def clock(self) -> Path:
        """A library that changes the clock of a process."""
        return self.folder / CLOCK

    def new_folder(self) -> Path:
        """Make a folder for a job."""
        made = self.folder / f"job{next(self._numbers)}"
        made.mkdir()
        return made

    def host_of(self, name: str) -> Host:
        """Return the host of this name."""
        assert self.cluster is not None
        return next(host for host in self.cluster.hosts if host.name == name)

    def own_processes(self) -> set[int]:
        """Return the processes on the hosts that do not belong to a job: the ssh servers."""
        return {server.pid for server in self._servers.values() if server.poll() is None}

    def start_ssh(self, host: Host) -> None:
        """Start the ssh server of a host, unless one runs."""
        known = self._servers.get(host.name)
        if known is not None and known.poll() is None:
            return
        config = self.folder / "ssh" / host.name / "sshd_config"
        self._servers[host.name] = subprocess.Popen(
            host.command(["/usr/sbin/sshd", "-D", "-e", "-f", str(config)]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop_ssh(self) -> None:
        """End the ssh servers that were started here."""
        for server in self._servers.values():
            server.kill()
            server.wait(_SECONDS)


@contextlib.contextmanager
def world(most_hosts: int, with_store: bool) -> Iterator[World]:
    """Make a world with up to `most_hosts` hosts; with 1, there are no namespaces."""
    if os.geteuid() == 0:
        _own_mounts()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdkit-chaos-")))
        (folder / "tmp").mkdir()
        if shutil.which("cc") is not None:
            source = Path(__file__).with_name("clock.c")
            _run("cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(folder / CLOCK), "-ldl")
        disk = folder / "disk"
        disk.mkdir()
        if os.geteuid() == 0:
            _run("mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "none", str(disk))
            stack.callback(_run, "umount", "-l", str(disk))
        cluster = access = None
        made = World(folder, disk, None, None, None)
        if most_hosts > 1:
            cluster = stack.enter_context(hosts(most_hosts))
            (folder / "ssh").mkdir()
            # A reboot kills these servers, and starts others.
            stack.callback(made.stop_ssh)
            settings = {host.name: f"SetEnv TMPDIR={made.temporary}" for host in cluster.hosts}
            access = stack.enter_context(
                ssh_servers.ssh_servers(cluster, folder / "ssh", settings=settings)
            )
        store = None
        if with_store:
            server = stack.enter_context(s3_server.running(folder / "s3.log"))
            store = stack.enter_context(s3_server.proxy(server))
        made.cluster, made.access, made.store = cluster, access, store
        yield made


def _own_mounts() -> None:
    """Give this process and its children mounts of their own, with an empty /dev/shm.

    So files of other programs in /dev/shm are not taken for those of a job.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "cannot make a mount namespace")
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-t", "tmpfs", "none", "/dev/shm")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=_SECONDS, capture_output=True)


def wait_until(condition: Any, seconds: float, poll: float = 0.05) -> bool:
    """Wait for a condition. Return whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll)
    return True
