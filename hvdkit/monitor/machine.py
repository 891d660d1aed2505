"""Measure the memory of this process, and the utilization of its GPU."""

import contextlib
import importlib
import os
from typing import Any

import psutil

from hvdkit.monitor import metrics


class Machine:
    """Measure this process and its GPU.

    The utilization of the GPU needs the package nvidia-ml-py (`pip install
    'hvdkit[monitor-gpu]'`). Without this package or without a GPU, it is not measured.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._nvml: Any = None
        self._handle: Any = None
        self._device: str | None = None

    def watch_gpu(self, uuid: str) -> None:
        """Measure the GPU with this UUID, such as "GPU-2b34…"."""
        if uuid == self._device:
            return
        self._device = uuid
        with contextlib.suppress(Exception):
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)

    def measure(self) -> dict[str, float]:
        """Return metric -> value, for the metrics that can be measured on this machine."""
        if self._process.pid != os.getpid():
            self._process = psutil.Process()
        values = {metrics.RSS: float(self._process.memory_info().rss)}
        if self._handle is not None:
            # The driver may have been reset.
            with contextlib.suppress(Exception):
                rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
                values[metrics.GPU] = rates.gpu / 100.0
        return values
