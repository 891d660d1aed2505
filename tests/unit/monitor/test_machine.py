"""Packages that may be missing, and the use of a GPU (simulated: there is no GPU here)."""

import sys
from types import SimpleNamespace

import pytest

from hvdkit.errors import UsageError
from hvdkit.monitor import MLFlowLogger, PrometheusLogger, TensorBoardLogger, WandbLogger, metrics
from hvdkit.monitor.machine import _handle_of, measure_machine


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [
        (lambda: TensorBoardLogger("folder"), "tensorboard", "tensorboard"),
        (PrometheusLogger, "prometheus_client", "prometheus"),
        (lambda: WandbLogger("project"), "wandb", "wandb"),
        (lambda: MLFlowLogger("experiment"), "mlflow", "mlflow"),
    ],
)
def test_a_missing_package_is_named_with_the_command(monkeypatch, make, package, extra):
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    command = rf"pip install 'hvdkit\[monitor-{extra}\]'"
    with pytest.raises(UsageError, match=rf"{package} is not installed here .*{command}"):
        make()


def test_memory_is_measured_and_a_gpu_without_its_library_is_not(monkeypatch):
    _handle_of.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    measured = measure_machine("GPU-1234")
    assert measured.keys() == {metrics.RSS}
    assert measured[metrics.RSS] > 1e6


class Nvml:
    """A simulation of nvidia-ml-py."""

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle != "GPU-1234":
            raise RuntimeError("no such device")
        return SimpleNamespace(gpu=75)


def test_the_use_of_a_gpu(monkeypatch):
    _handle_of.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    assert measure_machine("GPU-1234")[metrics.GPU] == 0.75
    assert metrics.GPU not in measure_machine("GPU-none")
