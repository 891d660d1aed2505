"""The state of a model: its `state_dict`, written in place where possible."""

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.module import _IncompatibleKeys

from hvdkit.checkpoint.items import does_not_fit
from hvdkit.checkpoint.state import Discarded, TensorSpec, Tree
from hvdkit.checkpoint.weights import TIED
from hvdkit.torch.dtensors import is_dtensor, local
from hvdkit.torch.items import compiled
from hvdkit.torch.items.tensors import (
    CPU,
    Held,
    TorchTensor,
    empty,
    empty_like,
    held,
    identity,
    memory,
    overlaps,
    writable,
)
from hvdkit.torch.items.trees import at, on_host, with_tensors, without_tensors


@dataclass(frozen=True)
class _Plan:
    """A planned restore.

    Attributes:
        names: name in the restored tree -> name in the module's `state_dict`.
        to_load: the tensors that `restore` loads with `load_state_dict`.
        restored: the `identity` of the parameters that a partial restore restores.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    to_load: Collection[str] = ()
    restored: Collection[Any] = ()


class ModelItem:
    """A `StatefulItem`: the `state_dict` of a module.

    A tensor with several names is saved once, under the first name.
    """

    def __init__(self, model: torch.nn.Module, subject: str = "model") -> None:
        self._model = model
        self._subject = subject
        self._plan = _Plan()

    def _state(self) -> dict[str, Any]:
        """Return the module's `state_dict`, with names that are equal in every process."""
        state = self._model.state_dict()
        return {known: state[name] for known, name in self._names(state).items()}

    def _names(self, state: Mapping[str, Any], saved: Collection[str] = ()) -> dict[str, str]:
        """Return name that is equal in every process -> name in `state`, the `state_dict`.

        Args:
            state: the `state_dict`.
            saved: the names in the restored tree. Earlier versions of hvdkit saved names with
                prefixes of `torch.compile`, and with Keras's numbers of layers.
        """
        plain = compiled.without_prefixes(self._model)
        earlier = {
            compiled.PREFIX.sub("", name): name for name in saved if compiled.PREFIX.search(name)
        }
        names: dict[str, str] = {}
        for name in state:
            known = plain(name)
            if known not in saved:
                known = earlier.get(known, name if name in saved else known)
            # If another tensor has this name already, keep the tensor's full name.
            names[name if known in names else known] = name
        return names

    @property
    def divided(self) -> bool:
        """Whether the model has DTensors."""
        return any(map(is_dtensor, self._model.state_dict().values()))

    def save(self) -> Tree:
        """Return name -> tensor, and the extra state of modules."""
        tree: dict[str, Any] = {}
        tied: dict[str, str] = {}
        holders: dict[Any, str] = {}
        for name, value in self._state().items():
            if not isinstance(value, torch.Tensor):
                tree[name] = with_tensors(value, at(self._subject, (name,)))
                continue
            tensor = held(value, at(self._subject, (name,)))
            # All empty tensors have the address 0.
            holder = holders.setdefault(memory(value), name) if value.numel() else name
            if holder != name:
                tied[name] = holder
            else:
                tree[name] = tensor
        return {**tree, TIED: tied} if tied else tree

    def signature(self) -> list[str]:
        """Return name, dtype and shape of each tensor of the `state_dict`."""
        lines = [
            f"{name} {_text(writable(value, at(self._subject, (name,))).spec)}"
            if isinstance(value, torch.Tensor)
            else name
            for name, value in self._state().items()
        ]
        # Keras sorts the variables of a layer by names that depend on the process.
        return sorted(lines)

    def plan_restore(self, tree: Tree) -> Tree:
        """Return the model's memory, or new memory where a module's `state_dict` returns copies.

        Raises:
            UsageError: names, shapes or dtypes differ; the message has the first differences.
        """
        own, lines, names = self._compared(tree)
        lines += [line for _, line in self._separate_in_checkpoint(tree, own)]
        if lines:
            raise does_not_fit(self._subject, lines)
        self._plan = _Plan(names, self._copies(tree, own))
        return self._destinations(tree, own)

    def plan_partial_restore(self, tree: Tree) -> tuple[Tree, list[str]]:
        """Plan the restore of the tensors that have the same name, shape and dtype."""
        own, lines, names = self._compared(tree)
        for name, line in self._separate_in_checkpoint(tree, own):
            del own[name]
            lines.append(line)
        plain = compiled.without_prefixes(self._model)
        fitting = {names[name] for name in own}
        restored = {
            identity(parameter)
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            # If nothing differs, all parameters are restored, even if the module's `state_dict`
            # names them differently than `named_parameters`.
            if not lines or name in fitting or plain(name) in own
        }
        self._plan = _Plan(names, self._copies(tree, own), restored)
        return self._destinations(tree, own), lines

    def names(self) -> dict[int, str]:
        """Return the name of each parameter, by `id`, equal in every process."""
        plain = compiled.without_prefixes(self._model)
        return {id(each): plain(name) for name, each in self._model.named_parameters()}

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether `parameter` is one of the model's."""
        return any(parameter is own for own in self._model.parameters())

    def restores(self, parameter: torch.Tensor) -> bool:
        """Return whether the last `plan_partial_restore` restores a parameter of the model."""
        return identity(parameter) in self._plan.restored

    def _separate_in_checkpoint(
        self, tree: Tree, own: Mapping[str, torch.Tensor]
    ) -> list[tuple[str, str]]:
        """Return name and text for each tensor that is tied here, but not in the checkpoint."""
        found = []
        holders: dict[Any, str] = {}
        for name in own:
            if name in tree.get(TIED, {}) or not own[name].numel():
                continue
            holder = holders.setdefault(memory(own[name]), name)
            if holder != name:
                found.append(
                    (name, f"{name} and {holder} are one tensor here, and two in the checkpoint")
                )
        return found

    def _compared(self, tree: Tree) -> tuple[dict[str, torch.Tensor], list[str], Mapping[str, str]]:
        """Return the tensors that match the saved state, and a text for each that does not.

        Also return the result of `_names`.
        """
        state = self._model.state_dict()
        # Compare all names, because the first of several names may have changed.
        names = self._names(state, {*tree, *tree.get(TIED, {})})
        own = {k: state[n] for k, n in names.items() if isinstance(state[n], torch.Tensor)}
        saved = {name: spec for name, spec in tree.items() if isinstance(spec, TensorSpec)}
        named = saved | {name: saved[holder] for name, holder in tree.get(TIED, {}).items()}
        lines = [f"the checkpoint has no {name}" for name in own if name not in named]
        lines += [f"the model has no {name}" for name in named if name not in own]
        alike = {}
        for name in own:
            here = held(own[name], at(self._subject, (name,))).spec
            if local(own[name]).is_meta:
                lines.append(f"{name} is on the meta device: first call Module.to_empty()")
            elif overlaps(own[name]):
                lines.append(f"{name} is a result of expand() and cannot be written: clone it")
            elif name in named and named[name] == here:
                alike[name] = own[name]
            elif name in named:
                lines.append(
                    f"{name} is {_text(here)} here and {_text(named[name])} in the checkpoint"
                )
        return alike, lines, names

    def _copies(self, tree: Tree, own: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the tensors to load with `load_state_dict`.

        These are copies of the model's memory, and tensors that were tied in the saved model only.
        """
        tied = tree.get(TIED, {})
        live = {
            local(t).untyped_storage().data_ptr()
            for t in itertools.chain(self._model.parameters(), self._model.buffers())
        }
        return [
            name
            for name in own
            if local(own[name]).untyped_storage().data_ptr() not in live
            or (name in tied and not _share_memory(own[name], own.get(tied[name])))
        ]

    def _destinations(self, tree: Tree, own: Mapping[str, torch.Tensor]) -> Tree:
        """Return the tree with the memory of `own` in place of the tensors.

        Args:
            tree: the saved state.
            own: name -> tensor of the model to restore.
        """
        tied = tree.get(TIED, {})
        prepared = dict(tree)
        to_load = self._plan.to_load
        loaded = {tied.get(name, name) for name in to_load}
        for name, spec in tree.items():
            if not isinstance(spec, TensorSpec):
                if name != TIED:
                    prepared[name] = on_host(spec)
                continue
            if name in own and name not in to_load:
                prepared[name] = held(own[name])
            elif name in loaded and name in own and is_dtensor(own[name]):
                prepared[name] = held(empty_like(own[name], spec.dtype, own[name].device))
            elif name in loaded:
                prepared[name] = TorchTensor(empty(spec, own[name].device if name in own else CPU))
            else:
                prepared[name] = Discarded(spec)
        return prepared

    def restore(self, tree: Tree) -> None:
        """Load the values that were not written in place.

        Also call the hooks of `register_load_state_dict_post_hook`, in which modules compute other
        values from those that they have loaded.
        """
        tied = tree.get(TIED, {})
        loaded = {name: tree[tied.get(name, name)].tensor for name in self._plan.to_load}
        extra = {
            name: without_tensors(value)
            for name, value in tree.items()
            if not isinstance(value, Held | Discarded) and name != TIED
        }
        names = self._plan.names
        state = {names.get(n, n): value for n, value in {**loaded, **extra}.items()}
        if state:
            self._model.load_state_dict(state, strict=False)
            return
        # Not `load_state_dict`: code of modules that converts earlier versions, or creates new
        # parameters, must not run on values that are in place already.
        for module in reversed(list(self._model.modules())):
            for hook in module._load_state_dict_post_hooks.values():
                hook(module, _IncompatibleKeys([], []))


def _text(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def _share_memory(tensor: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and identity(tensor) == identity(other)
