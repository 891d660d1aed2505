"""Track which part of each gradient is reduced, for one optimizer on this rank.

After a round a gradient is reduced: the same on every rank. If a later backward pass adds to it,
only the added part must be reduced. So before PyTorch accumulates into a reduced gradient, that
gradient is stored as the base and `p.grad` is cleared. The round reduces the new `p.grad` and adds
the base. (A second reduction of the base would be wrong for `Sum`, and would round it twice.)
"""

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

import torch

from hvdkit.core import bucketing
from hvdkit.core.accumulation import Window
from hvdkit.core.consistency import are_equal
from hvdkit.core.reduction import Reduction
from hvdkit.core.synchronizer import Synchronizer
from hvdkit.core.wire_format import WireFormat
from hvdkit.errors import HvdkitError
from hvdkit.torch import holders, hooks
from hvdkit.torch.backend import TorchBackend, dtype_of_gradient, fits, is_writable, spec
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.digests import digests
from hvdkit.torch.nonfinite import NonFiniteNames

TorchSynchronizer = Synchronizer[torch.Tensor, Any]

# The largest number of parameters that an error lists.
_SHOWN = 3

_Layout = tuple[torch.dtype, torch.device, torch.Size]


def _layout(parameter: torch.Tensor) -> _Layout:
    """Return the properties that a bucket depends on and that `parameter.data = ...` can change."""
    return dtype_of_gradient(parameter), parameter.device, parameter.shape


class _Mark:
    """Identifies a gradient, as an attribute of it.

    Not a weak reference: with `torch.__future__.set_swap_module_params_on_conversion`, PyTorch does
    not convert a module whose gradients have weak references. An id alone may be used again.
    """

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # a copy is another gradient, and torch.load accepts this class


_MARK = "_hvdkit_mark"

# The mark, the version counter and the id of a gradient.
_Snapshot = tuple[_Mark, int, int]


def _snapshot(gradient: torch.Tensor | None) -> _Snapshot | None:
    """Return a gradient's identity and version counter, to detect changes."""
    if gradient is None:
        return None
    mark = gradient.__dict__.get(_MARK)
    if type(mark) is not _Mark:
        mark = gradient.__dict__[_MARK] = _Mark()
    return mark, _version(gradient), id(gradient)


def _is_same(snapshot: _Snapshot, gradient: torch.Tensor) -> bool:
    """Return whether the snapshot is one of this gradient."""
    return gradient.__dict__.get(_MARK) is snapshot[0]


def _is_changed(snapshot: _Snapshot, gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient was changed or replaced since the snapshot."""
    return gradient is not None and not (
        _is_same(snapshot, gradient) and _version(gradient) == snapshot[1]
    )


def _version(gradient: torch.Tensor) -> int:
    # Tensors of the inference mode have no version counter.
    return 0 if gradient.is_inference() else gradient._version


def _is_nonzero(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is sparse, or has an element that is not 0."""
    if gradient.is_sparse or not gradient.numel():
        return gradient.is_sparse
    values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return bool(torch.stack(torch.aminmax(values)).any())  # faster than `any` of all elements


class Owner(Protocol):
    """The optimizer that the gradients belong to."""

    def _all_parameters(self) -> list[torch.nn.Parameter]:
        """Return the optimizer's parameters, in order. `add_param_group` may append some."""
        ...

    def _name_of(self, parameter: torch.nn.Parameter) -> str:
        """Return a parameter's name."""
        ...

    def _consistency_lines(self) -> Sequence[str]:
        """Return lines that must be the same on every rank."""
        ...

    def _register_hooks(self, parameter: torch.nn.Parameter, number: int | None) -> None:
        """Call the optimizer before and after a gradient of the parameter is accumulated.

        Args:
            parameter: the parameter.
            number: its number in the plans; None if it is in no plan.
        """
        ...

    def _forget_parameter(self, parameter: torch.nn.Parameter) -> None:
        """Remove the hooks of a parameter that the optimizer does not have any more."""
        ...


class OptimizerGradients:
    """`hvdkit.core.rounds.LocalGradients` of a wrapped optimizer's parameters.

    A parameter is planned if it belongs to a synchronizer. Planned parameters have a number.

    Args:
        owner: the optimizer. Pass a weak reference, so that the optimizer can be freed.
        collectives: the collectives of the ranks to reduce over.
        reduction: the settings of the reduction, without groups.
        groups: parameters that share a bucket.
        window: the accumulation window.
        keep_sparse: make all gradients sparse after a round, for an optimizer that needs sparse
            gradients although the reduction is dense.
        finds_nonfinite: find gradients with NaN or infinity before they are reduced.

    Attributes:
        synchronizers: see `LocalGradients`.
        invalid_reason: why the gradients cannot be used; empty if they can.
        unused: whether there are reduced gradients that no step has used. The script may have
            removed them itself.
        after_round: called when the gradients are reduced, before the script can change them; None
            for no call.
    """

    def __init__(
        self,
        owner: Owner,
        collectives: TorchCollectives,
        reduction: Reduction,
        groups: Sequence[Sequence[torch.nn.Parameter]],
        window: Window,
        keep_sparse: bool,
        finds_nonfinite: bool = False,
    ) -> None:
        self._owner = owner
        self._collectives = collectives
        self._reduction = reduction
        self._groups = groups
        self._window = window
        self._keep_sparse = keep_sparse
        self._nonfinite = NonFiniteNames() if finds_nonfinite else None
        # Name -> the gradient as it was when `_nonfinite` looked at it.
        self._checked: dict[str, _Snapshot] = {}
        self.synchronizers: list[TorchSynchronizer] = []
        self.invalid_reason = ""
        self.unused = False
        self.after_round: Callable[[], None] | None = None
        self._backends: list[TorchBackend] = []
        self._layouts: list[list[_Layout]] = []
        # The planned parameters by number, and the synchronizer and index of each.
        self._parameters: list[torch.nn.Parameter] = []
        self._numbers: dict[torch.nn.Parameter, int] = {}
        self._locations: list[tuple[int, int]] = []
        # The gradients as the last round left them.
        self._after_round: list[_Snapshot | None] = []
        # Numbers of parameters whose gradients were added to since the last round.
        self._unreduced: set[int] = set()
        # Number -> base, while `p.grad` holds only the unreduced part.
        self._bases: dict[int, torch.Tensor] = {}
        # In a round, all reduced parts are bases, and packing fills missing gradients with zeros.
        self._in_round = False
        # In the current pass: parameters about to get a gradient, and parameters that got one.
        self._expected: set[int] = set()
        self._arrived: set[int] = set()
        # Parameters that have got gradients several times in an earlier pass, and in the current
        # one. Their buckets wait for the end of the pass.
        self._repeated: set[int] = set()
        self._repeated_now: set[int] = set()
        # Parameters without a plan, such as frozen ones, that have hooks.
        self._unplanned: dict[torch.nn.Parameter, None] = {}
        self._unplanned_arrived = False
        # The ids and the contents of the parameters that have hooks.
        self._hooked: list[int] = []
        # Whether a base differs from the gradient that the last round left.
        self._changed = False
        # Names of gradients whose reduced part is not known any more.
        self._mixed: list[str] = []
        self.plan_new_parameters()
        self.hook_unplanned_parameters()

    # --- plans ----------------------------------------------------------------------------------

    def plan_new_parameters(self, with_gradients: bool = False) -> bool:
        """Make a synchronizer for the parameters without one; return whether there are any.

        Args:
            with_gradients: count the gradients that these parameters have as unreduced.
        """
        # The script may assign gradients of frozen parameters. In a round, the ranks have compared
        # which of them have one (`signature`).
        added = [
            p
            for p in self._owner._all_parameters()
            if (p.requires_grad or (self._in_round and p.grad is not None))
            and p not in self._numbers
        ]
        if not added and self.synchronizers:
            return False
        if self._collectives.single_rank:
            self.forget_removed_parameters()  # on several ranks, the next round does
        for index, p in enumerate(added):
            self._numbers[p] = len(self._parameters)
            self._parameters.append(p)
            self._locations.append((len(self.synchronizers), index))
            self._after_round.append(None)
            if with_gradients and p.grad is not None:
                self._unreduced.add(self._numbers[p])
        self._plan(added)
        for p in added:
            self._unplanned.pop(p, None)
            self._owner._register_hooks(p, self._numbers[p])
            if self._numbers[p] in self._unreduced:
                self._check_finite(p)
        return True

    def hook_unplanned_parameters(self) -> None:
        """Register hooks for parameters without a plan, and those that PyTorch has lost.

        A frozen parameter may be unfrozen, and the script may add parameters to the optimizer
        (`add_param_group`).
        """
        parameters = self._owner._all_parameters()
        # Compare in C, because this runs several times in each step.
        found = [*map(id, parameters), *map(holders.address, parameters)]
        if found == self._hooked:
            return
        for p in parameters:
            if p in self._numbers or p in self._unplanned:
                if hooks.are_lost(p):
                    self._owner._register_hooks(p, self._numbers.get(p))
                    self._find_converted_gradient(p)
            elif p.dtype.is_floating_point or p.dtype.is_complex:
                self._unplanned[p] = None
                self._owner._register_hooks(p, None)
            else:
                found = []  # its dtype may change
        self._hooked = found

    def _find_converted_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Mark the gradient of a converted parameter again: a conversion swaps attributes.

        If the gradient has changed since, a pass without hooks may have added to the reduced
        gradient. The mean over the ranks is still right, but their sum would count the reduced part
        once for each rank.
        """
        number, gradient = self._numbers.get(parameter), parameter.grad
        if number is None or gradient is None:
            return
        snapshot = self._after_round[number]
        if snapshot is None or snapshot[2] != id(gradient):
            return
        gradient.__dict__[_MARK] = snapshot[0]
        if number in self._unreduced or self._reduction.average or self._collectives.single_rank:
            return
        if _version(gradient):
            self._mixed.append(self._owner._name_of(parameter))
            self._window.dropped = True  # lets the round fail on all ranks

    def _plan(self, parameters: list[torch.nn.Parameter]) -> None:
        self._layouts.append([_layout(p) for p in parameters])
        backend = TorchBackend(parameters, self._collectives)
        self._backends.append(backend)
        self.synchronizers.append(
            Synchronizer(
                [spec(self._owner._name_of(p), p) for p in parameters],
                backend,
                self._collectives,
                replace(self._reduction, groups=self._groups_of(parameters)),
                self._window,
                self._owner._consistency_lines(),
            )
        )

    def plan_outdated(self) -> bool:
        """Return whether parameters have another dtype, device or shape than the buckets.

        Also true if the script has removed parameters from the optimizer.
        """
        return self._has_removed_parameters() or any(
            _layout(p) != layout
            for layouts, part in zip(self._layouts, self._parts(), strict=True)
            for p, layout in zip(part, layouts, strict=True)
        )

    def _has_removed_parameters(self) -> bool:
        present = set(map(id, self._owner._all_parameters()))
        return any(id(p) not in present for p in self._parameters)

    def forget_removed_parameters(self) -> None:
        """Make new synchronizers if the script has removed parameters. Not a collective."""
        if self._has_removed_parameters():
            self.replan()

    def replan(self) -> None:
        """Make new synchronizers for the parameters as they are now. Not a collective.

        Free the parameters that the script has removed from the optimizer, or replaced there. For
        example, a pruned layer, or the points of a scene whose number has changed.
        """
        parts = list(self._parts())
        if self._has_removed_parameters():
            parts = self._without_removed_parameters(parts)
        for made in (self.synchronizers, self._backends, self._layouts):
            made.clear()
        for part in parts:
            self._plan(part)

    def _without_removed_parameters(
        self, parts: Sequence[list[torch.nn.Parameter]]
    ) -> list[list[torch.nn.Parameter]]:
        """Give the other parameters new numbers; return the parameters of each synchronizer."""
        present = set(map(id, self._owner._all_parameters()))
        for p in self._parameters:
            if id(p) not in present:
                self._owner._forget_parameter(p)
        kept = [number for number, p in enumerate(self._parameters) if id(p) in present]
        numbers = {old: new for new, old in enumerate(kept)}
        self._after_round = [self._after_round[old] for old in kept]
        self._unreduced = {numbers[old] for old in self._unreduced if old in numbers}
        self._repeated = {numbers[old] for old in self._repeated if old in numbers}
        self._repeated_now.clear()
        self._bases = {numbers[old]: base for old, base in self._bases.items() if old in numbers}
        self._groups = [[p for p in group if id(p) in present] for group in self._groups]
        parts = [[p for p in part if id(p) in present] for part in parts]
        parts = [part for part in parts if part]
        self._parameters = [p for part in parts for p in part]
        self._numbers = {p: number for number, p in enumerate(self._parameters)}
        self._locations = [(k, i) for k, part in enumerate(parts) for i in range(len(part))]
        for p, number in self._numbers.items():
            self._owner._register_hooks(p, number)
        return parts

    @property
    def bucket_bytes(self) -> int:
        """The largest size of a bucket with several gradients, in bytes."""
        return self._reduction.bucket_bytes

    @property
    def wire_format(self) -> WireFormat:
        """The wire format."""
        return self._reduction.format

    def set_buckets(self, size: int, wire_format: WireFormat) -> None:
        """Make new buckets of another size or format, before the next round. Not a collective.

        Keep a restored state that no round has used yet.
        """
        self.forget_removed_parameters()
        restored = [None if each.planned else each.state for each in self.synchronizers]
        self._reduction = replace(self._reduction, bucket_bytes=size, format=wire_format)
        self.replan()
        for synchronizer, state in zip(self.synchronizers, restored, strict=True):
            synchronizer.resume(state)

    def distinct_bucket_bytes(self, sizes: Sequence[int], wire_format: WireFormat) -> list[int]:
        """Return `sizes` without those that make the same buckets as an earlier one."""
        if wire_format.tensor_by_tensor:
            return list(sizes[:1])
        plans: dict[tuple[str, ...], int] = {}
        for size in sizes:
            key = tuple(
                bucketing.plan(
                    each.specs, size, groups=self._groups_of(part), kind=wire_format.kind
                ).digest
                for each, part in zip(self.synchronizers, self._parts(), strict=True)
            )
            plans.setdefault(key, size)
        return list(plans.values())

    def reduction_lines(self) -> list[str]:
        """Return lines that describe the gradients and the settings, without the bucket size."""
        lines = replace(self._reduction, bucket_bytes=1).describe()
        for synchronizer in self.synchronizers:
            lines += bucketing.describe(synchronizer.specs)
        return lines

    def _groups_of(self, parameters: Sequence[torch.nn.Parameter]) -> list[list[int]]:
        index = {p: i for i, p in enumerate(parameters)}
        groups = ([index[p] for p in group if p in index] for group in self._groups)
        return [group for group in groups if group]

    def _parts(self) -> Iterator[list[torch.nn.Parameter]]:
        """Yield the parameters of each synchronizer."""
        start = 0
        for layouts in list(self._layouts):
            yield self._parameters[start : start + len(layouts)]
            start += len(layouts)

    # --- in a backward pass ---------------------------------------------------------------------

    def before_accumulation(self, number: int, assigned: bool) -> None:
        """Store a reduced gradient as base before PyTorch adds to it.

        Args:
            number: the parameter's number.
            assigned: see `LocalGradients.begin_round`.

        Raises:
            HvdkitError: the script has removed a gradient during an accumulation window.
        """
        if number in self._expected:
            return
        self._expected.add(number)
        gradient = self._parameters[number].grad
        if gradient is None:
            self._bases.pop(number, None)
            if number in self._unreduced and self._window.made:
                name = self._owner._name_of(self._parameters[number])
                advice = (
                    "Inside a window, call optimizer.zero_grad(), which does nothing there, "
                    "instead of model.zero_grad()"
                    if self._window.mean
                    else "With backward_passes_per_step, remove gradients only after "
                    "optimizer.step()"
                )
                raise HvdkitError(
                    f"the gradient of {name!r} was removed after {self._window.begun} of "
                    f"{self._window.size} batches of an accumulation window. {advice}."
                )
        elif number not in self._unreduced and self._is_reduced(number, gradient, assigned):
            self._record_change(number, gradient)
            self._bases[number] = gradient
            self._parameters[number].grad = None

    def after_accumulation(self, number: int, ready: bool) -> None:
        """Record that a gradient has been accumulated.

        Args:
            number: the parameter's number.
            ready: whether the parameter's bucket may be sent when it is full.
        """
        if number in self._arrived:
            self._repeated_now.add(number)
        self._arrived.add(number)
        self._unreduced.add(number)
        self.check_finite(number)
        if ready and number not in self._repeated:
            part, index = self._locations[number]
            try:
                self.synchronizers[part].mark_ready(index)
            except HvdkitError:
                # The pass ends here, so it does not show which other gradients arrive again.
                self._repeated_now.update(range(len(self._parameters)))
                raise

    def check_finite(self, number: int) -> None:
        """Look for NaN and infinity in the unreduced gradient of a parameter, if requested."""
        self._check_finite(self._parameters[number])

    def _check_finite(self, parameter: torch.nn.Parameter) -> None:
        if self._nonfinite is None:
            return
        name, snapshot = self._owner._name_of(parameter), _snapshot(parameter.grad)
        if parameter.grad is None or snapshot is None:
            self._checked.pop(name, None)
            self._nonfinite.discard(name)
        else:
            self._checked[name] = snapshot
            self._nonfinite.add(name, parameter.grad)

    def _check_if_changed(self, parameter: torch.nn.Parameter) -> None:
        """Look again at a gradient that the script has changed, replaced or removed."""
        if self._nonfinite is None:
            return
        snapshot, gradient = self._checked.get(self._owner._name_of(parameter)), parameter.grad
        if gradient is None or snapshot is None or _is_changed(snapshot, gradient):
            self._check_finite(parameter)

    def check_written(self, assigned: bool) -> None:
        """Look for NaN and infinity in unreduced gradients that the script has written.

        Not during a round, which may reduce gradients in place.

        Args:
            assigned: see `LocalGradients.begin_round`. If so, gradients that the script has written
                in place count as unreduced, too.
        """
        if self._nonfinite is None:
            return
        for number, p in enumerate(self._parameters):
            snapshot = self._after_round[number]
            if number in self._unreduced or (
                assigned
                and number not in self._bases
                and (snapshot is None or _is_changed(snapshot, p.grad))
            ):
                self._check_if_changed(p)
        self._check_unfrozen()

    def _check_unfrozen(self) -> None:
        """Look at gradients of parameters that the next round plans."""
        for p in self._unplanned:
            if p.requires_grad:
                self._check_if_changed(p)

    def forget_nonfinite(self) -> None:
        """Forget which gradients contain NaN or infinity."""
        self._checked.clear()
        if self._nonfinite is not None:
            self._nonfinite.clear()

    def nonfinite(self) -> list[str]:
        """Return the names of the unreduced gradients with NaN or infinity."""
        return [] if self._nonfinite is None else self._nonfinite.names()

    def after_unplanned_accumulation(self, parameter: torch.nn.Parameter) -> None:
        """Record that a gradient of a parameter without a plan has been accumulated."""
        self._unplanned_arrived = True
        self._check_finite(parameter)

    def end_pass(self) -> bool:
        """End a pass. Return whether it has accumulated any gradient.

        Restore the gradients that became bases although the pass added nothing to them:
        `torch.autograd.grad` calls the hook before the accumulation, but accumulates nothing.
        """
        for number in self._expected - self._arrived - self._unreduced:
            if number in self._bases:
                self._parameters[number].grad = self._bases.pop(number)
        # The buckets of other gradients may be reduced in place already.
        for number in self._unreduced - self._arrived:
            self._check_if_changed(self._parameters[number])
        any_arrived = self.any_arrived
        self._repeated |= self._repeated_now
        self._repeated_now.clear()
        self._expected.clear()
        self._arrived.clear()
        self._unplanned_arrived = False
        return any_arrived

    @property
    def any_arrived(self) -> bool:
        """Whether a gradient has been accumulated in the current pass."""
        return bool(self._arrived) or self._unplanned_arrived

    def _is_reduced(self, number: int, gradient: torch.Tensor, assigned: bool) -> bool:
        """Return whether the last round left this gradient. True if not `assigned`."""
        snapshot = self._after_round[number]
        return (snapshot is not None and _is_same(snapshot, gradient)) or not assigned

    # --- in a round -----------------------------------------------------------------------------

    def signature(self, assigned: bool) -> Sequence[object]:
        """Return which parameters need gradients, and which have reduced gradients."""
        # A frozen parameter gets a reduced gradient only on ranks where it has one already.
        needs = bytes(
            1 if p.requires_grad else 2 * self._frozen_has_gradient(p)
            for p in self._owner._all_parameters()
        )
        return needs, self._reduced(assigned)

    def _frozen_has_gradient(self, parameter: torch.nn.Parameter) -> bool:
        return parameter.grad is not None or self._numbers.get(parameter) in self._bases

    def _reduced(self, assigned: bool) -> list[int]:
        """Return the numbers of the parameters with a reduced gradient or a base."""
        return [
            number
            for number, p in enumerate(self._parameters)
            if number in self._bases
            or (
                not self._in_round
                and number not in self._unreduced
                and (gradient := p.grad) is not None
                and self._is_reduced(number, gradient, assigned)
            )
        ]

    def has_reduced(self, assigned: bool) -> bool:
        """Return whether earlier rounds have reduced a gradient or a part of one."""
        return bool(self._reduced(assigned))

    def describe(self) -> str:
        """Describe the signature for an error."""
        everything = self._owner._all_parameters()
        frozen = [p for p in everything if not p.requires_grad]
        held = {p for p in everything if p not in self._numbers and p.grad is not None}
        held |= {p for number, p in enumerate(self._parameters) if self._has_gradient(number)}
        missing = [p for p in everything if p.requires_grad and p not in held] if held else []
        bases = {self._parameters[number] for number in self._bases}
        new = [p for p in everything if p.requires_grad and p not in bases]
        return (
            f"{len(everything) - len(frozen)} of {len(everything)} parameters need gradients"
            f"{self._except(frozen)}, {len(held)} have one{self._except(missing)}"
            + (f", {len(bases)} from an earlier reduction{self._except(new)}" if bases else "")
            + self._outdated_text()
            + self._mixed_text()
        )

    def _mixed_text(self) -> str:
        """Return a text about gradients whose reduced part is not known any more, or ""."""
        if not self._mixed:
            return ""
        shown = ", ".join(self._mixed[:_SHOWN]) + (", ..." if len(self._mixed) > _SHOWN else "")
        return (
            f", {len(self._mixed)} parameters were converted while they had a reduced gradient "
            f"({shown}), and PyTorch has lost the hooks that would separate it from the new one: "
            f"call optimizer.zero_grad() before the conversion"
        )

    def _outdated_text(self) -> str:
        """Return a text about parameters that differ from the plan; "" if there are none."""
        outdated = [
            f"{self._owner._name_of(p)} is now {str(p.dtype).removeprefix('torch.')} "
            f"{list(p.shape)} on {p.device}"
            for p, layout in zip(self._parameters, chain(*self._layouts), strict=True)
            if _layout(p) != layout
        ]
        if not outdated:
            return ""
        shown = ", ".join(outdated[:_SHOWN]) + (", ..." if len(outdated) > _SHOWN else "")
        return f", {len(outdated)} have another dtype, device or shape than before ({shown})"

    def _except(self, parameters: Sequence[torch.nn.Parameter]) -> str:
        names = ", ".join(self._owner._name_of(p) for p in parameters[:_SHOWN])
        return f" (not: {names}{', ...' if len(parameters) > _SHOWN else ''})" if names else ""

    def _has_gradient(self, number: int) -> bool:
        if number in self._bases:
            return True
        packed = self._in_round and number not in self._unreduced
        return not packed and self._parameters[number].grad is not None

    def exist(self) -> bool:
        """Return whether there is any gradient."""
        return any(p.grad is not None for p in self._parameters)

    def any_nonzero(self) -> bool:
        """Return whether any gradient has a value other than 0. It waits for the device."""
        return any(p.grad is not None and bool(p.grad.any()) for p in self._parameters)

    def all_removed(self) -> bool:
        """Return whether the last round left gradients, and the script has removed all of them."""
        any_reduced = False
        for p, snapshot in zip(self._parameters, self._after_round, strict=True):
            if snapshot is not None:
                if p.grad is not None:
                    return False
                any_reduced = True
        return any_reduced

    def has_unreduced(self, assigned: bool) -> bool:
        """Return whether a gradient has an unreduced part."""
        if self._unreduced or any(
            (p.requires_grad or assigned) and p.grad is not None and p not in self._numbers
            for p in self._unplanned
        ):
            return True
        return assigned and any(
            (gradient := p.grad) is not None and not self._is_reduced(number, gradient, assigned)
            for number, p in enumerate(self._parameters)
        )

    def changed_since_round(self) -> bool:
        """Return whether a reduced gradient was changed or replaced since the last round."""
        for number, p in enumerate(self._parameters):
            if number not in self._unreduced and number not in self._bases:
                self._record_change(number, p.grad)
        return self._changed

    def written_before_pass(self) -> bool:
        """Return whether a base was changed since the last round, and is not 0."""
        return self._changed and any(map(_is_nonzero, self._bases.values()))

    def _record_change(self, number: int, gradient: torch.Tensor | None) -> None:
        snapshot = self._after_round[number]
        if snapshot is not None and _is_changed(snapshot, gradient):
            self._changed = True

    def are_equal(self, assigned: bool) -> bool:
        """Return whether the reduced gradients have the same bits on all ranks. A collective."""
        reduced = (
            self._bases.get(number, self._parameters[number].grad)
            for number in self._reduced(assigned)
        )
        own = digests([gradient for gradient in reduced if gradient is not None])
        value = zlib.crc32(repr(own).encode()) & 0xFFFFFF
        return are_equal(self._collectives, value, "hvdkit.equal")

    def mark_changed_unreduced(self) -> None:
        """Mark all gradients as unreduced, because the script has written to them in place."""
        self._add_bases()
        for number, p in enumerate(self._parameters):
            if p.grad is not None:
                self._unreduced.add(number)
        self._changed = False

    def end_step(self) -> None:
        """Mark all current gradients as reduced, because a step has used them."""
        for number, p in enumerate(self._parameters):
            if number not in self._unreduced and number not in self._bases:
                self._after_round[number] = _snapshot(p.grad)
        if not self._unreduced:
            self.forget_nonfinite()

    def begin_round(self, assigned: bool) -> None:
        """Split off the bases: leave in each gradient only its unreduced part."""
        for number, p in enumerate(self._parameters):
            if number in self._unreduced:
                continue
            gradient = p.grad
            if gradient is None:
                continue
            if self._is_reduced(number, gradient, assigned):
                self._record_change(number, gradient)
                self._bases[number] = gradient
                p.grad = None
            else:
                self._unreduced.add(number)
                self._check_if_changed(p)
        self._check_unfrozen()
        self._in_round = True

    @torch.no_grad()
    def _add_bases(self) -> None:
        """Add the unreduced parts to the bases, which become the gradients again.

        So a gradient keeps its memory as in one process, where a pass adds to it in place.
        """
        for number, base in self._bases.items():
            p = self._parameters[number]
            if p.grad is None:
                p.grad = base
            elif base.is_sparse or p.grad.is_sparse or not is_writable(base) or not fits(p, base):
                p.grad = p.grad + base
            else:
                p.grad = base.add_(p.grad)
        self._bases.clear()

    @torch.no_grad()
    def end_round(self) -> None:
        """Add the bases to the reduced gradients."""
        self._add_bases()
        if self._keep_sparse:
            for p in self._parameters:
                if p.grad is not None and not p.grad.is_sparse:
                    p.grad = p.grad.to_sparse(1)
        self._unreduced.clear()
        self.forget_nonfinite()
        self._in_round = False
        self._after_round = [_snapshot(p.grad) for p in self._parameters]
        self._changed = False
        self.unused = True
        if self.after_round is not None:
            self.after_round()

    def is_busy(self) -> bool:
        """Return whether a backward pass is adding to the gradients."""
        return bool(self._expected) or self.any_arrived

    def needs_sparse_bucket(self) -> bool:
        """Return whether a sparse gradient has a dense bucket."""
        if self._reduction.sparse_as_dense:
            return False
        return any(
            backend.has_sparse_in(synchronizer.plan)
            for backend, synchronizer in zip(self._backends, self.synchronizers, strict=True)
            if synchronizer.plan is not None
        )

    def make_sparse(self) -> None:
        """Make gradients that are sparse on some rank sparse on all ranks. A collective."""
        for k, (backend, synchronizer) in enumerate(
            zip(self._backends, self.synchronizers, strict=True)
        ):
            dims = self._collectives.max(backend.sparse_seen, f"hvdkit.sparse.{k}")
            assert synchronizer.plan is not None
            if backend.make_sparse(dims, synchronizer.plan):
                synchronizer.forget()

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the unreduced gradients by `factor`: the reduction of a single rank."""
        for number in self._unreduced:
            gradient = self._parameters[number].grad
            if gradient is not None:
                gradient.mul_(factor)

    def invalidate(self, reason: str) -> None:
        """Record why the gradients cannot be used, and drop the bases."""
        self.invalid_reason = reason
        self._window.close()
        self.discard()

    def remove_unreduced(self) -> None:
        """Remove the gradients that are not reduced; all of them if they cannot be used."""
        for number, p in enumerate(self._parameters):
            if number in self._unreduced or self.invalid_reason:
                p.grad = None
        for p in self._unplanned:
            if p.requires_grad:
                p.grad = None

    def discard(self) -> None:
        """Drop the bases and all records of passes and rounds."""
        self._bases.clear()
        self._mixed.clear()
        self._unreduced.clear()
        self.forget_nonfinite()
        self._in_round = False
        self._expected.clear()
        self._arrived.clear()
        self._unplanned_arrived = False
        self._after_round = [None] * len(self._parameters)
        self._changed = False

    def used_parameters(self) -> Sequence[int]:
        """Return 1 for each planned parameter with a gradient, else 0.

        The result is empty without `find_unused`.
        """
        if not self._reduction.find_unused:
            return ()
        return [int(self._has_gradient(number)) for number in range(len(self._parameters))]

    def drop_unused(self, used: Sequence[int]) -> None:
        """Remove the gradients whose entry in `used` is 0."""
        for p, count in zip(self._parameters, used, strict=False):
            if not count:
                p.grad = None
