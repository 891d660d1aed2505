"""The gradients of one optimizer on this rank: the reduced part and the new part of each.

After a round, gradients are final: the same on every rank. If a later backward pass adds to a final
gradient, only the new part must be reduced. So before PyTorch accumulates into a final gradient,
the gradient is kept apart as the base. The next round reduces the new part and adds it to the base.
Reducing the sum of both again would be wrong for `Sum`, and would round twice in 16 bits.
"""

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hvdkit.core.accumulation import Window
from hvdkit.core.consistency import are_equal
from hvdkit.core.reduction import Reduction
from hvdkit.core.synchronizer import Synchronizer
from hvdkit.errors import HvdkitError
from hvdkit.torch.backend import TorchBackend, dtype_of_gradient, spec
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.digests import digests

TorchSynchronizer = Synchronizer[torch.Tensor, Any]

_SHOWN = 3

_Layout = tuple[torch.dtype, torch.device, torch.Size]


def _layout(parameter: torch.Tensor) -> _Layout:
    """Return the properties that buckets depend on and that `parameter.data = ...` may change."""
    return dtype_of_gradient(parameter), parameter.device, parameter.shape


_Left = tuple["weakref.ref[torch.Tensor]", int]


def _left(gradient: torch.Tensor | None) -> _Left | None:
    """Return the identity and the version of a gradient; in-place changes increase the version."""
    return None if gradient is None else (weakref.ref(gradient), gradient._version)


class OptimizerGradients:
    """`hvdkit.core.rounds.LocalGradients` of a wrapped optimizer's parameters.

    Args:
        parameters: returns the optimizer's current parameters, in order.
        name_of: returns a parameter's name.
        collectives: of the ranks to reduce over.
        reduction: the settings, without groups.
        groups: parameters that share a bucket.
        window: the accumulation window.
        context: returns lines that must be the same on every rank.
        on_watched: called with each parameter to register hooks for, and its number, or None if it
            is in no bucket yet.
        keep_sparse: convert gradients back to sparse ones after a dense reduction.

    Attributes:
        synchronizers: one for the initial parameters, and one for each later set of parameters.
        void: why the gradients cannot be used; "" if they can.
        unused: whether there are reduced gradients that no step has used.
    """

    def __init__(
        self,
        parameters: Callable[[], list[torch.nn.Parameter]],
        name_of: Callable[[torch.nn.Parameter], str],
        collectives: TorchCollectives,
        reduction: Reduction,
        groups: Sequence[Sequence[torch.nn.Parameter]],
        window: Window,
        context: Callable[[], Sequence[str]],
        on_watched: Callable[[torch.nn.Parameter, int | None], None],
        keep_sparse: bool,
    ) -> None:
        self._all = parameters
        self._name_of = name_of
        self._collectives = collectives
        self._reduction = reduction
        self._groups = groups
        self._window = window
        self._context = context
        self._on_watched = on_watched
        self._keep_sparse = keep_sparse
        self.synchronizers: list[TorchSynchronizer] = []
        self.void = ""
        self.unused = False
        self._backends: list[TorchBackend] = []
        self._layouts: list[list[_Layout]] = []
        # Planned parameters by number; for each, its synchronizer and its index there.
        self._parameters: list[torch.nn.Parameter] = []
        self._numbers: dict[torch.nn.Parameter, int] = {}
        self._places: list[tuple[int, int]] = []
        # The identity and version of each gradient after the last round.
        self._left: list[_Left | None] = []
        # Numbers of parameters with a new part since the last round.
        self._new: set[int] = set()
        # Number -> the base, while `grad` has only the new part.
        self._base: dict[int, torch.Tensor] = {}
        # In a round, all reduced parts are bases, and packing assigns zeros to missing gradients.
        self._in_round = False
        # In the current pass: parameters that PyTorch announced a gradient for, and that got one.
        self._expected: set[int] = set()
        self._arrived: set[int] = set()
        # Parameters without a plan, mostly frozen ones, that have hooks.
        self._unplanned: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._unplanned_arrived = False
        # Whether a final gradient has changed since the last round.
        self._changed = False
        self.add_trainable()
        self.watch()

    # --- plans ----------------------------------------------------------------------------------

    def add_trainable(self) -> bool:
        """Plan trainable parameters that are not planned yet; return whether there were any."""
        added = [p for p in self._all() if p.requires_grad and p not in self._numbers]
        if not added and self.synchronizers:
            return False
        for place, p in enumerate(added):
            self._numbers[p] = len(self._parameters)
            self._parameters.append(p)
            self._places.append((len(self.synchronizers), place))
            self._left.append(None)
        self._plan(added)
        for p in added:
            self._unplanned.pop(p, None)
            self._on_watched(p, self._numbers[p])
        return True

    def watch(self) -> None:
        """Register hooks for parameters without a plan.

        A frozen parameter may become trainable, and the script may add parameters to the groups.
        """
        for p in self._all():
            if p in self._numbers or p in self._unplanned:
                continue
            if p.dtype.is_floating_point or p.dtype.is_complex:
                self._unplanned[p] = True
                self._on_watched(p, None)

    def _plan(self, parameters: list[torch.nn.Parameter]) -> None:
        self._layouts.append([_layout(p) for p in parameters])
        index = {p: i for i, p in enumerate(parameters)}
        groups = [[index[p] for p in group if p in index] for group in self._groups]
        backend = TorchBackend(parameters, self._collectives)
        self._backends.append(backend)
        self.synchronizers.append(
            Synchronizer(
                [spec(self._name_of(p), p) for p in parameters],
                backend,
                self._collectives,
                replace(self._reduction, groups=[group for group in groups if group]),
                self._window,
                self._context(),
            )
        )

    def moved(self) -> bool:
        """Return whether parameters have another dtype, device or shape than the buckets."""
        return any(
            _layout(p) != layout
            for layouts, part in zip(self._layouts, self._parts(), strict=True)
            for p, layout in zip(part, layouts, strict=True)
        )

    def replan(self) -> None:
        """Create new synchronizers for the current parameters. Not a collective."""
        parts = list(self._parts())
        for made in (self.synchronizers, self._backends, self._layouts):
            made.clear()
        for part in parts:
            self._plan(part)

    def _parts(self) -> Iterator[list[torch.nn.Parameter]]:
        """Return the parameters of each synchronizer."""
        start = 0
        for layouts in list(self._layouts):
            yield self._parameters[start : start + len(layouts)]
            start += len(layouts)

    # --- in a backward pass ---------------------------------------------------------------------

    def before(self, number: int, assigned: bool) -> None:
        """Prepare for a gradient that is about to be accumulated.

        Raises:
            HvdkitError: the gradients of an open window have been removed.
        """
        if number in self._expected:
            return
        self._expected.add(number)
        gradient = self._parameters[number].grad
        if gradient is None:
            self._base.pop(number, None)
            if number in self._new and self._window.passes:
                name = self._name_of(self._parameters[number])
                raise HvdkitError(
                    f"the gradient of {name!r} was removed after {self._window.passes} of "
                    f"{self._window.size} backward passes of an accumulation window. Inside one, "
                    f"call optimizer.zero_grad(), which does nothing until the window ends, "
                    f"instead of model.zero_grad()."
                )
        elif number not in self._new and self._is_reduced(number, gradient, assigned):
            self._note_change(number, gradient)
            self._base[number] = gradient
            self._parameters[number].grad = None

    def arrived_unplanned(self) -> None:
        """Record that a gradient of a parameter without a plan has been accumulated."""
        self._unplanned_arrived = True

    def arrived(self, number: int) -> None:
        """Record that a gradient has been accumulated."""
        if number in self._base and number not in self._new:
            # The base may be memory of the bucket that the new part is packed into.
            self._base[number] = self._base[number].detach().clone()
        self._arrived.add(number)
        self._new.add(number)

    def mark_ready(self, number: int) -> None:
        """Mark a gradient as complete in its synchronizer."""
        part, place = self._places[number]
        self.synchronizers[part].mark_ready(place)

    def end_pass(self) -> bool:
        """Restore gradients without a new part; return whether a gradient was accumulated.

        `torch.autograd.grad` announces gradients that it does not accumulate.
        """
        for number in self._expected - self._arrived - self._new:
            if number in self._base:
                self._parameters[number].grad = self._base.pop(number)
        any_arrived = self.any_arrived
        self._expected.clear()
        self._arrived.clear()
        self._unplanned_arrived = False
        return any_arrived

    @property
    def any_arrived(self) -> bool:
        """Whether a gradient has been accumulated in the current pass."""
        return bool(self._arrived) or self._unplanned_arrived

    def _is_reduced(self, number: int, gradient: torch.Tensor, assigned: bool) -> bool:
        left = self._left[number]
        return (left is not None and left[0]() is gradient) or not assigned

    # --- in a round -----------------------------------------------------------------------------

    def signature(self, assigned: bool) -> Sequence[object]:
        """Return which parameters require gradients, and which have reduced ones."""
        needs = bytes(p.requires_grad for p in self._all())
        reduced = [
            number
            for number, p in enumerate(self._parameters)
            if number in self._base
            or (
                not self._in_round
                and number not in self._new
                and (gradient := p.grad) is not None
                and self._is_reduced(number, gradient, assigned)
            )
        ]
        return needs, reduced

    def explain(self) -> str:
        """Describe the signature, for an error."""
        everything = self._all()
        frozen = [self._name_of(p) for p in everything if not p.requires_grad]
        names = ", ".join(frozen[:_SHOWN]) + (", ..." if len(frozen) > _SHOWN else "")
        planned = sum(map(self._has_gradient, range(len(self._parameters))))
        held = planned + sum(p.grad is not None for p in everything if p not in self._numbers)
        return (
            f"{len(everything) - len(frozen)} of {len(everything)} parameters need gradients"
            + (f" (not: {names})" if frozen else "")
            + f", {held} have one"
        )

    def _has_gradient(self, number: int) -> bool:
        if number in self._base:
            return True
        packed = self._in_round and number not in self._new
        return not packed and self._parameters[number].grad is not None

    def exist(self) -> bool:
        """Return whether there is any gradient."""
        return any(p.grad is not None for p in self._parameters)

    def removed(self) -> bool:
        """Return whether the script has removed all gradients that the last round left."""
        any_left = False
        for p, left in zip(self._parameters, self._left, strict=True):
            if left is not None:
                if p.grad is not None:
                    return False
                any_left = True
        return any_left

    def has_new(self, assigned: bool) -> bool:
        """Return whether a gradient has a new part."""
        if self._new or any(
            p.requires_grad and p.grad is not None and p not in self._numbers
            for p in self._unplanned
        ):
            return True
        return assigned and any(
            (gradient := p.grad) is not None and not self._is_reduced(number, gradient, assigned)
            for number, p in enumerate(self._parameters)
        )

    def changed(self) -> bool:
        """Return whether a final gradient has changed since the last round."""
        for number, p in enumerate(self._parameters):
            if number not in self._new and number not in self._base:
                self._note_change(number, p.grad)
        return self._changed

    def _note_change(self, number: int, gradient: torch.Tensor | None) -> None:
        left = self._left[number]
        if left is not None and (
            gradient is not left[0]() or (gradient is not None and gradient._version != left[1])
        ):
            self._changed = True

    def are_equal(self) -> bool:
        """Return whether reduced gradients are bit-identical on all ranks. A collective."""
        reduced = [
            self._base.get(number, None if self._in_round or number in self._new else p.grad)
            for number, p in enumerate(self._parameters)
        ]
        own = digests([gradient for gradient in reduced if gradient is not None])
        value = zlib.crc32(repr(own).encode()) & 0xFFFFFF
        return are_equal(self._collectives, value, "hvdkit.equal")

    def count_changed_as_new(self) -> None:
        """Count gradients that the script has written in place as new ones."""
        for number, p in enumerate(self._parameters):
            if p.grad is not None and number not in self._base:
                self._new.add(number)
        self._changed = False

    def end_step(self) -> None:
        """Count the current gradients, which a step has used, as reduced ones."""
        for number, p in enumerate(self._parameters):
            if number not in self._new and number not in self._base:
                self._left[number] = _left(p.grad)

    def begin_round(self, assigned: bool) -> None:
        """Keep all bases apart, and leave only new parts in the gradients."""
        for number, p in enumerate(self._parameters):
            if number in self._new:
                continue
            gradient = p.grad
            if gradient is None:
                continue
            if self._is_reduced(number, gradient, assigned):
                self._note_change(number, gradient)
                self._base[number] = gradient.detach().clone()
                p.grad = None
            else:
                self._new.add(number)
        self._in_round = True

    @torch.no_grad()
    def end_round(self) -> None:
        """Add the reduced gradients to their bases."""
        for number, reduced_before in self._base.items():
            p = self._parameters[number]
            if p.grad is None:
                p.grad = reduced_before
            elif p.grad.is_sparse or reduced_before.is_sparse:
                p.grad = p.grad + reduced_before
            else:
                p.grad.add_(reduced_before)
        if self._keep_sparse:
            for p in self._parameters:
                if p.grad is not None and not p.grad.is_sparse:
                    p.grad = p.grad.to_sparse(1)
        self._base.clear()
        self._new.clear()
        self._in_round = False
        self._left = [_left(p.grad) for p in self._parameters]
        self._changed = False
        self.unused = True

    def is_busy(self) -> bool:
        """Return whether a backward pass is adding to the gradients."""
        return bool(self._expected) or self.any_arrived

    def is_sparse(self) -> bool:
        """Return whether there is a sparse gradient in a dense bucket."""
        if self._reduction.sparse_as_dense:
            return False
        return any(
            backend.has_sparse_in(synchronizer.plan)
            for backend, synchronizer in zip(self._backends, self.synchronizers, strict=True)
            if synchronizer.plan is not None
        )

    def make_sparse(self) -> None:
        """Make these gradients sparse on every rank, and plan new buckets. A collective."""
        for k, (backend, synchronizer) in enumerate(
            zip(self._backends, self.synchronizers, strict=True)
        ):
            dims = self._collectives.max(backend.sparse_seen, f"hvdkit.sparse.{k}")
            assert synchronizer.plan is not None
            if backend.make_sparse(dims, synchronizer.plan):
                synchronizer.forget()

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the new gradients by `factor`: the reduction of a single rank."""
        for number in self._new:
            gradient = self._parameters[number].grad
            if gradient is not None:
                gradient.mul_(factor)

    def invalidate(self, reason: str) -> None:
        """Record why the gradients cannot be used until they are removed."""
        self.void = reason
        self._window.close()
        self.discard()

    def discard(self) -> None:
        """Drop bases and new parts."""
        self._base.clear()
        self._new.clear()
        self._in_round = False
        self._expected.clear()
        self._arrived.clear()
        self._unplanned_arrived = False
        self._left = [None] * len(self._parameters)
        self._changed = False

    def used(self) -> Sequence[int]:
        """Return 1 for each planned parameter with a gradient, else 0; () without find_unused."""
        if not self._reduction.find_unused:
            return ()
        return [int(self._has_gradient(number)) for number in range(len(self._parameters))]

    def drop_unused(self, used: Sequence[int]) -> None:
        """Remove the gradients of parameters whose entry in `used` is 0."""
        for p, count in zip(self._parameters, used, strict=False):
            if not count:
                p.grad = None
