"""Moving statistics of `BatchNormalization`: each rank's are of its own batches, until averaged."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hvdkit.keras import backend


def statistics_of(model: Any) -> list[Any]:
    """Return the statistics that batch normalisation in a model moves in training."""
    return [
        variable
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built and layer.trainable
        # With `renorm`, more than a mean and a variance.
        for variable in layer._non_trainable_variables
        if backend.is_floating(variable)
    ]


def average_statistics(model: Any, group: Any, is_local: Callable[[Any], bool]) -> None:
    """Make the statistics of batch normalisation the averages over ranks. A collective.

    Nothing happens where ranks have different numbers of them.

    Args:
        model: its layers, those of models in it, too.
        group: `backend.collectives` of the ranks.
        is_local: tells whether each rank has a variable for itself; it is left out then.
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
