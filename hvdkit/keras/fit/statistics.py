"""Statistics of `BatchNormalization`: average moving statistics, which differ between ranks."""

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hvdkit.agreement.consistency import all_equal
from hvdkit.keras import backend
from hvdkit.keras.model_state import buffers_of

log = logging.getLogger("hvdkit.keras")


def statistics_of(model: Any) -> list[Any]:
    """Return the moving statistics of a model's trainable batch normalization layers.

    Also those of PyTorch's normalization modules, which `trainable` does not stop.
    """
    return [variable for variable, is_frozen in _all_statistics(model) if not is_frozen]


def _all_statistics(model: Any) -> list[tuple[Any, bool]]:
    """Return all moving statistics of a model, each with whether its layer is frozen now."""
    own = [
        (variable, not layer.trainable)
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built
        # With `renorm`, a layer has more statistics than a mean and a variance.
        for variable in layer._non_trainable_variables
        if backend.is_floating(variable)
    ]
    moved = (buffer for buffer in buffers_of(model) if buffer.of_normalization)
    return [*own, *((buffer, False) for buffer in moved if backend.is_floating(buffer))]


def compared_buffers(model: Any) -> list[Any]:
    """Return the buffers of PyTorch modules that must be equal on all ranks.

    The buffers of normalization modules are left out: the statistics are averaged, and the number
    of batches may differ if a rank has called the model before.
    """
    return [buffer for buffer in buffers_of(model) if not buffer.of_normalization]


def synchronized_by_strategy(model: Any) -> list[Any]:
    """Return a model's layers that only a `tf.distribute.Strategy` would synchronize.

    These are trainable `BatchNormalization(synchronized=True)`. A subclass with its own `_moments`,
    such as `SyncBatchNormalization`, computes its statistics itself. On PyTorch, Keras raises an
    error.
    """
    kind = keras.layers.BatchNormalization
    return [
        layer
        for layer in model._flatten_layers()
        if backend.NAME == "tensorflow"
        and isinstance(layer, kind)
        and layer.synchronized
        and layer.trainable
        and type(layer)._moments is kind._moments
    ]


class StatisticsAverage:
    """Averages the moving statistics of batch normalization over ranks.

    Those of a frozen layer only if they have changed: a callback may freeze it within an epoch.

    After a batch with NaN or infinity, the statistics of its rank stay NaN, even if the optimizer
    skips the step. Such a rank gets the average of the other ranks. If no rank has finite
    statistics, all ranks get their last finite statistics.

    Args:
        model: the model; layers of nested models are included.
        group: the `backend.collectives` of the ranks.
        is_local: returns whether a variable is local to each rank; such variables are excluded.
    """

    def __init__(self, model: Any, group: Any, is_local: Callable[[Any], bool]) -> None:
        self._model = model
        self._group = group
        self._is_local = is_local
        # The id of a variable -> its last value that was finite.
        self._finite: dict[int, np.ndarray] = {}
        for variable, _ in self._variables():
            self._keep(variable)

    def average(self, trains_one_model: bool) -> None:
        """Average the statistics. A collective.

        Does nothing if the statistics' sizes differ between ranks.

        Args:
            trains_one_model: whether this rank's gradients are reduced. If they are on some ranks
                only, the statistics are not averaged.
        """
        found = self._variables() if trains_one_model else []
        variables = [variable for variable, _ in found]
        values = [_value_of(variable) for variable in variables]
        moved = [
            not is_frozen or not np.array_equal(value, self._finite.get(id(variable), np.nan))
            for (variable, is_frozen), value in zip(found, values, strict=True)
        ]
        size = sum(value.size for value in values)
        ranks, total, squares = self._group.sum(
            [1, size, size * size], "hvdkit.keras.statistics.size"
        )
        if not all_equal(ranks, total, squares) or not size:
            return
        finite = [bool(np.isfinite(value).all()) for value in values]
        own = [v if f else np.zeros_like(v) for v, f in zip(values, finite, strict=True)]
        *sums, counts, movements = backend.sum_arrays(
            [*own, np.array(finite), np.array(moved)],
            "hvdkit.keras.statistics",
            self._group.process_set,
        )
        for variable, value, count, moves in zip(variables, sums, counts, movements, strict=True):
            if moves and count:
                variable.assign(value / count)
                self._keep(variable)
            elif moves and id(variable) in self._finite:
                variable.assign(self._finite[id(variable)])
        fewest = int(counts[movements > 0].min(initial=ranks))
        if fewest < ranks and self._group.is_first:
            log.warning(
                "moving statistics of BatchNormalization contain NaN or infinity on %d of %d "
                "ranks. All ranks get %s. Remove samples with NaN or infinity from the data.",
                ranks - fewest,
                ranks,
                "the average of the other ranks" if fewest else "the last finite statistics",
            )

    def _variables(self) -> list[tuple[Any, bool]]:
        return [each for each in _all_statistics(self._model) if not self._is_local(each[0])]

    def _keep(self, variable: Any) -> None:
        value = _value_of(variable)
        if np.isfinite(value).all():
            self._finite[id(variable)] = value


def _value_of(variable: Any) -> np.ndarray:
    # A copy, because on the CPU an array may share the memory of the variable.
    return np.array(keras.ops.convert_to_numpy(variable), np.float64)
