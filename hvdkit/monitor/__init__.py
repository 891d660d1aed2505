"""Measure the steps of a training on all ranks, and write the metrics to loggers.

hvdkit.torch and hvdkit.tensorflow have a class `Monitor`, and hvdkit.keras has a callback. Every
few steps, they pass one record to each logger:

    from hvdkit.monitor import ConsoleLogger, JSONLLogger, TensorBoardLogger

    loggers = [ConsoleLogger(), JSONLLogger("run/metrics.jsonl"), TensorBoardLogger("run")]
    with hvd.Monitor(loggers, every=10) as monitor:
        for x, y in monitor.batches(loader):
            ...
            optimizer.step()
            monitor.step({"loss": loss}, samples=len(x))

`read` reads the file of a `JSONLLogger`.
"""

from hvdkit.monitor.history import History, read
from hvdkit.monitor.loggers.console import ConsoleLogger
from hvdkit.monitor.loggers.jsonl import JSONLLogger
from hvdkit.monitor.loggers.logger import Logger
from hvdkit.monitor.loggers.mlflow_run import MLFlowLogger
from hvdkit.monitor.loggers.prometheus import PrometheusLogger
from hvdkit.monitor.loggers.tensorboard import TensorBoardLogger
from hvdkit.monitor.loggers.weights_and_biases import WandbLogger
from hvdkit.monitor.records import Record, Run, Slowest, Statistic

__all__ = [
    "ConsoleLogger",
    "History",
    "JSONLLogger",
    "Logger",
    "MLFlowLogger",
    "PrometheusLogger",
    "Record",
    "Run",
    "Slowest",
    "Statistic",
    "TensorBoardLogger",
    "WandbLogger",
    "read",
]
