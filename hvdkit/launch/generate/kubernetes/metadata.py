"""The name, the namespace and the queue of a Kubernetes job, from the options of `generate`."""

from __future__ import annotations

import argparse
import re
from typing import Any

from hvdkit.launch.generate.options import script_name

#: The label that names the LocalQueue of Kueue.
_QUEUE = "kueue.x-k8s.io/queue-name"


def job_name(options: argparse.Namespace) -> str:
    """Return `--name`; without it, a name made from that of the script."""
    if options.name is not None:
        return str(options.name)
    name = script_name(options.command).lower()
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-0123456789") or "job"


def metadata(options: argparse.Namespace) -> dict[str, Any]:
    """Return the metadata of an object of the job."""
    found: dict[str, Any] = {"name": job_name(options)}
    if options.namespace is not None:
        found["namespace"] = options.namespace
    return found


def queued(options: argparse.Namespace) -> dict[str, Any]:
    """Return the metadata of the object that Kueue puts into its queue."""
    found = metadata(options)
    if options.queue is not None:
        found["labels"] = {_QUEUE: options.queue}
    return found


def suspended(options: argparse.Namespace) -> dict[str, bool]:
    """Return the field that makes a job wait for its queue; none without a queue."""
    return {} if options.queue is None else {"suspend": True}


def kubectl(options: argparse.Namespace) -> str:
    """Return `kubectl`, with the job's namespace."""
    return "kubectl" if options.namespace is None else f"kubectl -n {options.namespace}"


def suspended_comment(options: argparse.Namespace) -> str:
    """Return the comment above `suspend`."""
    return f"Kueue sets it to false when the queue {options.queue} admits the job."
