"""Alias of `horovod.tensorflow.gradient_aggregation` for scripts that import this name."""

from horovod.tensorflow.gradient_aggregation import (
    LocalGradientAggregationHelper,
    apply_op_to_not_none_tensors,
    get_not_none_from_list,
)

__all__ = [
    "LocalGradientAggregationHelper",
    "apply_op_to_not_none_tensors",
    "get_not_none_from_list",
]
