"""Metrics over all ranks: their totals and counts are added up, not their averages averaged.

A mean of means is wrong as soon as ranks have seen different numbers of samples, and for what is
no mean (AUC, precision, RMSE) it is always wrong. All of Keras's own metrics keep sums, confusion
counts among them: with the sums of all ranks, `result()` is what one process would have found.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import keras
import numpy as np

# Not public, and the only thing that tells the metrics given to `compile`, which Keras keeps in
# one object, from a user's own metric that has others inside.
from keras.src.trainers.compile_utils import CompileMetrics

from hvdkit.core.consistency import RankMismatchError, check_consistency
from hvdkit.errors import UsageError
from hvdkit.keras import backend

log = logging.getLogger("hvdkit.keras")

_MARK = "_hvdkit_adds_up"
_M = TypeVar("_M")
_SUBJECT = "the metrics and logs of this epoch"


def additive(metric: _M) -> _M:
    """Say that a metric of your own keeps nothing but sums over the samples that it has seen.

    Its variables are then added up over the ranks before its `result()` is asked for, as those of
    Keras's own metrics are. Without it, its results are averaged over the ranks.

    Args:
        metric: a subclass of `keras.metrics.Metric`, or an instance.

    Returns:
        `metric`, so that this serves as a decorator.

    Raises:
        UsageError: `metric` is something else.

    Example:
        @hvd.callbacks.additive
        class Misses(keras.metrics.Metric):
            ...
    """
    cls = metric if isinstance(metric, type) else type(metric)
    if not issubclass(cls, keras.metrics.Metric):
        raise UsageError(f"{metric!r} was given: expected a keras.metrics.Metric, or a class of it")
    setattr(metric, _MARK, True)
    return metric


def is_additive(metric: Any) -> bool:
    """Whether the sums of a metric's variables over ranks are the state of one that saw all data.

    True of Keras's own metrics, of subclasses that leave accumulating to them, and of what
    `additive` has marked.
    """
    owner = next(cls for cls in type(metric).__mro__ if "update_state" in cls.__dict__)
    keeps_sums = owner.__module__.split(".")[0] == "keras" and owner is not keras.metrics.Metric
    return keeps_sums or getattr(metric, _MARK, False)


def flat_metrics(model: Any) -> list[Any]:
    """A model's metrics, each once, those given to `compile` among them one by one."""
    found: dict[int, Any] = {}
    for metric in model.metrics:
        inner = metric.metrics if isinstance(metric, CompileMetrics) else [metric]
        found.update((id(m), m) for m in inner)
    return list(found.values())


@dataclass(frozen=True)
class MetricState:
    """The state of a model's metrics on this rank, before they are reset."""

    #: Per metric: whether its arrays are its variables (sums) or its results (to be averaged).
    adds_up: list[bool]
    names: list[str]
    arrays: list[list[np.ndarray]]
    #: What Keras puts into the logs on this rank.
    results: dict[str, float]

    @classmethod
    def of(cls, model: Any) -> "MetricState":
        """The state of `model`'s metrics now."""
        metrics = flat_metrics(model)
        adds_up = [is_additive(metric) for metric in metrics]
        return cls(
            adds_up,
            [metric.name for metric in metrics],
            [
                [_to_numpy(variable) for variable in metric.variables]
                if sums
                else [_to_numpy(value) for value in keras.tree.flatten(metric.result())]
                for metric, sums in zip(metrics, adds_up, strict=True)
            ],
            _numbers(model.get_metrics_result()),
        )

    def averaged(self) -> list[str]:
        """The metrics whose results can only be averaged over ranks."""
        return [name for name, sums in zip(self.names, self.adds_up, strict=True) if not sums]


# What is sent of each metric and log: [kind, name, shapes of its arrays]. JSON, because ranks that
# have nothing of the kind themselves get it from those that have.
_Layout = list[tuple[str, str, list[list[int]]]]
_SUMS, _MEAN, _LOG = "sums of metric", "result of metric", "log"


def reduce_logs(
    model: Any, state: MetricState | None, logs: dict[str, Any], group: Any, everyone: bool
) -> dict[str, float]:
    """The logs of all ranks: exact for metrics that add up, otherwise averaged. A collective.

    Args:
        model: whose metrics `state` is of; the same on every rank.
        state: None on a rank that has nothing to contribute and still is told the result.
        logs: what Keras made of the metrics, or what a custom step returned.
        group: the collectives of the ranks that take part.
        everyone: whether no rank's `state` is None; the same on every rank.

    Returns:
        For every number in the logs of the ranks that have some: its value over all of them.

    Raises:
        RankMismatchError: on every rank, when metrics, their shapes or the logs' names differ.
    """
    layout: _Layout = []
    arrays: list[np.ndarray] = []
    if state is not None:
        for sums, name, parts in zip(state.adds_up, state.names, state.arrays, strict=True):
            layout.append((_SUMS if sums else _MEAN, name, [list(part.shape) for part in parts]))
            arrays += parts if sums else [*parts, np.ones(())]
        # As Keras itself decides whether it puts the metrics' results into the logs.
        all_results = logs.keys() == state.results.keys()
        for name, value in _numbers(logs).items():
            layout.append((_LOG, name, []))
            is_result = all_results or _is_result(state.results.get(name), value)
            arrays.append(np.array([value, 1.0, is_result]))
    layout = _agreed(layout, group, everyone)
    if state is None:
        arrays = [array for entry in layout for array in _zeros(entry)]
    sums_of_all = backend.sum_arrays(arrays, "hvdkit.keras.metrics", group.process_set)
    return _logs_of(model, layout, iter(sums_of_all))


def _to_numpy(value: Any) -> np.ndarray:
    # A copy, because on the CPU an array may share the memory of the variable.
    return np.array(keras.ops.convert_to_numpy(value), dtype=np.float64)


def flatten(logs: dict[str, Any]) -> None:
    """Put the results of metrics that are dictionaries beside the others, as Keras does later."""
    for name, value in list(logs.items()):
        if isinstance(value, dict):
            del logs[name]
            logs.update(value)
            flatten(logs)
            return


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """The logs that are single numbers; others are a rank's own."""
    flat = dict(logs)
    flatten(flat)
    numbers = {}
    for name, value in sorted(flat.items()):
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            continue
    return numbers


def _is_result(result: float | None, value: float) -> bool:
    """Whether a log is a metric's result, and not what a custom step returned by the same name."""
    # A graph may round differently from the same operations outside of it.
    return result is not None and bool(np.isclose(result, value, rtol=1e-4, equal_nan=True))


def _agreed(layout: _Layout, group: Any, everyone: bool) -> _Layout:
    """The layout of those ranks that have one, once it is sure that it is the same."""
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
    if kind == _LOG:
        return [np.zeros(3)]
    return [np.zeros(shape) for shape in [*shapes, *([[]] if kind == _MEAN else [])]]


def _logs_of(model: Any, layout: _Layout, sums: Iterator[np.ndarray]) -> dict[str, float]:
    """The logs that follow from the sums over the ranks."""
    metrics = iter(flat_metrics(model))
    state_mapping: list[tuple[Any, Any]] = []
    averages: list[tuple[Any, Any]] = []
    logs: dict[str, tuple[float, bool]] = {}
    for kind, name, shapes in layout:
        if kind == _LOG:
            total, ranks, are_results = next(sums)
            logs[name] = (float(total / ranks), bool(are_results == ranks))
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
    # The metrics themselves stay this rank's: Keras goes on counting in them where a callback
    # evaluates in the middle of an epoch.
    with _results_replaced(averages), keras.StatelessScope(state_mapping=state_mapping):
        results = _numbers(model.get_metrics_result())
    return {
        name: results[name] if is_result and name in results else average
        for name, (average, is_result) in logs.items()
    }


@contextmanager
def _results_replaced(values: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Let metrics say something else for a moment, so that Keras names and nests it as ever."""
    for metric, value in values:
        # Not by a plain assignment, which Keras would try to track.
        object.__setattr__(metric, "result", lambda value=value: value)
    try:
        yield
    finally:
        for metric, _ in values:
            object.__delattr__(metric, "result")
