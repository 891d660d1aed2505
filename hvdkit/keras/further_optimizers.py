"""The optimizers of a model beside the optimizer of `compile`, as in a GAN.

They are attributes of the model, or of layers in it: a nested model may be compiled.

Keras creates the variables of such an optimizer in the first `apply_gradients`, for the variables
that the model's `train_step` passes. A new process therefore needs their list before it can restore
or receive the optimizer's state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from hvdkit.checkpoint.items import Variables, does_not_fit, named
from hvdkit.checkpoint.state import Tree
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.optimizer import distribution_of
from hvdkit.keras_variables.loss_scaling import inner_optimizers, innermost
from hvdkit.keras_variables.optimizer_slots import optimizer_variables

#: Optimizer -> the indexes of its trained variables in `model.weights`; -1 for other variables.
Trained = Mapping[str, Sequence[int]]
# Longer lists are data.
_LONGEST = 1000
# Attributes in which Keras and PyTorch list the layers of a layer.
_LISTS = ("_functional", "_layers", "_modules", "_operations", "_operations_by_depth")


def further_optimizers(model: Any, nested: bool = True) -> dict[str, Any]:
    """Return the optimizers of a model beside that of `compile`, by name.

    They are attributes of the model and of its layers, or elements of lists and dicts in these
    attributes. Optimizers in these and in that of `compile`, as in a Lookahead, follow, unless the
    outer optimizer reduces their gradients and has their state in its `variables`, as a
    `LossScaleOptimizer`.

    Args:
        model: the model.
        nested: whether to include optimizers of layers, such as nested models.
    """
    found: dict[str, Any] = {}
    visited = {id(model)}
    layers = [("", model)]
    # The list grows. The model's own attributes come first.
    for prefix, layer in layers:
        of_layer: list[tuple[str, Any]] = []
        for name, value in _attributes(layer).items():
            _collect(f"{prefix}{name}", value, found, visited, of_layer)
        layers += of_layer if nested else []
    first = getattr(model, "optimizer", None)
    known = {id(first)}
    inside: dict[str, Any] = {}
    for name, outer in [("optimizer", first), *found.items()]:
        chain = inner_optimizers(outer)
        for path, inner in chain.items():
            if any(_is_covered(inner, each) for each in (outer, *chain.values())):
                known.add(id(inner))
            else:
                inside[f"{name}.{path}"] = inner
    result = {}
    for name, each in [*found.items(), *inside.items()]:
        if id(each) not in known:
            known.add(id(each))
            result[name] = each
    return result


def _is_covered(inner: Any, outer: Any) -> bool:
    """Return whether an optimizer reduces gradients and has a state only as a part of another."""
    if inner is outer:
        return False
    distribution = distribution_of(inner)
    if distribution is not None and distribution is not distribution_of(outer):
        return False
    return {id(v) for v in inner.variables} <= {id(v) for v in outer.variables}


def _attributes(layer: Any) -> dict[str, Any]:
    """Return the attributes of a layer, and the layers in it that are not attributes."""
    own = vars(layer)
    # TensorFlow's lists of what it tracks, whose names begin with `_self_`, have the same objects.
    found = {n: v for n, v in own.items() if n not in _LISTS and not n.startswith("_self_")}
    # PyTorch keeps layers apart from other attributes.
    found |= own.get("_modules") or {}
    if isinstance(layer, keras.layers.Layer):
        inside = layer._flatten_layers(include_self=False, recursive=False)
        found |= {f"layers.{index}": each for index, each in enumerate(inside)}
    return found


def _collect(
    name: str,
    value: Any,
    found: dict[str, Any],
    visited: set[int],
    layers: list[tuple[str, Any]],
) -> None:
    """Add the optimizers in a value to `found`, its layers to `layers`, and both to `visited`."""
    if isinstance(value, keras.optimizers.Optimizer):
        found[name] = value
        return
    if not isinstance(value, Mapping | list | tuple | keras.layers.Layer) or id(value) in visited:
        return
    if isinstance(value, keras.layers.Layer):
        visited.add(id(value))
        layers.append((f"{name}.", value))
        return
    if len(value) > _LONGEST:
        return
    visited.add(id(value))
    for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
        _collect(f"{name}.{key}", each, found, visited, layers)


def all_optimizers(model: Any) -> list[Any]:
    """Return the optimizer of `compile`, if there is one, and the further optimizers."""
    own = [getattr(model, "optimizer", None), *further_optimizers(model).values()]
    return [each for each in own if each is not None]


def built_optimizers(model: Any) -> dict[str, Any]:
    """Return the further optimizers that are built, by name."""
    return {name: each for name, each in further_optimizers(model).items() if each.built}


def trained_of(model: Any, optimizers: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return for each of these optimizers that is built: the variables that it trains."""
    index = {id(variable): number for number, variable in enumerate(model.weights)}
    return {
        name: [
            index.get(id(variable), -1) for variable in innermost(optimizer)._trainable_variables
        ]
        for name, optimizer in optimizers.items()
        if optimizer.built
    }


def build(model: Any, optimizers: Mapping[str, Any], trained: Trained) -> None:
    """Build optimizers of a model as in another process.

    Args:
        model: a built model.
        optimizers: its optimizers by name.
        trained: the result of `trained_of` in the other process.

    Raises:
        UsageError: the model lacks an optimizer or a variable, or an optimizer is built for other
            variables.
    """
    here, weights = trained_of(model, optimizers), model.weights
    for name, numbers in trained.items():
        if name not in optimizers:
            raise does_not_fit("the model's optimizers (saved -> here)", [f"{name} -> nothing"])
        if name in here:
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
        optimizers[name].build([weights[number] for number in numbers])


def build_for_training(model: Any, optimizer: Any) -> None:
    """Build an optimizer, unless it is built, or the whole model is frozen.

    An optimizer that is built without variables cannot be used after the model is unfrozen.
    """
    if optimizer is not None and not optimizer.built and model.trainable_variables:
        optimizer.build(model.trainable_variables)


class OptimizerStates:
    """A `StatefulItem`: the variables and wire-format scales of optimizers of a model.

    Args:
        model: a built model.
        optimizers: returns the optimizers by name.
    """

    def __init__(self, model: Any, optimizers: Callable[[], Mapping[str, Any]]) -> None:
        self._model = model
        self._optimizers = optimizers

    def _built(self) -> dict[str, Any]:
        return {name: each for name, each in self._optimizers().items() if each.built}

    def save(self) -> Tree:
        """Return the state of each optimizer that is built."""
        optimizers = self._built()
        trained = trained_of(self._model, optimizers)
        return {
            name: {
                "trained": trained[name],
                "variables": _variables(name, optimizer).save(),
                "reduction": _reduction_state(optimizer),
            }
            for name, optimizer in optimizers.items()
        }

    def signature(self) -> list[str]:
        """Return a text for each variable."""
        return [
            f"{name}: {line}"
            for name, optimizer in self._built().items()
            for line in _variables(name, optimizer).signature()
        ]

    def plan_restore(self, tree: Tree) -> Tree:
        """Build the optimizers, and return their own memory as destinations.

        Raises:
            UsageError: the optimizers differ from those that were saved.
        """
        own = self._optimizers()
        build(self._model, own, {name: saved["trained"] for name, saved in tree.items()})
        return {
            name: saved
            | {"variables": _variables(name, own[name]).plan_restore(saved["variables"])}
            for name, saved in tree.items()
        }

    def restore(self, tree: Tree) -> None:
        """Restore the scales: the variables have been written to."""
        own = self._optimizers()
        for name, saved in tree.items():
            distribution = distribution_of(own[name])
            if distribution is not None:
                distribution.restore_reduction_state(saved["reduction"])


class FurtherOptimizers(OptimizerStates):
    """An `OptionalItem`: the states of the further optimizers."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, lambda: further_optimizers(model))

    @property
    def optional(self) -> bool:
        """Whether all optimizers belong to layers: earlier versions did not save them."""
        return not further_optimizers(self._model, nested=False)


class OptimizerVariables(Variables):
    """A `StatefulItem`: the variables of an optimizer.

    The path of a variable begins with the name scopes that are open when the optimizer is built. If
    its first step builds it, for example in a `LossScaleOptimizer`, there are more scopes than if
    hvdkit builds it before a restore. These scopes need not be equal.

    Args:
        optimizer: the optimizer.
        subject: its name in errors.
    """

    def __init__(self, optimizer: Any, subject: str) -> None:
        super().__init__(lambda: named(optimizer_variables(optimizer)), subject, backend.tensor_of)

    def plan_restore(self, tree: Tree) -> Tree:
        """Return the variables' own memory as destinations.

        Raises:
            UsageError: the variables differ from those that were saved.
        """
        own = self._variables()
        if len(own) == len(tree):
            own = {
                _scoped_as(saved, name): own[name] for saved, name in zip(tree, own, strict=True)
            }
        return Variables(lambda: own, self._subject, self._tensor).plan_restore(tree)


def _scoped_as(saved: str, name: str) -> str:
    """Return the path `name` with as many name scopes at its beginning as the path `saved` has."""
    scopes, parts = saved.split("/"), name.split("/")
    more = len(scopes) - len(parts)
    return "/".join([*scopes[:more], *parts] if more > 0 else parts[-more:])


def _variables(name: str, optimizer: Any) -> Variables:
    return OptimizerVariables(optimizer, f"the optimizer {name}")


def _reduction_state(optimizer: Any) -> Tree:
    distribution = distribution_of(optimizer)
    return None if distribution is None else distribution.reduction_state()
