"""Traced functions: the same names of collectives on every rank, and new traces after `init`."""

import collections
import itertools
import re
import sys
from collections.abc import Hashable
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops as resource_ops
from tensorflow.python.ops import resource_variable_ops

_asked: WeakKeyDictionary[tf.Graph, collections.Counter[Hashable]] = WeakKeyDictionary()

_Function: Any = type(tf.function(lambda: None))
_to_trace_again: WeakSet[Any] = WeakSet()


def place(key: Hashable) -> str:
    """Return where in a traced program `key` is asked for: the functions around, and how often.

    A rank may trace a function more often than another rank, for example because it has called the
    model before and its variables exist. So each trace of a function counts from 0, and the names
    of the functions are without the numbers that TensorFlow appends to them.

    Outside of a graph the place is always "0": what is done eagerly happens one at a time.
    """
    if tf.executing_eagerly():
        return "0"
    graph = tf.compat.v1.get_default_graph()
    counter = _asked.setdefault(graph, collections.Counter())
    counter[key] += 1
    names = [str(counter[key] - 1)]
    # The outermost function is left out: `fit` and a script's own loop may call theirs differently.
    while _is_function(outer := getattr(graph, "outer_graph", None)):
        names.append(re.sub(r"(_\d+)+$", "", graph.name))
        graph = outer
    return "/".join(reversed(names))


def new_variable(value: Any) -> tf.Variable:
    """Return a new int32 variable that outlives the graph that is being traced, if any.

    Args:
        value: its first value: a number, or several.
    """

    def create(_: Any, **arguments: Any) -> Any:
        return resource_variable_ops.ResourceVariable(**arguments)

    # A tf.function creates variables in its first trace only, and refuses even those that
    # init_scope takes out of the graph. The outer creator does not ask it.
    with tf.init_scope(), tf.variable_creator_scope(create):
        return tf.Variable(value, dtype=tf.int32, trainable=False)


class Counter:
    """A number that graphs read and write, 0 at first.

    Not a `tf.Variable`: a `tf.Module` whose function has one that is not its own cannot be saved.
    """

    def __init__(self) -> None:
        self._name = f"hvdkit.counter.{next(_numbers)}"
        # Kept, because it goes with the last handle.
        with tf.init_scope():
            self._handle = self.handle()
        self.reset()
        _counters.add(self)

    def handle(self) -> tf.Tensor:
        """Return what `read` and `assign` take, in the graph that is traced."""
        with tf.device("/cpu:0"):
            return resource_ops.var_handle_op(dtype=tf.int32, shape=[], shared_name=self._name)

    @staticmethod
    def read(handle: tf.Tensor) -> tf.Tensor:
        """Return the number. A graph runs what has the same handle in the program's order."""
        return resource_ops.read_variable_op(handle, tf.int32)

    @staticmethod
    def assign(handle: tf.Tensor, value: tf.Tensor) -> Any:
        """Change the number; return the operation."""
        return resource_ops.assign_variable_op(handle, value)

    def reset(self) -> None:
        """Make it 0, now."""
        with tf.init_scope():
            self.assign(self._handle, tf.constant(0))


_numbers = itertools.count()
_counters: WeakSet[Counter] = WeakSet()


def reset_counters() -> None:
    """Make all counters 0, on ranks that do it together."""
    for counter in list(_counters):
        counter.reset()


def trace_again_after_init() -> None:
    """Let `forget_traces` forget the traces of all `tf.function`s around this call.

    For what a graph contains that depends on the number of ranks, or on what they have agreed on.
    In an elastic job both change, and a rank that has just started must trace together with the
    others. Does nothing outside of a graph.
    """
    if tf.executing_eagerly():
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("polymorphic_function.py"):
            function = frame.f_locals.get("self")
            if isinstance(function, _Function):
                _to_trace_again.add(function)
        frame = frame.f_back


def forget_traces() -> None:
    """Let the functions that `trace_again_after_init` has recorded be traced at their next call."""
    for function in list(_to_trace_again):
        # Not public: a tf.function has no method for it.
        function._function_cache.clear()
    _to_trace_again.clear()


def _is_function(graph: tf.Graph | None) -> bool:
    # The graph that is the default when nothing is traced builds no function.
    return graph is not None and bool(getattr(graph, "building_function", False))
