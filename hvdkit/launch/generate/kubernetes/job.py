"""The indexed Job of `hvdkit generate kubernetes`: no operator, no ssh.

Each pod runs the same `hvdkit run --nodes`. Kubernetes numbers the pods, a headless Service gives
them names, and pod 0 is the rendezvous.
"""

from __future__ import annotations

import argparse
from typing import Any

from hvdkit.errors import RESUMABLE
from hvdkit.exit_statuses import resumable
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
    JOB_START_SECONDS,
    grace,
    network_policy,
    rank_pod,
    rank_pod_comments,
    resume_comment,
)
from hvdkit.launch.generate.options import restarts
from hvdkit.launch.output import SHOWN_RANKS

#: The port of the rendezvous in pod 0.
_PORT = 29400

#: The field of the Secret with the key.
_SECRET_KEY = "key"


def longest_name(options: argparse.Namespace) -> str:
    """Return the longest host name of the job's pods."""
    return f"{job_name(options)}-{options.workers - 1}"


def head(options: argparse.Namespace) -> str:
    """Return the comment at the head of the file."""
    return "# A training job for Kubernetes 1.28 or newer: a Service and an indexed Job.\n" + usage(
        options, job=job_name(options)
    )


def documents(options: argparse.Namespace) -> list[Document]:
    """Return the Service, the NetworkPolicy and the Job.

    Raises:
        UsageError: an option is malformed.
    """
    return [
        Document(_service(options), _service_comments(options)),
        network_policy(metadata(options), {"job-name": job_name(options)}),
        Document(_job(options), _job_comments(options)),
    ]


def usage(options: argparse.Namespace, job: str) -> str:
    """Return the lines of the head with the commands to start, watch and end the Job `job`."""
    secret = f"secret generic {_secret(options)} --from-file={_SECRET_KEY}=/dev/stdin"
    logs = f"{kubectl(options)} logs -f --tail=-1 -l job-name={job}"
    return f"""\
#   key     openssl rand -hex 16 | {kubectl(options)} create {secret}
#   start   kubectl apply -f FILE
#   watch   {logs},batch.kubernetes.io/job-completion-index=0
#   end     kubectl delete -f FILE; {kubectl(options)} delete secret {_secret(options)}
# The key belongs to this job alone: whoever can read the Secret can join the job.
# The log of pod 0 (job-completion-index=0) has the output of all ranks. In a job of more than
# {SHOWN_RANKS} ranks, it has only that of rank 0, unless `hvdkit run` gets --all-output. The log of
# any other pod has the output of its own ranks.
"""


def indexed(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that make a Job start all pods at the same time, and number them."""
    return {
        "completionMode": "Indexed",
        "completions": options.workers,
        "parallelism": options.workers,
    }


INDEXED_COMMENTS: Comments = {
    ("completionMode",): "Each pod gets a number, JOB_COMPLETION_INDEX: its node rank.",
    ("completions",): (
        "The number of pods, which all run at the same time. --nodes has the same value, and -np "
        "is a multiple of it."
    ),
}


def interruptions(action: str) -> dict[str, Any]:
    """Return a podFailurePolicy with an action for pods that were evicted or have saved."""
    return {
        "rules": [
            {"action": action, "onPodConditions": [{"type": "DisruptionTarget"}]},
            {"action": action, "onExitCodes": {"operator": "In", "values": [*resumable()]}},
        ]
    }


def node_pod(options: argparse.Namespace, rendezvous: str) -> dict[str, Any]:
    """Return the spec of a pod that is one node of the job.

    Args:
        options: those of `hvdkit generate kubernetes`, checked.
        rendezvous: the DNS name of pod 0.

    Raises:
        UsageError: --rdma, --node-selector or --toleration is malformed.
    """
    ranks = options.workers * (options.ranks_per_worker or options.gpus_per_worker or 1)
    run = ["hvdkit", "run", "--nodes", str(options.workers), "--rdzv", f"{rendezvous}:{_PORT}"]
    run += ["--start-timeout", str(JOB_START_SECONDS), "-np", str(ranks)]
    run += [*restarts(options), *options.command]
    key = {"secretKeyRef": {"name": _secret(options), "key": _SECRET_KEY}}
    container = {
        "name": "worker",
        "image": options.image,
        "args": run,
        "env": [{"name": "HVDKIT_JOB_KEY", "valueFrom": key}],
    }
    return {"restartPolicy": "Never", **grace(), **rank_pod(options, container)}


def node_pod_comments(options: argparse.Namespace) -> Comments:
    """Return the comments on `node_pod`."""
    return {
        ("terminationGracePeriodSeconds",): GRACE_COMMENT,
        ("containers", 0, "args"): (
            "The same in all pods: pod 0 listens, the others connect to it. -np is the number of "
            "all ranks. Pods wait for each other up to --start-timeout seconds."
        ),
        ("containers", 0, "env"): (
            "The pods prove to each other that they know this key, which no other job has. A pod "
            "waits until the Secret exists."
        ),
        **rank_pod_comments(options),
    }


def _secret(options: argparse.Namespace) -> str:
    return str(options.key_secret or f"{job_name(options)}-key")


def _service(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(options),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": job_name(options)},
        },
    }


def _service_comments(options: argparse.Namespace) -> Comments:
    name = job_name(options)
    return {
        ("spec", "clusterIP"): f"One DNS name per pod, no IP: {name}-0.{name} is pod 0.",
        ("spec", "publishNotReadyAddresses"): "A pod connects to pod 0 before either is ready.",
    }


def _job(options: argparse.Namespace) -> dict[str, Any]:
    name = job_name(options)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": queued(options),
        "spec": {
            **suspended(options),
            **indexed(options),
            "backoffLimit": options.retries * options.workers,
            "podFailurePolicy": interruptions("Ignore"),
            "template": {"spec": {"subdomain": name, **node_pod(options, f"{name}-0.{name}")}},
        },
    }


def _job_comments(options: argparse.Namespace) -> Comments:
    spec: Comments = {
        **INDEXED_COMMENTS,
        ("backoffLimit",): (
            f"{options.retries} retries x {options.workers} pods: when one pod fails, all end with "
            "the same status, and each counts. Kubernetes waits before it starts new pods: 10 s "
            "after the first failed pod, twice as long after each further one, at most 10 minutes. "
            f"{resume_comment(options)}"
        ),
        ("podFailurePolicy",): (
            "Not counted: pods that Kubernetes evicts (a drained node, preemption), and exit "
            f"status {RESUMABLE} (saved and stopped). They are replaced too."
        ),
        ("template", "spec", "subdomain"): "The name of the Service.",
        ("template", "spec", "restartPolicy"): (
            "Each try gets new pods, so the logs of failed pods stay."
        ),
        **below(("template", "spec"), node_pod_comments(options)),
    }
    if options.queue is not None:
        spec["suspend",] = suspended_comment(options)
    return below(("spec",), spec)
