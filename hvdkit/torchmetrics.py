"""Compute the metrics of TorchMetrics over all ranks.

TorchMetrics gathers the states of a metric with torch.distributed. In a job that does not use
torch.distributed, `compute()` would return a different value on each rank, of its own samples.

Example:
    accuracy = compute_over_ranks(torchmetrics.classification.MulticlassAccuracy(10))
    accuracy.update(predictions, targets)  # on each rank, with its own samples
    accuracy.compute()  # the accuracy over the samples of all ranks
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

import hvdkit.torch as hvd
from hvdkit.agreement.consistency import check_consistency
from hvdkit.errors import UsageError
from hvdkit.torch.collectives import TorchCollectives

Module = TypeVar("Module", bound=torch.nn.Module)

#: The largest number of dimensions of a state.
_MOST_DIMENSIONS = 8
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)


def compute_over_ranks(module: Module, process_set: Any = None) -> Module:
    """Make all metrics of a module compute their value over the ranks of the job.

    All ranks must call `compute()` of such a metric, in the same order; another order, or lists of
    other lengths that are not concatenated, are a `RankMismatchError` on all ranks. Metrics with a
    `dist_sync_fn` of their own are not changed.

    Args:
        module: a metric, a `MetricCollection`, or any module that has metrics.
        process_set: a `hvd.ProcessSet`, to compute over its ranks only; None for all ranks. Only
            the ranks of the process set may call `compute()`.

    Returns:
        `module`.
    """
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn in (None, gather):
            metric.dist_sync_fn = gather
            metric.distributed_available_fn = _is_distributed
            metric._sync_dist = functools.partial(_synchronize, metric)
            if process_set is not None:
                metric.process_group = process_set
    return module


def _synchronize(metric: Metric, dist_sync_fn: Any = None, process_group: Any = None) -> None:
    """Gather the states of a metric, after a comparison of what the ranks will gather.

    A list that is not concatenated is gathered tensor by tensor. Otherwise, the surplus tensors of
    a rank would meet those of other states.
    """
    process_set = process_group or metric.process_group or hvd.global_process_set
    if process_set.included():
        check_consistency(
            TorchCollectives(process_set),
            [f"metric {type(metric).__name__}", *_describe_states(metric)],
            "a metric",
            "Compute the same metrics in the same order on all ranks. If a state is a list without "
            "a reduction, call update() as often on all ranks.",
        )
    type(metric)._sync_dist(metric, dist_sync_fn or gather, process_group)


def _describe_states(metric: Metric) -> list[str]:
    """Return a line for each state, with the number of its tensors that are gathered."""
    lines = []
    for name, reduction in metric._reductions.items():
        value = getattr(metric, name)
        count = len(value) if isinstance(value, list) and reduction != dim_zero_cat else 1
        lines.append(f"its state {name!r} has {count} tensors")
    return lines


def gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Return the tensors of all ranks: a `dist_sync_fn` for TorchMetrics. All ranks call it.

    Args:
        tensor: a tensor with the same dtype and number of dimensions on all ranks. The sizes may
            differ. A rank without values may have another dtype and number of dimensions.
        group: a `hvd.ProcessSet`; None for all ranks.

    Raises:
        UsageError: on every rank, if the tensors have different dtypes or numbers of dimensions;
            on a rank that is not in the process set.
    """
    process_set = hvd.global_process_set if group is None else group
    if not process_set.included():
        raise UsageError(
            f"a metric of the process set with ranks {process_set.ranks} was computed on rank "
            f"{hvd.rank()}: call compute() on the ranks of the process set only"
        )
    with torch.no_grad():
        described = hvd.allgather(
            _describe(tensor), name="torchmetrics.shapes", process_set=process_set
        ).tolist()
        shapes = [row[2 : 2 + row[1]] for row in described]
        dtype = _common_dtype(described, shapes, process_set.ranks)
        flat = tensor.detach().to(dtype).contiguous().reshape(-1)
        values = hvd.allgather(flat, name="torchmetrics.values", process_set=process_set)
    sizes = [math.prod(shape) for shape in shapes]
    parts = [part.reshape(shape) for part, shape in zip(values.split(sizes), shapes, strict=True)]
    # Keep the autograd graph of this rank's tensor, like the gather function of TorchMetrics.
    parts[process_set.rank()] = tensor.to(dtype)
    return parts


def _describe(tensor: torch.Tensor) -> torch.Tensor:
    """Return the dtype, the number of dimensions and the shape as one row of numbers."""
    dtype = _DTYPES.index(tensor.dtype) if tensor.dtype in _DTYPES else -1
    shape = [*tensor.shape, *[0] * _MOST_DIMENSIONS][:_MOST_DIMENSIONS]
    return torch.tensor([[dtype, tensor.ndim, *shape]], device="cpu")


def _common_dtype(
    described: list[list[int]], shapes: list[list[int]], ranks: Sequence[int]
) -> torch.dtype:
    """Return the dtype of the tensors that have values.

    Raises:
        UsageError: on all ranks, if the tensors do not fit together.
    """
    if any(row[0] < 0 or row[1] > _MOST_DIMENSIONS for row in described):
        raise UsageError(
            f"a state of a metric is a complex tensor, or has more than {_MOST_DIMENSIONS} "
            f"dimensions: expected numbers or booleans in at most {_MOST_DIMENSIONS} dimensions"
        )
    full = [tuple(row[:2]) for row, shape in zip(described, shapes, strict=True) if 0 not in shape]
    if len(set(full)) > 1:
        found = "; ".join(
            f"rank {rank} has {_DTYPES[row[0]]} in {row[1]} dimensions"
            for rank, row, shape in zip(ranks, described, shapes, strict=True)
            if 0 not in shape
        )
        raise UsageError(
            f"the ranks have different states of a metric: {found}. Expected the same dtype and "
            f"number of dimensions. Call update() with the same kinds of tensors on all ranks"
        )
    return _DTYPES[full[0][0] if full else described[0][0]]


def _is_distributed() -> bool:
    return bool(hvd.is_initialized() and hvd.size() > 1)
