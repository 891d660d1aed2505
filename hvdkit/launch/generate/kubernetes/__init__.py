"""`hvdkit generate kubernetes`: its options, their checks, and the kinds of jobs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Protocol

from hvdkit.errors import UsageError
from hvdkit.flags import flag
from hvdkit.launch.generate.kubernetes import job, jobset, mpijob
from hvdkit.launch.generate.kubernetes.commented_yaml import Document, dump
from hvdkit.launch.generate.kubernetes.pod import CHECKPOINTS
from hvdkit.launch.generate.options import add_restarts, check_command, check_numbers

HELP = "write a commented job for Kubernetes: an MPIJob, an indexed Job or a JobSet"
EXAMPLE = """\
  hvdkit generate kubernetes --image registry/me/train:1 --workers 2 --gpus-per-worker 8 \\
      --cpus 64 --memory 512Gi --checkpoints my-claim -o job.yaml python train.py
  hvdkit generate kubernetes --kind jobset --image registry/me/train:1 --workers 2 \\
      --queue research --rdma rdma/hca=1 --toleration nvidia.com/gpu -o job.yaml python train.py
  kubectl apply -f job.yaml"""


class _Kind(Protocol):
    """A module that writes one kind of job."""

    def longest_name(self, options: argparse.Namespace) -> str:
        """Return the longest of the pod names that begin with the job's name."""

    def head(self, options: argparse.Namespace) -> str:
        """Return the comment at the head of the file."""

    def documents(self, options: argparse.Namespace) -> list[Document]:
        """Return the objects of the job.

        Raises:
            UsageError: an option does not fit this kind, or is malformed.
        """


_KINDS: Mapping[str, _Kind] = {
    "mpijob": mpijob,
    "job": job,
    "jobset": jobset,
}

_QUANTITY = re.compile(r"(?=.*[1-9])\d+(\.\d+)?(m|[kMGTP]|[KMGTP]i)?")
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# Pods' names are host names and values of labels, which have at most 63 characters.
_NAME_LENGTH = 63


def add_arguments(action: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvdkit generate kubernetes`."""
    action.add_argument(
        "--kind",
        dest="job_kind",
        choices=list(_KINDS),
        default="mpijob",
        help="mpijob: mpi-operator and ssh; job: an indexed Job, which needs no operator; jobset: "
        "the same pods, restarted together by JobSet (default: %(default)s)",
    )
    action.add_argument(
        "--image", required=True, metavar="NAME", help="an image with hvdkit, built as in docker/"
    )
    action.add_argument("--name", metavar="NAME", help="of the job (default: the script's)")
    action.add_argument("--namespace", metavar="NAME", help="(default: kubectl's)")
    action.add_argument("--workers", type=int, default=1, metavar="N", help="pods (default: 1)")
    action.add_argument(
        "--gpus-per-worker",
        type=int,
        metavar="N",
        help="NVIDIA GPUs, with one rank each (default: none)",
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
        help=f"an existing PersistentVolumeClaim, mounted at {CHECKPOINTS}",
    )
    action.add_argument(
        "--retries",
        type=int,
        default=3,
        metavar="N",
        help="restarts of the job with new pods after failures (default: %(default)s)",
    )
    add_restarts(action)
    action.add_argument(
        "--key-secret",
        metavar="NAME",
        help="the Secret with the job's key, for job and jobset (default: the job's name with "
        "-key added)",
    )
    _add_cluster_arguments(action.add_argument_group("the cluster"))


def _add_cluster_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--queue", metavar="NAME", help="the LocalQueue of Kueue (default: none)")
    group.add_argument(
        "--rdma",
        metavar="RESOURCE=N",
        help="a worker's RDMA devices, as their device plugin names them, e.g. rdma/hca=1",
    )
    group.add_argument(
        "--node-selector",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a label that the workers' nodes have; repeatable",
    )
    group.add_argument(
        "--toleration",
        action="append",
        default=[],
        metavar="KEY[=VALUE][:EFFECT]",
        help="a taint of nodes that workers tolerate; repeatable",
    )


def text(options: argparse.Namespace) -> str:
    """Return the job as YAML, with comments.

    Raises:
        UsageError: an option is malformed or does not fit the kind, or there is no command.
    """
    _check(options)
    kind = _KINDS[options.job_kind]
    longest = kind.longest_name(options)
    if len(longest) > _NAME_LENGTH:
        raise UsageError(
            f"the pod name {longest} has {len(longest)} characters; expected at most "
            f"{_NAME_LENGTH}. Give a shorter --name"
        )
    return kind.head(options) + dump(*kind.documents(options))


def _check(options: argparse.Namespace) -> None:
    check_command(options, "kubernetes --image IMAGE --workers 2")
    least = {"workers": 1, "gpus_per_worker": 1, "ranks_per_worker": 1, "retries": 0, "restarts": 0}
    check_numbers(options, least)
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
