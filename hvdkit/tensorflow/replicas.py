"""The variables of a custom training loop that must be equal on all ranks at a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import xxhash
from horovod.tensorflow import mpi_ops

from hvdkit.agreement.differences import Replicas
from hvdkit.agreement.replicas import CheckSettings, ReplicaCheck
from hvdkit.keras_variables.variable_replicas import state_of, variable_replicas
from hvdkit.tensorflow.collectives import TensorFlowCollectives
from hvdkit.tensorflow.items import VariableTensor, memory_of
from hvdkit.tensorflow.unwrapped import handled
from hvdkit.tensorflow.variables import NotedVariables, tf_variable, tf_variable_or_none

_ADVICE = (
    "Reduced gradients are the same on all ranks. So memory or a processor of a host has "
    "failed, or code changes reduced gradients or variables on some ranks only, or the script has "
    "not called hvd.broadcast_variables(model.variables, root_rank=0), or nothing reduces the "
    "gradients because hvd.DistributedGradientTape(tape) was forgotten. Restore a checkpoint of an "
    "earlier step. If ranks should differ, pass check_parameters=False to "
    "hvd.DistributedGradientTape, or call hvd.register_local(variables)."
)

#: The variables whose gradients tapes have reduced with `check_parameters`. All ranks then apply
#: the same gradients, so the variables must stay equal.
reduced = NotedVariables()


def all_reduced(variables: Sequence[Any], process_set: mpi_ops.ProcessSet) -> bool:
    """Return whether the gradients of all these variables are reduced over these ranks."""
    return all(reduced.has(each, process_set.ranks) for each in variables)


class TensorAccess:
    """Implements `agreement.differences.Access` for tensors, `tf.Variable`s, `keras.Variable`s."""

    def digests(self, values: Sequence[Any]) -> Sequence[int]:
        return [xxhash.xxh64_intdigest(self.read(value).data) for value in values]

    def read(self, value: Any) -> np.ndarray:
        variable = tf_variable_or_none(value)
        return memory_of(value if variable is None else variable.read_value())

    def write(self, value: Any, data: np.ndarray) -> None:
        VariableTensor(tf_variable(value)).write(data)

    def elements(self, value: Any, data: np.ndarray) -> np.ndarray:
        # A copy, because `data` may be unaligned.
        elements = data.copy().view(tf.as_dtype(value.dtype).as_numpy_dtype)
        if elements.dtype.kind in "iubc":
            return elements
        # NumPy does not know that bfloat16 and float8 are floating-point types.
        return elements.astype(np.float64)


def tape_check(
    collectives: TensorFlowCollectives,
    models: Callable[[], Mapping[str, Mapping[str, Any]]],
    optimizers: Sequence[Any],
) -> ReplicaCheck:
    """Return the comparison of the variables whose gradients tapes reduce, or nothing reduces.

    Args:
        collectives: the collectives of the ranks.
        models: returns the name of each model -> the name of each variable -> the variable.
        optimizers: the optimizers. The variables of a Keras optimizer are compared.
    """

    def shared() -> dict[int, tuple[str, Any]]:
        """Return id -> the name and the variable. Variables of two models may have equal names."""
        named = models()
        return {
            id(variable): (f"{model}: {name}" if len(named) > 1 else name, variable)
            for model, variables in named.items()
            for name, variable in variables.items()
            if reduced.has(variable, collectives.ranks)
            # Nothing has reduced the gradients of these: a tape may have been forgotten.
            or (getattr(variable, "trainable", False) and not handled.has(variable))
        }

    def replicas() -> Replicas:
        found = shared()
        variables = [variable for _, variable in found.values()]
        state = [
            (found[id(each)][0] if id(each) in found else each.path, each)
            for optimizer in optimizers
            if isinstance(optimizer, keras.optimizers.Optimizer)
            for each in state_of(optimizer, variables)
        ]
        return variable_replicas(TensorAccess(), list(found.values()), state)

    return ReplicaCheck(collectives, CheckSettings(), replicas, _ADVICE)
