"""Compare the variables of a training loop between ranks, before some reductions of a tape.

The ranks compare eagerly. In a graph, an operation of Python does it when a comparison is due, with
the values that the graph has read.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.agreement.replicas import INTERVAL, CheckSettings, ReplicaCheck
from hvdkit.keras_variables.variable_replicas import variable_replicas
from hvdkit.tensorflow.call_order import BLOCKING
from hvdkit.tensorflow.collectives import TensorFlowCollectives
from hvdkit.tensorflow.graphs import GraphValue
from hvdkit.tensorflow.replicas import TensorAccess
from hvdkit.tensorflow.variables import tf_variable_or_none

# Whether a comparison is due after so many reductions. The first one is after one reduction,
# because Horovod's scripts broadcast after their first step. Models of the same architecture share
# a count, so two reductions in a row are compared: each of two models that a loop trains in turn.
# After the end of the table, its second half repeats.
_DUE = [CheckSettings().is_due(count - 1, together=2) for count in range(2 * INTERVAL)]
_ADVICE = (
    "Mean gradients never make different values equal. Call hvd.broadcast_variables("
    "model.variables, root_rank=0) before the first step or after it. If ranks should have "
    "different values, pass check_parameters=False to hvd.DistributedGradientTape."
)


class ValueCheck:
    """Compare variables between ranks before some of the reductions of their gradients.

    Every rank has one for each plan. It counts the reductions of the plan, which are collectives.
    The count begins at 0 again after `join`, because joined ranks do not count.

    Args:
        names: the variables' names, for errors.
        collectives: the collectives of the ranks to compare.
    """

    def __init__(self, names: Sequence[str], collectives: TensorFlowCollectives) -> None:
        self._names = list(names)
        self._collectives = collectives
        self._count = GraphValue(tf.int32)
        # The kinds of lines that comparisons log once.
        self._logged: set[str] = set()

    def compare(self, variables: Mapping[int, Any]) -> None:
        """Count one eager reduction, and compare if a comparison is due. A collective.

        Args:
            variables: the variables by their index among the names.

        Raises:
            RankMismatchError: on every rank, naming the variables that differ.
        """
        count = int(self._count.numpy())
        self._count.set(count + 1)
        if _DUE[min(count, INTERVAL + count % INTERVAL)]:
            self._compare(count, _found(variables))

    def compare_in_graph(self, variables: Mapping[int, Any]) -> Any:
        """Count one reduction in a graph, and compare if a comparison is due. A collective.

        Returns:
            The operation that must run before the reduction. On a difference it fails with an error
            of TensorFlow, which has the text of the RankMismatchError.
        """
        handle = self._count.handle()
        count = self._count.read(handle)
        found = _found(variables)
        # The function lives as long as the graph, and must not keep the variables.
        indices = list(found)

        @tf.autograph.experimental.do_not_convert
        def compare(count: tf.Tensor, *values: tf.Tensor) -> int:
            self._compare(int(count), dict(zip(indices, values, strict=True)))
            return 0

        def run() -> tf.Tensor:
            values = [variable.read_value() for variable in found.values()]
            compared = tf.py_function(compare, [count, *values], tf.int32, name=BLOCKING)
            return tf.ensure_shape(compared, ())

        due = tf.gather(_DUE, tf.minimum(count, INTERVAL + count % INTERVAL))
        checked = tf.cond(due, run, lambda: tf.constant(0))
        with tf.control_dependencies([checked]):
            return self._count.assign(handle, count + 1)

    def _compare(self, count: int, values: Mapping[int, Any]) -> None:
        named = [(self._names[index], value) for index, value in values.items()]
        own = variable_replicas(TensorAccess(), named)
        # A loop may reduce often before its first update, and broadcast after it.
        raises = count >= INTERVAL
        consequence = "" if raises else f"This will be an error after {INTERVAL} reductions."
        check = ReplicaCheck(
            *(self._collectives, CheckSettings(), lambda: own, _ADVICE, _ADVICE),
            unit="reduction",
            done=self._logged,
        )
        try:
            check.compare(count, count == 1, consequence, raises)
        except RankMismatchError:
            # Begin again, because a new model may use the same plan.
            self._count.reset()
            self._logged.clear()
            raise


def _found(variables: Mapping[int, Any]) -> dict[int, tf.Variable]:
    """Return the `tf.Variable`s by index, without other sources of a tape."""
    found = {index: tf_variable_or_none(source) for index, source in variables.items()}
    return {index: variable for index, variable in found.items() if variable is not None}
