"""The flight recorder of the engine: the last collectives of this rank, for a verdict on a hang.

The engine records every collective (`hvdkit/engine/sources/recorder.h`). With HVDKIT_RECORD_DIR, it
writes the record and the stacks of all threads to `rank-N.json` in that folder:

- if a collective fails;
- if a collective waits, and none has ended for HVDKIT_STALL_TIMEOUT seconds;
- on SIGUSR2, and if the file `request` in the folder is touched.

`hvdkit run` sets the folder. `hvdkit.faults` reads the files.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import IO, Any

from hvdkit.errors import UsageError
from hvdkit.runtime import record_files
from hvdkit.system.owned_folders import TemporaryFolder, is_own

#: The folder for records.
FOLDER_VARIABLE = "HVDKIT_RECORD_DIR"
#: Seconds without progress after which a record is written; 0 for never.
STALL_VARIABLE = "HVDKIT_STALL_TIMEOUT"
STALL_SECONDS = 60.0

_log = logging.getLogger(__name__)
_SIGNAL = signal.SIGUSR2


class Recorder:
    """The engine's flight recorder.

    Args:
        library: the loaded extension of Horovod.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        # faulthandler writes to the descriptor of the last file, so the files stay open.
        self._stacks: list[IO[bytes]] = []
        # `read` stops the writing of records. This starts it again, if `watch` had started it.
        self._watch_again: Callable[[], None] = self.unwatch
        self._watched = False

    def note_init(
        self,
        state: str,
        start: int = 1,
        environ: Mapping[str, str] = os.environ,
        *,
        ended: bool = False,
    ) -> None:
        """Note how far Horovod is, for the launcher. Over MPI, each step may wait forever.

        Args:
            state: `ENTERED`, `CONNECTED` or `LEAVING` of `hvdkit.runtime.record_files`.
            start: the number of the start of Horovod in this process.
            environ: the environment.
            ended: whether the state has ended.
        """
        folder = environ.get(FOLDER_VARIABLE)
        if folder and os.path.isdir(folder):
            note = Path(folder) / state.format(start)
            with contextlib.suppress(OSError):
                note.unlink() if ended else note.touch()

    def describe(self, name: str, text: str) -> None:
        """Set the text that a verdict on a hang shows for a collective.

        Args:
            name: the name of the collective, without the prefix of the framework.
            text: the data of the collective, such as the parameters of a bucket.
        """
        if call := self._function("describe"):
            call(name.encode(), text.encode(errors="replace"))

    def watch(
        self, rank: int, size: int, limit: float, environ: Mapping[str, str] = os.environ
    ) -> None:
        """Start to write records, if HVDKIT_RECORD_DIR is set.

        The first call in a process deletes the records of earlier jobs in the folder: a verdict
        must not combine them with those of this job.

        Args:
            rank: the rank.
            size: the number of ranks.
            limit: the seconds that a collective may wait before the job ends; 0 for no limit.
            environ: the environment.

        Raises:
            UsageError: HVDKIT_STALL_TIMEOUT is not a number of seconds.
        """
        stall = stall_seconds(environ)
        folder = environ.get(FOLDER_VARIABLE)
        self._watch_again = self.unwatch
        if not folder or self._function("write_records") is None:
            return
        try:
            if not self._watched:
                _delete_earlier(Path(folder), rank, size)
            self._watched = True
            stacks = self._register(Path(folder) / record_files.STACKS.format(rank))
        except OSError as error:
            _log.warning(
                "cannot write to %s: %s. A hang will have no record. Set %s to a folder that this "
                "rank can write.",
                folder,
                error.strerror,
                FOLDER_VARIABLE,
            )
            return
        self._watch_again = functools.partial(
            self._write_to, Path(folder), rank, size, stall, limit, stacks
        )
        self._watch_again()

    def read(self, rank: int, timeout: float = 10.0) -> str | None:
        """Return the record of this rank as text, see `hvdkit.faults.records`; None without one.

        It takes about half a second. Meanwhile, no record of a stall is written.

        Args:
            rank: the rank.
            timeout: the seconds to wait for the record.
        """
        if self._function("write_records") is None:
            return None
        with TemporaryFolder("hvdkit-record-") as name:
            folder = Path(name)
            try:
                # The engine shortens the records of large jobs. With a size of 1, it does not.
                self._write_to(folder, rank, 1, 0.0, 0.0, -1)
                (folder / record_files.REQUEST).touch()
                path = folder / record_files.RECORD.format(rank)
                deadline = time.monotonic() + timeout
                while time.monotonic() < deadline:
                    if path.exists():
                        return path.read_text(encoding="utf-8")
                    time.sleep(0.02)
                return None
            finally:
                self._watch_again()

    def _write_to(
        self, folder: Path, rank: int, size: int, stall: float, limit: float, stacks: int
    ) -> None:
        """Write records to a folder."""
        self._library.horovod_hvdkit_write_records(
            os.fsencode(folder),
            rank,
            size,
            socket.gethostname().encode(),
            ctypes.c_double(stall),
            ctypes.c_double(limit),
            stacks,
            int(_SIGNAL),
        )

    def unwatch(self) -> None:
        """Stop writing records. Collectives are still recorded."""
        # The signal's handler stays: without it, a signal that arrives late would end the process.
        self._watch_again = self.unwatch
        if call := self._function("unwatch"):
            call()

    def _register(self, path: Path) -> int:
        """Make the file `path`, and let the signal write all stacks to it.

        Return the descriptor; -1 if the script uses the signal. Then the file stays empty.
        """
        # `getsignal` does not return the handler of faulthandler.
        ignored = signal.SIG_IGN if self._stacks else None
        if signal.getsignal(_SIGNAL) not in (signal.SIG_DFL, ignored):
            path.touch()  # the file also shows that this rank writes records
            return -1  # the script uses the signal
        known = [file for file in self._stacks if file.name == str(path)]
        if known:
            return known[0].fileno()
        # The engine reads what faulthandler writes.
        file = path.open("w+b", buffering=0)
        # When Python ends, faulthandler restores the disposition that it found. The engine still
        # sends the signal then, and the default disposition would end the process.
        if not self._stacks:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(_SIGNAL, signal.SIG_IGN)
        # Unlike a handler in Python, faulthandler's handler also runs while the GIL is held.
        faulthandler.register(_SIGNAL, file, all_threads=True, chain=False)
        self._stacks.append(file)
        return file.fileno()

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"horovod_hvdkit_{name}", None)


def _delete_earlier(folder: Path, rank: int, size: int) -> None:
    """Delete the record of this rank; on rank 0 also those of ranks that this job does not have."""
    for path in folder.glob(record_files.RECORD.format("*")):
        number = path.stem.rpartition("-")[2]
        if number == str(rank) or (rank == 0 and number.isdigit() and int(number) >= size):
            path.unlink(missing_ok=True)


def use_folder(environ: MutableMapping[str, str]) -> None:
    """Make the folder of HVDKIT_RECORD_DIR, and its path absolute.

    Unset the variable if the folder belongs to another user, or if other users can make files in
    it: a link there would lead the files of this rank to any other file of this user.
    """
    if not (folder := environ.get(FOLDER_VARIABLE)):
        return
    try:
        # The script may change its working directory, and another user the links of the path.
        path = Path(folder).resolve()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = "" if is_own(path) else "other users can make files in it, or own it"
    except OSError as error:
        problem = str(error.strerror)
    if not problem:
        environ[FOLDER_VARIABLE] = str(path)
        return
    del environ[FOLDER_VARIABLE]
    _log.warning(
        "cannot write to %s: %s. A hang will have no record. Set %s to a folder of this user in "
        "which only this user can write.",
        *(folder, problem, FOLDER_VARIABLE),
    )


def stall_seconds(environ: Mapping[str, str]) -> float:
    """Return the seconds without progress after which a record is written; 0 for never.

    Raises:
        UsageError: HVDKIT_STALL_TIMEOUT is not a number of seconds.
    """
    text = environ.get(STALL_VARIABLE)
    if text is None:
        disabled = environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0")
        return 0.0 if disabled else STALL_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError(
            f"{STALL_VARIABLE} is {text!r}: expected a number of seconds, or 0 to write no record "
            f"of a stall"
        )
    return seconds
