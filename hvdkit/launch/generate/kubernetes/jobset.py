"""The JobSet of `hvdkit generate kubernetes`, for JobSet's API v1alpha2.

The pods are those of the indexed Job. JobSet adds its own headless Service, and restarts all pods
together, without the increasing delays of a Job.
"""

from __future__ import annotations

import argparse
from typing import Any

from hvdkit.errors import RESUMABLE
from hvdkit.launch.generate.kubernetes.commented_yaml import Comments, Document, below
from hvdkit.launch.generate.kubernetes.job import (
    INDEXED_COMMENTS,
    indexed,
    interruptions,
    node_pod,
    node_pod_comments,
    usage,
)
from hvdkit.launch.generate.kubernetes.metadata import (
    job_name,
    metadata,
    queued,
    suspended,
    suspended_comment,
)
from hvdkit.launch.generate.kubernetes.pod import network_policy, resume_comment

#: The name of the replicated job. JobSet names its only Job NAME-worker-0.
_REPLICATED = "worker"

#: The label of a JobSet's pods.
_LABEL = "jobset.sigs.k8s.io/jobset-name"

#: JobSet refuses a name that is too long for the random suffix of a pod.
_SUFFIX = "-abcde"


def longest_name(options: argparse.Namespace) -> str:
    """Return the longest pod name."""
    return f"{_child(options)}-{options.workers - 1}{_SUFFIX}"


def head(options: argparse.Namespace) -> str:
    """Return the comment at the head of the file."""
    return "# A training job for Kubernetes 1.28 or newer with JobSet 0.6 or newer.\n" + usage(
        options, job=_child(options)
    )


def documents(options: argparse.Namespace) -> list[Document]:
    """Return the NetworkPolicy and the JobSet.

    Raises:
        UsageError: an option is malformed.
    """
    return [
        network_policy(metadata(options), {_LABEL: job_name(options)}),
        Document(_job_set(options), _comments(options)),
    ]


def _child(options: argparse.Namespace) -> str:
    """Return the name of the Job that JobSet makes."""
    return f"{job_name(options)}-{_REPLICATED}-0"


def _job_set(options: argparse.Namespace) -> dict[str, Any]:
    name = job_name(options)
    job = {
        **indexed(options),
        "backoffLimit": 0,
        "podFailurePolicy": interruptions("FailJob"),
        "template": {"spec": node_pod(options, f"{_child(options)}-0.{name}")},
    }
    uncounted = {
        "name": "interrupted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": queued(options),
        "spec": {
            **suspended(options),
            "network": {
                "enableDNSHostnames": True,
                "subdomain": name,
                "publishNotReadyAddresses": True,
            },
            "failurePolicy": {"maxRestarts": options.retries, "rules": [uncounted]},
            "replicatedJobs": [{"name": _REPLICATED, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _comments(options: argparse.Namespace) -> Comments:
    name = job_name(options)
    job: Comments = {
        **INDEXED_COMMENTS,
        ("backoffLimit",): "The first pod that fails ends the Job, and JobSet restarts all pods.",
        ("podFailurePolicy",): (
            "Pods that Kubernetes evicts (a drained node, preemption), and exit status "
            f"{RESUMABLE} (saved and stopped), end the Job with the reason PodFailurePolicy."
        ),
        ("template", "spec", "restartPolicy"): (
            "podFailurePolicy requires Never. A restart deletes the pods and their logs. With "
            "--output-dir on a volume, `hvdkit run` keeps the ranks' output."
        ),
        **below(("template", "spec"), node_pod_comments(options)),
    }
    spec: Comments = {
        ("network", "enableDNSHostnames"): (
            f"JobSet makes the Service: {_child(options)}-0.{name} is pod 0."
        ),
        ("network", "publishNotReadyAddresses"): "A pod connects to pod 0 before either is ready.",
        ("failurePolicy", "maxRestarts"): (
            f"Restarts all pods together after a failure, up to {options.retries} times. "
            f"{resume_comment(options)}"
        ),
        ("failurePolicy", "rules"): "Restarts that do not count: see podFailurePolicy.",
        **below(("replicatedJobs", 0, "template", "spec"), job),
    }
    if options.queue is not None:
        spec["suspend",] = suspended_comment(options)
    return below(("spec",), spec)
