"""Optimizers that are attributes of a model beside the optimizer of `compile`, as in a GAN.

Keras creates the variables of such an optimizer in the first `apply_gradients`, for the variables
that the model's `train_step` passes. A new process therefore needs their list before it can restore
or receive the optimizer's state.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdkit.checkpoint.items import Variables, does_not_fit, named
from hvdkit.checkpoint.state import Tree
from hvdkit.core.loss_scaling import inner_optimizers, innermost
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.optimizer import distribution_of

#: Optimizer -> the indexes of its trained variables in `model.weights`; -1 for other variables.
Trained = Mapping[str, Sequence[int]]
# Longer lists are data.
_LONGEST = 1000


def further_optimizers(model: Any) -> dict[str, Any]:
    """Return the optimizers that are attributes of a model, or in lists or dicts of it, by name.

    The optimizer of `compile` and the inner optimizers of `LossScaleOptimizer` are left out.
    """
    found: dict[str, Any] = {}
    visited: set[int] = set()
    for name, value in vars(model).items():
        if name.startswith("_self_"):
            # TensorFlow's lists of what it tracks. They contain the same optimizers.
            continue
        _collect(name, value, found, visited)
    first = getattr(model, "optimizer", None)
    known = {id(first)}
    for each in [first, *found.values()]:
        known.update(map(id, inner_optimizers(each)))
    result = {}
    for name, each in found.items():
        if id(each) not in known:
            known.add(id(each))
            result[name] = each
    return result


def _collect(name: str, value: Any, found: dict[str, Any], visited: set[int]) -> None:
    """Add the optimizers in a value to `found`, and the lists and dicts in it to `visited`."""
    if isinstance(value, keras.optimizers.Optimizer):
        found[name] = value
        return
    if not isinstance(value, Mapping | list | tuple) or id(value) in visited:
        return
    if len(value) > _LONGEST:
        return
    visited.add(id(value))
    for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
        _collect(f"{name}.{key}", each, found, visited)


def all_optimizers(model: Any) -> list[Any]:
    """Return the optimizer of `compile`, if there is one, and the further optimizers."""
    own = [getattr(model, "optimizer", None), *further_optimizers(model).values()]
    return [each for each in own if each is not None]


def built_optimizers(model: Any) -> dict[str, Any]:
    """Return the further optimizers that are built, by name."""
    return {name: each for name, each in further_optimizers(model).items() if each.built}


def trained_of(model: Any) -> dict[str, list[int]]:
    """Return for each further optimizer that is built: the variables that it trains."""
    index = {id(variable): number for number, variable in enumerate(model.weights)}
    return {
        name: [
            index.get(id(variable), -1) for variable in innermost(optimizer)._trainable_variables
        ]
        for name, optimizer in built_optimizers(model).items()
    }


def build(model: Any, trained: Trained) -> dict[str, Any]:
    """Build further optimizers as in another process. Return them by name.

    Args:
        model: a built model.
        trained: the result of `trained_of` in the other process.

    Raises:
        UsageError: the model lacks an optimizer or a variable, or an optimizer is built for other
            variables.
    """
    here = trained_of(model)
    own, weights = further_optimizers(model), model.weights
    for name, numbers in trained.items():
        if name not in own:
            raise does_not_fit("the model's optimizers (saved -> here)", [f"{name} -> nothing"])
        if own[name].built:
            if here[name] != list(numbers):
                raise UsageError(
                    f"the optimizer {name} is built for other variables than in the process that "
                    f"saved its state: build it for the same variables, in the same order"
                )
            continue
        if -1 in numbers or max(numbers, default=0) >= len(weights):
            raise UsageError(
                f"the optimizer {name} trains variables that are not weights of the model: call "
                f"{name}.build(variables) before fit"
            )
        own[name].build([weights[number] for number in numbers])
    return {name: own[name] for name in trained}


class FurtherOptimizers:
    """A `StatefulItem`: the variables and wire-format scales of the further optimizers."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def save(self) -> Tree:
        """Return the state of each optimizer that is built."""
        trained = trained_of(self._model)
        return {
            name: {
                "trained": trained[name],
                "variables": _variables(name, optimizer).save(),
                "reduction": _reduction_state(optimizer),
            }
            for name, optimizer in built_optimizers(self._model).items()
        }

    def signature(self) -> list[str]:
        """Return a text for each variable."""
        return [
            f"{name}: {line}"
            for name, optimizer in built_optimizers(self._model).items()
            for line in _variables(name, optimizer).signature()
        ]

    def plan_restore(self, tree: Tree) -> Tree:
        """Build the optimizers, and return their own memory as destinations.

        Raises:
            UsageError: the optimizers differ from those that were saved.
        """
        own = build(self._model, {name: saved["trained"] for name, saved in tree.items()})
        return {
            name: saved
            | {"variables": _variables(name, own[name]).plan_restore(saved["variables"])}
            for name, saved in tree.items()
        }

    def restore(self, tree: Tree) -> None:
        """Restore the scales: the variables have been written to."""
        own = further_optimizers(self._model)
        for name, saved in tree.items():
            distribution = distribution_of(own[name])
            if distribution is not None:
                distribution.restore_reduction_state(saved["reduction"])


def _variables(name: str, optimizer: Any) -> Variables:
    return Variables(lambda: named(optimizer.variables), f"the optimizer {name}", backend.tensor_of)


def _reduction_state(optimizer: Any) -> Tree:
    distribution = distribution_of(optimizer)
    return None if distribution is None else distribution.reduction_state()
