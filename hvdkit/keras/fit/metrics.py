"""Reduce metrics over ranks by summing their variables, such as totals and counts.

The mean of the ranks' results is wrong if ranks have different numbers of samples, or if the metric
is not a mean (AUC, precision, RMSE). Keras's own metrics keep only sums. With the sums over all
ranks, `result()` is therefore that of one process with all the data.
"""

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import keras
import numpy as np

# Not public. This class holds the metrics of `compile`, and only its type distinguishes it from a
# user's metric that contains other metrics.
from keras.src.trainers.compile_utils import CompileMetrics

from hvdkit.agreement.consistency import RankMismatchError, check_consistency
from hvdkit.errors import UsageError
from hvdkit.keras import backend

log = logging.getLogger("hvdkit.keras")

_MARK = "_hvdkit_additive"
_M = TypeVar("_M")
_SUBJECT = "the metrics and logs of this epoch"


def additive(metric: _M) -> _M:
    """Mark a custom metric whose variables are all sums over samples.

    Its variables are then summed over the ranks before `result()` is called, like those of Keras's
    own metrics. Without the mark, its results are averaged over the ranks.

    Args:
        metric: a subclass of `keras.metrics.Metric`, or an instance.

    Returns:
        `metric`, so `additive` can be a decorator.

    Raises:
        UsageError: `metric` is neither.

    Example:
        @hvd.callbacks.additive
        class Misses(keras.metrics.Metric):
            ...
    """
    cls = metric if isinstance(metric, type) else type(metric)
    if not issubclass(cls, keras.metrics.Metric):
        raise UsageError(f"metric is {metric!r}: expected a keras.metrics.Metric or a subclass")
    setattr(metric, _MARK, True)
    return metric


def is_additive(metric: Any) -> bool:
    """Return whether a metric's variables may be summed over ranks.

    True for Keras's own metrics, for subclasses that inherit `update_state`, and for metrics marked
    with `additive`.
    """
    owner = next(cls for cls in type(metric).__mro__ if "update_state" in cls.__dict__)
    keeps_sums = owner.__module__.split(".")[0] == "keras" and owner is not keras.metrics.Metric
    return keeps_sums or getattr(metric, _MARK, False)


def flat_metrics(model: Any) -> list[Any]:
    """Return each metric of a model once.

    Keras keeps the metrics of `compile` in a container. The result has these metrics instead of
    their container.
    """
    found: dict[int, Any] = {}
    for metric in model.metrics:
        inner = metric.metrics if isinstance(metric, CompileMetrics) else [metric]
        found.update((id(m), m) for m in inner)
    return list(found.values())


@dataclass(frozen=True)
class MetricState:
    """A copy of the state of a model's metrics on this rank.

    Attributes:
        additive: for each metric, whether its variables are summed. Otherwise its results are
            averaged.
        names: the metrics' names.
        arrays: for each metric, its variables or its results.
        results: this rank's results, by their names in the logs: numbers and arrays.
    """

    additive: list[bool]
    names: list[str]
    arrays: list[list[np.ndarray]]
    results: dict[str, Any]

    @classmethod
    def of(cls, model: Any) -> "MetricState":
        """Return the current state of the metrics of `model`."""
        metrics = flat_metrics(model)
        summed = [is_additive(metric) for metric in metrics]
        arrays = [
            [_to_numpy(variable) for variable in metric.variables]
            if sums
            else [_to_numpy(value) for value in keras.tree.flatten(metric.result())]
            for metric, sums in zip(metrics, summed, strict=True)
        ]
        _count_rows(model, dict(zip(map(id, metrics), arrays, strict=True)))
        return cls(
            summed,
            [metric.name for metric in metrics],
            arrays,
            {name: _copy(value) for name, value in _flat(model.get_metrics_result()).items()},
        )

    def averaged(self) -> list[str]:
        """Return the names of metrics whose results are averaged."""
        return [name for name, sums in zip(self.names, self.additive, strict=True) if not sums]


def _count_rows(model: Any, arrays: Mapping[int, list[np.ndarray]]) -> None:
    """Weight the losses of a model's outputs by rows.

    Keras counts 1 for a batch, not its rows, where a graph of TensorFlow does not know their number
    when it is traced, as with a smaller last batch. Ranks may differ in this.

    Args:
        model: the model.
        arrays: the id of a metric -> its variables; changed in place.
    """
    # A model may have its own `metrics`.
    if id(tracker := getattr(model, "_loss_tracker", None)) not in arrays:
        return
    _, rows = arrays[id(tracker)]
    for each in getattr(model._compile_loss, "metrics", None) or ():
        total, count = arrays.get(id(each), (0, 0))
        if 0 < count < rows:
            arrays[id(each)][:] = [total * (rows / count), rows]


# One entry for each metric and log: [kind, name, shapes of its arrays]. Ranks without metrics
# receive the layout from ranks with metrics, as JSON.
_Layout = list[tuple[str, str, list[list[int]]]]
_SUMS, _MEAN, _LOG, _ARRAY = "sums of metric", "result of metric", "log", "array"

#: Names of logs for which a warning has been logged.
_unreduced: set[str] = set()


def reduce_logs(
    model: Any, state: MetricState | None, logs: dict[str, Any], group: Any, everyone: bool
) -> dict[str, Any]:
    """Return the logs over all ranks: exact for additive metrics, otherwise averaged. A collective.

    Args:
        model: the model with these metrics.
        state: this rank's metrics; None on a rank that only receives the result.
        logs: this rank's logs, from Keras's metrics or from a custom step.
        group: the collectives of the participating ranks.
        everyone: whether all ranks have a `state`; the same on every rank.

    Returns:
        Each number in the logs, reduced over the ranks that have it, and each array that is the
        result of a metric on these ranks. Other arrays are missing, with one warning: their shapes
        may differ between ranks.

    Raises:
        RankMismatchError: on every rank, if metrics, their shapes or the logs' names differ.
    """
    layout: _Layout = []
    arrays: list[np.ndarray] = []
    logs = _flat(logs)
    if state is not None:
        for sums, name, parts in zip(state.additive, state.names, state.arrays, strict=True):
            layout.append((_SUMS if sums else _MEAN, name, [list(part.shape) for part in parts]))
            arrays += parts if sums else [*parts, np.ones(())]
        # Keras uses the same condition to put the metrics' results into the logs.
        all_results = logs.keys() == state.results.keys()
        for name, value in sorted(logs.items()):
            result, number = state.results.get(name), _number(value)
            if number is None and not isinstance(result, np.ndarray):
                continue
            layout.append((_ARRAY if number is None else _LOG, name, []))
            is_result = all_results or _is_result(result, value)
            arrays.append(np.array([number or 0.0, 1.0, is_result]))
    layout = _checked_layout(layout, group, everyone)
    if state is None:
        arrays = [array for entry in layout for array in _zeros(entry)]
    sums_of_all = backend.sum_arrays(arrays, "hvdkit.keras.metrics", group.process_set)
    reduced = _logs_of(model, layout, iter(sums_of_all))
    if group.is_first:
        _warn_of_arrays(logs.keys() - reduced.keys() - _unreduced, logs)
        if state is not None:
            _warn_of_renamed_results(state.results, logs)
    return reduced


def _warn_of_renamed_results(results: Mapping[str, Any], logs: Mapping[str, Any]) -> None:
    """Log a warning for a log that seems to be a metric's result, but has not its name."""
    missing = {name: value for name, value in results.items() if name not in logs}
    for name in sorted(logs.keys() - results.keys() - _unreduced):
        for result_name, result in missing.items():
            if _number(result) not in (None, 0.0, 1.0) and _is_result(result, logs[name]):
                _unreduced.add(name)
                log.warning(
                    "the log %r is averaged over ranks, although on this rank it has the value of "
                    "metric %r. If it is the result of this metric, return it as %r: it is then "
                    "that of the data of all ranks.",
                    name,
                    result_name,
                    result_name,
                )
                break


def _warn_of_arrays(names: Collection[str], logs: Mapping[str, Any]) -> None:
    """Log a warning if logs of these names are arrays."""
    for name in sorted(names):
        if shape := tuple(getattr(logs[name], "shape", ())):
            _unreduced.add(name)
            log.warning(
                "the log %r is an array of shape %s and not the result of a metric, so it is not "
                "reduced: each rank logs its own. To reduce it, return a number or the result of a "
                "keras.metrics.Metric of the model.",
                name,
                list(shape),
            )


def _to_numpy(value: Any) -> np.ndarray:
    # A copy, because on the CPU an array may share the memory of the variable.
    return np.array(keras.ops.convert_to_numpy(value), dtype=np.float64)


def flatten(logs: dict[str, Any]) -> None:
    """Replace dictionaries in `logs` by their items, as Keras does later."""
    for name, value in list(logs.items()):
        if isinstance(value, dict):
            del logs[name]
            logs.update(value)
            flatten(logs)
            return


def _flat(logs: Mapping[str, Any]) -> dict[str, Any]:
    flat = dict(logs)
    flatten(flat)
    return flat


def numbers_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the logs that are single numbers."""
    numbers = {name: _number(value) for name, value in sorted(_flat(logs).items())}
    return {name: number for name, number in numbers.items() if number is not None}


def _number(value: Any) -> float | None:
    """Return a log as Keras's callbacks get it if it is a number, otherwise None."""
    try:
        # An array of one element is a number for PyTorch, and not for NumPy since 2.4.
        return float(keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value)
    except (TypeError, ValueError):
        return None


def _copy(result: Any) -> Any:
    """Return a metric's result as a number or an array."""
    number = _number(result)
    return _to_numpy(result) if number is None else number


def _is_result(result: Any, value: Any) -> bool:
    """Return whether a log is a metric's result, not another value with the metric's name."""
    if result is None or np.shape(result) != tuple(getattr(value, "shape", ())):
        return False
    # A graph may round differently than eager operations.
    return bool(np.allclose(result, _copy(value), rtol=1e-4, equal_nan=True))


def _checked_layout(layout: _Layout, group: Any, everyone: bool) -> _Layout:
    """Return the layout, after a check that all ranks with metrics have the same layout."""
    lines = [json.dumps(entry) for entry in layout]
    if everyone:
        check_consistency(group, lines, _SUBJECT)
        return layout
    gathered = group.allgather("\n".join(lines).encode(), "hvdkit.keras.metrics.layout")
    theirs = {data for data in gathered if data}
    if len(theirs) > 1:
        raise RankMismatchError(
            f"ranks disagree about {_SUBJECT}: "
            + "; ".join(
                f"rank {rank} has {', '.join(data.decode().splitlines()) or 'none'}"
                for rank, data in zip(group.ranks, gathered, strict=True)
            )
            + ". Compile the model with the same metrics on every rank."
        )
    return [json.loads(line) for data in theirs for line in data.decode().splitlines()]


def _zeros(entry: tuple[str, str, list[list[int]]]) -> list[np.ndarray]:
    kind, _, shapes = entry
    if kind in (_LOG, _ARRAY):
        return [np.zeros(3)]
    return [np.zeros(shape) for shape in [*shapes, *([[]] if kind == _MEAN else [])]]


def _logs_of(model: Any, layout: _Layout, sums: Iterator[np.ndarray]) -> dict[str, Any]:
    """Return the logs, computed from the sums over the ranks."""
    metrics = iter(flat_metrics(model))
    state_mapping: list[tuple[Any, Any]] = []
    averages: list[tuple[Any, Any]] = []
    reduced: dict[str, Any] = {}
    are_results: set[str] = set()
    for kind, name, shapes in layout:
        if kind in (_LOG, _ARRAY):
            total, ranks, ranks_with_result = next(sums)
            if kind == _LOG:
                reduced[name] = float(total / ranks)
            if ranks_with_result == ranks:
                are_results.add(name)
            continue
        metric = next(metrics)
        parts = [next(sums) for _ in shapes]
        if kind == _SUMS:
            for variable, part in zip(metric.variables, parts, strict=True):
                total_of_all = keras.ops.convert_to_tensor(part, dtype=variable.dtype)
                state_mapping.append((variable, total_of_all))
        else:
            ranks = next(sums)
            flat = [part / ranks for part in parts]
            averages.append((metric, keras.tree.pack_sequence_as(metric.result(), flat)))
    # The metrics themselves keep this rank's state, because Keras may still update them in this
    # epoch.
    with _results_replaced(averages), keras.StatelessScope(state_mapping=state_mapping):
        # On TensorFlow, a result may be a variable, which has the sum only in this scope.
        results = {
            name: result.value if isinstance(result, keras.Variable) else result
            for name, result in _flat(model.get_metrics_result()).items()
        }
    for name in are_results & results.keys():
        number = _number(results[name])
        reduced[name] = results[name] if number is None else number
    return reduced


@contextmanager
def _results_replaced(values: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Return a context in which `result()` of each metric returns the given value.

    Keras then gives these values their names in the logs.
    """
    for metric, value in values:
        # Bypass Keras's `__setattr__`, which would track the value.
        object.__setattr__(metric, "result", lambda value=value: value)
    try:
        yield
    finally:
        for metric, _ in values:
            object.__delattr__(metric, "result")
