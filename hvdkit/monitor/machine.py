"""Measure the memory of this process, and the utilization of its GPU."""

import contextlib
import functools
import importlib
from typing import Any

import psutil

from hvdkit.monitor import metrics


def measure_machine(gpu: str | None) -> dict[str, float]:
    """Return metric -> value, for the metrics that can be measured on this machine.

    The utilization of the GPU needs the package nvidia-ml-py (`pip install
    'hvdkit[monitor-gpu]'`). Without this package or without a GPU, it is not measured.

    Args:
        gpu: the UUID of this process's GPU, such as "GPU-2b34…"; None without one.
    """
    values = {metrics.RSS: float(psutil.Process().memory_info().rss)}
    nvml, handle = (None, None) if gpu is None else _handle_of(gpu)
    if nvml is not None:
        # The driver may have been reset.
        with contextlib.suppress(Exception):
            values[metrics.GPU] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0
    return values


@functools.cache
def _handle_of(gpu: str) -> tuple[Any, Any]:
    """Return the package pynvml and its handle of a GPU; None without the package or the GPU."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return nvml, nvml.nvmlDeviceGetHandleByUUID(gpu)
    except Exception:
        return None, None
