import os
import sys

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.launch.control import preflight, prepare
from hvdkit.launch.control.network import Interface
from hvdkit.launch.control.output import Output
from hvdkit.launch.control.plan import make_plan
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.hosts import allocation
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.hosts.ssh import Ssh
from hvdkit.launch.launchers import slurm
from tests.unit.launch.commands import run
from tests.unit.launch.test_allocation import ENV


def command(allocated, size, kind=None):
    plan = make_plan(["train"], "/data", allocated.hosts, size)
    return slurm.srun_command(plan, allocated, kind)


@pytest.fixture
def srun(tmp_path, monkeypatch):
    program = tmp_path / "srun"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return str(program)


def test_srun_starts_agents_on_the_hosts_of_the_plan(srun, monkeypatch):
    monkeypatch.setenv("OWN", "forwarded")
    monkeypatch.setenv("OWN_TOKEN", "secret")
    words = command(allocation.read(ENV), 5)
    assert words[0] == srun
    assert {"--nodes=3", "--ntasks=5", "--nodelist=a1,a1,a2,a2,a3"} <= set(words)
    assert {"--mpi=none", "--chdir=/"} <= set(words)
    (names,) = (word.removeprefix("--export=") for word in words if word.startswith("--export="))
    names = set(names.split(","))
    assert {"PATH", "OWN", "HVDKIT_LAUNCHER_ADDRESS", "HVDKIT_LAUNCHER_TOKEN"} <= names
    assert "OWN_TOKEN" not in names
    assert "--overlap" not in words
    assert words[-1] == "hvdkit.launch.agent.main"


@pytest.mark.usefixtures("srun")
def test_srun_gets_options_that_it_does_not_take_from_the_allocation(monkeypatch):
    env = ENV | {"SLURM_CPUS_PER_TASK": "4"}
    assert "--cpus-per-task=4" in command(allocation.read(env), 7)
    assert "--mpi=pmix" in command(allocation.read(env), 7, kind="pmix")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(HvdkitError, match="no srun on PATH"):
        command(allocation.read(ENV), 1)


def test_nothing_listens_after_a_failed_start(monkeypatch):
    """The fixture `nothing_leaks` fails this test if the thread of the listener still runs."""
    monkeypatch.setenv("PATH", "")
    host = Host("localhost", 1)
    plan = make_plan(["true"], "/", [host], 1)
    allocated = allocation.Allocation([host], {host: 1})
    launcher = slurm.Slurm(Settings(Ssh(), sys.executable), allocated, None)
    with pytest.raises(HvdkitError, match="no srun on PATH"):
        launcher.describe(plan)


@pytest.mark.parametrize(
    ("cores", "per_task", "threads"),
    [
        (64, None, 4),  # not bound: a share of the job's CPUs of the node
        (2, None, 2),  # bound to two CPUs
        (64, "3", 3),
    ],
)
def test_threads_of_a_rank(cores, per_task, threads):
    env = ENV if per_task is None else ENV | {"SLURM_CPUS_PER_TASK": per_task}
    allocated = allocation.read(env)
    plan = make_plan(["train"], "/data", allocated.hosts, 7)
    host = allocated.hosts[0]
    facts = slurm._facts({"cores": cores, "gpus": None}, host, plan, allocated)
    settings = Settings(ssh=None, python="python")
    interface = Interface("eth0", "10.0.0.1", 24)
    hosts = allocated.hosts
    workers = prepare.Workers(
        None, dict.fromkeys(hosts, facts), dict.fromkeys(hosts, interface), "10.0.0.1"
    )
    ranks = prepare.rank_messages(plan, workers, settings, lambda *_: {}, None)
    assert ranks[0]["defaults"]["OMP_NUM_THREADS"] == str(threads)


@pytest.mark.parametrize(("variables", "pins"), [({}, True), ({"SLURM_GPUS_PER_TASK": "1"}, False)])
def test_a_gpu_that_slurm_has_pinned_is_not_pinned_again(variables, pins):
    settings = Settings(Ssh(), sys.executable, pin_gpus=True)
    assert slurm.Slurm(settings, allocation.read(ENV | variables), None).settings.pin_gpus == pins


def test_named_hosts_take_precedence_over_an_allocation():
    code = (sys.executable, "-c", "print('up')")
    done = run("-H", "localhost:2", *code, env=os.environ | ENV)
    assert sorted(done.stdout.splitlines()) == ["[0] up", "[1] up"]


#: A simulated srun, which starts all tasks on this machine.
SRUN = """#!/bin/sh
for word; do case $word in --ntasks=*) tasks=${word#*=};; esac; done
while [ "${1#--}" != "$1" ]; do shift; done
task=0
while [ $task -lt $tasks ]; do SLURM_PROCID=$task "$@" & task=$((task + 1)); done
wait
"""


def test_agents_that_are_not_asked_get_heartbeats(tmp_path, monkeypatch):
    """Without heartbeats, the second agent of a host would give the launcher up after a minute."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    connected = []

    def before_start(workers, *others):
        agents = workers.agents
        connected.append((len(agents.connections), len(agents.every)))
        check(workers, *others)

    check = preflight.before_start
    monkeypatch.setattr(preflight, "before_start", before_start)
    hosts = [Host("localhost", 2), Host("127.0.0.1", 1)]
    allocated = allocation.Allocation(hosts, dict.fromkeys(hosts, 2))
    plan = make_plan(["true"], "/", hosts, 3)
    launcher = slurm.Slurm(Settings(Ssh(), sys.executable), allocated, None)
    with Output(3, progress=False) as output, launcher.run(plan, output) as outcome:
        assert outcome.status == 0
    assert connected == [(2, 3)]
