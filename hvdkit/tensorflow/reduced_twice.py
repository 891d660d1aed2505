"""Recognise gradients that a distributed tape has reduced, before an optimizer reduces them again.

A second mean changes nothing. A second sum multiplies the gradients by the number of ranks.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import xxhash
from horovod.tensorflow import mpi_ops

from hvdkit.core.collectives import Collectives
from hvdkit.core.consistency import are_equal
from hvdkit.tensorflow.graphs import root_graph
from hvdkit.tensorflow.variables import tf_variable_or_none

#: The ranks, and the id of a variable.
_Key = tuple[tuple[int, ...], int]

#: The variables whose gradients tapes have reduced, in each graph that is being traced.
_in_graphs: "weakref.WeakKeyDictionary[tf.Graph, set[_Key]]" = weakref.WeakKeyDictionary()
#: The same outside of graphs, since a wrapped optimizer has updated them. Not of graphs: each rank
#: decides when it traces, and all ranks must call the collective of `are_reduced`.
_since_update: "weakref.WeakValueDictionary[_Key, tf.Variable]" = weakref.WeakValueDictionary()


def record(sources: Sequence[Any], process_set: mpi_ops.ProcessSet) -> None:
    """Record that a tape has reduced the gradients of its sources over these ranks."""
    if not process_set.included() or process_set.size() == 1:
        return
    found = {_key(variable, process_set.ranks): variable for variable in _variables(sources)}
    if tf.executing_eagerly():
        _since_update.update(found)
    else:
        _in_graphs.setdefault(root_graph(), set()).update(found)


def are_reduced(
    gradients: Sequence[Any], variables: Sequence[Any], collectives: Collectives
) -> bool:
    """Return whether a tape has reduced the gradients that an optimizer is about to reduce.

    A collective outside of graphs, if a tape has reduced gradients of these variables there since
    the optimizer's last update. A script may have used them for another optimizer, so the ranks
    compare the gradients: after a reduction, they are equal. Gradients that a graph returns for an
    eager update are not found.

    Args:
        gradients: the gradients; None for a missing one.
        variables: their variables.
        collectives: the ranks that the optimizer reduces over.
    """
    keys = [_key(variable, collectives.ranks) for variable in _variables(variables)]
    if not tf.executing_eagerly():
        return not _in_graphs.get(root_graph(), set()).isdisjoint(keys)
    pending = [_since_update.pop(key, None) for key in keys]
    if all(variable is None for variable in pending):
        return False
    state = xxhash.xxh64()
    given = [gradient for gradient in gradients if gradient is not None]
    for gradient in given:
        for tensor in tf.nest.flatten(gradient, expand_composites=True):
            state.update(tensor.numpy().tobytes())
    equal = are_equal(collectives, state.intdigest() & 0xFFFFFF, "hvdkit.reduced_twice")
    return bool(given) and equal


def _variables(sources: Sequence[Any]) -> list[tf.Variable]:
    found = map(tf_variable_or_none, sources)
    return [variable for variable in found if variable is not None]


def _key(variable: tf.Variable, ranks: Sequence[int]) -> _Key:
    return tuple(ranks), id(variable)
