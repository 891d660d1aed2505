"""`ProfileCallback` on real ranks."""

from pathlib import Path

import pytest

from hvdkit.errors import UsageError
from hvdkit.profiling import trace_file
from tests.ranks.folders import shared_folder
from tests.ranks.keras.test_monitor import data, model_of
from tests.ranks.traces import check


@pytest.mark.long
def test_batches_of_fit(hvd):
    with shared_folder(hvd) as folder:
        path = Path(folder) / "trace.json.gz"
        callback = hvd.callbacks.ProfileCallback(path, steps=2, wait=3)
        model = model_of(hvd, bucket_bytes=16)
        model.fit(*data(hvd), batch_size=2, verbose=0, callbacks=[callback])
        assert f"wrote 2 steps of {hvd.size()} ranks" in callback.summary
        check(hvd, trace_file.read(path), [4, 5])
        # Another fit, which is shorter than `wait` and `steps`.
        model.fit(*data(hvd, 8), batch_size=2, verbose=0, callbacks=[callback])
        assert "wrote 1 step of" in callback.summary


def test_invalid_arguments(hvd):
    with pytest.raises(UsageError, match="steps is 0: expected a whole number >= 1"):
        hvd.callbacks.ProfileCallback(steps=0)
