"""Check that the options of `hvdkit run` can be given together.

`command` calls `check`. Conflicts with the environment, such as a Slurm allocation, are found
later, in `command` and `supervised`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from hvdkit.errors import UsageError


class _Rule(NamedTuple):
    """Options that are refused in some jobs.

    Attributes:
        applies: returns whether the rule applies to a job, given its options.
        refused: the options, as the error names them. `{launcher}` becomes the option's value.
        error: the text of the error. `{}` becomes the first refused option that was given.
    """

    applies: Callable[[argparse.Namespace], bool]
    refused: tuple[str, ...]
    error: str


# The first rule that is broken is reported.
_RULES = (
    _Rule(
        lambda options: not options.elastic,
        (
            *("--max-np", "--slots-per-host", "--elastic-timeout", "--reset-limit"),
            "--blacklist-cooldown-range",
        ),
        "{} needs --elastic",
    ),
    _Rule(
        lambda options: options.elastic and options.host_discovery_script is None,
        ("--slots-per-host",),
        "{} needs --host-discovery-script: it sets the slots of hosts that the script prints "
        "without a number. With -H or --hostfile, give the slots of each host, such as host1:4",
    ),
    _Rule(
        lambda options: options.elastic,
        ("--nodes", "--debug-rank", "--mpi", "--launcher {launcher}"),
        "--elastic cannot be combined with {}: an elastic job starts its ranks over Gloo, with an "
        "agent on each host",
    ),
    _Rule(
        lambda options: options.nodes is None,
        ("--node-rank", "--rdzv", "--rdzv-file", "--key-file"),
        "{} needs --nodes N, the number of nodes",
    ),
    _Rule(
        lambda options: options.nodes is not None,
        ("-H", "--hostfile", "--mpi", "--debug-rank", "--host-discovery-script", "--launcher"),
        "{} cannot be combined with --nodes, where each node joins by itself",
    ),
    _Rule(
        lambda options: not (options.restarts or options.elastic),
        ("--min-np",),
        "{0} needs --restarts N: add it, or remove {0}",
    ),
    _Rule(
        lambda options: options.restarts,
        ("--debug-rank",),
        "--restarts cannot be combined with {}. Remove one of them",
    ),
    _Rule(
        lambda options: options.host_discovery_script is not None,
        ("-H", "--hostfile"),
        "--host-discovery-script was given with hosts. Remove -H and --hostfile, or the script",
    ),
    _Rule(
        lambda options: options.launcher == "slurm",
        ("-H", "--hostfile", "--host-discovery-script"),
        "--launcher slurm was given with hosts, but the hosts are those of the allocation. Remove "
        "-H, --hostfile and --host-discovery-script",
    ),
)


def check(options: argparse.Namespace) -> None:
    """Check that the options can be given together.

    Raises:
        UsageError: two options exclude each other, or one needs another.
    """
    for rule in _RULES:
        if rule.applies(options):
            for name in rule.refused:
                if _is_given(options, name.split()[0]):
                    raise UsageError(rule.error.format(name.format_map(vars(options))))


def _is_given(options: argparse.Namespace, name: str) -> bool:
    if name == "--launcher":
        # Jobs that refuse --launcher use Gloo, so `--launcher gloo` does not conflict.
        return options.launcher not in ("auto", "gloo")
    attribute = "hosts" if name == "-H" else name.removeprefix("--").replace("-", "_")
    return getattr(options, attribute) is not None
