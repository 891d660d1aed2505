"""Compute the metrics of TorchMetrics over all ranks.

TorchMetrics gathers the states of a metric with torch.distributed. In a job that does not use
torch.distributed, `compute()` would return a different value on each rank, of its own samples.

Example:
    accuracy = compute_over_ranks(torchmetrics.classification.MulticlassAccuracy(10))
    accuracy.update(predictions, targets)  # on each rank, with its own samples
    accuracy.compute()  # the accuracy over the samples of all ranks
"""

from typing import Any, TypeVar

import torch
from torchmetrics import Metric

import hvdkit.torch as hvd

Module = TypeVar("Module", bound=torch.nn.Module)


def compute_over_ranks(module: Module) -> Module:
    """Make all metrics of a module compute their value over the ranks of the job.

    All ranks must call `compute()` of such a metric, in the same order. Metrics with a
    `dist_sync_fn` of their own are not changed.

    Args:
        module: a metric, a `MetricCollection`, or any module that has metrics.

    Returns:
        `module`.
    """
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = gather
            metric.distributed_available_fn = _is_distributed
    return module


def gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Return the tensors of all ranks: a `dist_sync_fn` for TorchMetrics. All ranks call it.

    Args:
        tensor: a tensor, with the same number of dimensions on all ranks. The sizes may differ.
        group: None, or a `hvd.ProcessSet`.
    """
    process_set = hvd.global_process_set if group is None else group
    shape = torch.tensor(tensor.shape, dtype=torch.int64)
    flat = tensor.detach().contiguous().reshape(-1)
    with torch.no_grad():
        shapes = hvd.allgather(
            shape.unsqueeze(0), name="torchmetrics.shapes", process_set=process_set
        )
        values = hvd.allgather(flat, name="torchmetrics.values", process_set=process_set)
    sizes = [int(each.prod()) for each in shapes]
    parts = [
        part.reshape(each.tolist()) for part, each in zip(values.split(sizes), shapes, strict=True)
    ]
    # Keep the autograd graph of this rank's tensor, like the gather function of TorchMetrics.
    parts[process_set.rank()] = tensor
    return parts


def _is_distributed() -> bool:
    return bool(hvd.is_initialized() and hvd.size() > 1)
