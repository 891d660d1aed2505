"""Names, values and new traces for graphs that contain collectives.

- `trace_position` gives a collective the same name in the traces of all ranks.
- `GraphValue` keeps a value that graphs read and write, such as a count of reductions.
- `retrace_after_init` and `clear_traces` trace a function again after `init`.
"""

import collections
import itertools
import re
import sys
from collections.abc import Hashable, Sequence
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops as resource_ops
from tensorflow.python.ops import resource_variable_ops

_calls: WeakKeyDictionary[tf.Graph, collections.Counter[Hashable]] = WeakKeyDictionary()

_Function: Any = type(tf.function(lambda: None))
_to_retrace: WeakSet[Any] = WeakSet()


def trace_position(key: Hashable) -> str:
    """Return a name for this call in the traced program, equal on all ranks.

    The name consists of the names of the enclosing functions and the number of earlier calls with
    `key` in the same trace. A rank may trace a function more often than another rank, for example
    because its model has been called before and has variables. Each trace therefore counts from 0,
    and the functions' names omit the numbers that TensorFlow appends.

    Outside of a graph the position is "0", because eager operations run one at a time.
    """
    if tf.executing_eagerly():
        return "0"
    graph = tf.compat.v1.get_default_graph()
    counter = _calls.setdefault(graph, collections.Counter())
    counter[key] += 1
    names = [str(counter[key] - 1)]
    # Without the outermost function, whose name may differ between `fit` and a custom loop.
    while _is_function(outer := getattr(graph, "outer_graph", None)):
        names.append(re.sub(r"(_\d+)+$", "", graph.name))
        graph = outer
    # Horovod cuts off the part of a collective's name before a slash.
    return ".".join(reversed(names)).replace("/", ".")


def root_graph() -> tf.Graph:
    """Return the graph of the outermost function that is being traced."""
    graph = tf.compat.v1.get_default_graph()
    while _is_function(outer := getattr(graph, "outer_graph", None)):
        graph = outer
    return graph


def new_variable(value: Any) -> tf.Variable:
    """Return a new int32 variable that outlives the graph that is being traced, if any.

    Args:
        value: the initial value, a number or a list of numbers.
    """

    def create(_: Any, **arguments: Any) -> Any:
        return resource_variable_ops.ResourceVariable(**arguments)

    # A tf.function allows new variables in its first trace only, even under init_scope. This
    # creator bypasses the check.
    with tf.init_scope(), tf.variable_creator_scope(create):
        return tf.Variable(value, dtype=tf.int32, trainable=False)


class GraphValue:
    """A value that graphs read and write, initially zeros.

    Not a `tf.Variable`, because a `tf.Module` cannot be saved if its function uses a variable that
    the module does not own.

    Args:
        dtype: the dtype.
        shape: the shape.
    """

    def __init__(self, dtype: tf.DType, shape: Sequence[int] = ()) -> None:
        self._name = f"hvdkit.value.{next(_numbers)}"
        self._dtype, self._shape = dtype, list(shape)
        # TensorFlow keeps the value as long as a handle of it exists.
        with tf.init_scope():
            self._handle = self.handle()
        self.reset()
        _values.add(self)

    def handle(self) -> tf.Tensor:
        """Return a handle for `read` and `assign` in the graph that is being traced."""
        with tf.device("/cpu:0"):
            return resource_ops.var_handle_op(
                dtype=self._dtype, shape=self._shape, shared_name=self._name
            )

    def read(self, handle: tf.Tensor) -> tf.Tensor:
        """Return the value. A graph runs operations on the same handle in program order."""
        return resource_ops.read_variable_op(handle, self._dtype)

    def assign(self, handle: tf.Tensor, value: tf.Tensor) -> Any:
        """Set the value; return the operation."""
        return resource_ops.assign_variable_op(handle, value)

    def numpy(self) -> np.ndarray:
        """Return the current value, outside of graphs."""
        with tf.init_scope():
            found: np.ndarray = self.read(self._handle).numpy()
            return found

    def set(self, value: Any) -> None:
        """Set the value immediately."""
        with tf.init_scope():
            self.assign(self._handle, tf.constant(value, self._dtype, self._shape))

    def reset(self) -> None:
        """Set the value to zeros immediately."""
        self.set(0)


_numbers = itertools.count()
_values: WeakSet[GraphValue] = WeakSet()


def reset_values() -> None:
    """Set the values of all graphs to 0. All ranks call it together."""
    for value in list(_values):
        value.reset()


def retrace_after_init() -> None:
    """Record all `tf.function`s around this call, for `clear_traces`.

    Call it where a graph depends on the number of ranks or on a consistency check. In an elastic
    job both change, and all ranks must trace together with a new rank. Does nothing outside of a
    graph.
    """
    if tf.executing_eagerly():
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("polymorphic_function.py"):
            function = frame.f_locals.get("self")
            if isinstance(function, _Function):
                _to_retrace.add(function)
        frame = frame.f_back


def clear_traces() -> None:
    """Make the functions that `retrace_after_init` has recorded trace again at their next call."""
    for function in list(_to_retrace):
        # tf.function has no public method to clear its traces.
        function._function_cache.clear()
    _to_retrace.clear()


def _is_function(graph: tf.Graph | None) -> bool:
    # The default graph builds no function while nothing is traced.
    return graph is not None and bool(getattr(graph, "building_function", False))
