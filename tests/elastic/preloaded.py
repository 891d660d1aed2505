"""Start ranks quickly: fork them from a process that has imported a framework.

The launcher starts this file as the rank. This file asks the process of `serve` to fork the rank,
and ends with the rank's status. It imports only small modules: it starts in a few milliseconds.
"""

import array
import contextlib
import json
import os
import signal
import socket
import sys

#: The variable with the address of the process of `serve`.
ADDRESS = "PRELOADED_ADDRESS"


def _rank() -> None:
    """Ask for a rank with the environment and the output of this process, and wait for its end."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[ADDRESS])
        request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode() + b"\n"
        files = array.array("i", [0, 1, 2])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
        sent = connection.sendmsg([request], ancillary)
        connection.sendall(request[sent:])
        with connection.makefile() as answers:
            pid = int(answers.readline())

            def forward(number: int, _: object) -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, forward)
            status = int(answers.readline())
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # SIGKILL
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def serve(address: str, modules: list[str]) -> None:
    """Import modules, and fork a rank for each connection. Ends with the process's parent."""
    import importlib

    for name in modules:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        listener.settimeout(1)
        while os.getppid() == parent:
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                if os.fork() == 0:
                    listener.close()
                    _attend(connection)
                connection.close()


def _attend(connection: socket.socket) -> None:
    """Fork one rank, and send its status. Kill it if its client ends."""
    import time

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.setblocking(True)
    request, files, *_ = socket.recv_fds(connection, 1 << 20, 3)
    while not request.endswith(b"\n"):
        request += connection.recv(1 << 20)
    arguments, environment, folder = json.loads(request)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(arguments, environment, folder, files)
    for number in files:
        os.close(number)
    try:
        connection.sendall(f"{pid}\n".encode())
        connection.setblocking(False)
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                connection.sendall(f"{status}\n".encode())
                os._exit(0)
            with contextlib.suppress(BlockingIOError):
                if not connection.recv(1):
                    break
            time.sleep(0.02)
    except OSError:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _become(arguments: list[str], environment: dict[str, str], folder: str, files: list) -> None:
    """Run a script in this process, and end the process as the interpreter would."""
    import atexit
    import runpy
    import threading

    for target, number in enumerate(files):
        os.dup2(number, target)
        os.close(number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = arguments
    status = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _rank()
