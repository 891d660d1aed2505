"""A node's part in a job of nodes without ssh (`hvdkit run --nodes`), as the user says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import UsageError

#: Has the job's key, the same on every node.
KEY_VARIABLE = "HVDKIT_JOB_KEY"

#: Seconds that nodes get to come: images are pulled, and machines start.
START_SECONDS = 600.0

# Where systems that start the same command on every node say which node it is.
_RANK_VARIABLES = ("JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK", "NODE_RANK", "SLURM_NODEID")
_SHORTEST_KEY = 16


@dataclass(frozen=True)
class Membership:
    """One node's part in a job, as the user said it.

    Attributes:
        nodes: how many there are.
        node: which one this is, from 0.
        slots: how many ranks it takes.
        address: where node 0 listens: host and port; None where a file says so.
        file: where node 0 writes its address; None where the user has said it.
        key: the job's; empty where node 0 writes one into the file.
        size: the number of all ranks, as the user said it; None where nobody has.
        timeout: seconds that nodes get to come.
    """

    nodes: int
    node: int
    slots: int
    address: tuple[str, int] | None
    file: Path | None
    key: bytes
    size: int | None = None
    timeout: float = START_SECONDS

    def __str__(self) -> str:
        if self.address is None:
            return f"--rdzv-file {self.file}"
        return "--rdzv {}:{}".format(*self.address)


def node_rank(given: int | None, nodes: int, env: Mapping[str, str]) -> int:
    """Return which node this is.

    Args:
        given: the user's `--node-rank`; None for what a batch system's variable says.
        nodes: how many there are.
        env: this process's environment.

    Raises:
        UsageError: nobody says it, or there is no such node.
    """
    source, number = "--node-rank", given
    if number is None:
        source = next((name for name in _RANK_VARIABLES if _is_number(env.get(name, ""))), "")
        if not source:
            raise UsageError(
                f"--nodes {nodes}: which of them is this? Give --node-rank, from 0 to {nodes - 1} "
                f"({', '.join(_RANK_VARIABLES)} are not set)"
            )
        number = int(env[source])
    if not 0 <= number < nodes:
        raise UsageError(f"{source} is {number}; with --nodes {nodes}, expected 0 to {nodes - 1}")
    return number


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def read_key(file: Path | None, env: Mapping[str, str], may_lack: bool) -> bytes:
    """Return the job's key.

    Args:
        file: the user's `--key-file`; None for the variable HVDKIT_JOB_KEY.
        env: this process's environment.
        may_lack: whether node 0 may make one.

    Raises:
        UsageError: there is none, or it is too short.
    """
    try:
        key = env.get(KEY_VARIABLE, "") if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"--key-file {file}: {reason}") from error
    key = key.strip()
    advice = "Give every node the same random text, such as `openssl rand -hex 16` prints"
    if not key and may_lack and file is None:
        return b""
    if not key:
        raise UsageError(f"there is no key for the job ({KEY_VARIABLE}, --key-file). {advice}")
    if len(key) < _SHORTEST_KEY:
        raise UsageError(
            f"the job's key has {len(key)} characters; expected at least {_SHORTEST_KEY}. {advice}"
        )
    return key.encode()


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port of `--rdzv`.

    Raises:
        UsageError: it is not HOST:PORT.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and _is_number(port) and 0 < int(port) < 65536):
        raise UsageError(f"--rdzv {text}: expected HOST:PORT, such as node0:29400")
    return host, int(port)
