"""The gradients of one optimizer on this rank: the reduced part and the new part of each.

A gradient that a round has left is final: the same on every rank. What a later backward pass adds
to it is new, and only that is reduced. So before PyTorch accumulates into a final gradient, the
gradient is kept apart as its base. The round adds the reduced new part to the base. (To reduce the
sum of both again would be wrong for `Sum`, and would round twice in 16 bits.)
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
    """Return what a bucket depends on, and `parameter.data = ...` may change."""
    return dtype_of_gradient(parameter), parameter.device, parameter.shape


_Left = tuple["weakref.ref[torch.Tensor]", int]


def _left(gradient: torch.Tensor | None) -> _Left | None:
    """Return what identifies a gradient and tells whether it has been changed in place."""
    return None if gradient is None else (weakref.ref(gradient), gradient._version)


class OptimizerGradients:
    """`hvdkit.core.rounds.LocalGradients` of a wrapped optimizer's parameters.

    Args:
        parameters: returns the optimizer's parameters, in order; it may get more of them later.
        name_of: returns a parameter's name.
        collectives: of the ranks to reduce over.
        reduction: how to reduce, without groups.
        groups: parameters that share a bucket.
        window: the accumulation window.
        context: lines that must be the same on every rank, made when they are compared.
        on_watched: called with each parameter whose gradients are to be reported, and its number,
            which is None while it has no plan.
        keep_sparse: sparse gradients stay sparse although they are reduced as dense ones.

    Attributes:
        synchronizers: one for the parameters at the start, and one for each set of later ones.
        void: why the gradients cannot be used; empty where they can.
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
        # Of the planned parameters, by number: the parameter, and its synchronizer and place there.
        self._parameters: list[torch.nn.Parameter] = []
        self._numbers: dict[torch.nn.Parameter, int] = {}
        self._places: list[tuple[int, int]] = []
        #: Gradients as the last round left them, with their version counters.
        self._left: list[_Left | None] = []
        # Numbers of parameters whose gradients have been added to since the last round.
        self._new: set[int] = set()
        # Number -> the reduced part, while the gradient holds only the new part.
        self._base: dict[int, torch.Tensor] = {}
        # All reduced parts are bases. Packing gives parameters without a gradient zeros.
        self._in_round = False
        # Of the current pass: parameters that were about to get a gradient, and that got one.
        self._expected: set[int] = set()
        self._arrived: set[int] = set()
        # Parameters without a plan, frozen ones above all, that tell when they get a gradient.
        self._unplanned: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._unplanned_arrived = False
        # A base differed from the gradient that the last round left.
        self._changed = False
        self.adopt()
        self.watch()

    # --- plans ----------------------------------------------------------------------------------

    def adopt(self) -> bool:
        """Plan the parameters that need gradients and are not planned yet, if there are any."""
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
        """Let parameters without a plan tell when they get a gradient.

        A frozen parameter may be unfrozen, and the script may put new parameters into the groups.
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
        """Make new synchronizers for the parameters as they are now. Not a collective."""
        parts = list(self._parts())
        for made in (self.synchronizers, self._backends, self._layouts):
            made.clear()
        for part in parts:
            self._plan(part)

    def _parts(self) -> Iterator[list[torch.nn.Parameter]]:
        """The parameters of each synchronizer."""
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
            # It may live in a bucket, which the new part is packed into.
            self._base[number] = self._base[number].detach().clone()
        self._arrived.add(number)
        self._new.add(number)

    def mark_ready(self, number: int) -> None:
        """Tell the synchronizer that a gradient is complete."""
        part, place = self._places[number]
        self.synchronizers[part].mark_ready(place)

    def end_pass(self) -> bool:
        """Restore gradients that got nothing; return whether any got something.

        `torch.autograd.grad` for a parameter announces a gradient that it does not accumulate.
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
        """Return which parameters need gradients, and which have reduced ones already."""
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
        """Return the signature in words."""
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
        """Return whether the last round left gradients and the script has removed all of them."""
        any_left = False
        for p, left in zip(self._parameters, self._left, strict=True):
            if left is not None:
                if p.grad is not None:
                    return False
                any_left = True
        return any_left

    def has_new(self, assigned: bool) -> bool:
        """Return whether a gradient has been added to that has not been reduced since."""
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
        """Return whether a reduced gradient differs from what the last round left."""
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
        """Return whether reduced gradients are the same bits on all ranks. A collective."""
        reduced = [
            self._base.get(number, None if self._in_round or number in self._new else p.grad)
            for number, p in enumerate(self._parameters)
        ]
        own = digests([gradient for gradient in reduced if gradient is not None])
        value = zlib.crc32(repr(own).encode()) & 0xFFFFFF
        return are_equal(self._collectives, value, "hvdkit.equal")

    def count_changed_as_new(self) -> None:
        """Take gradients that the script has written in place for new ones."""
        for number, p in enumerate(self._parameters):
            if p.grad is not None and number not in self._base:
                self._new.add(number)
        self._changed = False

    def end_step(self) -> None:
        """Take the gradients as they are now, which a step has used, for reduced ones."""
        for number, p in enumerate(self._parameters):
            if number not in self._new and number not in self._base:
                self._left[number] = _left(p.grad)

    def begin_round(self, assigned: bool) -> None:
        """Leave in each gradient only what has been added since its last reduction."""
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
        """Return whether a gradient is sparse whose bucket is dense."""
        if self._reduction.sparse_as_dense:
            return False
        return any(
            backend.has_sparse_in(synchronizer.plan)
            for backend, synchronizer in zip(self._backends, self.synchronizers, strict=True)
            if synchronizer.plan is not None
        )

    def make_sparse(self) -> None:
        """Make those gradients sparse on every rank, and plan them so. A collective."""
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
        """Record that the gradients cannot be used until they are removed, and why."""
        self.void = reason
        self._window.close()
        self.discard()

    def discard(self) -> None:
        """Forget bases and new parts."""
        self._base.clear()
        self._new.clear()
        self._in_round = False
        self._expected.clear()
        self._arrived.clear()
        self._unplanned_arrived = False
        self._left = [None] * len(self._parameters)
        self._changed = False

    def used(self) -> Sequence[int]:
        """Return 1 for each planned parameter with a gradient, else 0; nothing if nobody asks."""
        if not self._reduction.find_unused:
            return ()
        return [int(self._has_gradient(number)) for number in range(len(self._parameters))]

    def drop_unused(self, used: Sequence[int]) -> None:
        """Remove the gradients whose entry is 0."""
        for p, count in zip(self._parameters, used, strict=False):
            if not count:
                p.grad = None
