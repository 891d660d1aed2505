"""Hooks on parameters, which call a wrapped optimizer when gradients are accumulated.

A parameter belongs to the optimizer that wrapped it last. The hooks do not keep the optimizer
alive.
"""

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle


class Listener(Protocol):
    """The optimizer that is called."""

    #: Whether another optimizer has wrapped parameters of this one.
    _wrapped_again: bool

    def _before_accumulation(self, number: int | None) -> None:
        """Handle that a gradient is about to be added to `p.grad`."""
        ...

    def _after_accumulation(self, number: int | None, parameter: torch.nn.Parameter) -> None:
        """Handle that `parameter.grad` is complete."""
        ...


@dataclass(frozen=True)
class _Hooks:
    """The hooks of a parameter.

    Attributes:
        listener: refers to the listener, which keeps the parameter alive.
        content: the address of the parameter's content when the hooks were registered.
        handles: remove the hooks.
    """

    listener: weakref.ref[Listener]
    content: int
    handles: Sequence[RemovableHandle]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


# The id of a parameter -> its hooks. No weak references to parameters: with
# `torch.__future__.set_swap_module_params_on_conversion`, PyTorch refuses to convert such tensors.
_hooks: dict[int, _Hooks] = {}


def register(listener: Listener, parameter: torch.nn.Parameter, number: int | None) -> None:
    """Register hooks on a parameter, and remove those of earlier calls.

    Args:
        listener: the optimizer. It must keep the parameter alive until `unregister`.
        parameter: the parameter.
        number: the parameter's number, which is passed to the listener; None if it is in no plan.
    """
    reference = weakref.ref(listener)
    previous = _hooks.pop(id(parameter), None)
    if previous is not None:
        other = previous.listener()
        if other is not None and other is not listener:
            other._wrapped_again = True
        previous.remove()
    # PyTorch accepts hooks only while the parameter needs gradients.
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    handles = (
        parameter.register_hook(functools.partial(_before, reference, number)),
        parameter.register_post_accumulate_grad_hook(functools.partial(_after, reference, number)),
    )
    _hooks[id(parameter)] = _Hooks(reference, parameter._cdata, handles)
    if previous is not None and previous.content != parameter._cdata:
        # After `swap_tensors`, PyTorch does not know the hooks of the new content.
        parameter._backward_hooks = parameter._backward_hooks
        parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    if frozen:
        parameter.requires_grad_(False)


def are_lost(parameter: torch.nn.Parameter) -> bool:
    """Return whether PyTorch has lost the hooks of a parameter, in `torch.utils.swap_tensors`."""
    hooks = _hooks.get(id(parameter))
    return hooks is not None and hooks.content != parameter._cdata


def unregister(listener: Listener, parameter: torch.nn.Parameter) -> None:
    """Remove the hooks of a parameter, unless it belongs to another listener now."""
    hooks = _hooks.get(id(parameter))
    if hooks is not None and hooks.listener() is listener:
        del _hooks[id(parameter)]
        hooks.remove()


def listener_of(parameter: torch.Tensor) -> Listener | None:
    """Return the optimizer that the hooks of a parameter call; None if there is none."""
    hooks = _hooks.get(id(parameter))
    return None if hooks is None else hooks.listener()


def remove(listener: Listener | None) -> None:
    """Remove the hooks of a listener, so that backward passes no longer call it.

    Args:
        listener: None for all listeners that do not exist any more.
    """
    for key, hooks in list(_hooks.items()):
        if hooks.listener() is listener:
            del _hooks[key]
            hooks.remove()


def _before(reference: weakref.ref[Listener], number: int | None, _: torch.Tensor) -> None:
    listener = reference()
    if listener is not None:
        listener._before_accumulation(number)


def _after(
    reference: weakref.ref[Listener], number: int | None, parameter: torch.nn.Parameter
) -> None:
    listener = reference()
    if listener is not None:
        listener._after_accumulation(number, parameter)
