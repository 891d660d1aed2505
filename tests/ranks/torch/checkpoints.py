"""One save, or one restore, with a checkpointer of its own; and a folder that all ranks share."""

import contextlib
import shutil
import tempfile
from pathlib import Path


def save_once(hvd, folder, **items):
    """Save step 1."""
    with hvd.Checkpointer(folder, **items) as checkpointer:
        checkpointer.save(1)


def restore_once(hvd, folder, strict=True, **items):
    """Restore the newest step."""
    with hvd.Checkpointer(folder, **items) as checkpointer:
        return checkpointer.restore(strict=strict)


@contextlib.contextmanager
def shared_folder(hvd):
    """One folder for all ranks, removed at the end of the test."""
    made = tempfile.mkdtemp(prefix="hvdkit-checkpoint-") if hvd.rank() == 0 else None
    path = Path(hvd.broadcast_object(made, 0))
    try:
        yield path
        hvd.barrier()
    finally:
        if hvd.rank() == 0:
            shutil.rmtree(path)
