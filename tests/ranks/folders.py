"""A folder that all ranks share."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def shared_folder(hvd: Any) -> Iterator[Path]:
    """Yield one folder for all ranks, which is removed at the end."""
    made = tempfile.mkdtemp(prefix="hvdkit-test-") if hvd.rank() == 0 else None
    try:
        yield Path(hvd.broadcast_object(made, 0))
        for rank in range(hvd.size()):  # until no rank uses the folder
            hvd.broadcast_object(None, rank)
    finally:
        if made:
            shutil.rmtree(made)
