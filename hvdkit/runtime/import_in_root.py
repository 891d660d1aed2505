"""Import a module while the current folder is `/`, without a change of folder for other threads.

UCX, which Open MPI loads with Horovod's extension, reads a file `ucx.conf` in the current folder
when it is loaded. If this folder is of another user, the file could name libraries of that user,
which UCX then loads.
"""

import contextvars
import ctypes
import importlib
import os
import threading

_CLONE_FS = 0x200


def import_in_root(name: str) -> None:
    """Import a module in a thread whose current folder is `/`.

    If the system refuses a thread with a folder of its own, as some containers do, nothing is
    imported.

    Raises:
        BaseException: an error of the import.
    """
    raised: list[BaseException] = []

    def work() -> None:
        try:
            if ctypes.CDLL(None).unshare(_CLONE_FS) == 0:
                os.chdir("/")
                importlib.import_module(name)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=[work])
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
