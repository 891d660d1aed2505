"""A callback that profiles some batches of `model.fit` on all ranks."""

import importlib
import os
from collections.abc import Sequence
from typing import Any

from hvdkit.keras import backend
from hvdkit.keras.fit.collective_callbacks import LastCallback
from hvdkit.profiling.profile import BaseProfile

_adapter: Any = importlib.import_module(f"hvdkit.{backend.NAME}.profiling")


class ProfileCallback(LastCallback):
    """Record some batches of `fit` on all ranks, and write one trace.

    Pass a `ProfileCallback` to `fit` on every rank. The trace has the batches of each rank, all its
    collectives, and the operations that the profiler of TensorFlow or PyTorch records. All times
    are those of rank 0's clock. Rank 0 writes the trace; open it with https://ui.perfetto.dev or
    chrome://tracing. See docs/performance.md.

    A step is a batch; with `steps_per_execution`, the batches that are executed together.

        model.fit(data, callbacks=[hvd.callbacks.ProfileCallback("trace.json.gz")])
    """

    def __init__(
        self, path: str | os.PathLike[str] = "trace.json.gz", *, steps: int = 5, wait: int = 10
    ) -> None:
        """
        Args:
            path: the file for the trace, which is compressed with gzip. Each `fit` replaces it.
            steps: the number of steps to record.
            wait: the number of steps of `fit` before the first recorded step.

        Raises:
            UsageError: an argument is invalid.
        """
        super().__init__()
        self._make = lambda: _adapter.profile(path, steps=steps, wait=wait)
        self._profile: BaseProfile | None = None
        self._make()  # checks the arguments

    @property
    def summary(self) -> str:
        """A text about the trace of the last `fit`; empty before the trace is written."""
        return self._profile.summary if self._profile else ""

    def fit_begins(self, callbacks: Sequence[Any]) -> None:  # noqa: ARG002
        """Compare the settings of all ranks. A collective."""
        if self._profile is not None:
            # Keras does not tell callbacks that an exception has ended `fit`.
            self._profile.abandon()
        self._profile = self._make()
        self._profile.__enter__()

    def batches_end(self, batches: range) -> None:  # noqa: ARG002
        """Begin the recording after `wait` batches, and end it after `steps` more.

        A collective when the recording begins or ends.
        """
        assert self._profile is not None
        self._profile.step()

    def fit_ends(self) -> None:
        """If `fit` ends before `wait + steps` batches, write the trace. This is a collective."""
        assert self._profile is not None
        self._profile.__exit__(None, None, None)
