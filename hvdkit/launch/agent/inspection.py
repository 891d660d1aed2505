"""Answer the launcher's questions about this host, for `preflight`. Runs in the agent."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import psutil

from hvdkit.errors import HvdkitError
from hvdkit.launch.agent import open_files
from hvdkit.launch.control.listener import Listener
from hvdkit.launch.control.network import free_port
from hvdkit.launch.control.reachability import FULL_MESH_HOSTS

#: The packages that all hosts must have in the same version.
PACKAGES = ("hvdkit", "horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "numpy")

_CONNECT_SECONDS = 5.0
_GPU_SECONDS = 20
# A connection without data for this time is dropped.
_SILENT_SECONDS = 60.0
_CHUNK = bytes(1 << 20)
# Anyone can connect to a port of `listen`, so the buffer of a connection is small.
_BUFFER_BYTES = 1 << 18


def examine(directory: str) -> dict[str, Any]:
    """Return the state of this host, for a job in `directory`."""
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # the launcher compares hosts: a package may be missing on all
    return {
        "versions": versions,
        "own_name": _own_name(),
        "shared_memory": _free("/dev/shm"),
        "shared_memory_writable": os.access("/dev/shm", os.W_OK | os.X_OK),
        "disk": _free(directory),
        "memory": psutil.virtual_memory().available,
        "gpus": gpus(),
        "open_files": open_files.hard_limit(),
    }


def _own_name() -> dict[str, str]:
    name = socket.gethostname()
    try:
        return {"name": name, "address": socket.gethostbyname(name)}
    except (OSError, UnicodeError) as error:  # UnicodeError: the name is too long for DNS
        return {"name": name, "error": str(error)}


def _free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def gpus() -> list[str]:
    """Return each GPU's name and driver version.

    If `nvidia-smi` fails, return one text that says so, such as `nvidia-smi hangs`.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            query,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GPU_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ["nvidia-smi hangs"]
    return (answer.stdout if answer.returncode == 0 else "nvidia-smi fails").strip().splitlines()


def clock() -> float:
    """Return this host's time, in seconds since the epoch."""
    return time.time()


_listeners: list[Listener[None]] = []


def listen(address: str) -> int:
    """Accept connections at `address` and discard their data, until `stop_listening`.

    The connections are not authenticated, but `Listener` limits their number.

    Returns:
        The port.
    """
    server = socket.create_server((address, 0), backlog=1024)
    port: int = server.getsockname()[1]
    _listeners.append(Listener(server, FULL_MESH_HOSTS, _drain))
    return port


def stop_listening() -> None:
    """Close the ports of `listen`, and their connections.

    Raises:
        HvdkitError: connections were closed because this host may start no more threads. The other
            hosts find that a connection fails.
    """
    problem = ""
    while _listeners:
        listener = _listeners.pop()
        listener.close()
        problem = problem or listener.problem
    if problem:
        raise HvdkitError(problem)


def _drain(connection: socket.socket) -> None:
    connection.settimeout(_SILENT_SECONDS)
    buffer = bytearray(_BUFFER_BYTES)
    while connection.recv_into(buffer):
        pass
    connection.sendall(b"!")  # all data has arrived


def connect(targets: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Try to connect to each of `targets`.

    Args:
        targets: name -> address, port, and the number of bytes to send. If this number is not 0,
            the port must be one of `listen`, which confirms that all bytes have arrived.

    Returns:
        Name -> error; empty after a success.
    """

    def attempt(target: Sequence[Any]) -> str:
        address, port, size = target
        connected = False
        try:
            with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as connection:
                connected = True
                if size:
                    connection.sendall(bytes(size))
                    connection.shutdown(socket.SHUT_WR)
                    return "" if connection.recv(1) else "the connection was closed"
                return ""
        except TimeoutError:
            return f"connected, but {size:,} bytes did not arrive" if connected else "no answer"
        except OSError as error:
            return error.strerror or str(error)

    with ThreadPoolExecutor(max_workers=64) as pool:
        return dict(zip(targets, pool.map(attempt, targets.values()), strict=True))


def send(address: str, port: int, seconds: float) -> float:
    """Send data to a port of `listen` on another host. Return the bytes per second."""
    with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as connection:
        connection.settimeout(seconds + 30)
        started, sent = time.monotonic(), 0
        while time.monotonic() < started + seconds:
            connection.sendall(_CHUNK)
            sent += len(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        return sent / (time.monotonic() - started)


#: The functions that answer the launcher's questions, by the name of the question.
QUESTIONS: Mapping[str, Callable[..., Any]] = {
    question.__name__: question
    for question in (examine, clock, listen, stop_listening, connect, send, free_port)
}
