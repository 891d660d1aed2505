"""The variables of a custom training loop that must be equal on all ranks at a checkpoint."""

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import xxhash
from horovod.tensorflow import mpi_ops

from hvdkit.core.replicas import CheckSettings, ReplicaCheck
from hvdkit.core.variable_replicas import VariableReplicas, state_of
from hvdkit.tensorflow.collectives import TensorFlowCollectives
from hvdkit.tensorflow.items import VariableTensor
from hvdkit.tensorflow.unwrapped import is_handled
from hvdkit.tensorflow.variables import tf_variable, tf_variable_or_none

_ADVICE = (
    "Reduced gradients are the same on all ranks. So memory or a processor of a host has "
    "failed, or code changes reduced gradients or variables on some ranks only, or the script has "
    "not called hvd.broadcast_variables(model.variables, root_rank=0), or nothing reduces the "
    "gradients because hvd.DistributedGradientTape(tape) was forgotten. Restore a checkpoint of an "
    "earlier step. If ranks should differ, pass check_parameters=False to "
    "hvd.DistributedGradientTape, or call hvd.register_local(variables)."
)

#: The variables whose gradients tapes have reduced with `check_parameters`, by ranks and id.
_reduced: "weakref.WeakValueDictionary[tuple[Any, ...], tf.Variable]" = (
    weakref.WeakValueDictionary()
)


def record_reduced(variables: Iterable[Any], process_set: mpi_ops.ProcessSet) -> None:
    """Record that the gradients of these variables are reduced.

    All ranks then apply the same gradients, so the variables must stay equal.

    Args:
        variables: `tf.Variable`s and `keras.Variable`s; other sources of a tape are ignored.
        process_set: the ranks.
    """
    ranks = tuple(process_set.ranks)
    for source in variables:
        if (variable := tf_variable_or_none(source)) is not None:
            _reduced[ranks, id(variable)] = variable


def all_reduced(variables: Sequence[Any], process_set: mpi_ops.ProcessSet) -> bool:
    """Return whether the gradients of all these variables are reduced over these ranks."""
    ranks = tuple(process_set.ranks)
    return all((ranks, id(tf_variable(each))) in _reduced for each in variables)


class _Access:
    """Implements `VariableAccess` for `tf.Variable`s and `keras.Variable`s."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names

    def name_of(self, variable: Any) -> str:
        return self._names[id(variable)]

    def dtype_of(self, variable: Any) -> np.dtype:
        return np.dtype(tf_variable(variable).dtype.as_numpy_dtype)

    def read(self, variable: Any) -> np.ndarray:
        return VariableTensor(tf_variable(variable)).memory()

    def write(self, variable: Any, content: np.ndarray) -> None:
        VariableTensor(tf_variable(variable)).write(content)

    def digests(self, variables: Sequence[Any]) -> list[int]:
        return [xxhash.xxh64_intdigest(self.read(variable).data) for variable in variables]


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
    ranks = tuple(collectives.ranks)

    def shared() -> dict[int, tuple[str, Any]]:
        """Return id -> the name and the variable. Variables of two models may have equal names."""
        named = models()
        return {
            id(variable): (f"{model}: {name}" if len(named) > 1 else name, variable)
            for model, variables in named.items()
            for name, variable in variables.items()
            if (ranks, id(tf_variable(variable))) in _reduced
            # Nothing has reduced the gradients of these: a tape may have been forgotten.
            or (getattr(variable, "trainable", False) and not is_handled(variable))
        }

    def replicas() -> VariableReplicas:
        found = shared()
        variables = [variable for _, variable in found.values()]
        state = [
            variable
            for optimizer in optimizers
            if isinstance(optimizer, keras.optimizers.Optimizer)
            for variable in state_of(optimizer, variables)
        ]
        names = {key: name for key, (name, _) in found.items()}
        names |= {id(variable): variable.path for variable in state}
        return VariableReplicas(_Access(names), variables, state)

    # The number of steps is unknown, because a graph may make them. Return a new number each time.
    numbers = itertools.count(1)
    return ReplicaCheck(
        collectives,
        CheckSettings(),
        replicas,
        lambda: next(numbers) if shared() else 0,
        advice=_ADVICE,
    )
