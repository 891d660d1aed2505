"""Run Horovod's own launcher: `python -m hvdkit.launch.horovods_launcher WORDS...`.

Horovod's launcher unpickles data of anyone who reaches its ports (CVE-2024-10190), and passes the
whole environment of the ranks on their command lines, which all users of a host can read. Here, its
pickles can contain plain data and Horovod's messages only, and a command line contains no variable
that a rank inherits and none that looks like a secret. The rendezvous answers at the address of the
ranks only, and no process of another user of this machine.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
import sys
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hvdkit.launch.control.environment import forwarded

_MESSAGES = ("Request", "Response", "Signal")


# Not `pickle.Unpickler`, in C: its memo has as many places as a pickle's highest number, 64 GB.
class _Messages(pickle._Unpickler):
    """Unpickle plain data and the messages of Horovod's launcher."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of messages.

        Raises:
            UnpicklingError: it is another object. A name with a dot could lead to any module.
        """
        if module.startswith("horovod.runner.") and name.endswith(_MESSAGES) and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is not a message of Horovod's launcher")


def _loads(data: bytes) -> Any:
    return _Messages(io.BytesIO(data)).load()


def _is_of_other_user(connection: socket.socket, own_addresses: Container[str]) -> bool:
    """Return whether another user of this machine has made a connection (TCP over IPv4).

    A connection that its maker has closed has no user, and counts as that of another one.

    Args:
        own_addresses: the addresses of this machine. Those of loopback may be missing.
    """

    def shown(address: tuple[str, int]) -> str:  # as in /proc/net/tcp
        number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
        return f"{number:08X}:{address[1]:04X}"

    there = connection.getpeername()
    if there[0] not in own_addresses and not there[0].startswith("127."):
        return False
    ends = [shown(there), shown(connection.getsockname())]
    for line in Path("/proc/net/tcp").read_text().splitlines():
        _, *addresses, _, _, _, _, user, _, inode = line.split()[:10]
        if addresses == ends:
            return inode == "0" or user != str(os.geteuid())
    return True


def protect() -> None:
    """Replace the parts of Horovod's launcher that believe strangers. Not for ranks."""
    from horovod.runner import gloo_run
    from horovod.runner.common.util import codec, network
    from horovod.runner.elastic.rendezvous import PUT_WORKER_ADDRESSES
    from horovod.runner.http.http_server import KVStoreHandler, RendezvousHTTPServer
    from horovod.runner.util import network as hosts

    codec.cloudpickle = network.cloudpickle = SimpleNamespace(
        loads=_loads, dumps=network.cloudpickle.dumps
    )
    value_of, command_of = KVStoreHandler._get_value, gloo_run._slot_info_to_command_fn
    address_of = hosts.get_driver_ip

    def get_driver_ip(nics: Any) -> str:
        # Before this, no rank has been started, and no one is answered.
        RendezvousHTTPServer.address = address_of(nics)
        return str(RendezvousHTTPServer.address)

    def verify_request(server: Any, connection: socket.socket, _: Any) -> bool:
        with contextlib.suppress(OSError):  # it is closed
            at = connection.getsockname()[0]
            return at == getattr(server, "address", None) and not _is_of_other_user(
                connection, hosts.get_local_host_addresses()
            )
        return False

    def get_value(handler: Any, scope: str, key: str) -> Any:
        # A secret with which the rank would unpickle anything. Only the launcher uses it.
        return None if scope == PUT_WORKER_ADDRESSES else value_of(handler, scope, key)

    def command(run_command: str, env: Mapping[str, str]) -> Callable[[Any], str]:
        def of_slot(slot: Any) -> str:
            address = hosts.resolve_host_address(slot.hostname)
            if address in hosts.get_local_host_addresses():
                sent = {n: value for n, value in env.items() if os.environ.get(n) != value}
            else:
                sent = forwarded(env)
            text: str = command_of(run_command, sent)(slot)
            return text

        return of_slot

    KVStoreHandler._get_value, gloo_run._slot_info_to_command_fn = get_value, command
    hosts.get_driver_ip, RendezvousHTTPServer.verify_request = get_driver_ip, verify_request


if __name__ == "__main__":
    protect()
    from horovod.runner.launch import run_commandline

    run_commandline()
