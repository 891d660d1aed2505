"""The options of `hvdkit run --nodes`, for one node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import UsageError
from hvdkit.system.plain_files import read_named

#: The job's key, the same on every node.
KEY_VARIABLE = "HVDKIT_JOB_KEY"

#: Seconds for all nodes to join: images are pulled, and machines start.
START_SECONDS = 600.0

# The node's number, from systems that start the same command on every node.
_RANK_VARIABLES = ("JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK", "NODE_RANK", "SLURM_NODEID")
_SHORTEST_KEY = 16


@dataclass(frozen=True)
class NodeSettings:
    """The options of one node.

    Attributes:
        nodes: the number of nodes.
        node: the number of this node, from 0.
        slots: the number of ranks on this node.
        address: the host and port of node 0's listener; None if `file` has it.
        file: the file for node 0's address; None if the user gave `address`.
        key: the job's key; empty if node 0 writes one into `file`.
        size: the user's -np, the number of ranks on all nodes together; None without -np.
        timeout: seconds for all nodes to join.
    """

    nodes: int
    node: int
    slots: int
    address: tuple[str, int] | None
    file: Path | None
    key: bytes
    size: int | None = None
    timeout: float = START_SECONDS

    @property
    def rendezvous(self) -> str:
        """The option with which the user gave the address of node 0, for messages."""
        if self.address is None:
            return f"--rdzv-file {self.file}"
        return "--rdzv {}:{}".format(*self.address)


def node_rank(given: int | None, nodes: int, env: Mapping[str, str]) -> int:
    """Return the number of this node.

    Args:
        given: the user's `--node-rank`; None to use a cluster's variable.
        nodes: the number of nodes.

    Raises:
        UsageError: neither is given, or the number is out of range.
    """
    source, number = "--node-rank", given
    if number is None:
        source = next((name for name in _RANK_VARIABLES if _is_number(env.get(name, ""))), "")
        if not source:
            raise UsageError(
                f"--nodes is {nodes}, and the number of this node is not known "
                f"({', '.join(_RANK_VARIABLES)} are not set to a number). Give --node-rank, from 0 "
                f"to {nodes - 1}"
            )
        number = int(env[source])
    if not 0 <= number < nodes:
        raise UsageError(f"{source} is {number}; with --nodes {nodes}, expected 0 to {nodes - 1}")
    return number


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def read_key(file: Path | None, env: Mapping[str, str], optional: bool) -> bytes:
    """Return the job's key.

    Args:
        file: the user's `--key-file`; None to use HVDKIT_JOB_KEY.
        optional: whether to return an empty key if the user gave none: node 0 then makes a key.

    Raises:
        UsageError: there is no key, or the key is too short.
    """
    try:
        key = env.get(KEY_VARIABLE, "") if file is None else read_named(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"--key-file {file}: {reason}") from error
    key = key.strip()
    advice = "Give every node the same random text, such as `openssl rand -hex 16` prints"
    if not key and optional and file is None:
        return b""
    if not key:
        raise UsageError(f"the job has no key; expected {KEY_VARIABLE} or --key-file. {advice}")
    if len(key) < _SHORTEST_KEY:
        raise UsageError(
            f"the job's key has {len(key)} characters; expected at least {_SHORTEST_KEY}. {advice}"
        )
    return key.encode()


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port of `--rdzv`.

    Raises:
        UsageError: the text is not HOST:PORT.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and _is_number(port) and 0 < int(port) < 65536):
        raise UsageError(f"--rdzv is {text}; expected HOST:PORT, such as node0:29400")
    return host, int(port)
