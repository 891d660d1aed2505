"""Slurm on several hosts: a controller on the first, a node on each, with Debian's programs.

Settings, keys, state and logs are in a separate folder. This machine's own Slurm and munge are not
used.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdkit.bench.namespaces import Cluster, Host, missing_program

_SECONDS = 60
_MUNGED, _CONTROLLER, _NODE = "/usr/sbin/munged", "/usr/sbin/slurmctld", "/usr/sbin/slurmd"

# More CPUs than this machine has, for several ranks. Processes are tracked by their parents, as not
# every container has control groups. The scheduler runs every few seconds, not every minute.
_SETTINGS = """\
ClusterName=hvdkit
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=3,bf_interval=3
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
PropagateResourceLimits=NONE
KillWait=30
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return why Slurm cannot run here; None if it can."""
    programs = (_MUNGED, _CONTROLLER, _NODE, "srun", "sbatch", "salloc")
    return missing_program(programs, "slurm-wlm munge")


@dataclass(frozen=True)
class Slurm:
    """A running Slurm.

    Attributes:
        cluster: its hosts; the first has the controller, and runs the users' commands.
        env: the variables with the path of the settings.
    """

    cluster: Cluster
    env: dict[str, str]

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on the users' host."""
        settings = [f"{name}={value}" for name, value in self.env.items()]
        return self.cluster.hosts[0].command(["env", *settings, *command])

    def run(self, *command: str) -> str:
        """Return the output of one of Slurm's commands."""
        done = subprocess.run(
            self.command(command), capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """Return the state of a job, also after its end."""
        shown = self.run("scontrol", "show", "job", job, "-o")
        return dict(part.split("=", 1) for part in shown.split() if "=" in part)["JobState"]


@contextlib.contextmanager
def slurm(cluster: Cluster, cpus: int = 4) -> Iterator[Slurm]:
    """Run Slurm on the hosts of `cluster`, each with `cpus` CPUs."""
    with contextlib.ExitStack() as stack:
        # Not pytest's folder, whose path is too long for a socket.
        folder = Path(tempfile.mkdtemp(prefix="hvdkit-slurm-"))
        stack.callback(shutil.rmtree, folder)
        own = [f"{kind}-{host.name}" for kind in ("spool", "tmp") for host in cluster.hosts]
        for name in ("state", *own):
            (folder / name).mkdir()
        # By default a node detects the mounted version of control groups. These hosts have none.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        nodes = "\n".join(
            f"NodeName={host.name} NodeAddr={host.address} CPUs={cpus} State=UNKNOWN"
            for host in cluster.hosts
        )
        settings = folder / "slurm.conf"
        settings.write_text(_SETTINGS.format(folder=folder, first=cluster.hosts[0], nodes=nodes))
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        munged = [_MUNGED, "--foreground", "--force", f"--socket={folder}/munge", *files]
        _start(stack, folder, "munged", munged)
        _wait(lambda: (folder / "munge").exists(), "munged", folder)
        running = Slurm(cluster, {"SLURM_CONF": str(settings)})
        first = cluster.hosts[0]
        _start(stack, folder, "slurmctld", first.command([_CONTROLLER, "-D", "-f", str(settings)]))
        for host in cluster.hosts:
            command = [_NODE, "-D", "-f", str(settings), "-N", host.name]
            _start(stack, folder, host.name, host.command(command), host)
        _wait(lambda: _idle(running), "slurmctld", folder)
        yield running


def _idle(running: Slurm) -> bool:
    with contextlib.suppress(AssertionError):  # the controller does not answer yet
        states = running.run("sinfo", "-h", "-N", "-o", "%T").split()
        return states == ["idle"] * len(running.cluster.hosts)
    return False


def _start(
    stack: contextlib.ExitStack,
    folder: Path,
    name: str,
    command: Sequence[str],
    host: Host | None = None,
) -> None:
    log = stack.enter_context((folder / f"{name}.log").open("wb"))
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    stack.callback(_end, server, host)


def _end(server: subprocess.Popen[bytes], host: Host | None) -> None:
    server.terminate()
    try:
        server.wait(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait(timeout=_SECONDS)
    # slurmstepd is not a child of the node's server any more.
    for pid in host.processes() if host is not None else ():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if psutil.Process(pid).name() == "slurmstepd":
                os.kill(pid, signal.SIGKILL)


def _wait(ready: Callable[[], bool], name: str, folder: Path) -> None:
    deadline = time.monotonic() + _SECONDS
    while not ready():
        if time.monotonic() > deadline:
            logs = [path.read_text(errors="replace")[-1500:] for path in folder.glob("*.log")]
            raise TimeoutError(f"{name} did not come up:\n" + "\n---\n".join(logs))
        time.sleep(0.1)
