"""Answer the launcher's questions about this host, for `preflight`. Runs in the agent."""

from __future__ import annotations

import contextlib
import platform
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import psutil

from hvdkit.launch import open_files
from hvdkit.launch.network import free_port

#: The packages that all hosts must have in the same version.
PACKAGES = ("hvdkit", "horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "numpy")

_CONNECT_SECONDS = 5.0
_GPU_SECONDS = 20
# A connection without data for this time is dropped.
_SILENT_SECONDS = 60.0
_CHUNK = bytes(1 << 20)


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
        "disk": _free(directory),
        "memory": psutil.virtual_memory().available,
        "gpus": gpus(),
        "open_files": open_files.hard_limit(),
    }


def _own_name() -> dict[str, str]:
    name = socket.gethostname()
    try:
        return {"name": name, "address": socket.gethostbyname(name)}
    except OSError as error:
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
            query, capture_output=True, text=True, timeout=_GPU_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return ["nvidia-smi hangs"]
    return (answer.stdout if answer.returncode == 0 else "nvidia-smi fails").strip().splitlines()


def clock() -> float:
    """Return this host's time, in seconds since the epoch."""
    return time.time()


# The sockets that `listen` has opened, and their threads.
_listeners: list[tuple[socket.socket, threading.Thread]] = []


def listen(address: str) -> int:
    """Accept connections at `address` and read their data, until `stop_listening`.

    Returns:
        The port.
    """
    server = socket.create_server((address, 0), backlog=1024)
    thread = threading.Thread(target=_serve, args=(server,), daemon=True)
    thread.start()
    _listeners.append((server, thread))
    port: int = server.getsockname()[1]
    return port


def stop_listening() -> None:
    """Close the sockets of `listen`."""
    while _listeners:
        server, thread = _listeners.pop()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        server.close()
        thread.join(_CONNECT_SECONDS)


def _serve(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return  # closed
        connection.settimeout(_SILENT_SECONDS)
        threading.Thread(target=_drain, args=(connection,), daemon=True).start()


def _drain(connection: socket.socket) -> None:
    buffer = bytearray(len(_CHUNK))
    with connection:
        try:
            while connection.recv_into(buffer):
                pass
            connection.sendall(b"!")  # all data has arrived
        except OSError:
            return  # the other side has disconnected


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
