"""Average the moving statistics of `BatchNormalization`, which differ between ranks."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hvdkit.keras import backend


def statistics_of(model: Any) -> list[Any]:
    """Return the moving statistics of a model's trainable batch normalization layers."""
    return [
        variable
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built and layer.trainable
        # With `renorm`, a layer has more statistics than a mean and a variance.
        for variable in layer._non_trainable_variables
        if backend.is_floating(variable)
    ]


def average_statistics(model: Any, group: Any, is_local: Callable[[Any], bool]) -> None:
    """Average the moving statistics of batch normalization over ranks. A collective.

    Does nothing if the statistics' sizes differ between ranks.

    Args:
        model: the model; layers of nested models are included.
        group: the `backend.collectives` of the ranks.
        is_local: returns whether a variable is local to each rank; such variables are excluded.
    """
    variables = [variable for variable in statistics_of(model) if not is_local(variable)]
    values = [np.asarray(keras.ops.convert_to_numpy(v), np.float64) for v in variables]
    size = sum(value.size for value in values)
    ranks, total, squares = group.sum([1, size, size * size], "hvdkit.keras.statistics.size")
    if ranks * squares != total * total or not size:
        return
    sums = backend.sum_arrays(values, "hvdkit.keras.statistics", group.process_set)
    for variable, value in zip(variables, sums, strict=True):
        variable.assign(value / ranks)
