"""The state of an optimizer: its `state_dict`, with the bits and devices that it was saved with."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from hvdkit.checkpoint.items import does_not_fit
from hvdkit.checkpoint.state import Discarded, TensorSpec, Tree
from hvdkit.errors import UsageError
from hvdkit.torch.dtensors import is_dtensor, replicated
from hvdkit.torch.items.model import ModelItem
from hvdkit.torch.items.tensors import (
    CPU,
    Held,
    SharePart,
    TorchTensor,
    dtype_of,
    empty,
    empty_like,
    held,
    memory,
)
from hvdkit.torch.items.trees import at, leaves, mapped, with_tensors, without_tensors
from hvdkit.torch.reduction.memory_order import memory_order
from hvdkit.torch.shards import Shards
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer


class OptimizerItem:
    """The state and options of an optimizer, with their shapes, dtypes and devices.

    It does not call torch's `load_state_dict`, which casts state to the dtype of the parameter and
    loses bits.

    Args:
        optimizer: the optimizer.
        subject: its name in errors.
        models: name -> the model's item. If a partial restore leaves a parameter unchanged, the
            optimizer state of this parameter also stays unchanged.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        subject: str = "optimizer",
        models: Mapping[str, ModelItem] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._subject = subject
        self._models = dict(models or {})
        # Indices of the parameters whose state a partial restore leaves as it is.
        self._left: set[int] = set()

    @property
    def divided(self) -> bool:
        """Whether parameters are DTensors, and so is their state, or the optimizer is sharded."""
        return self._shards is not None or any(map(is_dtensor, self._parameters()))

    @property
    def _shards(self) -> Shards | None:
        optimizer = self._optimizer
        return optimizer.shards if isinstance(optimizer, WrappedOptimizer) else None

    def save(self) -> Tree:
        """Return the `state_dict`, the class, and the shapes and names of the parameters.

        Raises:
            UsageError: the `state_dict` has entries of its own, which `restore` could not load.
        """
        optimizer = self._optimizer
        if isinstance(optimizer, WrappedOptimizer):
            state = optimizer.own_state_dict()
        else:
            state = optimizer.state_dict()
        self._check_entries(state)
        return self.tree(state) | self._window()

    def tree(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tree of a `state_dict`, without the position in an accumulation window."""
        return {
            "state": mapped(state["state"], self._held),
            "param_groups": with_tensors(state["param_groups"], f"{self._subject}['param_groups']"),
            "optimizer": type(self._optimizer).__name__,
            "shapes": self._shapes(),
            "names": self._names(),
            # For a model on a GPU, some optimizers have step counters on the host.
            "on_host": [
                list(path)
                for path, leaf in leaves(state["state"])
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"
            ],
            "orders": self._orders(state["state"]),
            "tied": _tied(state["state"]),
        }

    def _held(self, leaf: Any, path: tuple[Any, ...]) -> Any:
        """Return what the tree has in place of a value of the state."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        parameter = self._parameters()[path[0]] if isinstance(path[0], int) else None
        if self._shards is not None and parameter is not None:
            part = self._shards.part_of(leaf, parameter)
            if part is not None:
                return SharePart(leaf, parameter, part)
            if leaf.dim() == 1 and leaf.numel() == parameter.numel():
                leaf = leaf.view(parameter.shape)
        return held(leaf, at(f"{self._subject}['state']", path))

    def _orders(self, state: Mapping[Any, Any]) -> list[list[list[Any]]]:
        """Return path and memory order of each tensor that has not the usual order."""
        parameters = self._parameters()
        found = []
        for path, leaf in leaves(state):
            if isinstance(leaf, torch.Tensor):
                order = memory_order(leaf)
                if order != _usual_order(tuple(leaf.shape), path, parameters):
                    found.append([list(path), list(order)])
        return found

    def _window(self) -> Tree:
        """Return the position in an accumulation window; empty outside of a window."""
        optimizer = self._optimizer
        if not isinstance(optimizer, WrappedOptimizer) or not optimizer.reducer.window.begun:
            return {}
        return {"window": [optimizer.reducer.window.begun, optimizer.reducer.window.size]}

    def _check_entries(self, state: Mapping[str, Any]) -> None:
        own = sorted(str(key) for key in state.keys() - {"state", "param_groups"})
        if own:
            raise UsageError(
                f"the state_dict() of {self._subject}, a {type(self._optimizer).__name__}, has the "
                f"entries {', '.join(own)}, which a checkpoint would lose: expected only state and "
                f"param_groups. Keep the values in optimizer.state, for example in "
                f"optimizer.state[parameter][{own[0]!r}]"
            )

    def signature(self) -> list[str]:
        """Return the class, the index and shape of each parameter, and the names.

        Raises:
            UsageError: see `save`.
        """
        self._check_entries(_local_state(self._optimizer))
        return [
            type(self._optimizer).__name__,
            *(
                f"parameter {i} of group {g} {shape}"
                for g, group in enumerate(self._shapes())
                for i, shape in enumerate(group)
            ),
            *self._names(),
        ]

    def _shapes(self) -> list[list[list[int]]]:
        return [[list(p.shape) for p in group["params"]] for group in self._optimizer.param_groups]

    def _names(self) -> list[str]:
        """Return the name of each parameter; "" for a parameter of no model."""
        known = {
            key: f"{part}.{name}"
            for part, model in self._models.items()
            for key, name in model.names().items()
        }
        return [known.get(id(parameter), "") for parameter in self._parameters()]

    def plan_restore(self, tree: Tree) -> Tree:
        """Return the optimizer's memory where it fits the saved tensor, otherwise new memory.

        Raises:
            UsageError: the saved optimizer is of another class or has other parameters.
        """
        self._left = set()
        kind, shapes = type(self._optimizer).__name__, self._shapes()
        if tree["optimizer"] != kind:
            raise does_not_fit(
                self._subject,
                [f"the optimizer is {kind} here and {tree['optimizer']} in the checkpoint"],
            )
        lines = []
        if len(shapes) != len(tree["shapes"]):
            lines.append(
                f"the optimizer has {len(shapes)} parameter groups here and {len(tree['shapes'])} "
                f"in the checkpoint"
            )
        for g, (saved, own) in enumerate(zip(tree["shapes"], shapes, strict=False)):
            if len(saved) != len(own):
                lines.append(
                    f"group {g} has {len(own)} parameters here and {len(saved)} in the checkpoint"
                )
            lines += [
                f"parameter {i} of group {g} is {b} here and {a} in the checkpoint"
                for i, (a, b) in enumerate(zip(saved, own, strict=False))
                if a != b
            ]
        # The state is saved by index. Steps of earlier versions have no names. A name that is
        # unknown here is no error: the parameter may have been renamed.
        names = self._names()
        lines += [
            f"parameter {i} is {own_name or 'of no model'} here and {saved_name} in the checkpoint"
            for i, (saved_name, own_name) in enumerate(
                zip(tree.get("names", []), names, strict=False)
            )
            if saved_name != own_name and saved_name and saved_name in names
        ]
        if lines:
            raise does_not_fit(self._subject, lines)
        parameters = self._parameters()
        own_leaves = dict(leaves(_local_state(self._optimizer)["state"]))
        device_of = self._devices(tree)
        # Steps of earlier versions have no orders.
        orders = {tuple(path): tuple(order) for path, order in tree.get("orders", [])}
        # Nor do they tell which tensors are one tensor.
        tied = {tuple(path): tuple(first) for path, first in tree.get("tied", [])}
        destinations: dict[tuple[Any, ...], Held] = {}
        # The memory of tensors that were separate stays separate.
        taken = set()

        def convert(leaf: Any, path: tuple[Any, ...]) -> Any:
            if not isinstance(leaf, TensorSpec):
                return leaf
            destination = destinations.get(tied.get(path, path)) or destination_of(leaf, path)
            destinations[path] = destination
            taken.add(memory(destination.tensor))
            return destination

        def destination_of(leaf: TensorSpec, path: tuple[Any, ...]) -> Held:
            current = own_leaves.get(path)
            device = device_of(path, current)
            order = orders.get(path) or _usual_order(leaf.shape, path, parameters)
            if (
                isinstance(current, torch.Tensor)
                and current.device == device
                and memory(current) not in taken
            ):
                kept = held(current, at(f"{self._subject}['state']", path))
                if kept.spec == leaf and memory_order(current) == order:
                    return kept
            parameter = parameters[path[0]] if isinstance(path[0], int) else None
            if self._shards is not None and parameter is not None:
                own = self._shards.empty_share(leaf.shape, parameter)
                if own is not None:
                    new = torch.empty(own.shape, dtype=dtype_of(leaf), device=device)
                    return SharePart(new, parameter, self._shards.first_of(parameter))
            if not is_dtensor(parameter) or path[-1] == "step":
                return TorchTensor(empty(leaf, device, order))
            if parameter is not None and leaf.shape == tuple(parameter.shape):
                return held(empty_like(parameter, leaf.dtype, device))
            new = empty(leaf, device, order)
            # Factors of a matrix, for example. A counter is a plain tensor.
            return held(replicated(new, parameter) if leaf.shape else new)

        def convert_group(leaf: Any, path: tuple[Any, ...]) -> Any:
            if not isinstance(leaf, TensorSpec):
                return leaf
            # Keep a learning rate that is a tensor, because a graph may refer to it.
            held = self._optimizer.param_groups[path[0]].get(path[1])
            if isinstance(held, torch.Tensor) and TorchTensor(held).spec == leaf:
                return TorchTensor(held)
            return TorchTensor(empty(leaf, CPU))

        return tree | {
            "state": mapped(tree["state"], convert),
            "param_groups": mapped(tree["param_groups"], convert_group),
        }

    def plan_dependent_restore(
        self, tree: Tree, wanted: Collection[str], planned: Collection[str]
    ) -> tuple[Tree, list[str]]:
        """Plan the restore of the state of each parameter whose value is restored.

        Also restore the state of a parameter that belongs to no model in `wanted`. See
        `hvdkit.checkpoint.state` for the arguments.

        Raises:
            UsageError: see `plan_restore`.
        """
        prepared = self.plan_restore(tree)
        models = {name: model for name, model in self._models.items() if name in wanted}

        def is_left(parameter: torch.Tensor) -> bool:
            of = [name for name, model in models.items() if model.has(parameter)]
            return bool(of) and not any(
                name in planned and models[name].restores(parameter) for name in of
            )

        self._left = {
            index for index, parameter in enumerate(self._parameters()) if is_left(parameter)
        }
        saved = self._left & tree["state"].keys()
        for index in saved:
            prepared["state"][index] = mapped(
                tree["state"][index],
                lambda leaf, _: Discarded(leaf) if isinstance(leaf, TensorSpec) else leaf,
            )
        count = len(saved)
        if not count:
            return prepared, []
        of_them = "a parameter that is" if count == 1 else f"{count} parameters that are"
        return prepared, [f"the state of {of_them} not restored"]

    def _devices(self, tree: Tree) -> Callable[[tuple[Any, ...], Any], torch.device]:
        """Return a function that returns the device for a tensor of the state.

        A tensor that was saved from an accelerator gets the parameter's device. A tensor that was
        saved from the host, such as a step counter, gets the host if other state of the same
        parameter was on an accelerator. If all state of the parameter was on the host, the tensor
        gets the device of the optimizer's current tensor. If there is none, it gets the device that
        PyTorch would choose.
        """
        parameters = self._parameters()
        on_host = {tuple(path) for path in tree["on_host"]}
        tensors = [path for path, leaf in leaves(tree["state"]) if isinstance(leaf, TensorSpec)]
        elsewhere = {path[0] for path in tensors if path not in on_host}
        on_device = {
            index
            for group in tree["param_groups"]
            if group.get("capturable") or group.get("fused")
            for index in group["params"]
        }

        def device_of(path: tuple[Any, ...], held: Any) -> torch.device:
            index = path[0]
            known = held.device if isinstance(held, torch.Tensor) else None
            if not isinstance(index, int):
                return known or CPU
            if path not in on_host:
                return parameters[index].device
            if index in elsewhere:
                return CPU
            counter = path[-1] == "step" and index not in on_device
            return known or (CPU if counter else parameters[index].device)

        return device_of

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def restore(self, tree: Tree) -> None:
        """Restore the state, and the position in an accumulation window."""
        self.load(tree)
        if isinstance(optimizer := self._optimizer, WrappedOptimizer):
            optimizer.discard_accumulated()
            # Steps without an open window, and of earlier versions, have no position.
            optimizer.reducer.resume_window(*tree.get("window", (0, 1)))

    def load(self, tree: Tree) -> None:
        """Load a result of `tree` in place: LR schedulers and wrappers refer to its containers."""
        optimizer = self._optimizer
        parameters = self._parameters()
        state = {
            parameters[key] if isinstance(key, int) else key: value
            for key, value in without_tensors(tree["state"]).items()
            if key not in self._left
        }
        for parameter in (parameters[index] for index in self._left):
            key = parameter if self._shards is None else self._shards.share_of(parameter)
            if key in optimizer.state:
                state[key] = optimizer.state[key]
        self._left = set()
        optimizer.state.clear()
        optimizer.state.update(state)
        if self._shards is not None:
            self._shards.take_state()
        groups = without_tensors(tree["param_groups"])
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})


def _local_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the `state_dict`; of a sharded optimizer, without the state of shares."""
    if isinstance(optimizer, WrappedOptimizer) and optimizer.shards is not None:
        return {"state": {}, "param_groups": optimizer.param_groups}
    return optimizer.state_dict()


def _tied(state: Mapping[Any, Any]) -> list[list[list[Any]]]:
    """Return, for each further path of a tensor that has several, this path and the first one.

    Each path has its own copy in the step, so that earlier versions can restore it.
    """
    firsts: dict[Any, tuple[Any, ...]] = {}
    found = []
    for path, leaf in leaves(state):
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            first = firsts.setdefault(memory(leaf), path)
            if first != path:
                found.append([list(path), list(first)])
    return found


def _usual_order(
    shape: tuple[int, ...], path: tuple[Any, ...], parameters: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """Return the memory order of a tensor for which no order was saved.

    This is the order of its parameter if the shapes are equal: fused optimizers are faster then.
    """
    if isinstance(path[0], int) and shape == tuple(parameters[path[0]].shape):
        return memory_order(parameters[path[0]])
    return tuple(range(len(shape)))
