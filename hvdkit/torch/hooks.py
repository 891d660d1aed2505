"""Hooks on parameters, which call a wrapped optimizer when gradients are accumulated.

A parameter belongs to the optimizer that wrapped it last. The hooks do not keep the optimizer
alive.
"""

import functools
import weakref
from typing import Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary


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


# Parameter -> its listener and hooks.
_hooks: WeakIdKeyDictionary = WeakIdKeyDictionary()


def register(listener: Listener, parameter: torch.nn.Parameter, number: int | None) -> None:
    """Register hooks on a parameter, and remove those of earlier calls.

    Args:
        listener: the optimizer.
        parameter: the parameter.
        number: the parameter's number, which is passed to the listener; None if it is in no plan.
    """
    reference = weakref.ref(listener)
    previous, *handles = _hooks.get(parameter, (reference,))
    other = previous()
    if other is not None and other is not listener:
        other._wrapped_again = True
    for handle in handles:
        handle.remove()
    # PyTorch accepts hooks only while the parameter needs gradients.
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    _hooks[parameter] = (
        reference,
        parameter.register_hook(functools.partial(_before, reference, number)),
        parameter.register_post_accumulate_grad_hook(functools.partial(_after, reference, number)),
    )
    if frozen:
        parameter.requires_grad_(False)


def unregister(listener: Listener, parameter: torch.nn.Parameter) -> None:
    """Remove the hooks of a parameter, unless it belongs to another listener now."""
    reference, *handles = _hooks.get(parameter, (None,))
    if reference is not None and reference() is listener:
        for handle in handles:
            handle.remove()
        del _hooks[parameter]


def listener_of(parameter: torch.Tensor) -> Listener | None:
    """Return the optimizer that the hooks of a parameter call; None if there is none."""
    reference, *_ = _hooks.get(parameter, (None,))
    found: Listener | None = reference and reference()
    return found


def remove(listener: Listener) -> None:
    """Remove the hooks of a listener, so that backward passes no longer call it."""
    for parameter in list(_hooks.keys()):
        unregister(listener, parameter)


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
