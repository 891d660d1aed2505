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

from hvdkit.errors import HvdkitError
from hvdkit.launch.agent import Agent
from hvdkit.launch.arrivals import notice_silence
from hvdkit.launch.handshake import STEP_SECONDS, Refused, introduce
from hvdkit.launch.membership import Membership
from hvdkit.launch.output import Output

_RETRY_SECONDS = 0.5


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
    with _connected(mine) as line:
        notice_silence(line)
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
    status = int(agent.outcome["status"])
    if status:
        first = str(agent.outcome["report"]).partition("\n")[0]
        say(f"the job ended with status {status}: {first}")
    return status


@contextmanager
def _connected(mine: Membership) -> Iterator[socket.socket]:
    deadline = time.monotonic() + mine.timeout
    problem = "it has not been tried"
    while time.monotonic() < deadline:
        try:
            addresses, key = _where(mine)
            line = _line_to(addresses)
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            with line:
                try:
                    introduce(line, mine, key)
                except OSError as error:
                    problem = error.strerror or str(error)
                except Refused as error:
                    if mine.file is None:
                        raise
                    problem = str(error)  # the file may be of a job before
                else:
                    yield line
                    return
        time.sleep(_RETRY_SECONDS)
    raise HvdkitError(
        f"node 0 was not there within {mine.timeout:g} s (--start-timeout), at {mine}: {problem}. "
        f"Does `hvdkit run --node-rank 0` run there, and does a firewall let this node through?"
    )


def _where(mine: Membership) -> tuple[list[tuple[str, int]], bytes]:
    """Return the addresses of node 0, and the job's key.

    Raises:
        OSError: the file is not there yet.
    """
    if mine.address is not None:
        return [mine.address], mine.key
    assert mine.file is not None
    try:
        where = json.loads(mine.file.read_text(encoding="utf-8"))
        addresses = [(str(address), int(where["port"])) for address in where["addresses"]]
        return addresses, mine.key or str(where["key"]).encode()
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"{mine.file} is not what node 0 writes") from error


def _line_to(addresses: Sequence[tuple[str, int]]) -> socket.socket:
    problem: OSError = OSError("there is no address")
    for address in addresses:
        try:
            return socket.create_connection(address, timeout=STEP_SECONDS)
        except OSError as error:
            problem = error
    raise problem
