"""Names for collectives that a graph carries out side by side: every rank must find the same."""

from collections import Counter
from collections.abc import Hashable
from weakref import WeakKeyDictionary

import tensorflow as tf

_asked: WeakKeyDictionary[tf.Graph, Counter[Hashable]] = WeakKeyDictionary()


def occurrence(key: Hashable) -> int:
    """How often `key` has been asked for before in the graph that is being traced.

    The same on every rank, however often it has traced, because ranks trace the same program.
    Outside of a graph always 0: what is done eagerly happens one at a time.
    """
    if tf.executing_eagerly():
        return 0
    graph = tf.compat.v1.get_default_graph()
    # What a tf.function calls runs beside it.
    while getattr(graph, "outer_graph", None) is not None and not _is_eager(graph.outer_graph):
        graph = graph.outer_graph
    counter = _asked.setdefault(graph, Counter())
    counter[key] += 1
    return counter[key] - 1


def _is_eager(graph: tf.Graph) -> bool:
    # The graph that is the default when nothing is traced.
    return not getattr(graph, "building_function", False)
