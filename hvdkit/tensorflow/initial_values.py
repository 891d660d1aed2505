"""Compare the variables of a training loop between ranks, eagerly or in a graph."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.core.values import COMPARED, DONE, Value, count_reduction, digest_of
from hvdkit.tensorflow.collectives import TensorFlowCollectives
from hvdkit.tensorflow.graphs import new_variable


@functools.cache
def _turns() -> tf.Variable:
    """A variable that every comparison in a graph changes.

    Those that change one variable run one after another, in the order of the program. Comparisons
    have to: eager collectives are told apart by their order alone.
    """
    return new_variable(0)


class InitialValues:
    """Compares, before some of the first reductions, what they are the gradients of.

    Every rank makes one for the same plan, so all of them count alike, whatever else they do.

    Args:
        collectives: of the ranks that reduce.
        names: of the variables, for errors.
    """

    def __init__(self, collectives: TensorFlowCollectives, names: Sequence[str]) -> None:
        self._collectives = collectives
        self._names = list(names)
        self._counted = 0
        self._counted_in_graph: Any = None

    def compare(self, sources: Sequence[Any], advice: str) -> Any:
        """Count one reduction; compare before it if it is time to. A collective.

        Args:
            sources: as many as there are names; those that are no variables are not compared.
            advice: what to do about a difference, for the error.

        Returns:
            In a graph, the operation that does all this, which the reduction has to wait for.

        Raises:
            RanksDisagree: on every rank, naming the first variable that differs. Out of a graph
                TensorFlow raises an error of its own, with this text in it.
        """
        named = [
            (name, variable)
            for name, source in zip(self._names, sources, strict=True)
            if (variable := _variable_of(source)) is not None
        ]

        def read() -> list[tf.Tensor]:
            return [variable.read_value() for _, variable in named]

        def count(counted: int, read: Callable[[], Sequence[tf.Tensor]]) -> int:
            return count_reduction(
                self._collectives,
                counted,
                lambda: [
                    Value(name, digest_of(value.numpy()), value.numpy)
                    for (name, _), value in zip(named, read(), strict=True)
                ],
                advice,
            )

        if tf.executing_eagerly():
            # After an error the next model of this kind is counted from 0.
            counted, self._counted = self._counted, 0
            self._counted = count(counted, read)
            return None
        if self._counted_in_graph is None:
            self._counted_in_graph = new_variable(0)
        counter = self._counted_in_graph

        @tf.autograph.experimental.do_not_convert
        def count_given(counted: tf.Tensor, *values: tf.Tensor) -> int:
            counter.assign(0)
            return count(int(counted), lambda: values)

        with tf.device("/cpu:0"):
            reductions = counter.read_value()

            def compare_in_turn() -> tf.Tensor:
                with tf.control_dependencies([_turns().assign_add(1)]):
                    return tf.py_function(count_given, [reductions, *read()], tf.int32)

            after = tf.cond(
                tf.reduce_any(tf.equal(reductions, COMPARED)),
                compare_in_turn,
                lambda: tf.minimum(reductions + 1, DONE),
            )
            return counter.assign(tf.ensure_shape(after, ()))


def _variable_of(source: Any) -> tf.Variable | None:
    held = getattr(source, "value", None)  # of a keras.Variable
    variable = held if isinstance(held, tf.Variable) else source
    return variable if isinstance(variable, tf.Variable) else None
