"""The MPIJob of `hvdkit generate kubernetes`, for mpi-operator's API v2beta1.

The operator starts the workers, each an ssh server, gives all pods one key, and writes the hosts
into a file. What runs in the launcher's pod is `hvdkit run`, as on any cluster with ssh.
"""

from __future__ import annotations

import argparse
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from hvdkit.errors import RESUMABLE, UsageError
from hvdkit.launch.job import Limits
from hvdkit.launch.job_file import check_command, check_numbers, flag, script_name

HELP = "write a commented MPIJob for Kubernetes with mpi-operator"
EXAMPLE = """\
  hvdkit generate kubernetes --image registry/me/train:1 --workers 2 --gpus-per-worker 8 \\
      --cpus 64 --memory 512Gi --checkpoints my-claim -o job.yaml python train.py
  kubectl apply -f job.yaml"""

#: What the images of `docker/` have: a user without rights, and the port of its ssh server.
_USER_ID = 1000
_HOME = "/home/hvdkit"
_PORT = 2222

#: Where the operator mounts the file with the workers' names and slots.
_HOSTFILE = "/etc/mpi/hostfile"

_CHECKPOINTS = "/checkpoints"

# Nodes pull an image of several GB before a pod is up, and after a failure a worker may be new.
_START_SECONDS = 300
# What `hvdkit run` takes to end once its ranks have.
_SPARE_SECONDS = 30

_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTP]|[KMGTP]i)?")
# A pod's name is its host's, and a host's name has at most 63 characters.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAME_LENGTH = 63


def add_arguments(action: argparse.ArgumentParser) -> None:
    """The arguments of `hvdkit generate kubernetes`."""
    action.add_argument(
        "--image", required=True, metavar="NAME", help="one with hvdkit, made as in docker/"
    )
    action.add_argument("--name", metavar="NAME", help="of the job (default: the script's)")
    action.add_argument("--namespace", metavar="NAME", help="(default: kubectl's)")
    action.add_argument("--workers", type=int, default=1, metavar="N", help="pods (default: 1)")
    action.add_argument(
        "--gpus-per-worker", type=int, metavar="N", help="NVIDIA's, one rank each (default: none)"
    )
    action.add_argument(
        "--ranks-per-worker", type=int, metavar="N", help="(default: one per GPU, else 1)"
    )
    action.add_argument(
        "--cpus", default="4", metavar="N", help="cores of a worker (default: %(default)s)"
    )
    action.add_argument(
        "--memory",
        default="16Gi",
        metavar="SIZE",
        help="of a worker, shared memory included (default: %(default)s)",
    )
    action.add_argument(
        "--shared-memory",
        default="8Gi",
        metavar="SIZE",
        help="at most this much in /dev/shm (default: %(default)s)",
    )
    action.add_argument(
        "--checkpoints",
        metavar="CLAIM",
        help=f"an existing PersistentVolumeClaim, mounted at {_CHECKPOINTS}",
    )
    action.add_argument(
        "--retries",
        type=int,
        default=3,
        metavar="N",
        help="how often the job is started again after a failure (default: %(default)s)",
    )


def text(options: argparse.Namespace) -> str:
    """The MPIJob as YAML, with comments.

    Raises:
        UsageError: a number or a name cannot be one, or there is no command.
    """
    _check(options)
    dumped = yaml.dump(mpi_job(options), Dumper=_Dumper, sort_keys=False, width=100)
    return _HEAD + _commented(dumped, _comments(options))


class _Dumper(yaml.SafeDumper):
    """Writes what occurs twice twice, and not as a reference: people edit one place only."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def mpi_job(options: argparse.Namespace) -> dict[str, Any]:
    """The MPIJob as the API takes it. `options` are those of `add_arguments`, checked."""
    metadata = {"name": _job_name(options)}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": metadata,
        "spec": {
            "slotsPerWorker": options.ranks_per_worker or options.gpus_per_worker or 1,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "sshAuthMountPath": f"{_HOME}/.ssh",
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": options.retries},
            "mpiReplicaSpecs": {
                "Launcher": {
                    "replicas": 1,
                    "restartPolicy": "Never",
                    "template": {"spec": _launcher(options)},
                },
                "Worker": {
                    "replicas": options.workers,
                    "restartPolicy": "OnFailure",
                    "template": {"spec": _worker(options)},
                },
            },
        },
    }


def _launcher(options: argparse.Namespace) -> dict[str, Any]:
    run = ["hvdkit", "run", "--hostfile", _HOSTFILE, "--ssh-port", str(_PORT)]
    run += ["--ssh-arg=-oStrictHostKeyChecking=no", "--ssh-arg=-oUserKnownHostsFile=/dev/null"]
    run += ["--start-timeout", str(_START_SECONDS), *options.command]
    container = {
        "name": "launcher",
        "image": options.image,
        "args": run,
        "env": [{"name": "HVDKIT_WAIT_FOR_HOSTS", "value": _HOSTFILE}],
        "resources": _resources({"cpu": "1", "memory": "1Gi"}),
        "securityContext": _CONTAINER_SECURITY,
    }
    return {
        "terminationGracePeriodSeconds": round(Limits.stop) + _SPARE_SECONDS,
        "securityContext": _POD_SECURITY,
        "containers": [container],
    }


def _worker(options: argparse.Namespace) -> dict[str, Any]:
    resources = {"cpu": options.cpus, "memory": options.memory}
    if options.gpus_per_worker is not None:
        # Kubernetes takes whole numbers only, as text or not; the others are text too.
        resources["nvidia.com/gpu"] = str(options.gpus_per_worker)
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {
            "name": "shared-memory",
            "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory},
        }
    ]
    if options.checkpoints is not None:
        mounts.append({"name": "checkpoints", "mountPath": _CHECKPOINTS})
        claim = {"claimName": options.checkpoints}
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": claim})
    container = {
        "name": "worker",
        "image": options.image,
        "args": ["sshd"],
        "ports": [{"name": "ssh", "containerPort": _PORT}],
        "readinessProbe": {"tcpSocket": {"port": _PORT}, "periodSeconds": 2},
        "resources": _resources(resources),
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": mounts,
    }
    return {"securityContext": _POD_SECURITY, "containers": [container], "volumes": volumes}


def _resources(amounts: Mapping[str, str]) -> dict[str, Any]:
    return {"requests": dict(amounts), "limits": dict(amounts)}


#: As `restricted`, the strictest of Kubernetes' pod security standards, has it.
_POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": _USER_ID,
    "runAsGroup": _USER_ID,
    "fsGroup": _USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
_CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _check(options: argparse.Namespace) -> None:
    check_command(options, "kubernetes --image IMAGE --workers 2")
    least = {"workers": 1, "gpus_per_worker": 1, "ranks_per_worker": 1, "retries": 0}
    check_numbers(options, least)
    for option in ("cpus", "memory", "shared_memory"):
        amount = getattr(options, option)
        if not _QUANTITY.fullmatch(amount):
            raise UsageError(f"{flag(option)} is {amount!r}; expected e.g. 8, 500m, 64Gi or 100G")
    for option in ("name", "namespace", "checkpoints"):
        given = getattr(options, option)
        if given is not None and not _NAME.fullmatch(given):
            raise UsageError(
                f"{flag(option)} is {given!r}; expected small letters, digits and dashes, "
                "a letter first"
            )
    longest = max(f"{_job_name(options)}-{end}" for end in _pods(options.workers))
    if len(longest) > _NAME_LENGTH:
        raise UsageError(
            f"the job's name makes {longest}, the name of a host: {len(longest)} characters, and "
            f"{_NAME_LENGTH} are allowed; give a shorter --name"
        )


def _pods(workers: int) -> tuple[str, str]:
    return "launcher", f"worker-{workers - 1}"


def _job_name(options: argparse.Namespace) -> str:
    """The name given, else that of the script that the command runs."""
    if options.name is not None:
        return str(options.name)
    name = script_name(options.command).lower()
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-0123456789") or "job"


_HEAD = """\
# A training job for Kubernetes with mpi-operator (kubeflow.org/v2beta1).
#   start   kubectl apply -f FILE
#   watch   kubectl logs -f -l training.kubeflow.org/job-role=launcher
#   end     kubectl delete -f FILE
"""


def _comments(options: argparse.Namespace) -> dict[tuple[str | int, ...], str]:
    """By the path of a key, what is said above it."""
    spec = "spec"
    launcher = (spec, "mpiReplicaSpecs", "Launcher")
    worker = (spec, "mpiReplicaSpecs", "Worker")
    launcher_pod, worker_pod = (*launcher, "template", spec), (*worker, "template", spec)
    started, served = (*launcher_pod, "containers", 0), (*worker_pod, "containers", 0)
    command = shlex.join(options.command)
    told = (
        f"`{command}` then has to go on from what it finds in {_CHECKPOINTS}."
        if options.checkpoints is not None
        else "Without a volume for checkpoints (--checkpoints CLAIM) it begins anew."
    )
    slots = "Ranks on each worker" + (
        ": one per GPU." if options.gpus_per_worker and not options.ranks_per_worker else "."
    )
    return {
        (spec, "slotsPerWorker"): slots,
        (spec, "launcherCreationPolicy"): "Ready means that a worker's ssh server answers.",
        (spec, "sshAuthMountPath"): "The key that the operator makes for this job lies here.",
        (spec, "runPolicy", "backoffLimit"): (
            f"Starts the launcher again, up to {options.retries} times, whatever it ended with: "
            f"{RESUMABLE} (saved and stopped, when its node is drained) or a crash. {told}"
        ),
        (*launcher, "restartPolicy"): "A new pod for each try: the log of the last one stays.",
        (*launcher_pod, "terminationGracePeriodSeconds"): (
            "SIGTERM makes the ranks save and stop. This is the time that they have: --stop-grace, "
            "and some more."
        ),
        (*started, "args"): (
            "The workers make their host keys when they start, so nobody can know them. A pod that "
            "could answer to a worker's name would get the job's environment: trust your network."
        ),
        (*started, "env"): "A service's names may come a moment after its pods are ready.",
        (*started, "resources"): "No rank runs here.",
        (*worker, "restartPolicy"): "Not Never: a worker that is gone would fail every later try.",
        (*served, "args"): (
            "Ranks get the launcher's variables that `hvdkit run` forwards (and `-x NAME`), not "
            "those that are set here."
        ),
        (*served, "resources"): (
            "Requests and limits are the same, so that no other pod takes what a rank counts on: "
            "the slowest rank sets the pace of all."
        ),
        (*worker_pod, "volumes"): (
            "Ranks of one host share buffers in /dev/shm; Kubernetes gives 64 MB. It counts as "
            "memory."
            + (
                " The checkpoints' claim has to be ReadWriteMany: it is mounted in every worker."
                if options.checkpoints is not None and options.workers > 1
                else ""
            )
        ),
    }


def _commented(dumped: str, comments: Mapping[tuple[str | int, ...], str]) -> str:
    """YAML with a comment above each key that has one."""
    lines = dumped.splitlines()
    document = yaml.compose(dumped)
    assert document is not None
    places = dict(_places(document))
    # From the end, so that the numbers of the lines before stay what they are.
    for path in sorted(comments, key=lambda path: places[path], reverse=True):
        line, column = places[path]
        before = " " * column + "# "
        above = textwrap.wrap(comments[path], 100, initial_indent=before, subsequent_indent=before)
        lines[line:line] = above
    return "\n".join([*lines, ""])


def _places(
    node: yaml.Node, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], tuple[int, int]]]:
    """The line and column of each key."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), (key.start_mark.line, key.start_mark.column)
            yield from _places(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _places(value, (*path, number))
