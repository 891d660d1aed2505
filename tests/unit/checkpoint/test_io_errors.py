"""An error of any file operation on the first rank ends a call on all ranks, or on none.

Otherwise the other ranks would wait in the next collective.
"""

import errno
import functools
import os
import threading

import pytest

from hvdkit.checkpoint import background
from hvdkit.checkpoint.posix import disk, lock
from hvdkit.errors import HvdkitError
from tests.unit.checkpoint.test_manager import make, on_ranks, state

OPERATIONS = (
    *("open", "close", "listdir", "mkdir", "rename", "unlink", "rmdir", "link", "lstat"),
    *("fstat", "stat", "fsync", "write", "pwrite", "pread", "preadv"),
)
#: A short run fails one of so many operations.
STRIDE = 41


class Operations:
    """Counts the file operations of the first rank, and lets one of them fail.

    Args:
        fails: the number of the operation that fails; -1 for none.
        number: the error.
    """

    def __init__(self, patch, fails, number):
        self.count = 0
        self.failed = ""
        self._fails, self._number = fails, number
        for name in OPERATIONS:
            patch.setattr(os, name, functools.partial(self._call, name, getattr(os, name)))

    def _call(self, name, function, *args, **options):
        if threading.current_thread().name not in ("first", "hvdkit-checkpoint"):
            return function(*args, **options)
        number, self.count = self.count, self.count + 1
        if number != self._fails:
            return function(*args, **options)
        self.failed = f"{name} {args}"
        if name == "close":
            function(*args)
        raise OSError(self._number, os.strerror(self._number))


def calls_of(collectives, folder):
    """Call each method of a manager. Return what each call did."""
    if collectives.rank == 0:
        threading.current_thread().name = "first"
    done = []

    def attempt(method, *args, **options):
        try:
            found = method(*args, **options)
            done.append((method.__name__, str(getattr(found, "step", found))))
        except HvdkitError as error:
            done.append((method.__name__, type(error).__name__))

    for _ in range(2):
        manager = make(collectives, folder, state(1), every_steps=2)
        attempt(manager.restore)
        for step in (1, 2):
            attempt(manager.maybe_save, step)
        attempt(manager.save, 3, wait=True)
        attempt(manager.delete, 2)
        attempt(manager.latest)
        attempt(manager.restore, strict=False)
        attempt(manager.restore, only=("model",))
        attempt(manager.save, 4)
        attempt(manager.close)
    return done


def run(folder, fails, number):
    """Return what all ranks did, and the operations, of which one fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "_PAUSES", ())
        patch.setattr(disk, "_READ_AGAIN_SECONDS", 0.0)
        # After an error, the next attempt waits for the lease that is left.
        patch.setattr(lock, "LEASE_TIMEOUT_SECONDS", 0.1)
        operations = Operations(patch, fails, number)
        of_ranks = on_ranks(lambda collectives: calls_of(collectives, folder), size=2)
    return of_ranks, operations


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.long), STRIDE])
def test_an_error_of_one_operation_is_an_error_on_all_ranks_or_on_none(tmp_path, stride):
    _, undisturbed = run(tmp_path / "none", -1, 0)
    assert undisturbed.count > 100
    for fails in range(0, undisturbed.count, stride):
        number = (errno.EIO, errno.EACCES, errno.ENOSPC)[fails // stride % 3]
        (first, second), operations = run(tmp_path / str(fails), fails, number)
        assert operations.failed
        assert first == second, operations.failed
