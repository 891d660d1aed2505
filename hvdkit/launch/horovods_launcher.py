"""Run Horovod's own launcher: `python -m hvdkit.launch.horovods_launcher WORDS...`.

Horovod's launcher unpickles data of anyone who reaches its ports (CVE-2024-10190), and passes the
whole environment of the ranks on their command lines, which all users of a host can read. Here, its
pickles can contain plain data and Horovod's messages only, and a command line contains no variable
that a rank inherits and none that looks like a secret.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from hvdkit.launch.control.environment import forwarded

_MESSAGES = ("Request", "Response", "Signal")


class _Messages(pickle.Unpickler):
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


def protect() -> None:
    """Replace the parts of Horovod's launcher that believe strangers. Not for ranks."""
    from horovod.runner import gloo_run
    from horovod.runner.common.util import codec, network
    from horovod.runner.elastic.rendezvous import PUT_WORKER_ADDRESSES
    from horovod.runner.http.http_server import KVStoreHandler
    from horovod.runner.util import network as hosts

    codec.cloudpickle = network.cloudpickle = SimpleNamespace(
        loads=_loads, dumps=network.cloudpickle.dumps
    )
    value_of, command_of = KVStoreHandler._get_value, gloo_run._slot_info_to_command_fn

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


if __name__ == "__main__":
    protect()
    from horovod.runner.launch import run_commandline

    run_commandline()
