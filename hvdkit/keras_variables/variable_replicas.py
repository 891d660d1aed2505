"""The variables of Keras and TensorFlow that must be equal on all ranks; see `replicas`.

A slot is a variable that an optimizer keeps for one trained variable, such as a momentum.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from hvdkit.agreement.differences import Access, Item, Replicas
from hvdkit.agreement.names import without_model_names
from hvdkit.keras_variables.optimizer_slots import optimizer_variables, slots_of

# Keras numbers layers of the same class, also within the name of a slot:
# `adam/sequential_1_dense_2_kernel_momentum`.
_NUMBER = re.compile(r"_\d+(?=[_/]|$)")


def variable_replicas(
    access: Access, variables: Sequence[tuple[str, Any]], state: Sequence[tuple[str, Any]] = ()
) -> Replicas:
    """Return the replicas of variables, and of the variables of optimizers.

    Names contain the numbers of layers, which differ between ranks if a rank has made other models
    before, and the name of a model, unless a file was loaded. These parts need not be equal.

    Args:
        access: reads and writes the values.
        variables: names and values that must be equal, such as those that are trained.
        state: names and values of optimizers that must be equal, such as learning rates.
    """

    def item(name: str, value: Any, common: Callable[[str], str], trains: bool = False) -> Item:
        # TensorFlow's dtypes have names. The texts of the others are "float32", "torch.float32".
        dtype = str(getattr(value.dtype, "name", value.dtype)).removeprefix("torch.")
        line = f"variable {common(_NUMBER.sub('', name))}, {dtype} {list(value.shape)}"
        trained = math.prod(value.shape) if trains and "float" in dtype else 0
        return Item(repr(name), line, value, trained)

    # Counters and learning rates come first: if they differ, trained variables differ, too.
    # Their names may begin with the name scopes in which an optimizer was built.
    scalars = [
        item(name, v, lambda n: n.rsplit("/", 1)[-1]) for name, v in state if not len(v.shape)
    ]
    parameters = [item(name, v, without_model_names, trains=True) for name, v in variables]
    # Such as `adam/sequential_dense_kernel_momentum`; the order says of which variable.
    slots = [item(name, v, lambda n: n.rsplit("_", 1)[-1]) for name, v in state if len(v.shape)]
    return Replicas(access, [*scalars, *parameters, *slots])


def state_of(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the variables of a Keras optimizer, without the slots of other trained variables.

    Args:
        optimizer: the optimizer, a `LossScaleOptimizer` or a `MultiOptimizer`.
        variables: the trained variables whose slots are wanted.
    """
    own = {id(variable) for variable in variables}
    excluded = {id(slot) for variable, slot in slots_of(optimizer) if id(variable) not in own}
    return [v for v in optimizer_variables(optimizer) if id(v) not in excluded]
