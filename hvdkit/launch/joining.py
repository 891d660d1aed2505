"""A node other than 0 of a job whose nodes come together by themselves (`hvdkit run --nodes`).

It connects to node 0, and is then an agent of the launcher there.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.launch.agent import Agent
from hvdkit.launch.handshake import STEP_SECONDS, WrongKey, introduce
from hvdkit.launch.membership import Membership
from hvdkit.launch.output import Output

#: After so many seconds of waiting the user is told.
QUIET_SECONDS = 5.0

_RETRY_SECONDS = 0.5
_LONGEST_FILE = 100_000


def join(
    mine: Membership, command: Sequence[str], directory: str, say: Callable[[str], None]
) -> int:
    """Take part in a job as one of its nodes other than 0. Returns the job's exit status.

    Args:
        mine: this node's part.
        command: what its ranks run.
        directory: where.
        say: tells the user something at once.

    Raises:
        HvdkitError: node 0 cannot be reached, or does not take this node.
    """
    with _connected(mine, say) as line:
        own = {"command": list(command), "directory": directory, "path": os.environ.get("PATH")}
        # The selector takes a descriptor once, and this one is for both ways.
        reports = os.dup(line.fileno())
        outputs: list[Output] = []

        def echo(size: int) -> Output:
            outputs.append(Output(size, shown=range(size), say=say))
            return outputs[0]

        agent = Agent(line.fileno(), reports, own=own, echo=echo)
        try:
            agent.run()
        finally:
            os.close(reports)
            for output in outputs:
                output.close()
    if agent.outcome is None:
        say("node 0 is gone; it says why, if it still can")
        return 1
    status, report = int(agent.outcome["status"]), str(agent.outcome["report"])
    if status:
        say(f"the job ended with status {status}{f': {report}' if report else ''}")
    return status


@contextmanager
def _connected(mine: Membership, say: Callable[[str], None]) -> Iterator[socket.socket]:
    deadline = time.monotonic() + mine.timeout
    said_at = time.monotonic() + QUIET_SECONDS
    problem = "it has not been tried"
    while time.monotonic() < deadline:
        try:
            addresses, key = _where(mine)
            line = line_to(addresses)
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            with line:
                try:
                    introduce(line, mine, key)
                except OSError as error:
                    problem = error.strerror or str(error)
                except WrongKey as error:
                    if mine.file is None:
                        raise
                    problem = str(error)  # the file may be of a job before
                else:
                    yield line
                    return
        if time.monotonic() > said_at:
            said_at = float("inf")
            say(f"waiting for node 0 at {mine}: {problem}")
        time.sleep(_RETRY_SECONDS)
    raise HvdkitError(
        f"node 0 was not there within {mine.timeout:g} s (--start-timeout), at {mine}: {problem}. "
        f"Does `hvdkit run --node-rank 0` run there, and does a firewall let this node through?"
    )


def _where(mine: Membership) -> tuple[list[tuple[str, int]], bytes]:
    """Return the addresses of node 0, and the job's key.

    Raises:
        OSError: the file is not there yet.
        HvdkitError: the file may be somebody else's.
    """
    if mine.address is not None:
        return [mine.address], mine.key
    assert mine.file is not None
    addresses, key = read_file(mine.file)
    return addresses, mine.key or key


def read_file(path: Path) -> tuple[list[tuple[str, int]], bytes]:
    """Return the addresses and the key in an `--rdzv-file`.

    Raises:
        OSError: it is not there, or is not what node 0 writes.
        HvdkitError: it belongs to another user, who could run programs here, or others may change
            it.
    """
    with path.open(encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise HvdkitError(
                f"--rdzv-file {path} belongs to user {status.st_uid}, with mode "
                f"{status.st_mode & 0o777:o}; expected user {os.getuid()} and mode 600, as node 0 "
                f"writes it. Choose a file in a folder of your own"
            )
        try:
            where = json.loads(file.read(_LONGEST_FILE))
            port = int(where["port"])
            return [(str(a), port) for a in where["addresses"]], str(where["key"]).encode()
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise OSError(f"{path} is not what node 0 writes") from error


def line_to(addresses: Sequence[tuple[str, int]], timeout: float = STEP_SECONDS) -> socket.socket:
    """Connect to the first of these addresses that answers.

    Raises:
        OSError: none does.
    """
    problem: OSError = OSError("there is no address")
    for address in addresses:
        try:
            return socket.create_connection(address, timeout=timeout)
        except OSError as error:
            problem = error
        except (UnicodeError, OverflowError) as error:
            problem = OSError(f"{address[0]!r} cannot be a host: {error}")
    raise problem
