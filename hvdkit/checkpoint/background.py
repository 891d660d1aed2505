"""One write at a time, in a thread, while training goes on."""

import atexit
import logging
import threading
import time

from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.store import Store
from hvdkit.checkpoint.writing import Snapshot, Writer

_log = logging.getLogger("hvdkit.checkpoint")

# A write that takes longer hangs, as on a file server that is gone. Shorter than what Horovod
# grants the ranks that wait for the first one meanwhile.
_WRITE_SECONDS = 1500.0
# Waiting for the write before this one is worth a word.
_WAIT_WORTH_SAYING_SECONDS = 1.0


class BackgroundWriter:
    """Writes snapshots into a store. For the first rank.

    Args:
        store: where to.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writer: Writer | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    @property
    def failed(self) -> bool:
        """Whether a write has failed, and `finish` has not told yet."""
        return self._failure is not None

    def open(self) -> None:
        """Take the folder, unless that has been done.

        Raises:
            CheckpointError: as `Store.open_for_writing`.
        """
        if self._writer is None:
            self._writer = self._store.open_for_writing()

    def try_to_open(self) -> None:
        """`open`, and let `finish` tell what goes wrong."""
        try:
            if not self.failed:
                self.open()
        except Exception as error:
            self._failure = error

    def begin(self, snapshot: Snapshot) -> None:
        """Write a snapshot. `open` and `finish` come before it; it must not change until the next
        `finish`, which also tells what goes wrong."""
        assert self._writer is not None
        assert self._thread is None
        self._thread = threading.Thread(
            target=self._write, args=[self._writer, snapshot], name="hvdkit-checkpoint", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            self._failure = CheckpointError(f"step {snapshot.step} was not saved: {error}")
            return
        # A process that ends meanwhile lets it come to its end, which a daemon's would not; but
        # one that is no daemon would keep the process for ever if it hangs.
        atexit.register(self._thread.join, _WRITE_SECONDS)

    def _write(self, writer: Writer, snapshot: Snapshot) -> None:
        began = time.perf_counter()
        try:
            path = writer.write(snapshot)
        except Exception as error:
            self._failure = error
        else:
            _log.info("%s written in %.1f s", path, time.perf_counter() - began)

    def finish(self) -> None:
        """Wait for the write that is going on, if any.

        Raises:
            CheckpointError: it failed, or does not end.
            UsageError: it cannot be written by anyone.
        """
        thread = self._thread
        if thread is not None:
            thread.join(_WAIT_WORTH_SAYING_SECONDS)
            if thread.is_alive():
                _log.info("waiting until the checkpoint before this one is written")
                thread.join(_WRITE_SECONDS)
            if thread.is_alive():
                raise CheckpointError(
                    f"a checkpoint is being written since {_WRITE_SECONDS / 60:.0f} minutes: is "
                    f"the file server still there?"
                )
            atexit.unregister(thread.join)
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Give the folder back, if no write hangs. After `finish`."""
        writer, self._writer = self._writer, None
        if writer is not None and self._thread is None:
            writer.close()
