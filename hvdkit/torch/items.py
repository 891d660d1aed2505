"""The stateful items of a PyTorch training; see `hvdkit.checkpoint.state`."""

import itertools
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from horovod.torch import SyncBatchNorm

from hvdkit.checkpoint import dtypes, randomness
from hvdkit.checkpoint.items import LARGEST_STATISTICS
from hvdkit.checkpoint.state import Discarded, SmallTensor, TensorSpec, Tree
from hvdkit.checkpoint.tree import MAX_ARRAY_BYTES
from hvdkit.checkpoint.weights import TIED
from hvdkit.core.reduction import ReductionState
from hvdkit.errors import UsageError
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer

#: dtype of torch -> its name in safetensors. Older versions of torch do not have all of them.
_DTYPES = {
    getattr(torch, name): code for name, code in dtypes.CODES.items() if hasattr(torch, name)
}
_BY_CODE = {code: dtype for dtype, code in _DTYPES.items()}

_SHOWN = 3


class TorchTensor:
    """A `hvdkit.checkpoint.state.Tensor` for a torch tensor on any device.

    Args:
        tensor: a tensor of a class that overrides no operations, because the content of other
            classes may be in other tensors.
        subject: its name in errors.

    Raises:
        UsageError: the tensor's class, dtype or layout is not supported, or the tensor is not
            initialised.
    """

    def __init__(self, tensor: torch.Tensor, subject: str = "a tensor") -> None:
        if torch.nn.parameter.is_lazy(tensor):
            raise UsageError(
                f"{subject} is not initialised and has no shape: call the model on one batch before"
            )
        kind = type(tensor)
        if _has_own_operations(kind):
            raise UsageError(
                f"{subject} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot "
                f"hold: expected a torch.Tensor, or a subclass that overrides no operations. "
                f"Convert it, or return its component tensors from get_extra_state()"
            )
        if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
            raise UsageError(
                f"{subject} is {tensor.dtype} with layout {tensor.layout}: a checkpoint holds "
                f"dense tensors of {', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}"
            )
        self.tensor = tensor.detach()
        # The writer thread must read after the operations that this thread has started.
        self._stream: AbstractContextManager[Any] = (
            torch.cuda.stream(torch.cuda.current_stream(tensor.device))
            if tensor.is_cuda
            else nullcontext()
        )
        self._staged: torch.Tensor | None = None

    @property
    def spec(self) -> TensorSpec:
        """Its dtype and shape."""
        return TensorSpec(_DTYPES[self.tensor.dtype], tuple(self.tensor.shape))

    @torch.no_grad()
    def read(self, out: np.ndarray) -> None:
        """Copy the content into `out`, directly from the device."""
        # An empty array has no strides that torch could reinterpret.
        if not self.tensor.numel():
            return
        shape = self.tensor.shape
        with self._stream:
            torch.from_numpy(out).view(self.tensor.dtype).view(shape).copy_(self.tensor)

    def memory(self) -> np.ndarray | None:
        """Return the tensor's memory if it is contiguous and on the CPU, else None."""
        tensor = self.tensor
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None
        # One element may have any stride.
        flat = tensor.as_strided((tensor.numel(),), (1,))
        memory: np.ndarray = flat.view(torch.uint8).numpy()
        return memory

    @torch.no_grad()
    def write(self, content: np.ndarray, start: int = 0) -> None:
        """Copy `content` into the tensor, directly to the device."""
        tensor = self.tensor
        if not tensor.numel():
            return
        piece = torch.from_numpy(content).view(tensor.dtype)
        first = start // tensor.element_size()
        if piece.numel() == tensor.numel():
            tensor.copy_(piece.view(tensor.shape))
        elif tensor.is_contiguous():
            tensor.view(-1)[first : first + piece.numel()].copy_(piece)
        else:
            # The tensor has another memory order: collect the pieces first.
            if self._staged is None:
                self._staged = torch.empty(tensor.numel(), dtype=tensor.dtype)
            self._staged[first : first + piece.numel()].copy_(piece)
            if first + piece.numel() == tensor.numel():
                tensor.copy_(self._staged.view(tensor.shape))
                self._staged = None


def writable(tensor: torch.Tensor, subject: str) -> TorchTensor:
    """Return a `TorchTensor` that a restore can write to.

    Raises:
        UsageError: see `TorchTensor`; or the tensor is on the meta device, or several of its
            elements share one place in memory.
    """
    wrapped = TorchTensor(tensor, subject)
    if tensor.is_meta:
        raise UsageError(
            f"{subject} is on the meta device and has no content: create it on a device before, "
            f"such as with Module.to_empty()"
        )
    if _overlaps(tensor):
        raise UsageError(
            f"{subject} has several elements in one place of its memory, as expand() makes them: "
            f"expected a tensor that a restore can write to. Use clone() or contiguous() before"
        )
    return wrapped


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a value that is equal for tensors of the same memory."""
    return tensor.data_ptr(), tensor.device


def _overlaps(tensor: torch.Tensor) -> bool:
    lengths = zip(tensor.shape, tensor.stride(), strict=True)
    return any(length > 1 and stride == 0 for length, stride in lengths)


def _has_own_operations(kind: type) -> bool:
    function = getattr(kind, "__torch_function__", None)
    plain = (
        vars(torch.Tensor)["__torch_function__"].__func__,
        # The function of parameters.
        torch._C._disabled_torch_function_impl,
    )
    if getattr(function, "__func__", function) not in plain:
        return True
    return getattr(kind, "__torch_dispatch__", None) != torch.Tensor.__torch_dispatch__


def with_small_tensors(value: Any, subject: str) -> Tree:
    """Return `value` with a `SmallTensor` in place of each tensor in it.

    Args:
        value: a tree with tensors on any device.
        subject: its name in errors.

    Raises:
        UsageError: a tensor is too large, or its dtype or layout is not supported.
    """

    def convert(leaf: Any, path: tuple[Any, ...]) -> Any:
        if not _is_tensor(leaf):
            return leaf
        where = _at(subject, path)
        if leaf.layout == torch.strided and _nbytes(leaf) > MAX_ARRAY_BYTES:
            raise UsageError(
                f"{where} is a tensor of {_nbytes(leaf)} bytes: expected at most {MAX_ARRAY_BYTES} "
                f"bytes in the state of a rank"
            )
        tensor = TorchTensor(leaf, where)
        return SmallTensor(tensor.spec, _content(tensor.tensor))

    return _mapped(value, convert)


def without_small_tensors(value: Tree) -> Any:
    """Reverse `with_small_tensors`, with tensors on the CPU."""

    def convert(leaf: Any, _: Any) -> Any:
        if not isinstance(leaf, SmallTensor):
            return leaf
        tensor = empty(leaf.spec, _CPU)
        TorchTensor(tensor).write(np.frombuffer(bytearray(leaf.content), np.uint8))
        return tensor

    return _mapped(value, convert)


def with_tensors(value: Any, subject: str) -> Tree:
    """Return `value` with a `TorchTensor` in place of each tensor in it.

    Args:
        value: dicts, lists and tuples that contain tensors.
        subject: its name in errors.
    """
    return _mapped(
        value,
        lambda leaf, path: TorchTensor(leaf, _at(subject, path)) if _is_tensor(leaf) else leaf,
    )


def _at(subject: str, path: tuple[Any, ...]) -> str:
    return subject + "".join(f"[{key!r}]" for key in path)


def without_tensors(value: Tree) -> Any:
    """Return a tree with the tensor in place of each `TorchTensor`."""
    return _mapped(value, lambda leaf, _: leaf.tensor if isinstance(leaf, TorchTensor) else leaf)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _mapped(value: Any, change: Callable[[Any, tuple[Any, ...]], Any], path: Any = ()) -> Any:
    """Return a copy of nested dicts, lists and tuples, with `change(leaf, path)` for each leaf."""
    # Other dicts, such as a defaultdict, are leaves, which encoding refuses.
    if type(value).__name__ in ("dict", "OrderedDict", "Counter") and isinstance(value, dict):
        changed = {key: _mapped(item, change, (*path, key)) for key, item in value.items()}
        # Keep a Counter, which MultiStepLR has.
        return changed if type(value).__name__ in ("dict", "OrderedDict") else type(value)(changed)
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change, (*path, i)) for i, item in enumerate(value))
    return change(value, path)


def _leaves(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    found: list[tuple[tuple[Any, ...], Any]] = []
    _mapped(value, lambda leaf, path: found.append((path, leaf)))
    return iter(found)


def empty(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Return new memory for a tensor."""
    return torch.empty(spec.shape, dtype=_BY_CODE[spec.dtype], device=device)


def on_host(tree: Tree) -> Tree:
    """Return a tree with new memory on the host in place of each `TensorSpec`."""

    def convert(leaf: Any, _: Any) -> Any:
        return TorchTensor(empty(leaf, _CPU)) if isinstance(leaf, TensorSpec) else leaf

    return _mapped(tree, convert)


def _differences(subject: str, lines: list[str]) -> UsageError:
    more = f", and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return UsageError(
        f"the checkpoint does not fit {subject}: {'; '.join(lines[:_SHOWN])}{more}. Build it as "
        f"in the run that saved the checkpoint"
    )


def _text(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


class ModelItem:
    """A `StatefulItem`: the `state_dict` of a module.

    A tensor with several names is saved once, under the first name.
    """

    def __init__(self, model: torch.nn.Module, subject: str = "model") -> None:
        self._model = model
        self._subject = subject
        self._to_load: list[str] = []
        # The addresses of the parameters that the planned partial restore restores.
        self._restored: set[int] = set()
        #: Name in the restored tree -> name in the module's `state_dict`.
        self._names: dict[str, str] = {}

    def _state(self, saved: Collection[str] = ()) -> dict[str, Any]:
        """Return the module's `state_dict`, without prefixes of `torch.compile` in names.

        Args:
            saved: the names in the restored tree. Earlier versions saved prefixes.
        """
        state = self._model.state_dict()
        plain = _without_prefixes(self._model)
        earlier = {_PREFIX.sub("", name): name for name in saved if _PREFIX.search(name)}
        self._names = {}
        for name in state:
            known = plain(name)
            if known not in saved and known in earlier:
                known = earlier[known]
            # A module that is not compiled may have both names.
            self._names[name if known in self._names else known] = name
        return {known: state[name] for known, name in self._names.items()}

    def save(self) -> Tree:
        """Return name -> tensor, and the extra state of modules."""
        tree: dict[str, Any] = {}
        tied: dict[str, str] = {}
        holders: dict[Any, str] = {}
        for name, value in self._state().items():
            if not _is_tensor(value):
                tree[name] = with_tensors(value, _at(self._subject, (name,)))
                continue
            tensor = TorchTensor(value, _at(self._subject, (name,)))
            # All empty tensors have the address 0.
            holder = holders.setdefault(_memory(value), name) if value.numel() else name
            if holder != name:
                tied[name] = holder
            else:
                tree[name] = tensor
        return {**tree, TIED: tied} if tied else tree

    def signature(self) -> list[str]:
        """Return name, dtype and shape of each tensor of the `state_dict`."""
        return [
            f"{name} {_text(writable(value, _at(self._subject, (name,))).spec)}"
            if _is_tensor(value)
            else name
            for name, value in self._state().items()
        ]

    def plan_restore(self, tree: Tree) -> Tree:
        """Return the model's memory, or new memory where a module's `state_dict` returns copies.

        Raises:
            UsageError: names, shapes or dtypes differ; the message has the first differences.
        """
        own, lines = self._compared(tree)
        lines += [line for _, line in self._separate_in_checkpoint(tree, own)]
        if lines:
            raise _differences(self._subject, lines)
        return self._destinations(tree, own)

    def plan_partial_restore(self, tree: Tree) -> tuple[Tree, list[str]]:
        """Plan the restore of the tensors that have the same name, shape and dtype."""
        own, lines = self._compared(tree)
        for name, line in self._separate_in_checkpoint(tree, own):
            del own[name]
            lines.append(line)
        plain = _without_prefixes(self._model)
        fitting = {self._names[name] for name in own}
        self._restored = {
            parameter.data_ptr()
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            # If everything fits, a `state_dict` may even have other names.
            if not lines or name in fitting or plain(name) in own
        }
        return self._destinations(tree, own), lines

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether `parameter` is one of the model's."""
        return any(parameter is own for own in self._model.parameters())

    def restores(self, parameter: torch.Tensor) -> bool:
        """Return whether the last `plan_partial_restore` restores a parameter of the model."""
        return parameter.data_ptr() in self._restored

    def _separate_in_checkpoint(
        self, tree: Tree, own: Mapping[str, torch.Tensor]
    ) -> list[tuple[str, str]]:
        """Return name and text for each tensor that is tied here, but not in the checkpoint."""
        found = []
        holders: dict[Any, str] = {}
        for name in own:
            if name in tree.get(TIED, {}) or not own[name].numel():
                continue
            holder = holders.setdefault(_memory(own[name]), name)
            if holder != name:
                found.append(
                    (name, f"{name} and {holder} are one tensor here, and two in the checkpoint")
                )
        return found

    def _compared(self, tree: Tree) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Return the tensors that match the saved state, and a text for each that does not."""
        # Compare all names, because the first of several names may have changed.
        names = {*tree, *tree.get(TIED, {})}
        own = {n: v for n, v in self._state(names).items() if _is_tensor(v)}
        saved = {name: spec for name, spec in tree.items() if isinstance(spec, TensorSpec)}
        named = saved | {name: saved[holder] for name, holder in tree.get(TIED, {}).items()}
        lines = [f"the checkpoint has no {name}" for name in own if name not in named]
        lines += [f"the model has no {name}" for name in named if name not in own]
        alike = {}
        for name in own:
            here = TorchTensor(own[name], _at(self._subject, (name,))).spec
            if _overlaps(own[name]):
                lines.append(f"{name} is a result of expand() and cannot be written: clone it")
            elif name in named and named[name] == here:
                alike[name] = own[name]
            elif name in named:
                lines.append(
                    f"{name} is {_text(here)} here and {_text(named[name])} in the checkpoint"
                )
        return alike, lines

    def _destinations(self, tree: Tree, own: Mapping[str, torch.Tensor]) -> Tree:
        """Return the tree with the memory of `own` in place of the tensors.

        Args:
            tree: the saved state.
            own: name -> tensor of the model to restore.
        """
        tied = tree.get(TIED, {})
        live = {
            t.untyped_storage().data_ptr()
            for t in itertools.chain(self._model.parameters(), self._model.buffers())
        }
        prepared = dict(tree)
        # Load these with `load_state_dict`: copies, and tensors that are no longer tied.
        self._to_load = [
            name
            for name in own
            if own[name].untyped_storage().data_ptr() not in live
            or (name in tied and not _share_memory(own[name], own.get(tied[name])))
        ]
        loaded = {tied.get(name, name) for name in self._to_load}
        for name, spec in tree.items():
            if not isinstance(spec, TensorSpec):
                if name != TIED:
                    prepared[name] = on_host(spec)
                continue
            if name in own and name not in self._to_load:
                prepared[name] = TorchTensor(own[name])
            elif name in loaded:
                prepared[name] = TorchTensor(empty(spec, own[name].device if name in own else _CPU))
            else:
                prepared[name] = Discarded(spec)
        return prepared

    def restore(self, tree: Tree) -> None:
        """Load the values that were not written in place."""
        tied = tree.get(TIED, {})
        loaded = {name: tree[tied.get(name, name)].tensor for name in self._to_load}
        extra = {
            name: without_tensors(value)
            for name, value in tree.items()
            if not isinstance(value, TorchTensor | Discarded) and name != TIED
        }
        if loaded or extra:
            state = {self._names.get(n, n): value for n, value in {**loaded, **extra}.items()}
            self._model.load_state_dict(state, strict=False)


#: The prefix that `torch.compile` adds to names.
_PREFIX = re.compile(r"(?<![^.])_orig_mod\.")


def _without_prefixes(model: torch.nn.Module) -> Callable[[str], str]:
    """Return a function that removes the prefixes of `torch.compile` from a name in `model`."""
    # torch.compile imports it, which is slow.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    prefixes = {
        f"{path}._orig_mod".removeprefix(".")
        for path, module in model.named_modules(remove_duplicate=False)
        if dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    }

    def plain(name: str) -> str:
        if not prefixes:
            return name
        words = name.split(".")
        return ".".join(
            word
            for place, word in enumerate(words)
            if word != "_orig_mod" or ".".join(words[: place + 1]) not in prefixes
        )

    return plain


def _share_memory(tensor: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and tensor.data_ptr() == other.data_ptr()


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors of the same memory and shape."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    return tensor.data_ptr(), tensor.device, tensor.dtype, shape, strides


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

    def save(self) -> Tree:
        """Return the `state_dict`, the class and the shapes of the parameters."""
        state = self._optimizer.state_dict()
        return {
            "state": with_tensors(state["state"], f"{self._subject}['state']"),
            "param_groups": with_tensors(state["param_groups"], f"{self._subject}['param_groups']"),
            "optimizer": type(self._optimizer).__name__,
            "shapes": self._shapes(),
            # For a model on a GPU, some optimizers have step counters on the host.
            "on_host": [
                list(path)
                for path, leaf in _leaves(state["state"])
                if _is_tensor(leaf) and leaf.device.type == "cpu"
            ],
        }

    def signature(self) -> list[str]:
        """Return the class, and the index and shape of each parameter."""
        return [type(self._optimizer).__name__] + [
            f"parameter {i} of group {g} {shape}"
            for g, group in enumerate(self._shapes())
            for i, shape in enumerate(group)
        ]

    def _shapes(self) -> list[list[list[int]]]:
        return [[list(p.shape) for p in group["params"]] for group in self._optimizer.param_groups]

    def plan_restore(self, tree: Tree) -> Tree:
        """Return the optimizer's memory if dtype, shape and device match, otherwise new memory.

        Raises:
            UsageError: the saved optimizer is of another class or has other parameters.
        """
        self._left = set()
        kind, shapes = type(self._optimizer).__name__, self._shapes()
        if tree["optimizer"] != kind:
            raise _differences(
                self._subject,
                [f"the optimizer is {kind} here and {tree['optimizer']} in the checkpoint"],
            )
        lines = []
        if len(shapes) != len(tree["shapes"]):
            lines.append(f"it has {len(tree['shapes'])} parameter groups; expected {len(shapes)}")
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
        if lines:
            raise _differences(self._subject, lines)
        parameters = self._parameters()
        own_leaves = dict(_leaves(self._optimizer.state_dict()["state"]))
        device_of = self._devices(tree)

        def convert(leaf: Any, path: tuple[Any, ...]) -> Any:
            if not isinstance(leaf, TensorSpec):
                return leaf
            parameter = parameters[path[0]] if isinstance(path[0], int) else None
            held = own_leaves.get(path)
            device = device_of(path, held)
            if isinstance(held, torch.Tensor) and held.device == device:
                kept = TorchTensor(held, _at(f"{self._subject}['state']", path))
                if kept.spec == leaf:
                    return kept
            return TorchTensor(
                empty(leaf, device) if parameter is None else _like(leaf, parameter, device)
            )

        def convert_group(leaf: Any, path: tuple[Any, ...]) -> Any:
            if not isinstance(leaf, TensorSpec):
                return leaf
            # Keep a learning rate that is a tensor, because a graph may refer to it.
            held = self._optimizer.param_groups[path[0]].get(path[1])
            if isinstance(held, torch.Tensor) and TorchTensor(held).spec == leaf:
                return TorchTensor(held)
            return TorchTensor(empty(leaf, _CPU))

        return tree | {
            "state": _mapped(tree["state"], convert),
            "param_groups": _mapped(tree["param_groups"], convert_group),
        }

    def plan_dependent_restore(
        self, tree: Tree, wanted: Collection[str], planned: Collection[str]
    ) -> tuple[Tree, list[str]]:
        """Plan the restore of the optimizer state of those parameters that are restored, too.

        Also restore the state of a parameter if no model that has it is among `wanted`. See
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
            index
            for index, parameter in enumerate(self._parameters())
            if index in tree["state"] and is_left(parameter)
        }
        for index in self._left:
            prepared["state"][index] = _mapped(
                tree["state"][index],
                lambda leaf, _: Discarded(leaf) if isinstance(leaf, TensorSpec) else leaf,
            )
        count = len(self._left)
        if not count:
            return prepared, []
        of_them = "a parameter that is" if count == 1 else f"{count} parameters that are"
        return prepared, [f"the state of {of_them} not restored"]

    def _devices(self, tree: Tree) -> Callable[[tuple[Any, ...], Any], torch.device]:
        """Return a function that returns the device for a tensor of the state.

        It is the device of the parameter, or the host for tensors that were on the host while
        others of the parameter were not, such as step counters. If all tensors of the parameter
        were on the host, torch's rule decides.
        """
        parameters = self._parameters()
        on_host = {tuple(path) for path in tree["on_host"]}
        tensors = [path for path, leaf in _leaves(tree["state"]) if isinstance(leaf, TensorSpec)]
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
                return known or _CPU
            if path not in on_host:
                return parameters[index].device
            if index in elsewhere:
                return _CPU
            counter = path[-1] == "step" and index not in on_device
            return known or (_CPU if counter else parameters[index].device)

        return device_of

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def restore(self, tree: Tree) -> None:
        """Restore the state in place: LR schedulers and wrappers refer to its containers."""
        optimizer = self._optimizer
        parameters = self._parameters()
        state = {
            parameters[key] if isinstance(key, int) else key: value
            for key, value in without_tensors(tree["state"]).items()
            if key not in self._left
        }
        for parameter in (parameters[index] for index in self._left):
            if parameter in optimizer.state:
                state[parameter] = optimizer.state[parameter]
        self._left = set()
        optimizer.state.clear()
        optimizer.state.update(state)
        groups = without_tensors(tree["param_groups"])
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        if isinstance(optimizer, WrappedOptimizer):
            optimizer.discard_accumulated()


_CPU = torch.device("cpu")


def _like(spec: TensorSpec, parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return new memory, with the parameter's memory order if the shapes are equal.

    Fused optimizers are faster with the same order.
    """
    if spec.shape == tuple(parameter.shape):
        dtype = _BY_CODE[spec.dtype]
        return torch.empty_like(
            parameter, dtype=dtype, device=device, memory_format=torch.preserve_format
        ).detach()
    return empty(spec, device)


class StateDictItem:
    """An object with `state_dict` and `load_state_dict`, such as an LR scheduler."""

    def __init__(self, stateful: Any, subject: str) -> None:
        if not all(hasattr(stateful, name) for name in ("state_dict", "load_state_dict")):
            raise UsageError(
                f"{subject} is a {type(stateful).__name__}: expected an object with state_dict() "
                f"and load_state_dict(state)"
            )
        self._stateful = stateful
        self._subject = subject

    def save(self) -> Tree:
        """Return the `state_dict`."""
        return with_tensors(self._stateful.state_dict(), self._subject)

    def plan_restore(self, tree: Tree) -> Tree:
        """Allocate memory for tensors, if there are any.

        Raises:
            UsageError: the state is of another class: both have entries of their own.
                A version of PyTorch may add entries, so a difference on one side is allowed.
        """
        own = self._stateful.state_dict()
        is_enabled = getattr(self._stateful, "is_enabled", None)
        if tree == {} and is_enabled is not None and is_enabled():
            raise UsageError(
                f"{self._subject} is an enabled {type(self._stateful).__name__}, but was disabled "
                f"when it was saved: expected the same options. With strict=False it is not "
                f"restored"
            )
        if isinstance(own, dict) and isinstance(tree, dict):
            saved_alone, own_alone = tree.keys() - own.keys(), own.keys() - tree.keys()
            if saved_alone and own_alone:
                raise UsageError(
                    f"{self._subject} is a {type(self._stateful).__name__} with "
                    f"{', '.join(sorted(map(str, own_alone)))}, and was saved with "
                    f"{', '.join(sorted(map(str, saved_alone)))}: expected the same class. "
                    f"With strict=False it is not restored"
                )
        return on_host(tree)

    def plan_partial_restore(self, tree: Tree) -> tuple[Tree, list[str]]:
        """Plan the restore if the entries are the same.

        Raises:
            UsageError: the entries differ.
        """
        own = self._stateful.state_dict()
        if isinstance(own, dict) and isinstance(tree, dict) and own.keys() != tree.keys():
            raise UsageError(
                f"it was saved with {', '.join(map(str, tree))}, and has "
                f"{', '.join(map(str, own))} here"
            )
        return self.plan_restore(tree), []

    def restore(self, tree: Tree) -> None:
        """Call `load_state_dict`."""
        self._stateful.load_state_dict(without_tensors(tree))


class ReductionItem:
    """The reduction states of wrapped optimizers, which bit-identical sums need."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._optimizers = {
            name: optimizer
            for name, optimizer in optimizers.items()
            if isinstance(optimizer, WrappedOptimizer)
        }

    def save(self) -> Tree:
        """Return the states of each optimizer's synchronizers."""
        return {
            name: [
                state
                and {
                    "gradients": state.gradients,
                    "order": list(state.order),
                    "channels": [list(numbers) for numbers in state.codecs],
                }
                for state in optimizer.reduction_states()
            ]
            for name, optimizer in self._optimizers.items()
        }

    def plan_restore(self, tree: Tree) -> Tree:
        """Return the tree: there are no tensors."""
        return tree

    def restore(self, tree: Tree) -> None:
        """Restore the states. Optimizers ignore incompatible state."""
        for name, optimizer in self._optimizers.items():
            optimizer.resume_reduction(
                [
                    state
                    and ReductionState(
                        state["gradients"],
                        tuple(state["order"]),
                        tuple(tuple(numbers) for numbers in state["channels"]),
                    )
                    for state in tree.get(name, [])
                ]
            )


class Randomness:
    """A `RankItem`: the random states of Python, NumPy, torch, this rank's GPU and generators.

    Args:
        generators: name -> generator of torch, NumPy or Python.
    """

    def __init__(self, generators: Mapping[str, Any] | None = None) -> None:
        self._generators = randomness.Generators(
            generators,
            torch.Generator,
            "torch.Generator",
            lambda generator: generator.get_state().numpy().tobytes(),
            lambda generator, content: generator.set_state(_state(content)),
        )

    def save(self) -> Tree:
        """Return the states of this rank."""
        # Do not initialise CUDA in a process that does not use it.
        gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        return randomness.save() | {
            "torch": torch.get_rng_state().numpy().tobytes(),
            "cuda": torch.cuda.get_rng_state().numpy().tobytes() if gpu else None,
            "generators": self._generators.save(),
        }

    def check(self, tree: Tree) -> None:
        """Check that the saved generators match.

        Raises:
            UsageError: names or kinds differ.
        """
        randomness.check(tree)
        self._generators.check(tree["generators"])

    def restore(self, tree: Tree) -> None:
        """Restore the states."""
        randomness.restore(tree)
        torch.set_rng_state(_state(tree["torch"]))
        if tree["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_state(tree["cuda"]))
        self._generators.restore(tree["generators"])


class Statistics:
    """A `RankItem`: the running statistics of normalisation layers, from this rank's batches.

    Training does not depend on them, but validation does. Above `LARGEST_STATISTICS` bytes, all
    ranks get those of the first rank.

    Args:
        models: name -> model.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        self._models = models

    def save(self) -> Tree:
        """Return the statistics of this rank."""
        own = self._buffers()
        if sum(map(_nbytes, own.values())) > LARGEST_STATISTICS:
            return {}
        return {name: _content(buffer) for name, buffer in own.items()}

    def restore(self, tree: Tree) -> None:
        """Restore the statistics."""
        own = self._buffers()
        # Earlier versions saved prefixes of torch.compile.
        saved = {_PREFIX.sub("", name): content for name, content in tree.items()} | tree
        for name in own.keys() & saved.keys():
            TorchTensor(own[name]).write(np.frombuffer(bytearray(saved[name]), np.uint8))

    def _buffers(self) -> dict[str, torch.Tensor]:
        found = {}
        for model, module in self._models.items():
            plain = _without_prefixes(module)
            for layer, norm in module.named_modules():
                if isinstance(norm, torch.nn.modules.batchnorm._NormBase) and not isinstance(
                    norm, torch.nn.SyncBatchNorm | SyncBatchNorm
                ):
                    for name, buffer in norm.named_buffers(recurse=False):
                        found[f"{model}.{plain(f'{layer}.{name}')}"] = buffer
        return found


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _content(tensor: torch.Tensor) -> bytes:
    out = np.empty(_nbytes(tensor), np.uint8)
    TorchTensor(tensor).read(out)
    return out.tobytes()


def _state(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
