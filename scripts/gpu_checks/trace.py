"""Count CUDA calls in a trace of torch.profiler."""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

#: The annotation around the steps that are counted.
MEASURED = "gpu_checks: measured"

_CALLS = ("cuda_runtime", "cuda_driver")
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch")
_SYNCHRONIZATIONS = {
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cuCtxSynchronize",
    # Without Async: these return when the copy is done.
    "cudaMemcpy",
    "cudaMemcpy2D",
}


def record(work: Callable[[], None], cuda: bool) -> list[dict[str, Any]]:
    """Profile `work` and return the trace's events (Chrome's trace event format)."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        with record_function(MEASURED):
            work()
        if cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def count(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count what happens inside the annotation `MEASURED`.

    Threads that run PyTorch's operators (the main thread, autograd's threads) are counted apart
    from others, such as Horovod's background thread, whose waits do not delay the training.

    Returns:
        `launches` (on all threads), `synchronizations` (on PyTorch's threads), `synchronizations
        of other threads`, `copies to the host`, `pageable copies to the host`, `kernels` and
        `operators`.

    Raises:
        ValueError: the trace has no such annotation.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    spans = [e for e in complete if e.get("cat") == "user_annotation" and e["name"] == MEASURED]
    if not spans:
        raise ValueError(f"the trace has no annotation {MEASURED!r}")
    (span,) = spans
    begin, end = float(span["ts"]), float(span["ts"]) + float(span["dur"])
    operators = [e for e in complete if e.get("cat") == "cpu_op"]
    threads = {span["tid"], *(event["tid"] for event in operators)}
    counts: Counter[str] = Counter()
    for event in complete:
        name, category, ts = event["name"], event.get("cat"), float(event["ts"])
        if ts < begin:
            continue
        # The device may still be working after the host has left the annotation.
        if category == "kernel":
            counts["kernels"] += 1
        elif category == "gpu_memcpy" and "DtoH" in name:
            counts["copies to the host"] += 1
            counts["pageable copies to the host"] += "Pageable" in name
        if ts >= end:
            continue
        if category == "cpu_op":
            counts["operators"] += 1
        elif category in _CALLS and name.startswith(_LAUNCHES):
            counts["launches"] += 1
        elif category in _CALLS and name in _SYNCHRONIZATIONS:
            own = event["tid"] in threads
            counts["synchronizations" if own else "synchronizations of other threads"] += 1
    names = (
        "launches",
        "synchronizations",
        "synchronizations of other threads",
        "copies to the host",
        "pageable copies to the host",
        "kernels",
        "operators",
    )
    return {name: counts[name] for name in names}


def per_step(counts: Mapping[str, int], steps: int) -> dict[str, float]:
    """Divide counts by the number of steps."""
    return {name: number / steps for name, number in counts.items()}
