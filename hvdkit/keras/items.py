"""Stateful items of Keras for checkpoints; see `hvdkit.checkpoint.state`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

# Not public: the layout of a .weights.h5 file, and the global seed of `keras.random`.
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from keras.src.saving import saving_lib

from hvdkit.checkpoint import arrays, h5
from hvdkit.checkpoint.items import Plain, Variables, named, plain, smallest
from hvdkit.checkpoint.state import RankItem, StatefulItem, Tree
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.fit.metrics import flat_metrics
from hvdkit.keras.further_optimizers import (
    FurtherOptimizers,
    OptimizerVariables,
    all_optimizers,
    built_optimizers,
    further_optimizers,
)
from hvdkit.keras.model_state import buffers_of, loss_variables, recurrent_states
from hvdkit.keras.optimizer import distribution_of
from hvdkit.keras_variables.optimizer_slots import optimizer_variables, slots_of

#: The part of a checkpoint with the optimizers that are attributes of the model.
_FURTHER = "optimizers"


def items_of(model: Any) -> dict[str, StatefulItem]:
    """Return the items of a built and compiled model that are the same on all ranks."""
    optimizer = model.optimizer
    items: dict[str, StatefulItem] = {
        "model": Variables(lambda: named(model.weights), "the model", backend.tensor_of)
    }
    if buffers_of(model):
        items["buffers"] = Buffers(
            lambda: named(buffers_of(model)), "the buffers of modules", backend.tensor_of
        )
    if optimizer is not None:
        items["optimizer"] = OptimizerVariables(optimizer, "the optimizer")
    if further_optimizers(model):
        items[_FURTHER] = FurtherOptimizers(model)
    items[h5.PART] = Layout(model)
    return items | reduction_items_of(optimizer)


def reduction_items_of(optimizer: Any) -> dict[str, Plain]:
    """Return the item that is needed to resume with bit-identical sums.

    Args:
        optimizer: an optimizer. The dict is empty if it is not wrapped, or None.
    """
    distribution = distribution_of(optimizer)
    if distribution is None:
        return {}
    return {"reduction": Plain(distribution.reduction_state, distribution.restore_reduction_state)}


def rank_items_of(model: Any) -> dict[str, RankItem]:
    """Return the items of a built and compiled model that differ between ranks, except metrics."""
    items: dict[str, RankItem] = {
        "seeds": OwnVariables(lambda: _seeds(model)),
        "global_seed": GlobalSeed(),
        "variables": OwnVariables(lambda: _local(model)),
    }
    # Parts of their own, because earlier checkpoints lack them.
    if buffers_of(model):
        items["own_buffers"] = OwnVariables(lambda: _smallest(buffers_of(model)))
    if recurrent_states(model):
        items["recurrent"] = OwnVariables(lambda: recurrent_states(model))
    if loss_variables(model):
        items["losses"] = OwnVariables(lambda: _smallest(loss_variables(model)))
    return items | {
        # Last, because creating a seed draws from Python's random numbers.
        "random": backend.randomness(),
    }


class Buffers(Variables):
    """A `StatefulItem`: the first rank's buffers of PyTorch modules."""

    #: Earlier versions saved no buffers.
    optional = True


class Layout:
    """A `StatefulItem`: the place of each variable in Keras's `.weights.h5` format.

    Only the export of a checkpoint to such a file reads this item. A resume ignores it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        # Looked up once for the same built optimizers, because Keras then reads all variables.
        self._look_up = functools.lru_cache(maxsize=1)(self._look_up_with)

    def save(self) -> Tree:
        """Return the layout, and the tensors that are neither weights nor optimizer state."""
        layout, others = self._look_up(tuple(built_optimizers(self._model)))
        tensors = {name: backend.tensor_of(variable) for name, variable in others.items()}
        return {h5.LAYOUT: layout, "others": tensors}

    def plan_restore(self, tree: Tree) -> Tree:
        """Return memory to read the other tensors into. `restore` ignores them."""
        others = {name: arrays.empty(spec) for name, spec in tree["others"].items()}
        return {**tree, "others": others}

    def restore(self, tree: Tree) -> None:
        """Ignore the saved layout."""

    def _look_up_with(self, built: Sequence[str]) -> tuple[Tree, dict[str, Any]]:  # noqa: ARG002
        """Return the layout, and name -> variable for the other tensors.

        Args:
            built: the names of the optimizers that are built.
        """
        others: dict[str, Any] = {}
        recorder = _Recorder()
        try:
            saving_lib._save_state(
                self._model,
                weights_store=recorder,
                assets_store=None,
                inner_path="",
                visited_saveables=set(),
            )
        except Exception as error:
            # An error in the code of a layer. It affects an export only.
            return f"the layout is unknown ({type(error).__name__}: {error})", others
        optimizer = self._model.optimizer
        known = {
            id(variable): (part, name)
            for part, variables in (
                ("model", self._model.weights),
                ("optimizer", [] if optimizer is None else optimizer_variables(optimizer)),
            )
            for name, variable in named(variables).items()
        }
        for attribute, further in built_optimizers(self._model).items():
            variables = named(optimizer_variables(further))
            part = f"{attribute}.variables"
            known |= {id(v): (_FURTHER, f"{part}.{name}") for name, v in variables.items()}
        layout: list[Any] = []
        for group in recorder.groups:
            path, entries = group.path, []
            for key, given in group.values:
                value = self._of_optimizer(path, key, given)
                if not isinstance(value, keras.Variable):
                    return (
                        f"{path or type(self._model).__name__} computes the value that it saves as "
                        f"{key!r}, so this value is not a copy of a variable"
                    ), others
                if id(value) not in known:
                    other = f"{path}/{key}"
                    others[other] = value
                    # The name of this tensor in the checkpoint.
                    known[id(value)] = (h5.PART, f"others.{other}")
                entries.append([key, *known[id(value)]])
            layout.append([path, group.name, entries])
        return layout, others

    def _of_optimizer(self, path: str, key: str, value: Any) -> Any:
        """Return the optimizer's variable if `value` is a copy of it; otherwise `value`."""
        owner = self._model
        for name in path.split("/"):
            owner = getattr(owner, name, None)
        if not isinstance(owner, keras.optimizers.Optimizer):
            return value
        variable = owner.variables[int(key)]
        same = backend.read(variable).tobytes() == np.asarray(value).tobytes()
        return variable if same else value


class _Group:
    """The values that Keras would write to one group of a file.

    Attributes:
        path: of the group.
        name: of the layer or optimizer; None if Keras gives none.
        values: key and value, in order.
    """

    def __init__(self, path: str, name: str | None) -> None:
        self.path = path
        self.name = name
        self.values: list[tuple[str, Any]] = []

    def __setitem__(self, key: str, value: Any) -> None:
        self.values.append((key, value))

    def __len__(self) -> int:
        return len(self.values)


class _Recorder(saving_lib.H5IOStore):
    """A store that records the values that Keras would write to a file."""

    def __init__(self) -> None:
        self.mode = "w"
        self._made: list[_Group] = []

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: dict[str, Any] | None = None) -> Any:
        group = _Group(path, metadata.get("name") if metadata else None)
        self._made.append(group)
        return group

    @property
    def groups(self) -> list[_Group]:
        """The groups that have a name or values."""
        return [group for group in self._made if group.name is not None or group.values]


class OwnVariables:
    """A `RankItem`: small variables that differ between ranks.

    Args:
        variables: returns the variables, in the same order in each run of the program.
    """

    def __init__(self, variables: Callable[[], Sequence[Any]]) -> None:
        self._variables = variables

    def save(self) -> Tree:
        """Return each variable's name, dtype and shape, and its content."""
        return [[_line(v), backend.read(v).tobytes()] for v in self._variables()]

    def restore(self, tree: Tree) -> None:
        """Restore the contents.

        Raises:
            UsageError: the model has other variables.
        """
        if not tree:
            # Earlier versions left out all statistics of a model with large ones.
            return
        variables = list(self._variables())
        lines = [_line(variable) for variable in variables]
        if lines != [line for line, _ in tree]:
            raise UsageError(
                f"the checkpoint has other variables of this rank ({[line for line, _ in tree]}) "
                f"than the model ({lines}): build and compile the model as in the run that saved it"
            )
        for variable, (_, content) in zip(variables, tree, strict=True):
            backend.write(variable, np.frombuffer(content, np.uint8))


def _line(variable: Any) -> str:
    return f"{plain(variable.name)} {variable.dtype} {list(variable.shape)}"


def metric_variables(model: Any) -> list[Any]:
    """Return the variables of a model's metrics and losses."""
    return [variable for metric in flat_metrics(model) for variable in metric.variables]


def _seeds(model: Any) -> list[Any]:
    weights = {id(variable) for variable in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


class GlobalSeed:
    """A `RankItem`: the global seed of `keras.random`."""

    def save(self) -> Tree:
        """Return the state of the seed; None if the program has not used the global seed."""
        if global_state.get_global_attribute("global_seed_generator") is None:
            return None
        return backend.read(seed_generator.global_seed_generator().state).tobytes()

    def restore(self, tree: Tree) -> None:
        """Restore the state."""
        if tree is not None:
            state = seed_generator.global_seed_generator().state
            backend.write(state, np.frombuffer(tree, np.uint8))


def _local(model: Any) -> list[Any]:
    """Return the variables that differ between ranks.

    These are the variables of local layers with their optimizer state, and the statistics of layers
    such as BatchNormalization, up to a limit (`smallest`).
    """
    own = _smallest(
        [each for layer in model._flatten_layers() for each in layer._non_trainable_variables]
    )
    for optimizer in all_optimizers(model):
        distribution = distribution_of(optimizer)
        if distribution is not None and optimizer.built:
            for variable in distribution.local_variables:
                own += [variable, *(slot for each, slot in slots_of(optimizer) if each is variable)]
    return own


def _smallest(variables: Sequence[Any]) -> list[Any]:
    """Return the variables that each rank saves; see `smallest`."""
    by_id = {str(id(variable)): variable for variable in variables}
    chosen = smallest({key: backend.bytes_of(each) for key, each in by_id.items()})
    return [variable for key, variable in by_id.items() if key in chosen]
