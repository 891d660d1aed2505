"""Names for collectives that a graph carries out side by side: every rank must find the same."""

import re
from collections import Counter
from collections.abc import Hashable
from weakref import WeakKeyDictionary

import tensorflow as tf

_asked: WeakKeyDictionary[tf.Graph, Counter[Hashable]] = WeakKeyDictionary()


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
    counter = _asked.setdefault(graph, Counter())
    counter[key] += 1
    names = [str(counter[key] - 1)]
    # The outermost function is left out: `fit` and a script's own loop may call theirs differently.
    while _is_function(outer := getattr(graph, "outer_graph", None)):
        names.append(re.sub(r"(_\d+)+$", "", graph.name))
        graph = outer
    return "/".join(reversed(names))


def _is_function(graph: tf.Graph | None) -> bool:
    # The graph that is the default when nothing is traced builds no function.
    return graph is not None and bool(getattr(graph, "building_function", False))
