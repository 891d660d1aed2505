"""The parts of a pod that all kinds of jobs share: security, resources, volumes and nodes."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping
from typing import Any

from hvdkit.errors import UsageError
from hvdkit.launch.generate.kubernetes.commented_yaml import Comments, Document
from hvdkit.launch.timeouts import Timeouts

#: The folder for checkpoints in the images of `docker/`.
CHECKPOINTS = "/checkpoints"

#: Seconds for all pods to start, as nodes pull an image of several GB.
START_SECONDS = 300

#: Seconds for the pods of a Job to start. Kubernetes may wait 10 minutes before it replaces a pod.
JOB_START_SECONDS = 660

#: Seconds that `hvdkit run` needs to end after its ranks have ended.
_SPARE_SECONDS = 30

#: The unprivileged user of the images of `docker/`.
_USER_ID = 1000

#: The settings that `restricted`, the strictest pod security standard of Kubernetes, requires.
_POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": _USER_ID,
    "runAsGroup": _USER_ID,
    "fsGroup": _USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
_CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}

# In arguments, Kubernetes replaces `$(NAME)` by a variable, and `$$` by `$`.
_BEFORE_REFERENCE = re.compile(r"\$(?=[$(])")

# Kubernetes' syntax of labels, taints and extended resources.
_WORD = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN = rf"{_WORD}(\.{_WORD})*"
_LABEL = r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_KEY = rf"(?P<key>({_DOMAIN}/)?{_LABEL})"
_VALUE = rf"(?P<value>({_LABEL})?)"
_NODE_LABEL = re.compile(f"{_KEY}={_VALUE}")
_TOLERATION = re.compile(f"{_KEY}(={_VALUE})?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?")
_DEVICES = re.compile(rf"(?P<resource>{_DOMAIN}/{_LABEL})=(?P<count>[1-9][0-9]*)")


def pod(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of a pod with one container, without privileges.

    Args:
        container: the container. Kubernetes passes its `args` on as they are, also a `$(NAME)`.
    """
    arguments = [_BEFORE_REFERENCE.sub("$$", word) for word in container["args"]]
    confined = {**container, "args": arguments, "securityContext": _CONTAINER_SECURITY}
    return {
        # The job calls no API of Kubernetes.
        "automountServiceAccountToken": False,
        "securityContext": _POD_SECURITY,
        "containers": [confined],
    }


def network_policy(metadata: Mapping[str, Any], labels: Mapping[str, str]) -> Document:
    """Return the NetworkPolicy that lets only the pods of a job connect to its pods.

    Args:
        metadata: of the policy.
        labels: the labels of the job's pods.
    """
    pods = {"matchLabels": dict(labels)}
    content = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": dict(metadata),
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": pods}]}],
        },
    }
    comment = (
        "Only the job's own pods can connect to its pods, if the cluster's network plugin enforces "
        "policies. To let Prometheus in, add its pods here."
    )
    return Document(content, {("spec", "ingress"): comment})


def rank_pod(options: argparse.Namespace, container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of a pod with ranks: its nodes, resources, shared memory and checkpoints.

    Raises:
        UsageError: --rdma, --node-selector or --toleration is malformed.
    """
    resources = {"cpu": options.cpus, "memory": options.memory}
    if options.gpus_per_worker is not None:
        # Kubernetes accepts numbers and text; the other amounts are text.
        resources["nvidia.com/gpu"] = str(options.gpus_per_worker)
    resources |= _devices(options.rdma)
    mounts, volumes = _volumes(options)
    amounts = {"resources": requested(resources), "volumeMounts": mounts}
    return {**_nodes(options), **pod({**container, **amounts}), "volumes": volumes}


def requested(amounts: Mapping[str, str]) -> dict[str, Any]:
    """Return a container's `resources` with requests and limits of these amounts."""
    return {"requests": dict(amounts), "limits": dict(amounts)}


def grace() -> dict[str, int]:
    """Return the field with the time for ranks to save after SIGTERM."""
    return {"terminationGracePeriodSeconds": round(Timeouts.stop) + _SPARE_SECONDS}


GRACE_COMMENT = (
    "SIGTERM makes the ranks save and stop, within --stop-grace seconds. The rest of this time is "
    "for the end of `hvdkit run`."
)


def rank_pod_comments(options: argparse.Namespace) -> Comments:
    """Return the comments on the fields of `rank_pod`."""
    resources = (
        "Requests equal limits, so that no other pod takes resources of a rank: the slowest rank "
        "limits the speed of all."
    )
    if options.rdma is not None:
        resources += (
            " RDMA needs an unlimited `ulimit -l`, set in the nodes' container runtime. The "
            "capability IPC_LOCK has no effect for a user other than root."
        )
    volumes = (
        "NCCL and the workers of a DataLoader use /dev/shm; the default is 64 MB. It counts as "
        "memory."
    )
    if options.checkpoints is not None and options.workers > 1:
        volumes += " Every worker mounts the checkpoints' claim, so it must be ReadWriteMany."
    return {("containers", 0, "resources"): resources, ("volumes",): volumes}


def resume_comment(options: argparse.Namespace) -> str:
    """Return the sentence about where a restarted job begins."""
    if options.checkpoints is None:
        return "Without a volume for checkpoints (--checkpoints CLAIM) the job begins again."
    command = shlex.join(options.command)
    return f"`{command}` must resume from the checkpoints in {CHECKPOINTS}."


def _volumes(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the mounts of the container, and the volumes of the pod."""
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    memory = {"medium": "Memory", "sizeLimit": options.shared_memory}
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": memory}]
    if options.checkpoints is not None:
        mounts.append({"name": "checkpoints", "mountPath": CHECKPOINTS})
        claim = {"claimName": options.checkpoints}
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": claim})
    return mounts, volumes


def _nodes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that choose the nodes of a pod."""
    fields: dict[str, Any] = {}
    if options.node_selector:
        fields["nodeSelector"] = _node_labels(options.node_selector)
    if options.toleration:
        fields["tolerations"] = [_toleration(text) for text in options.toleration]
    return fields


def _node_labels(texts: list[str]) -> dict[str, str]:
    expected = "KEY=VALUE. `kubectl get nodes --show-labels` lists the labels of nodes"
    labels: dict[str, str] = {}
    for text in texts:
        given = _parse(_NODE_LABEL, "--node-selector", text, expected)
        key, value = given["key"], given["value"]
        if labels.get(key, value) != value:
            raise UsageError(
                f"--node-selector gives {key} twice: {labels[key]!r} and {value!r}. A node has "
                "one value for a label; leave one of them out"
            )
        labels[key] = value
    return labels


def _toleration(text: str) -> dict[str, str]:
    expected = (
        "KEY, KEY=VALUE, KEY:EFFECT or KEY=VALUE:EFFECT, with EFFECT one of NoSchedule, "
        "PreferNoSchedule, NoExecute. `kubectl describe node` lists the taints of a node"
    )
    given = _parse(_TOLERATION, "--toleration", text, expected)
    toleration = {"key": given["key"]}
    if given["value"] is None:
        toleration["operator"] = "Exists"
    else:
        toleration |= {"operator": "Equal", "value": given["value"]}
    # Without an effect, Kubernetes tolerates all effects of the taint.
    return toleration if given["effect"] is None else {**toleration, "effect": given["effect"]}


def _devices(text: str | None) -> dict[str, str]:
    if text is None:
        return {}
    expected = (
        "RESOURCE=N with N at least 1, e.g. rdma/hca=1. `kubectl describe node` lists the "
        "resources of a node under Allocatable"
    )
    given = _parse(_DEVICES, "--rdma", text, expected)
    return {given["resource"]: given["count"]}


def _parse(pattern: re.Pattern[str], option: str, text: str, expected: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise UsageError(f"{option} is {text!r}. Expected {expected}")
    return match
