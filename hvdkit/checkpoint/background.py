"""Write snapshots in a thread, one at a time, while training continues."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 (registers its own function first)
import errno
import logging
import threading
import time
from collections.abc import Callable

from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.step_files import Snapshot
from hvdkit.checkpoint.storage import newest_run
from hvdkit.checkpoint.store import Store
from hvdkit.checkpoint.writing import Writer
from hvdkit.errors import UsageError

_log = logging.getLogger("hvdkit.checkpoint")

# Seconds without progress after which a write counts as hung, as on a lost file server.
_NO_PROGRESS_SECONDS = 600.0
# Log that a save waits for the previous write after this many seconds.
_LOG_AFTER_SECONDS = 1.0
_POLL_SECONDS = 5.0
_CALLER_SECONDS = 0.001

# Errors of a disk or file server that may be temporary, and the pauses before further attempts.
_TEMPORARY = {
    *(errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.EBUSY),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENOTCONN, errno.ECONNRESET, errno.ECONNREFUSED),
}
_PAUSES = (2.0, 10.0)


class _Write:
    """A step that a thread writes.

    Attributes:
        failure: the error of the write.
        step: the number of the step.
    """

    def __init__(self, writer: Writer, snapshot: Snapshot) -> None:
        self.failure: Exception | None = None
        self.step = snapshot.step
        self._writer = writer
        self._snapshot: Snapshot | None = snapshot
        self._progress: int | None = None
        self._moved = time.monotonic()
        # A daemon: a write that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="hvdkit-checkpoint", daemon=True)

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: there are too many threads.
        """
        self._moved = time.monotonic()
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def ended(self, seconds: float) -> bool:
        """Wait at most `seconds` for the end of the write; return whether it has ended.

        Raises:
            CheckpointError: nothing was stored for a long time.
        """
        end = time.monotonic() + seconds
        # If an interrupt came before the thread started, the write counts as ended.
        while self._thread.is_alive():
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._thread.join(min(left, _POLL_SECONDS))
            progress = self._writer.progress
            if progress is None or progress != self._progress:
                self._progress, self._moved = progress, time.monotonic()
            still = time.monotonic() - self._moved
            if still > _NO_PROGRESS_SECONDS and self._thread.is_alive():
                raise CheckpointError(
                    f"step {self.step} is being written, and nothing of it was stored "
                    f"for {still / 60:.0f} minutes. Check that the file server still answers."
                )
        return True

    def _run(self) -> None:
        # Let the caller return first. It would wait for the interpreter's lock for 5 ms or more.
        time.sleep(_CALLER_SECONDS)
        began = time.perf_counter()
        step = self.step
        assert self._snapshot is not None
        try:
            location = self._try(self._snapshot)
        except Exception as error:
            self.failure = error
        except BaseException as error:
            # In a thread, this would end only the thread.
            self.failure = CheckpointError(f"step {step} was not saved: {error!r}")
        else:
            _log.info("%s written in %.1f s", location, time.perf_counter() - began)
        # Free the snapshot's memory now: the next call may be hours later.
        self._snapshot = None

    def _try(self, snapshot: Snapshot) -> str:
        """Write, and retry after temporary errors. Return the step's path or URL."""
        for pause in _PAUSES:
            try:
                return self._writer.write(snapshot)
            except CheckpointError as error:
                cause = error.__cause__
                if not isinstance(cause, OSError) or cause.errno not in _TEMPORARY:
                    raise
                _log.warning("%s Trying again in %g s.", error, pause)
            time.sleep(pause)
        return self._writer.write(snapshot)


# Writes that the process waits for at exit.
_writing: set[_Write] = set()


def _finish_writing() -> None:
    """Wait for the writes of managers that were not closed, and log failures."""
    for write in list(_writing):
        try:
            while not write.ended(_POLL_SECONDS):
                pass
        except CheckpointError as error:
            _log.error("%s", error)
        if write.failure is not None:
            _log.error("the last save failed: %s", write.failure)


# Uploads use thread pools, which Python ends before it calls the functions of `atexit`. Functions
# registered here run first (https://github.com/python/cpython/issues/86813).
getattr(threading, "_register_atexit", atexit.register)(_finish_writing)


class BackgroundWriter:
    """Write snapshots into a store, on the first rank.

    Args:
        store: the store.
        overwrite: begin a new run if there are steps and none was restored.
        run: a run that this process has begun, to continue; None: see `open`.

    Attributes:
        run: the current run; None before the first write.
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
        """Whether a write has failed and `finished` has not raised the error yet."""
        return self._failure is not None or (
            self._write is not None and self._write.failure is not None
        )

    def restored(self, base: Manifest) -> None:
        """Continue the run of a restored step."""
        self._base = base
        self.run = base.run

    def continue_newest(self) -> None:
        """Continue the newest run, whatever its steps are.

        Raises:
            CheckpointError: the store cannot be read.
        """
        self.run = newest_run(self._store.entries())

    def begin_run(self) -> None:
        """Let the next write begin a new run."""
        self.run = self._base = None
        self._overwrite = True
        self.close()

    def open(self) -> None:
        """Open the store for writing, if it is not open, and continue from the restored step.

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

    def open_at(self, run: int, on_stored: Callable[[], None]) -> Writer:
        """Open the store, if it is not open, and write into this run from now on.

        For steps that may be lost at any time: they are no progress of the job. Steps of later
        runs, and incomplete steps, are deleted.

        Args:
            run: the run.
            on_stored: called in the thread that writes, after each step.

        Raises:
            CheckpointError: see `Store.open_for_writing`.
        """
        if self._writer is None:
            self._writer = self._store.open_for_writing()
            self._writer.on_progress = on_stored
            entries = self._store.entries()
            self._writer.prune([e.name for e in entries if e.run > run or e.error is not None])
        self._writer.write_into(run)
        self.run = run
        return self._writer

    def _expect_no_steps(self) -> None:
        entries = self._store.entries()
        if entries:
            raise UsageError(
                f"{self._store.location} has checkpoints of an earlier run, the newest of step "
                f"{entries[-1].step}, and none of them was restored. Call restore() first to "
                f"resume it, or continue_at(step) for an archive; or give another folder; or pass "
                f"overwrite=True, which begins a new run in this folder and deletes nothing of the "
                f"earlier run"
            )

    def continue_run(self, run: int) -> None:
        """Continue a run, whatever steps the store has of it.

        For the run of a restored step that is in the memory of the hosts only.
        """
        self._base = None
        self.run = run

    def try_to_open(self) -> None:
        """Call `open`. If it fails, keep the error; `finished` raises it later."""
        try:
            if not self.failed:
                self.open()
        except Exception as error:
            self._failure = error

    @property
    def busy(self) -> bool:
        """Whether a write is running."""
        return self._write is not None and self._write.running

    def settled(self, seconds: float) -> bool:
        """Wait at most `seconds` until no write is running. A failure stays for `finished`.

        Raises:
            CheckpointError: the write made no progress for 10 minutes.
        """
        return self._write is None or self._write.ended(seconds)

    def begin(self, snapshot: Snapshot) -> None:
        """Start to write a snapshot, after `open` and `finished`.

        The snapshot must not change until `finished` returns True. If the write fails, `finished`
        raises the error.
        """
        assert self._writer is not None
        assert self._write is None
        # Registered before it starts: an interrupt may come at any time.
        write = self._write = _Write(self._writer, snapshot)
        _writing.add(write)
        try:
            write.start()
        except RuntimeError as error:
            _writing.discard(write)
            self._write = None
            self._failure = CheckpointError(f"step {snapshot.step} was not saved: {error}")

    def finished(self, seconds: float) -> bool:
        """Wait at most `seconds` for the current write. Return whether no write is running.

        Raises:
            CheckpointError: the write failed or made no progress for 10 minutes.
            UsageError: the snapshot cannot be written.
        """
        write = self._write
        if write is not None:
            said = min(seconds, _LOG_AFTER_SECONDS)
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
        """Delete a step of the newest run. Call `finished` first.

        Raises:
            UsageError: there is no such step.
            CheckpointError: see `Store.open_for_writing`.
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
        """Release the store, unless a write hangs. Call `finished` first.

        An error is only logged, because everything is saved, and the other ranks do not have it.
        """
        writer, self._writer = self._writer, None
        if writer is not None and self._write is None:
            try:
                writer.close()
            except Exception as error:
                _log.warning(
                    "%s was not released: %s. The next job may wait until the lease expires",
                    *(self._store.location, error),
                )
