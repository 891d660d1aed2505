"""Run `hvdkit run` on the first of several hosts, as a user does."""

import contextlib
import os
import subprocess
import sys
import time

import psutil

from tests.parallel.rank_pool import REPOSITORY

#: One rank on each of two hosts.
BOTH = ("-H", "host0:1,host1:1")

_SECONDS = 60
_RANK = (
    "import os, signal, subprocess, sys, time;"
    "names = ('HOROVOD_RANK', 'OMPI_COMM_WORLD_RANK', 'PMI_RANK');"
    "rank = next(int(os.environ[name]) for name in names if name in os.environ);"
    # The parent of a rank is its keeper, and the parent of that is the agent.
    "keeper = open(f'/proc/{os.getppid()}/stat').read();"
    "agent = int(keeper.rpartition(')')[2].split()[1]);"
)


class Watched:
    """Hosts on which no process of a job may stay. Subclasses define `start`."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.servers = self.processes()

    def processes(self):
        return set().union(*(host.processes() for host in self.cluster.hosts))

    def check_nothing_is_left(self, seconds=20.0):
        deadline = time.monotonic() + seconds
        while left := self.processes() - self.servers:
            if time.monotonic() > deadline:
                raise AssertionError(f"left: {[describe(pid) for pid in left]}")
            time.sleep(0.05)

    @contextlib.contextmanager
    def starting(self):
        """Yield `start`. At the end, kill its processes, and check that none is left."""
        started = []

        def begin(*arguments, **options):
            started.append(self.start(*arguments, **options))
            return started[-1]

        yield begin
        for job in started:
            job.kill()
            job.communicate(timeout=10)
        self.check_nothing_is_left()


class Launches(Watched):
    """Run `hvdkit run` on the first host."""

    def __init__(self, cluster, access, folder):
        super().__init__(cluster)
        self.access = access
        self.folder = folder

    def command(self, *arguments):
        run = [sys.executable, "-m", "hvdkit", "run", f"--ssh-arg=-F{self.access.config}"]
        return self.cluster.hosts[0].command([*run, *arguments])

    def run(self, *arguments, **env):
        """Run to the end, and check that no process is left on any host."""
        done = subprocess.run(
            self.command(*arguments),
            env=os.environ | env,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        self.check_nothing_is_left(5)
        return done

    def start(self, *arguments):
        return subprocess.Popen(
            self.command(*arguments),
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def describe(pid):
    try:
        return psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return f"{pid}, ended meanwhile"


def python(code):
    """Return the command of a rank with `code`, which may use `rank`, `agent` and some modules."""
    return (sys.executable, "-c", _RANK + code)


def wait_for(job, *lines):
    """Read the job's output until each of `lines` has arrived. Fail if it ends before."""
    waiting = set(lines)
    while waiting:
        line = job.stdout.readline()
        assert line, f"ended without {waiting}: {job.stderr.read()}"
        waiting.discard(line.rstrip("\n"))
