"""What `hvdkit run` does alike over ssh, with each installed MPI and in an allocation of Slurm.

Rank 0 is on the first host, and the last rank on the second one.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

from hvdkit.engine.toolchain import which
from tests.hosts.launches import BOTH, HVDKIT, UNEVEN, describe, python, wait_for
from tests.ranks.rank_pool import REPOSITORY, Configuration, skip_where_unsupported

MPIRUNS = {
    "mpi": which("mpirun") or "no mpirun",
    # Installed by `scripts/test --long`.
    "openmpi4": str(REPOSITORY / ".venv-openmpi4/bin/mpirun"),
    "mpich": str(REPOSITORY / ".venv-mpich/bin/mpirun"),
}
REDUCE = """
import torch
import hvdkit.torch as hvd

hvd.init()
total = hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum)
place = (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
print("place", hvd.rank(), *place, "sum", float(total))
"""
PLACES = {
    2: ["[0] place 0 0 1 0 2 sum 3.0", "[1] place 1 0 1 1 2 sum 3.0"],
    3: [
        "[0] place 0 0 2 0 2 sum 6.0",
        "[1] place 1 1 2 0 1 sum 6.0",
        "[2] place 2 0 1 1 2 sum 6.0",
    ],
}


class Launcher:
    """A way to start ranks on two hosts.

    Attributes:
        watched: runs commands on the first host.
        words: the first words of a command of `hvdkit run`.
        size: the number of ranks.
    """

    def __init__(self, request):
        self.name = request.param
        self.is_slurm = self.name == "slurm"
        self.watched = request.getfixturevalue("jobs" if self.is_slurm else "launches")
        self.size = 3 if self.is_slurm else 2
        self.words = (*UNEVEN, *HVDKIT, "run") if self.is_slurm else BOTH
        if self.name in MPIRUNS:
            if not Path(MPIRUNS[self.name]).exists():
                pytest.skip(f"no {MPIRUNS[self.name]} here")
            self.words += ("--launcher", "mpi", "--mpirun", MPIRUNS[self.name])

    def run(self, *words, **env):
        return self.watched.run(*self.words, *words, **env)

    def lines(self, text):
        return [f"[{rank}] {text}" for rank in range(self.size)]

    def launcher_of(self, job):
        """Return the number of the process of `hvdkit run`, which salloc or `job` has started."""
        if not self.is_slurm:
            return job.pid
        started = self.watched.processes() - self.watched.servers
        (found,) = [pid for pid in started if "run" in describe(pid)[3:4]]
        return found


@pytest.fixture(
    scope="module", params=["ssh", *MPIRUNS, pytest.param("slurm", marks=pytest.mark.long)]
)
def launcher(request):
    return Launcher(request)


@pytest.fixture
def start(launcher):
    """Yield a function that starts a job. Fail if its processes outlive the test."""
    with launcher.watched.starting() as begin:
        yield lambda *words: begin(*launcher.words, *words)


@pytest.mark.parametrize("launcher", ["ssh", "mpi", "slurm"], indirect=True)
def test_ranks_reduce(launcher):
    controller = "mpi" if launcher.name == "mpi" else "gloo"
    skip_where_unsupported(Configuration("torch", controller, 3))
    done = launcher.run(sys.executable, "-c", REDUCE)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == PLACES[launcher.size]


# A rank shows its host and variables, those of its agent, and what the command lines of processes
# show: the token of the launcher, and a value.
SHOW = """
agent = open(f'/proc/{agent}/environ').read().split(chr(0))
def contents(name):
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            yield open(f'/proc/{pid}/{name}', 'rb').read() + bytes(1)
        except OSError:
            continue  # it has ended

lines = b''.join(contents('cmdline'))
token = b''.join(contents('environ')).partition(b'HVDKIT_LAUNCHER_TOKEN=')[2].partition(bytes(1))[0]
names = ('MINE', 'OTHER_TOKEN', 'WANDB_API_KEY', 'NCCL_DEBUG', 'HOROVOD_CONTROLLER')
print(os.uname().nodename, os.getcwd(), *map(os.environ.get, names), 'PYTHONPATH=/modules' in agent,
      len(token) in (0, 32), bool(token) and token in lines, b'hid' + b'den' in lines, sep='|')
"""


def test_ranks_get_variables_without_secrets_and_no_command_line_shows_them(launcher):
    given = ("-x", "MINE", "-x", "WANDB_API_KEY", "-x", "OWN=a b'c")
    env = {"MINE": "hid" + "den", "OTHER_TOKEN": "secret", "WANDB_API_KEY": "wanted"}
    # The agents, which are the parents of the ranks, need the paths of environment modules.
    env |= {"NCCL_DEBUG": "WARN", "PYTHONPATH": "/modules"}
    done = launcher.run(*given, *python(f"assert os.environ['OWN'] == \"a b'c\"\n{SHOW}"), **env)
    controller = "mpi" if launcher.name in MPIRUNS else "gloo"
    rest = f"wanted|WARN|{controller}|True|True|False|False"
    # The host of `hvdkit run` has them anyway.
    first = "None" if launcher.is_slurm else "secret"
    hosts = [("host0", first)] * (launcher.size - 1) + [("host1", "None")]
    lines = [f"[{n}] {h}|{REPOSITORY}|hidden|{s}|{rest}" for n, (h, s) in enumerate(hosts)]
    assert sorted(done.stdout.splitlines()) == lines, done.stderr
    if launcher.name == "ssh":
        (warning,) = (text for text in done.stderr.splitlines() if "not sent to other ho" in text)
        assert "OTHER_TOKEN" in warning
        assert "WANDB_API_KEY" not in warning


def test_the_job_ends_with_the_status_of_the_rank_that_failed(launcher):
    last = launcher.size - 1
    end = f"os.kill(os.getpid(), 9) if rank == {last} else time.sleep(60)"
    done = launcher.run(*python(f"print('\\n'.join(f'line {{i}}' for i in range(30))); {end}"))
    assert done.returncode == 128 + 9
    ended = "" if launcher.name in MPIRUNS else f". The launcher ended {last} other rank"
    killed = "failed: killed by signal 9 (Killed)"
    assert f"hvdkit run: rank {last} on host1 {killed}{ended}" in done.stderr
    lines = [f"Rank {last}'s last lines:", *(f"  line {i}" for i in range(10, 30))]
    assert "\n".join(lines) in done.stderr


def test_no_rank_outlives_a_launcher_that_is_killed(launcher, start):
    code = "subprocess.Popen(['sleep', '60'], start_new_session=True); print('up'); time.sleep(60)"
    job = start(*python(code))
    wait_for(job, *launcher.lines("up"))
    os.kill(launcher.launcher_of(job), signal.SIGKILL)
    job.wait(timeout=600)
    launcher.watched.check_nothing_is_left()


ORDERLY = """
def stop(*_):
    print("saving")
    time.sleep(1 + rank)
    sys.exit(75)

signal.signal(signal.SIGINT, stop)
print("up")
time.sleep(60)
"""


def test_ctrl_c_lets_every_rank_save(launcher, start):
    job = start(*python(ORDERLY))
    wait_for(job, *launcher.lines("up"))
    os.kill(launcher.launcher_of(job), signal.SIGINT)
    out, err = job.communicate(timeout=600)
    assert sorted(out.splitlines()) == launcher.lines("saving")
    assert "SIGINT: asking all ranks to stop; press Ctrl-C again to end them" in err
    assert "start the job again to resume it" in err
    assert job.returncode == 75
