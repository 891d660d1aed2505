"""The MPIJob of `hvdkit generate kubernetes`, for mpi-operator's API v2beta1.

The operator starts the workers, each an ssh server, gives all pods one ssh key, and writes the
hosts into a file. The launcher's pod runs `hvdkit run`, as on any cluster with ssh.
"""

from __future__ import annotations

import argparse
from typing import Any

from hvdkit.errors import RESUMABLE, UsageError
from hvdkit.launch.generate.kubernetes.commented_yaml import Comments, Document, below
from hvdkit.launch.generate.kubernetes.metadata import (
    job_name,
    kubectl,
    metadata,
    queued,
    suspended,
    suspended_comment,
)
from hvdkit.launch.generate.kubernetes.pod import (
    GRACE_COMMENT,
    START_SECONDS,
    grace,
    network_policy,
    pod,
    rank_pod,
    rank_pod_comments,
    requested,
    resume_comment,
)
from hvdkit.launch.generate.options import restarts

#: The port of the ssh server in the images of `docker/`, and their user's home.
_PORT = 2222
_HOME = "/home/hvdkit"

#: The label of an MPIJob's pods.
_LABEL = "training.kubeflow.org/job-name"

#: The path at which the operator mounts the file with the workers' names and slots.
_HOSTFILE = "/etc/mpi/hostfile"


def longest_name(options: argparse.Namespace) -> str:
    """Return the longest host name of the job's pods."""
    return max(
        f"{job_name(options)}-{end}" for end in ("launcher", f"worker-{options.workers - 1}")
    )


def head(options: argparse.Namespace) -> str:
    """Return the comment at the head of the file."""
    return f"""\
# A training job for Kubernetes with mpi-operator (kubeflow.org/v2beta1).
#   start   kubectl apply -f FILE
#   watch   {kubectl(options)} logs -f -l training.kubeflow.org/job-role=launcher
#   end     kubectl delete -f FILE
"""


def documents(options: argparse.Namespace) -> list[Document]:
    """Return the NetworkPolicy and the MPIJob.

    Raises:
        UsageError: an option does not fit this kind, or is malformed.
    """
    if options.key_secret is not None:
        raise UsageError(
            f"--key-secret is {options.key_secret!r}, and --kind is mpijob, which uses none: "
            "mpi-operator makes the job's ssh key. Leave --key-secret out, or choose --kind job "
            "or jobset"
        )
    return [
        network_policy(metadata(options), {_LABEL: job_name(options)}),
        Document(_mpi_job(options), _comments(options)),
    ]


def _mpi_job(options: argparse.Namespace) -> dict[str, Any]:
    policy = {
        "cleanPodPolicy": "Running",
        "backoffLimit": options.retries,
        **suspended(options),
    }
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": queued(options),
        "spec": {
            "slotsPerWorker": options.ranks_per_worker or options.gpus_per_worker or 1,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "sshAuthMountPath": f"{_HOME}/.ssh",
            "runPolicy": policy,
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
    run += ["--start-timeout", str(START_SECONDS), *restarts(options), *options.command]
    container = {
        "name": "launcher",
        "image": options.image,
        "args": run,
        "env": [{"name": "HVDKIT_WAIT_FOR_HOSTS", "value": _HOSTFILE}],
        "resources": requested({"cpu": "1", "memory": "1Gi"}),
    }
    return {**grace(), **pod(container)}


def _worker(options: argparse.Namespace) -> dict[str, Any]:
    container = {
        "name": "worker",
        "image": options.image,
        "args": ["sshd"],
        "ports": [{"name": "ssh", "containerPort": _PORT}],
        "readinessProbe": {"tcpSocket": {"port": _PORT}, "periodSeconds": 2},
    }
    return rank_pod(options, container)


def _comments(options: argparse.Namespace) -> Comments:
    slots = "Ranks on each worker" + (
        ": one per GPU." if options.gpus_per_worker and not options.ranks_per_worker else "."
    )
    spec: Comments = {
        ("slotsPerWorker",): slots,
        ("launcherCreationPolicy",): "Ready means that a worker's ssh server answers.",
        ("sshAuthMountPath",): "The operator makes an ssh key for this job, and mounts it here.",
        ("runPolicy", "backoffLimit"): (
            f"Starts the launcher again, up to {options.retries} times, after any failure: "
            f"{RESUMABLE} (saved and stopped, when its node is drained) or a crash. "
            f"{resume_comment(options)}"
        ),
    }
    if options.queue is not None:
        spec["runPolicy", "suspend"] = suspended_comment(options)
    launcher: Comments = {
        ("restartPolicy",): "Each try gets a new pod, so the log of a failed pod stays.",
        ("template", "spec", "terminationGracePeriodSeconds"): GRACE_COMMENT,
        ("template", "spec", "containers", 0, "args"): (
            "The workers make their host keys when they start, so ssh cannot check them. A pod "
            "that takes over a worker's name would get the job's environment. So run the job only "
            "in a network that you trust."
        ),
        ("template", "spec", "containers", 0, "env"): (
            "A service's names may resolve a moment after its pods are ready."
        ),
        ("template", "spec", "containers", 0, "resources"): "No rank runs here.",
    }
    worker: Comments = {
        (
            "restartPolicy",
        ): "With Never, a lost worker would stay lost, and each later try would fail.",
        ("template", "spec", "containers", 0, "args"): (
            "Ranks get the variables of the launcher that `hvdkit run` forwards (and `-x NAME`), "
            "not variables that are set here."
        ),
        **below(("template", "spec"), rank_pod_comments(options)),
    }
    replicas = {
        **below(("Launcher",), launcher),
        **below(("Worker",), worker),
    }
    return below(("spec",), {**spec, **below(("mpiReplicaSpecs",), replicas)})
