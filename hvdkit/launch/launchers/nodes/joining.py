"""A node other than 0: it connects to node 0, and then runs as an agent of the launcher there."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from hvdkit.errors import HvdkitError
from hvdkit.launch.agent.echo import Echo
from hvdkit.launch.control import readers
from hvdkit.launch.hosts.hosts import own_addresses
from hvdkit.launch.launchers.nodes.handshake import authenticate_to_node_0, machine, shown
from hvdkit.launch.launchers.nodes.node_agent import NodeAgent
from hvdkit.launch.launchers.nodes.settings import NodeSettings
from hvdkit.system.plain_files import open_regular, parse_json
from hvdkit.system.sealed import STEP_SECONDS, Refused, SealedConnection, WrongKey

#: Seconds of waiting after which the user gets a message.
QUIET_SECONDS = 5.0

_RETRY_SECONDS = 0.5
_LONGEST_FILE = 100_000

End = TypeVar("End")


def join(settings: NodeSettings, command: Sequence[str], directory: str) -> int:
    """Run this node's ranks. Returns the job's exit status.

    Args:
        settings: this node's.

    Raises:
        HvdkitError: node 0 cannot be reached, or refuses this node.
    """
    with _connected(settings) as connection:
        overrides = {
            "command": list(command),
            "directory": directory,
            "path": os.environ.get("PATH"),
        }
        agent = NodeAgent(connection, connection, overrides, Echo())
        agent.run()
    if agent.outcome is None:
        readers.say("lost node 0; see its output for the reason")
        return 1
    status, report = int(agent.outcome["status"]), str(agent.outcome["report"])
    if status:
        readers.say(f"the job ended with status {status}{f': {report}' if report else ''}")
    return status


@contextmanager
def _connected(settings: NodeSettings) -> Iterator[SealedConnection]:
    """Connect to node 0, with retries."""
    deadline = time.monotonic() + settings.timeout
    say_at = time.monotonic() + QUIET_SECONDS
    problem = "it has not been tried"
    while time.monotonic() < deadline:
        try:
            addresses, key = _addresses_and_key(settings)
            authenticate = partial(authenticate_to_node_0, settings=settings, key=key)
            connection = connect_to_any(addresses, authenticate)
        except OSError as error:
            problem = error.strerror or str(error)
        except WrongKey as error:
            problem = f"it and node {settings.node} do not have the same key"
            if settings.file is None:  # a file may be that of an earlier job
                raise HvdkitError(f"node 0 at {settings.rendezvous}: {problem}") from error
        except Refused as error:
            raise HvdkitError(
                f"node 0 at {settings.rendezvous} refuses node {settings.node}: {shown(str(error))}"
            ) from error
        else:
            with connection:
                yield connection
            return
        if time.monotonic() > say_at:
            say_at = float("inf")
            readers.say(f"waiting for node 0 at {settings.rendezvous}: {problem}")
        time.sleep(_RETRY_SECONDS)
    raise HvdkitError(
        f"could not connect to node 0 at {settings.rendezvous} within {settings.timeout:g} s "
        f"(--start-timeout): {problem}. Check that `hvdkit run --node-rank 0` runs there, and that "
        f"no firewall blocks this node"
    )


def _addresses_and_key(settings: NodeSettings) -> tuple[list[tuple[str, int]], bytes]:
    """Return the addresses of node 0, and the job's key.

    Raises:
        OSError: the file does not exist yet.
        HvdkitError: another user may have written the file.
    """
    if settings.address is not None:
        return [settings.address], settings.key
    assert settings.file is not None
    addresses, key = read_file(settings.file)
    return addresses, settings.key or key


def read_file(path: Path) -> tuple[list[tuple[str, int]], bytes]:
    """Return the addresses of node 0 and the key in an `--rdzv-file`.

    If node 0 runs on another machine, addresses that this machine has, too, are left out. Those are
    127.0.0.1 and the addresses of bridges such as docker0. Other users of this machine may listen
    there.

    Raises:
        OSError: the file does not exist, or node 0 has not written it: it may be a link, or a pipe.
        HvdkitError: it belongs to another user, who could start programs here as a false node 0,
            or other users may read or change it.
    """
    with open(open_regular(path), encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise HvdkitError(
                f"--rdzv-file {path} belongs to user {status.st_uid}, with mode "
                f"{status.st_mode & 0o777:o}; expected user {os.getuid()} and mode 600, as node 0 "
                f"writes it. Choose a file in a folder of your own"
            )
        try:
            content = parse_json(file.read(_LONGEST_FILE))
            port = int(content["port"])
            addresses = [str(address) for address in content["addresses"]]
            if content["machine"] != machine():
                own = own_addresses()
                addresses = [a for a in addresses if not (a in own or _is_loopback(a))]
            return [(address, port) for address in addresses], str(content["key"]).encode()
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise OSError(f"{path} was not written by node 0") from error


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def connect_to_any(
    addresses: Sequence[tuple[str, int]],
    authenticate: Callable[[socket.socket], End],
    timeout: float = STEP_SECONDS,
) -> End:
    """Connect to the first of these addresses where node 0 answers. Another program may, too.

    Args:
        authenticate: returns the connection in another form. Raises OSError or `WrongKey` if the
            other end is not node 0.
        timeout: seconds for each connection.

    Raises:
        OSError: node 0 answers at none of the addresses.
        WrongKey: the same, and another node 0 answers.
    """
    problem: OSError | WrongKey = OSError("it has no address that this machine does not have, too")
    for address in addresses:
        try:
            with ExitStack() as unless_connected:
                connection = socket.create_connection(address, timeout=timeout)
                unless_connected.callback(connection.close)
                end = authenticate(connection)
                unless_connected.pop_all()
                return end
        except OSError as error:
            problem = problem if isinstance(problem, WrongKey) else error
        except WrongKey as error:
            problem = error
        except (UnicodeError, OverflowError) as error:
            problem = OSError(f"{address[0]!r} cannot be a host: {error}")
    raise problem
