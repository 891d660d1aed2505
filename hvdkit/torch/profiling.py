"""`hvd.profile`: one trace of all ranks, with PyTorch's profiler."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.profiling import clocks, events
from hvdkit.profiling.events import Event
from hvdkit.profiling.profile import BaseProfile
from hvdkit.system.owned_folders import TemporaryFolder
from hvdkit.torch import runtime
from hvdkit.torch.collectives import TorchCollectives

# The name of the events that connect the profiler's clock with the system's.
_MARK = "hvdkit.clock"
# The number of marks at the beginning. Several, because the first marks take long.
_MARKS = 10


def profile(
    path: str | os.PathLike[str] = "trace.json.gz",
    *,
    steps: int = 5,
    wait: int = 10,
    **options: Any,
) -> BaseProfile:
    """Return a context in which some steps are recorded on all ranks, for one trace.

    The trace has the operations of `torch.profiler`, the steps, and all collectives of each rank,
    on the clock of rank 0. Rank 0 writes it, for https://ui.perfetto.dev and chrome://tracing.
    Every rank calls this function. Then every rank calls `step()` of the result after each step of
    the optimizer, or loops over `batches(loader)` of the result.
    See docs/performance.md.

    With HOROVOD_TIMELINE=DYNAMIC, the trace also has Horovod's timeline of rank 0. On a GPU, each
    recorded step is an NVTX range, for Nsight Systems.

    Args:
        path: the file for the trace, which is compressed with gzip. An existing file is replaced.
        steps: the number of steps to record.
        wait: the number of steps before the recorded ones. The first steps of a job are slower.
        options: arguments of `torch.profiler.profile`, such as `with_stack=True`.

    Raises:
        UsageError: an argument is invalid; on every rank, if the file cannot be written.
        RankMismatchError: on every rank, if the arguments differ between ranks.

    Example:
        with hvd.profile("trace.json.gz", steps=5, wait=10) as profile:
            for x, y in profile.batches(loader):
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
    """
    if not mpi_ops.is_initialized():
        raise UsageError("Horovod is not initialised: call hvd.init() before this")
    return BaseProfile(
        TorchCollectives(mpi_ops.global_process_set),
        Profiler(options),
        runtime.recorder,
        mpi_ops._basics,
        path,
        steps,
        wait,
        [f"options: {sorted(options)}"],
    )


class Profiler:
    """`hvdkit.profiling.profile.Framework` with `torch.profiler`.

    Args:
        options: arguments of `torch.profiler.profile`.

    Raises:
        UsageError: an option is unknown, or belongs to `hvd.profile`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        for name in ("schedule", "on_trace_ready"):
            if name in options:
                raise UsageError(f"hvd.profile has no {name}: pass steps and wait instead")
        try:
            self._profiler = torch.profiler.profile(**options)
        except TypeError as error:
            raise UsageError(
                f"hvd.profile was given {sorted(options)}: expected arguments of "
                f"torch.profiler.profile, which raised: {error}"
            ) from error
        # What ends the recording, and the current step.
        self._recording = contextlib.ExitStack()
        self._step = contextlib.ExitStack()
        # The system's time before and after each mark.
        self._marks: list[clocks.Round] = []

    def start(self) -> None:
        """See `Framework`.

        Raises:
            HvdkitError: another profiler of PyTorch runs in this thread. PyTorch would end it, and
                would then crash.
        """
        if torch.autograd._profiler_enabled():
            raise HvdkitError(
                "another profiler of PyTorch, or another hvd.profile, is recording. End it first"
            )
        self._profiler.start()
        self._recording.callback(self._profiler.stop)
        self._recording.callback(self.step_ends)
        for _ in range(_MARKS):
            self._mark()

    def step_begins(self, number: int) -> None:
        """See `Framework`. The name is that of `torch.profiler`, which other tools look for."""
        self._step.enter_context(torch.profiler.record_function(f"ProfilerStep#{number}"))
        if torch.cuda.is_available():
            self._step.enter_context(torch.cuda.nvtx.range(f"step {number}"))

    def step_ends(self) -> None:
        self._step.close()
        self._mark()

    def stop(self) -> None:
        self._recording.close()

    def events(self, rank: int) -> list[Event]:
        """See `Framework`. The process numbers of the events belong to this rank only."""
        with TemporaryFolder("hvdkit-profile-") as folder:
            file = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(file))
            # The events may need hundreds of MB, and the script may keep this object.
            del self._profiler
            recorded = json.loads(file.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        marks = [
            (_nanoseconds(event["ts"]), _nanoseconds(event["ts"]) + _nanoseconds(event["dur"]))
            for event in recorded
            if event.get("name") == _MARK and event.get("cat") == "user_annotation"
        ]
        return _of_rank(recorded, rank, clocks.difference(self._marks, marks))

    def _mark(self) -> None:
        before = clocks.now()
        with torch.profiler.record_function(_MARK):
            pass
        self._marks.append((before, clocks.now()))


def _of_rank(recorded: list[Event], rank: int, difference: int) -> list[Event]:
    """Return events with the process numbers of a rank and nanoseconds of the rank's clock."""
    processes: dict[int, int] = {}
    kept = []
    for event in recorded:
        pid = event.get("pid")
        # The profiler's own events have a text as process.
        if not isinstance(pid, int) or event.get("name") == _MARK or "ph" not in event:
            continue
        place = processes.setdefault(pid, events.FRAMEWORK + len(processes))
        event = {**event, "pid": events.process_number(rank, place)}
        if event["ph"] == "M":
            event.pop("ts", None)
            if event["name"] == "process_sort_index":
                event["args"] = {"sort_index": event["pid"]}
            elif event["name"] == "process_labels":
                continue
            elif event["name"] == "process_name":
                what = "torch" if pid == os.getpid() else f"GPU {pid}"
                event["args"] = {"name": f"rank {rank}: {what}"}
        elif "ts" in event:
            event["ts"] = _nanoseconds(event["ts"]) + difference
            if "dur" in event:
                event["dur"] = _nanoseconds(event["dur"])
            if "id" in event:  # the id of an arrow must be unique in the whole trace
                event["id"] = f"{rank}.{event['id']}"
        kept.append(event)
    return kept


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1e3)
