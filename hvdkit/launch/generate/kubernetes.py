"""`hvdkit generate kubernetes`: an MPIJob, an indexed Job or a JobSet, from `templates`.

In an MPIJob, mpi-operator starts the workers, each an ssh server, gives all pods one ssh key, and
writes the hosts into a file. The launcher's pod runs `hvdkit run`, as on any cluster with ssh. The
pods of an indexed Job and of a JobSet all run the same `hvdkit run --nodes`. Kubernetes numbers
them, a headless Service gives them names, and pod 0 is the rendezvous.
"""

from __future__ import annotations

import argparse
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from hvdkit.console.flags import TYPES, add_options, check_least, flag
from hvdkit.errors import UsageError
from hvdkit.exit_statuses import resumable, resumable_text
from hvdkit.launch.control.output import SHOWN_RANKS
from hvdkit.launch.control.timeouts import Timeouts
from hvdkit.launch.generate.options import RESTARTS, fill, restarts, script_name

HELP = "write a commented job for Kubernetes: an MPIJob, an indexed Job or a JobSet"
EXAMPLE = """\
  hvdkit generate kubernetes --image registry/me/train:1 --workers 2 --gpus-per-worker 8 \\
      --cpus 64 --memory 512Gi --checkpoints my-claim -o job.yaml python train.py
  hvdkit generate kubernetes --kind jobset --image registry/me/train:1 --workers 2 \\
      --queue research --rdma rdma/hca=1 --toleration nvidia.com/gpu -o job.yaml python train.py
  kubectl apply -f job.yaml"""
COMMAND = "kubernetes --image IMAGE --workers 2"

_OPTIONS = f"""
--kind {{mpijob,job,jobset}}  mpijob: mpi-operator and ssh; job: an indexed Job, which needs no
                       operator; jobset: the same pods, restarted together by JobSet
                       (default: %(default)s)
--image NAME           an image with hvdkit, built as in docker/ (required)
--name NAME            of the job (default: the script's)
--namespace NAME       (default: kubectl's)
--workers N            pods (default: 1)
--gpus-per-worker N    NVIDIA GPUs, with one rank each (default: none)
--ranks-per-worker N   (default: one per GPU, else 1)
--cpus CORES           cores of a worker (default: %(default)s)
--memory SIZE          of a worker, shared memory included (default: %(default)s)
--shared-memory SIZE   at most this much in /dev/shm (default: %(default)s)
--checkpoints CLAIM    an existing PersistentVolumeClaim, mounted at /checkpoints
--retries N            restarts of the job with new pods after failures (default: %(default)s)
{RESTARTS}
--key-secret NAME      the Secret with the job's key, for job and jobset (default: the job's name
                       with -key added)
[the cluster]
--queue NAME           the LocalQueue of Kueue (default: none)
--rdma RESOURCE=N      a worker's RDMA devices, as their device plugin names them, e.g. rdma/hca=1
--node-selector KEY=VALUE...  a label that the workers' nodes have; repeatable
--toleration KEY[=VALUE][:EFFECT]...  a taint of nodes that workers tolerate; repeatable
"""

_QUANTITY = re.compile(r"(?=.*[1-9])\d+(\.\d+)?(m|[kMGTP]|[KMGTP]i)?")
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# Pods' names are host names and values of labels, which have at most 63 characters. JobSet refuses
# a name that is too long for the random suffix of a pod.
_NAME_LENGTH, _SUFFIX = 63, "-abcde"
# Kubernetes' syntax of labels, taints and extended resources.
_WORD = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN = rf"{_WORD}(\.{_WORD})*"
_LABEL = r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_KEY = rf"(?P<key>({_DOMAIN}/)?{_LABEL})"
_VALUE = rf"(?P<value>({_LABEL})?)"
_NODE_LABEL = re.compile(f"{_KEY}={_VALUE}")
_TOLERATION = re.compile(f"{_KEY}(={_VALUE})?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?")
_DEVICES = re.compile(rf"(?P<resource>{_DOMAIN}/{_LABEL})=(?P<count>[1-9][0-9]*)")
# In arguments, Kubernetes replaces `$(NAME)` by a variable, and `$$` by `$`.
_BEFORE_REFERENCE = re.compile(r"\$(?=[$(])")

# The label with the job's name that the pods of each kind of job have.
_LABELS = {
    "mpijob": "training.kubeflow.org/job-name",
    "job": "job-name",
    "jobset": "jobset.sigs.k8s.io/jobset-name",
}
# The path at which mpi-operator mounts the file with the workers' names and slots.
_HOSTFILE = "/etc/mpi/hostfile"
_LAUNCHER = (
    *("hvdkit", "run", "--hostfile", _HOSTFILE, "--ssh-port", "2222"),
    *("--ssh-arg=-oStrictHostKeyChecking=no", "--ssh-arg=-oUserKnownHostsFile=/dev/null"),
    # Seconds for all pods to start, as nodes pull an image of several GB.
    *("--start-timeout", "300"),
)
# The port of the rendezvous in pod 0. The seconds for the pods of a Job to start: Kubernetes may
# wait 10 minutes before it replaces a pod.
_PORT, _JOB_START_SECONDS = 29400, 660
# Seconds that `hvdkit run` needs to end after its ranks have ended.
_SPARE_SECONDS = 30


def add_arguments(action: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvdkit generate kubernetes`."""
    sizes = {"cpus": "4", "memory": "16Gi", "shared_memory": "8Gi"}
    add_options(action, _OPTIONS, TYPES, kind="mpijob", image="", workers=1, retries=3, **sizes)


def text(options: argparse.Namespace) -> str:
    """Return the job as YAML, with comments.

    Raises:
        UsageError: an option is malformed or does not fit the kind.
    """
    _check(options)
    kind, name, workers = options.kind, _job_name(options), options.workers
    # The Job that Kubernetes or JobSet makes.
    job = f"{name}-worker-0" if kind == "jobset" else name
    longest = {
        "mpijob": max((f"{name}-{end}" for end in ("launcher", f"worker-{workers - 1}")), key=len),
        "job": f"{job}-{workers - 1}",
        "jobset": f"{job}-{workers - 1}{_SUFFIX}",
    }[kind]
    if len(longest) > _NAME_LENGTH:
        raise UsageError(
            f"the pod name {longest} has {len(longest)} characters; expected at most "
            f"{_NAME_LENGTH}. Give a shorter --name"
        )
    slots = options.ranks_per_worker or options.gpus_per_worker or 1
    per_gpu = options.gpus_per_worker and not options.ranks_per_worker
    pod_0 = f"{job}-0.{name}"
    run = list(_LAUNCHER)
    if kind != "mpijob":
        run = ["hvdkit", "run", "--nodes", str(workers), "--rdzv", f"{pod_0}:{_PORT}"]
        run += ["--start-timeout", str(_JOB_START_SECONDS), "-np", str(workers * slots)]
    namespace, queue, claim = options.namespace, options.queue, options.checkpoints
    resources = {"cpu": options.cpus, "memory": options.memory}
    if options.gpus_per_worker is not None:
        # Kubernetes accepts numbers and text; the other amounts are text.
        resources["nvidia.com/gpu"] = str(options.gpus_per_worker)
    memory = {"medium": "Memory", "sizeLimit": options.shared_memory}
    mounts = {"shared-memory": "/dev/shm"} | ({"checkpoints": "/checkpoints"} if claim else {})
    volumes: list[Any] = [{"name": "shared-memory", "emptyDir": memory}]
    if claim:
        volumes += [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}}]
    command = shlex.join(options.command)
    values = {
        "name": _yaml(name),
        "label": _LABELS[kind],
        "metadata": _yaml({"name": name} | ({"namespace": namespace} if namespace else {})),
        "labels": _yaml({"labels": {"kueue.x-k8s.io/queue-name": queue}}) if queue else "",
        "suspend": queue
        and f"# Kueue sets it to false when the queue {queue} admits the job.\nsuspend: true",
        "kubectl": "kubectl" if namespace is None else f"kubectl -n {namespace}",
        "job": job,
        "pod_0": pod_0,
        "secret": _yaml(options.key_secret or f"{name}-key"),
        "shown_ranks": SHOWN_RANKS,
        "workers": workers,
        "slots": slots,
        "per_gpu": ": one per GPU" if per_gpu else "",
        "retries": options.retries,
        "pod_retries": options.retries * workers,
        "resume": "# Without a volume for checkpoints (--checkpoints CLAIM) the job begins again."
        if claim is None
        else _comment(f"`{command}` must resume from the checkpoints in /checkpoints."),
        "resumable": [*resumable()],
        "resumable_text": resumable_text(),
        "grace": round(Timeouts.stop) + _SPARE_SECONDS,
        "image": _yaml(options.image),
        "hostfile": _HOSTFILE,
        "args": _yaml(arguments([*run, *restarts(options), *options.command])),
        "nodes": _yaml(dict(_nodes(options))) if options.node_selector + options.toleration else "",
        "resources": _yaml(resources | _devices(options.rdma)),
        "rdma_comment": options.rdma
        and _comment(
            "RDMA needs an unlimited `ulimit -l`, set in the nodes' container runtime. The "
            "capability IPC_LOCK has no effect for a user other than root."
        ),
        "mounts": _yaml([{"name": each, "mountPath": mounts[each]} for each in mounts]),
        "volumes": _yaml(volumes),
        "claim_comment": claim
        and workers > 1
        and _comment("Every worker mounts the checkpoints' claim, so it must be ReadWriteMany."),
    }
    values["container"] = fill("ssh-server.yaml" if kind == "mpijob" else "node.yaml", values)
    values["pod"] = fill("pod.yaml", values)
    values["network_policy"] = fill("network-policy.yaml", values)
    values["head"] = fill("node-head.yaml", values)
    return fill(f"{kind}.yaml", values)


def _yaml(value: Any) -> str:
    # Repeated values are written in full, because a user who edits one must not change another.
    text: str = yaml.safe_dump(value, sort_keys=False, width=100)
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(text: str) -> str:
    return textwrap.fill(text, 84, initial_indent="# ", subsequent_indent="# ")


def arguments(words: Sequence[str]) -> list[str]:
    """Return `args` that Kubernetes passes to a container as these words, also a `$(NAME)`."""
    return [_BEFORE_REFERENCE.sub("$$", word) for word in words]


def _job_name(options: argparse.Namespace) -> str:
    """Return `--name`; without it, a name made from that of the script."""
    name = re.sub(r"[^a-z0-9]+", "-", script_name(options.command).lower()).strip("-0123456789")
    return options.name or name or "job"


def _check(options: argparse.Namespace) -> None:
    least = {"workers": 1, "gpus_per_worker": 1, "ranks_per_worker": 1, "retries": 0, "restarts": 0}
    check_least(options, least)
    if not re.fullmatch(r"\S+", options.image):
        raise UsageError(f"--image is {options.image!r}; expected e.g. registry/me/train:1")
    for option in ("cpus", "memory", "shared_memory"):
        amount = getattr(options, option)
        if not _QUANTITY.fullmatch(amount):
            raise UsageError(f"{flag(option)} is {amount!r}; expected e.g. 8, 500m, 64Gi or 100G")
    for option in ("name", "namespace", "checkpoints", "queue", "key_secret"):
        given = getattr(options, option)
        if given is not None and not _NAME.fullmatch(given):
            raise UsageError(
                f"{flag(option)} is {given!r}; expected lowercase letters, digits and "
                "dashes, beginning with a letter and ending with a letter or digit"
            )
    if options.key_secret is not None and options.kind == "mpijob":
        raise UsageError(
            f"--key-secret is {options.key_secret!r}, and --kind is mpijob, which uses none: "
            "mpi-operator makes the job's ssh key. Leave --key-secret out, or choose --kind job "
            "or jobset"
        )


def _nodes(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield the fields that choose the nodes of a pod."""
    labels: dict[str, str] = {}
    for text in options.node_selector:
        expected = "KEY=VALUE. `kubectl get nodes --show-labels` lists the labels of nodes"
        given = _parse(_NODE_LABEL, "--node-selector", text, expected)
        key, value = given["key"], given["value"]
        if labels.setdefault(key, value) != value:
            raise UsageError(
                f"--node-selector gives {key} twice: {labels[key]!r} and {value!r}. A node has "
                "one value for a label; leave one of them out"
            )
    if labels:
        yield "nodeSelector", labels
    if options.toleration:
        yield "tolerations", [_toleration(text) for text in options.toleration]


def _toleration(text: str) -> dict[str, str]:
    expected = (
        "KEY, KEY=VALUE, KEY:EFFECT or KEY=VALUE:EFFECT, with EFFECT one of NoSchedule, "
        "PreferNoSchedule, NoExecute. `kubectl describe node` lists the taints of a node"
    )
    given = _parse(_TOLERATION, "--toleration", text, expected).groupdict()
    given["operator"] = "Exists" if given["value"] is None else "Equal"
    # Without an effect, Kubernetes tolerates all effects of the taint.
    names = ("key", "operator", "value", "effect")
    return {name: given[name] for name in names if given[name] is not None}


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
