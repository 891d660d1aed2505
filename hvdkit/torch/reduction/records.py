"""A record for each parameter of a wrapped optimizer, and the hooks that report its gradients.

A parameter belongs to the optimizer that wrapped it last. Hooks refer to the record weakly, so they
do not keep the optimizer alive. A record that is freed removes its hooks.
"""

import enum
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvdkit.torch.dtensors import align_gradient
from hvdkit.torch.reduction.holders import version_of
from hvdkit.torch.reduction.memory import fits, is_writable

# The attribute of a gradient that a step has left: its id and its version then. PyTorch copies the
# attribute to a copy of the gradient, which has another id. No weak reference: with
# `torch.__future__.set_swap_module_params_on_conversion`, PyTorch does not convert a module whose
# gradients have weak references.
_LEFT = "_hvdkit_left"
_current_task = torch._C._current_graph_task_id


class Left(enum.Enum):
    """The kind of gradients that the last round or step has left in `p.grad`."""

    NOTHING = enum.auto()
    #: Reduced gradients that no step has used.
    UNUSED = enum.auto()
    #: The same, and a checkpoint was saved, which lacks them.
    UNSAVED = enum.auto()
    USED = enum.auto()


def leave(gradient: torch.Tensor, version: int | None = None) -> None:
    """Mark a gradient as left by hvdkit, with its present version or an earlier one."""
    at = version_of(gradient) if version is None else version
    gradient.__dict__[_LEFT] = id(gradient), at


def is_left(gradient: torch.Tensor) -> bool:
    """Return whether the gradient is marked, and not a new one of the script."""
    marked, _ = gradient.__dict__.get(_LEFT, (None, None))
    return marked == id(gradient)


def is_changed(gradient: torch.Tensor) -> bool:
    """Return whether a marked gradient was changed since; False for one without a mark."""
    marked, version = gradient.__dict__.get(_LEFT, (None, None))
    return marked == id(gradient) and version != version_of(gradient)


def forget(gradient: torch.Tensor) -> None:
    """Remove the mark: the gradient counts as the script's own."""
    gradient.__dict__.pop(_LEFT, None)


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Record:
    """A parameter of a wrapped optimizer, and the state of its gradient.

    `hvdkit.torch.reduction.gradients` has the table of the states.

    Attributes:
        owner: the `OptimizerReducer` that has the parameter.
        parameter: the parameter.
        name: its name, unique within the optimizer.
        number: the number of records of the optimizer before this one.
        group: the number of the parameter's group in the argument `groups`; None for none.
        part: the `hvdkit.torch.reduction.parts.Part` that has it; None without a plan.
        index: the place in `part`.
        base: the part of the gradient that earlier rounds have reduced, while `p.grad` has only
            what this rank has added.
        local: whether `p.grad` has something that is not reduced.
        arrived: how often the current pass has added to the gradient.
        repeats: whether a pass adds several times, so that the bucket waits for its end.
        content: the address of the parameter's content when hooks were registered; None without.
        undefined: whether the latest gradient of the parameter was None, so that nothing is added.
        handles: those of the hooks.
        share: of a sharded optimizer: the share of the parameter that this rank updates.
        place: of an optimizer that is sharded by whole tensors: the place of the parameter's owner.
    """

    owner: "weakref.ref[Any]"
    parameter: torch.nn.Parameter
    name: str
    number: int
    group: int | None = None
    part: Any = None
    index: int = 0
    base: torch.Tensor | None = None
    local: bool = False
    arrived: int = 0
    repeats: bool = False
    content: int | None = None
    undefined: bool = False
    handles: Sequence[RemovableHandle] = ()
    share: torch.nn.Parameter | None = None
    place: int | None = None

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient or a part of one."""
        return self.base is not None or self.parameter.grad is not None

    @property
    def hooks_lost(self) -> bool:
        """Whether `torch.utils.swap_tensors` or the script has removed the hooks, or none exist."""
        cleared = self.handles and not self.parameter._backward_hooks
        return bool(cleared or self.content != self.parameter._cdata)

    def register_hooks(self) -> None:
        """Register the hooks, and remove those of an earlier record of the parameter."""
        parameter = self.parameter
        previous = _records.get(id(parameter))
        if previous is not None:
            owner = previous.owner()
            if previous is not self and owner is not None and owner is not self.owner():
                owner.wrapped_again = True
            previous.remove_hooks()
        # PyTorch accepts hooks only while the parameter needs gradients.
        frozen = not parameter.requires_grad
        parameter.requires_grad_(True)
        own = weakref.ref(self)
        self.handles = (
            parameter.register_hook(functools.partial(_before, own)),
            parameter.register_post_accumulate_grad_hook(functools.partial(_after, own)),
        )
        self.content = parameter._cdata
        _records[id(parameter)] = self
        # After `swap_tensors`, PyTorch does not know the hooks of the new content.
        parameter._backward_hooks = parameter._backward_hooks
        parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
        if frozen:
            parameter.requires_grad_(False)

    @torch.no_grad()
    def add_base(self) -> None:
        """Add the local part to the base, which becomes the gradient again.

        So a gradient keeps its memory as in one process, where a pass adds to it in place.
        """
        p, base = self.parameter, self.base
        assert base is not None
        self.base = None
        if p.grad is None:
            p.grad = base
        elif p.grad.is_sparse and not base.is_sparse:
            p.grad = base + p.grad  # PyTorch cannot add in the other order
        elif base.is_sparse or not is_writable(base) or not fits(p, base):
            p.grad = p.grad + base
        else:
            p.grad = base.add_(p.grad)

    def remove_hooks(self) -> None:
        """Remove the hooks, so that backward passes no longer call the owner."""
        for handle in self.handles:
            handle.remove()
        self.handles = ()

    def __del__(self) -> None:
        self.remove_hooks()


# The id of a parameter -> the record with its hooks. The record keeps the parameter alive.
_records: "weakref.WeakValueDictionary[int, Record]" = weakref.WeakValueDictionary()


def owner_of(parameter: torch.Tensor) -> Any:
    """Return the reducer that the hooks of a parameter call; None if there is none."""
    record = _records.get(id(parameter))
    return None if record is None else record.owner()


def _before(reference: "weakref.ref[Record]", gradient: torch.Tensor | None) -> None:
    """Hook: a gradient is about to be added to `p.grad`, or to be returned by `autograd.grad`.

    It is None if a `torch.autograd.Function` has returned None for the parameter.
    """
    record = reference()
    if record is not None:
        record.undefined = gradient is None
        owner = record.owner()
        if owner is not None and (task := _current_task()) != owner.task:
            owner.enter_task(task)


def _after(reference: "weakref.ref[Record]", _: torch.Tensor) -> None:
    """Hook: `p.grad` is complete."""
    record = reference()
    if record is not None and not record.undefined:
        owner = record.owner()
        if owner is not None:
            if (task := _current_task()) != owner.task:
                owner.enter_task_late(task, record)
            align_gradient(record.parameter)
            owner.after_accumulation(record)
