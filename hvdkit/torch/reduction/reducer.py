"""Reduce gradients that the caller passes explicitly: Keras with the backend torch.

`DistributedOptimizer` gets gradients from hooks. Here the optimizer of Keras passes the gradients
that it applies. If `expect` is called before a backward pass, buckets are sent during the pass.
"""

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.agreement.names import unique_names, without_layer_numbers
from hvdkit.errors import HvdkitError
from hvdkit.reduction.accumulation import Window
from hvdkit.reduction.nonfinite import IGNORE, describe, raise_or_log
from hvdkit.reduction.plan import Reduction, ReductionState
from hvdkit.reduction.step_errors import BackwardFailed
from hvdkit.reduction.synchronizer import Synchronizer
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.reduction.backend import TorchBackend
from hvdkit.torch.reduction.memory import spec
from hvdkit.torch.reduction.nonfinite import NonFiniteNames
from hvdkit.training.stragglers import UPDATE, WAIT, StepTimes


@dataclass(eq=False)
class _Parameters:
    """Parameters that are reduced together.

    Attributes:
        parameters: leaf tensors that need gradients.
        synchronizer: the synchronizer of these parameters.
        labels: the names of the parameters for an error about NaN.
        nonfinite: the gradients since the last reduction that are not finite.
        overlaps: whether buckets can be sent during backward passes.
        expected_in: the generation of the collectives at the last `expect`; None after the
            gradients have been passed.
        hooked: whether the parameters have hooks.
        arrived: the parameters whose gradients have arrived since `expect`.
    """

    parameters: list[torch.Tensor]
    synchronizer: Synchronizer[torch.Tensor, Any]
    labels: Sequence[str]
    nonfinite: NonFiniteNames
    overlaps: bool = True
    expected_in: int | None = None
    hooked: bool = False
    arrived: set[int] = field(default_factory=set)

    def expect(self, generation: int) -> None:
        """Send buckets while the next backward pass accumulates gradients. Not a collective."""
        self.expected_in = generation
        self.arrived.clear()
        if self.hooked:
            return
        self.hooked = True
        # A weak reference, because the garbage collector does not see references of hooks.
        reference = weakref.ref(self)
        for i, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                hook = functools.partial(_accumulated, reference, i)
                parameter.register_post_accumulate_grad_hook(hook)

    def accumulated(self, i: int) -> None:
        """Record that a backward pass has accumulated the gradient of parameter `i`."""
        if self.expected_in is None:
            return
        if i in self.arrived:
            # Several re-entrant checkpoints use the parameter, and each adds to its gradient.
            self.overlaps = False
        self.arrived.add(i)
        gradient = self.parameters[i].grad
        if gradient is not None:
            self._send(i, gradient)

    def _send(self, i: int, gradient: torch.Tensor) -> None:
        if self.nonfinite.checks:
            self.nonfinite.add(self.labels[i], gradient)
        self.synchronizer.mark_ready(i)

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Set the gradients to reduce, and mark those ready that have not been sent.

        Raises:
            HvdkitError: a gradient was replaced after it had been sent.
        """
        for i, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if i in self.arrived and gradient is not parameter.grad:
                raise HvdkitError(
                    f"the gradient of {self.synchronizer.specs[i].name!r} was replaced between "
                    f"backward() and the optimizer's apply(), after it had been sent to the other "
                    f"ranks. Change gradients in a custom train_step instead"
                )
            parameter.grad = gradient
        # In the order of a backward pass.
        for i in reversed(range(len(gradients))):
            gradient = gradients[i]
            if gradient is not None and i not in self.arrived:
                self._send(i, gradient)
        self.expected_in = None
        self.arrived.clear()


def _accumulated(reference: "weakref.ref[_Parameters]", i: int, _: torch.Tensor) -> None:
    parameters = reference()
    if parameters is not None:
        parameters.accumulated(i)


class GradientReducer:
    """Reduce gradients over the ranks of a process set.

    Ranks may have gradients of different parameters. A rank contributes zeros for a missing
    gradient.

    Args:
        reduction: the settings of the reduction.
        process_set: the ranks to reduce over; other ranks keep their gradients.
        context: further lines that must be the same on every rank; errors show them first.
        passes: the number of backward passes whose gradients each given gradient sums. The result
            is the mean over these passes.
        on_nonfinite: what to do about gradients with NaN or infinity, see
            `hvdkit.reduction.nonfinite`.
        times: measures the time that this rank spends in each section of its steps; None for a
            new one.
    """

    def __init__(
        self,
        reduction: Reduction,
        process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
        context: Sequence[str] = (),
        passes: int = 1,
        on_nonfinite: str = IGNORE,
        times: StepTimes | None = None,
    ) -> None:
        self._times = StepTimes() if times is None else times
        self._on_nonfinite = on_nonfinite
        self._reduction = reduction
        self._window = Window(passes)
        self._context = tuple(context)
        self._collectives = TorchCollectives(process_set)
        # Ids of parameters -> the parameters. The reference keeps them alive, so ids stay unique.
        self._known: dict[tuple[int, ...], _Parameters] = {}
        self._resumed: list[ReductionState] = []

    def state(self) -> list[dict[str, Any]]:
        """Return the state needed to resume with bit-identical sums, for each set of gradients.

        The result is the same on every rank.
        """
        found = [known.synchronizer.state for known in self._known.values()]
        return [asdict(state) for state in [*found, *self._resumed] if state is not None]

    def restore_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore a value of `state()`, possibly of another process. Not a collective.

        A state of gradients that have not been reduced yet is used in their first reduction.
        """
        self._resumed = [ReductionState(**each) for each in state]
        for known in self._known.values():
            known.synchronizer.resume(self._resumed.pop(0) if self._resumed else None)

    def expect(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Send full buckets during the next backward pass.

        The next call must pass the same parameters, and their gradients must not change between the
        backward pass and that call. The results are the same without `expect`, so some ranks may
        omit it.

        Args:
            parameters: the parameters of the next call.
            names: their names.

        Raises:
            BackwardFailed: see `end_interrupted`.
        """
        self.end_interrupted()
        if self._collectives.single_rank:
            return
        known = self._parameters(parameters, names)
        if known.overlaps:
            known.expect(self._collectives.generation)

    @property
    def _expecting(self) -> _Parameters | None:
        """The parameters whose gradients a backward pass computes; None outside of one."""
        return next((p for p in self._known.values() if p.expected_in is not None), None)

    def end_interrupted(self) -> None:
        """Complete the reduction of a backward pass that raised. A collective in that case.

        Ranks whose pass did not raise are waiting in `__call__` then.

        Raises:
            BackwardFailed: on every rank, when the backward pass raised on some only.
        """
        interrupted = self._expecting
        if interrupted is None:
            return
        generation, interrupted.expected_in = interrupted.expected_in, None
        if generation == self._collectives.generation:
            self._reduce(interrupted, None)

    # Collectives cannot be part of a compiled graph.
    @torch.compiler.disable
    def reduce(
        self,
        gradients: Sequence[torch.Tensor | None],
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
    ) -> tuple[list[torch.Tensor | None], bool]:
        """Reduce gradients. A collective: every rank passes the same parameters.

        Args:
            gradients: the gradients of the parameters; None for a missing one.
            parameters: leaf tensors that need gradients. A `grad` that is the given gradient is
                set to the reduced one; another `grad` stays as it is.
            names: the parameters' names, for errors.

        Returns:
            The reduced gradients, in the same order, None if no rank has the gradient; and whether
            all ranks skip the step, because gradients are not finite.

        Raises:
            RankMismatchError: on every rank, when their parameters or settings differ.
            BackwardFailed: on every rank, when the backward pass raised on some only.
            NonFiniteGradients: on every rank, with `on_nonfinite="raise"`.
        """
        self._times.enter(WAIT)
        known = self._parameters(parameters, names)
        if self._expecting is not known:
            self.end_interrupted()
        others = [
            (k, parameter.grad)
            for k, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True))
            if gradient is not parameter.grad
        ]
        known.take(gradients)
        skips = self._reduce(known, gradients)
        reduced = [parameter.grad for parameter in parameters]
        for k, gradient in others:
            parameters[k].grad = gradient
        self._times.enter(UPDATE)
        return reduced, skips

    def _reduce(self, known: _Parameters, gradients: Sequence[torch.Tensor | None] | None) -> bool:
        """Reduce the gradients into the parameters' `grad`. A collective.

        Args:
            known: the parameters.
            gradients: their gradients; None if the backward pass raised.

        Returns:
            Whether all ranks skip the step, because gradients are not finite.

        Raises:
            BackwardFailed: on every rank, when the backward pass raised on some only.
            NonFiniteGradients: on every rank, with `on_nonfinite="raise"`.
        """
        synchronizer = known.synchronizer
        if not synchronizer.planned:
            synchronizer.make_plan()
        failed = gradients is None
        given = gradients or [None] * len(known.parameters)
        nonfinite = known.nonfinite.take()
        present = [int(gradient is not None) for gradient in given]
        values = [*present, int(failed), int(bool(nonfinite)), 1]
        started = self._collectives.start_sum(values, f"{synchronizer.name}.used")
        synchronizer.send()
        synchronizer.wait()
        *used, failures, found, count = started()
        if 0 < failures < count:
            raise BackwardFailed(
                f"the backward pass raised on {failures} of {count} ranks"
                + (", including this rank" if failed else "")
                + ", so no rank can use its gradients, and no rank has made this step"
            )
        for parameter, ranks in zip(known.parameters, used, strict=True):
            if not ranks:
                parameter.grad = None
        skips = bool(found) and not failures
        if skips:
            text = describe(self._collectives, nonfinite, found, count)
            raise_or_log(self._collectives, self._on_nonfinite, text)
        return skips

    def _parameters(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> _Parameters:
        key = tuple(map(id, parameters))
        if key not in self._known:
            # Ranks may number layers differently.
            unique = unique_names([without_layer_numbers(name) for name in names])
            specs = [spec(name, p) for name, p in zip(unique, parameters, strict=True)]
            own = list(parameters)
            synchronizer = Synchronizer(
                specs,
                # The caller holds the given gradients, but uses the returned ones.
                TorchBackend(own, self._collectives, keeps_memory=False),
                self._collectives,
                self._reduction,
                self._window,
                self._context,
            )
            if self._resumed:
                # In the order of the first calls. A state of other gradients is ignored.
                synchronizer.resume(self._resumed.pop(0))
            found = NonFiniteNames(self._on_nonfinite != IGNORE)
            self._known[key] = _Parameters(own, synchronizer, unique_names(names), found)
        return self._known[key]
