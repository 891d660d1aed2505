"""`hvd.profile`: one trace of all ranks, with TensorFlow's profiler."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.profiling import clocks, events
from hvdkit.profiling.events import Event
from hvdkit.profiling.profile import BaseProfile
from hvdkit.system.owned_folders import TemporaryFolder
from hvdkit.tensorflow import runtime
from hvdkit.tensorflow.collectives import TensorFlowCollectives

# The name of the events that connect the profiler's clock with the system's.
_MARK = "hvdkit.clock"
# The number of marks at the beginning: several, because the first marks are slow.
_MARKS = 10


def profile(
    path: str | os.PathLike[str] = "trace.json.gz", *, steps: int = 5, wait: int = 10
) -> BaseProfile:
    """Return a context in which some steps are recorded on all ranks, for one trace.

    The trace has the steps of each rank, all its collectives, and the operations that `tf.profiler`
    records. All times are those of rank 0's clock. Rank 0 writes the trace; open it with
    https://ui.perfetto.dev or chrome://tracing. Every rank calls `profile`. It then either calls
    `step` after each step of the optimizer, or loops over `batches`. See docs/performance.md.

    For `model.fit`, use `hvd.callbacks.ProfileCallback` of hvdkit.keras.

    With HOROVOD_TIMELINE=DYNAMIC, the trace also has Horovod's timeline of rank 0.

    Args:
        path: the file for the trace, which is compressed with gzip. An existing one is replaced.
        steps: the number of steps to record.
        wait: the number of steps before the first recorded step. The first steps of a program are
            slower than later steps.

    Raises:
        UsageError: an argument is invalid; on every rank, if the file cannot be written.
        RankMismatchError: on every rank, if the arguments differ between ranks.

    Example:
        with hvd.profile("trace.json.gz", steps=5, wait=10) as profile:
            for x, y in profile.batches(dataset):
                train_step(x, y)
    """
    if not mpi_ops.is_initialized():
        raise UsageError("Horovod is not initialised: call hvd.init() before this")
    return BaseProfile(
        TensorFlowCollectives(mpi_ops.global_process_set),
        Profiler(),
        runtime.recorder,
        mpi_ops._basics,
        path,
        steps,
        wait,
    )


class Profiler:
    """`hvdkit.profiling.profile.Framework` with `tf.profiler`."""

    def __init__(self) -> None:
        # What ends the recording, and the current step.
        self._recording = contextlib.ExitStack()
        self._step = contextlib.ExitStack()
        # The system's time before and after each mark.
        self._marks: list[clocks.Round] = []

    @functools.cached_property
    def _folder(self) -> TemporaryFolder:
        return TemporaryFolder("hvdkit-profile-")

    def start(self) -> None:
        """See `Framework`."""
        tf.profiler.experimental.start(self._folder.name)
        self._recording.callback(tf.profiler.experimental.stop)
        self._recording.callback(self.step_ends)
        for _ in range(_MARKS):
            self._mark()

    def step_begins(self, number: int) -> None:
        """See `Framework`."""
        self._step.enter_context(tf.profiler.experimental.Trace("step", step_num=number, _r=1))

    def step_ends(self) -> None:
        """See `Framework`."""
        self._step.close()
        self._mark()

    def stop(self) -> None:
        """See `Framework`."""
        self._recording.close()

    def events(self, rank: int) -> list[Event]:
        """See `Framework`."""
        try:
            planes = [
                plane
                for file in Path(self._folder.name).rglob("*.xplane.pb")
                for plane in _parse(file.read_bytes()).planes
            ]
        finally:
            self._folder.cleanup()
        spans = [span for plane in planes for span in _spans(plane)]
        marks = [(begin, end) for _, name, begin, end in spans if name == _MARK]
        change = clocks.difference(self._marks, marks)
        return [
            event for k, plane in enumerate(planes) for event in _events(plane, rank, k, change)
        ]

    def _mark(self) -> None:
        before = clocks.now()
        with tf.profiler.experimental.Trace(_MARK):
            pass
        self._marks.append((before, clocks.now()))


def _parse(data: bytes) -> Any:
    try:
        from tensorflow.tsl.profiler.protobuf import xplane_pb2
    except ImportError as error:
        raise HvdkitError(
            f"TensorFlow {tf.__version__} has no class to read the files of its profiler "
            f"({error}): use a version that has tensorflow.tsl.profiler.protobuf.xplane_pb2"
        ) from error
    return xplane_pb2.XSpace.FromString(data)


def _spans(plane: Any) -> Iterator[tuple[Any, str, int, int]]:
    """Yield thread, name, beginning and end of each event with a duration, in nanoseconds."""
    for line in plane.lines:
        for event in line.events:
            if event.duration_ps:
                begin = line.timestamp_ns + event.offset_ps // 1000
                end = line.timestamp_ns + (event.offset_ps + event.duration_ps) // 1000
                yield line, plane.event_metadata[event.metadata_id].name, begin, end


def _events(plane: Any, rank: int, number: int, change: int) -> Iterator[Event]:
    """Yield the events of a device."""
    pid = events.process_number(rank, number)
    threads: dict[int, int] = {}
    for line, name, begin, end in _spans(plane):
        if name == _MARK:
            continue
        if line.id not in threads:
            threads[line.id] = len(threads)
            yield from events.name_thread(pid, threads[line.id], line.name)
        yield events.complete(name, pid, threads[line.id], begin + change, end + change)
    if threads:
        yield from events.name_process(
            rank, events.FRAMEWORK + number, f"rank {rank}: {plane.name}"
        )
