"""Run `hvdkit run` on the first of several hosts, as a user does."""

import contextlib
import os
import subprocess
import sys
import time

import psutil

from tests.ranks.rank_pool import REPOSITORY

HVDKIT = (sys.executable, "-m", "hvdkit")
#: One rank on each of two hosts.
BOTH = ("-H", "host0:1,host1:1")
#: The command of an allocation whose first node has one task more than the second.
UNEVEN = ("salloc", "--nodes=2", "--ntasks=3")

_SECONDS = 600
_RANK = (
    "import os, signal, subprocess, sys, time;"
    "names = ('HOROVOD_RANK', 'OMPI_COMM_WORLD_RANK', 'PMI_RANK');"
    "rank = next(int(os.environ[name]) for name in names if name in os.environ);"
    # The parent of a rank is its keeper, and the parent of that is the agent.
    "keeper = open(f'/proc/{os.getppid()}/stat').read();"
    "agent = int(keeper.rpartition(')')[2].split()[1]);"
)


class Watched:
    """Hosts on which no process of a job may stay. Subclasses define `command`."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.servers = self.processes()

    def processes(self):
        return set().union(*(host.processes() for host in self.cluster.hosts))

    def check_nothing_is_left(self, seconds=120.0):
        deadline = time.monotonic() + seconds
        while left := self.processes() - self.servers:
            if time.monotonic() > deadline:
                raise AssertionError(f"left: {[describe(pid) for pid in left]}")
            time.sleep(0.05)

    def start(self, *words, **env):
        """Start the command of these words on the first host."""
        return subprocess.Popen(
            self.command(*words),
            env=os.environ | env,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words, **env):
        """Run the command to its end, and check that no process is left on any host."""
        with self.starting() as begin:
            job = begin(*words, **env)
            out, err = job.communicate(timeout=_SECONDS)
        return subprocess.CompletedProcess(words, job.returncode, out, err)

    @contextlib.contextmanager
    def starting(self):
        """Yield `start`. At the end, kill its processes, and check that none is left."""
        started = []

        def begin(*arguments, **options):
            started.append(self.start(*arguments, **options))
            return started[-1]

        try:
            yield begin
        finally:
            for job in started:
                job.kill()
                job.wait(timeout=600)
                job.stdout.close()
                job.stderr.close()
        self.check_nothing_is_left()


class Launches(Watched):
    """Run `hvdkit run`, or another verb, over ssh."""

    def __init__(self, cluster, access, folder):
        super().__init__(cluster)
        self.access = access
        self.folder = folder

    def command(self, *arguments, verb="run"):
        own = [*HVDKIT, verb, f"--ssh-arg=-F{self.access.config}"]
        return self.cluster.hosts[0].command([*own, *arguments])


class SlurmJobs(Watched):
    """Run commands on the first host of a Slurm."""

    def __init__(self, slurm):
        super().__init__(slurm.cluster)
        self.slurm = slurm

    def command(self, *words):
        return self.slurm.command(words)


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
