"""Run the calls of functions with collectives in program order, in a graph.

TensorFlow runs two calls in a graph at the same time, unless they use a common variable. A function
that is called twice has collectives of the same names in both calls, and so have two models that
one method trains. At the same time, a rank's collective of the first call could meet another rank's
collective of the second call.

So a call waits for the last earlier call that has a collective of the same name. Other calls do not
wait for each other, and neither do the collectives of one call. A branch of `tf.cond` and a loop
are calls, too.
"""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

# Not public. This registers a function that is called with the operations of each function that has
# been traced, in program order.
from tensorflow.python.framework import auto_control_deps

_CALLS = {
    "PartitionedCall",
    "StatefulPartitionedCall",
    "If",
    "StatelessIf",
    "Case",
    "StatelessCase",
    "While",
    "StatelessWhile",
}

#: The name of an operation of Python that calls eager collectives. These block, and comparisons of
#: all variables have the same names. So all ranks must run these operations in the same order.
BLOCKING = "hvdkit.blocking"

# Function -> the names of its collectives, including those of functions that it calls.
_names: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()
# Graph -> the name of a collective -> the name of the last operation that calls it. Operations
# would keep the graph alive.
_last: WeakKeyDictionary[tf.Graph, dict[str, str]] = WeakKeyDictionary()


def order_calls() -> None:
    """Order the calls in all functions that are traced from now on."""
    # Another version of TensorFlow may not have this function.
    if hasattr(auto_control_deps, "register_acd_resource_resolver"):
        auto_control_deps.register_acd_resource_resolver(_wait_for_earlier)


def _wait_for_earlier(op: Any, reads: Any, writes: Any) -> bool:  # noqa: ARG001
    """Make `op` wait for earlier calls with collectives of the same names.

    TensorFlow may call this several times for one operation. It wants to know whether `reads` or
    `writes`, the resources that the operation uses, have been changed: they have not.
    """
    if op.type not in _CALLS or not (names := _names_of_functions(op.graph, op.node_def)):
        return False
    last = _last.setdefault(op.graph, {})
    for earlier in sorted({last[name] for name in names if name in last} - {op.name}):
        before = op.graph.get_operation_by_name(earlier)
        if before._control_flow_context is op._control_flow_context:
            op._add_control_input(before)
    last.update(dict.fromkeys(names, op.name))
    return False


def _names_of_functions(graph: Any, node: Any) -> frozenset[str]:
    """Return the names of the collectives in the functions that a node calls."""
    found: set[str] = set()
    for called in _functions(node):
        function = graph._get_function(called)
        if function is None:
            continue
        if function not in _names:
            names: set[str] = set()
            for inner in function.cached_definition.node_def:
                # The name of the collective, unless it depends on name scopes.
                name = inner.name.rsplit("/", 1)[-1]
                if inner.op.startswith("Horovod"):
                    names.add(name)
                elif name.startswith(BLOCKING):
                    names.add(BLOCKING)
                elif inner.op in _CALLS:
                    names |= _names_of_functions(graph, inner)
            _names[function] = frozenset(names)
        found |= _names[function]
    return frozenset(found)


def _functions(node: Any) -> Iterator[str]:
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        elif value.HasField("list"):
            yield from (function.name for function in value.list.func)
