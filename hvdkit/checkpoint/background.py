"""One write at a time, in a thread, while training goes on."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 (registers its own function first)
import errno
import logging
import threading
import time

from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.storage import newest_run
from hvdkit.checkpoint.store import Store
from hvdkit.checkpoint.writing import Snapshot, Writer
from hvdkit.errors import UsageError

_log = logging.getLogger("hvdkit.checkpoint")

# A write that stores nothing for so long hangs, as on a file server that is gone.
_STILL_SECONDS = 600.0
# Waiting for the write before this one is worth a word.
_WAIT_WORTH_SAYING_SECONDS = 1.0
_LOOK_SECONDS = 5.0

# Errors of a disk or a file server that may be over soon, and the pauses before further attempts.
_PASSING = {
    *(errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.EBUSY),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENOTCONN, errno.ECONNRESET, errno.ECONNREFUSED),
}
_PAUSES = (2.0, 10.0)


class _Write:
    """A step that a thread writes.

    Attributes:
        failure: what went wrong.
        step: its number.
    """

    def __init__(self, writer: Writer, snapshot: Snapshot) -> None:
        self.failure: Exception | None = None
        self.step = snapshot.step
        self._writer = writer
        self._snapshot = snapshot
        self._progress: int | None = None
        self._moved = time.monotonic()
        # A daemon: a write that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="hvdkit-checkpoint", daemon=True)

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: there are too many.
        """
        self._moved = time.monotonic()
        self._thread.start()

    def ended(self, seconds: float) -> bool:
        """Wait until the write has ended, at most for some seconds.

        Raises:
            CheckpointError: nothing was stored for a long time.
        """
        end = time.monotonic() + seconds
        # A thread that an interrupt has kept from starting has ended, too.
        while self._thread.is_alive():
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._thread.join(min(left, _LOOK_SECONDS))
            progress = self._writer.progress
            if progress is None or progress != self._progress:
                self._progress, self._moved = progress, time.monotonic()
            still = time.monotonic() - self._moved
            if still > _STILL_SECONDS and self._thread.is_alive():
                raise CheckpointError(
                    f"step {self._snapshot.step} is being written, and nothing of it was stored "
                    f"for {still / 60:.0f} minutes. Check that the file server still answers."
                )
        return True

    def _run(self) -> None:
        began = time.perf_counter()
        step = self._snapshot.step
        try:
            location = self._try()
        except Exception as error:
            self.failure = error
        except BaseException as error:
            # Of a thread, it would end nothing but the thread.
            self.failure = CheckpointError(f"step {step} was not saved: {error!r}")
        else:
            _log.info("%s written in %.1f s", location, time.perf_counter() - began)

    def _try(self) -> str:
        """Write, again after an error that may be over soon. Returns the step's path or URL."""
        for pause in _PAUSES:
            try:
                return self._writer.write(self._snapshot)
            except CheckpointError as error:
                cause = error.__cause__
                if not isinstance(cause, OSError) or cause.errno not in _PASSING:
                    raise
                _log.warning("%s Trying again in %g s.", error, pause)
            time.sleep(pause)
        return self._writer.write(self._snapshot)


# The writes that a process waits for when it ends.
_writing: set[_Write] = set()


def _finish_writing() -> None:
    """Wait for writes whose manager was not closed, and log those that failed."""
    for write in list(_writing):
        try:
            while not write.ended(_LOOK_SECONDS):
                pass
        except CheckpointError as error:
            _log.error("%s", error)
        if write.failure is not None:
            _log.error("the last save failed: %s", write.failure)


# Uploads need thread pools, which end before the functions of `atexit` are called, in the reverse
# order of their registration here (https://github.com/python/cpython/issues/86813).
getattr(threading, "_register_atexit", atexit.register)(_finish_writing)


class BackgroundWriter:
    """Writes snapshots into a store. For the first rank.

    Args:
        store: where to.
        overwrite: begin a new run where there are steps, unless one of them was restored.
        run: continue this one, which this process has begun.

    Attributes:
        run: the one that is written; None before anything is.
    """

    def __init__(self, store: Store, overwrite: bool, run: int | None = None) -> None:
        self.run = run
        self._store = store
        self._overwrite = overwrite
        self._base: Manifest | None = None
        self._writer: Writer | None = None
        self._write: _Write | None = None
        self._failure: Exception | None = None

    @property
    def failed(self) -> bool:
        """Whether a write has failed, and `finished` has not raised it yet."""
        return self._failure is not None or (
            self._write is not None and self._write.failure is not None
        )

    def restored(self, base: Manifest) -> None:
        """Continue from this step: what is written next belongs to its run."""
        self._base = base
        self.run = base.run

    def begin_run(self) -> None:
        """Let what is written next begin a new run."""
        self.run = self._base = None
        self._overwrite = True
        self.close()

    def open(self) -> None:
        """Take the folder, unless that has been done, and continue from what was restored.

        Raises:
            UsageError: there are steps, and none was restored.
            CheckpointError: as `Store.open_for_writing` and `Writer.continue_from`.
        """
        if self._writer is None:
            begins = self.run is None
            if begins and not self._overwrite:
                self._expect_no_steps()
            # `continue_from` finds the run of a step that was restored.
            run = self.run if self._base is None else None
            self._writer = self._store.open_for_writing(run=run, new_run=begins)
        if self._base is not None:
            self._writer.continue_from(self._base)
            self._base = None
        self.run = self._writer.run

    def _expect_no_steps(self) -> None:
        entries = self._store.entries()
        if entries:
            raise UsageError(
                f"{self._store.location} has checkpoints of an earlier run, the newest of step "
                f"{entries[-1].step}, and none of them was restored. Call restore() first to go on "
                f"there; or give another folder; or pass overwrite=True, which begins a new run in "
                f"this one and deletes nothing of the earlier"
            )

    def try_to_open(self) -> None:
        """`open`, and let `finished` raise what goes wrong."""
        try:
            if not self.failed:
                self.open()
        except Exception as error:
            self._failure = error

    def begin(self, snapshot: Snapshot) -> None:
        """Write a snapshot. `open` and `finished` come before it.

        The snapshot must not change until `finished` is true, which also raises what goes wrong.
        """
        assert self._writer is not None
        assert self._write is None
        # Known before it begins: an interrupt may come at any moment.
        write = self._write = _Write(self._writer, snapshot)
        _writing.add(write)
        try:
            write.start()
        except RuntimeError as error:
            _writing.discard(write)
            self._write = None
            self._failure = CheckpointError(f"step {snapshot.step} was not saved: {error}")

    def finished(self, seconds: float) -> bool:
        """Wait for the write that is going on, if any, at most for some seconds.

        Raises:
            CheckpointError: it failed, or nothing was stored for a long time.
            UsageError: it cannot be written by anyone.
        """
        write = self._write
        if write is not None:
            said = min(seconds, _WAIT_WORTH_SAYING_SECONDS)
            if not write.ended(said):
                _log.info("waiting until step %d is written", write.step)
                if not write.ended(seconds - said):
                    return False
            _writing.discard(write)
            self._write = None
            self._failure = write.failure
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return True

    def delete(self, step: int) -> None:
        """Delete a step of the newest run. After `finished`.

        Raises:
            UsageError: there is no such step.
            CheckpointError: as `Store.open_for_writing`.
        """
        entries = self._store.entries()
        run = newest_run(entries)
        names = [entry.name for entry in entries if (entry.step, entry.run) == (step, run)]
        if not names:
            there = ", ".join(str(entry.step) for entry in entries if entry.run == run)
            raise UsageError(
                f"there is no step {step} in {self._store.location}; expected one of: "
                f"{there or 'none'}"
            )
        if self._writer is not None:
            self._writer.prune(names)
        else:
            with self._store.open_for_writing() as writer:
                writer.prune(names)
        if any(entry.name in names for entry in self._store.entries()):
            raise CheckpointError(
                f"step {step} in {self._store.location} could not be deleted; the log says why"
            )

    def close(self) -> None:
        """Give the folder back, if no write hangs. After `finished`."""
        writer, self._writer = self._writer, None
        if writer is not None and self._write is None:
            writer.close()
