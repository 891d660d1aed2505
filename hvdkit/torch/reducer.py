"""Gradients that are there already, reduced over all ranks: for loops that hand them over."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.core.accumulation import Window
from hvdkit.core.bucketing import unique_names
from hvdkit.core.reduction import Reduction, ReductionState
from hvdkit.core.synchronizer import Synchronizer
from hvdkit.torch.backend import TorchBackend, spec
from hvdkit.torch.collectives import TorchCollectives

_Held = tuple[Synchronizer[torch.Tensor, Any], list[torch.Tensor]]


class GradientReducer:
    """Reduces gradients over the ranks of a process set.

    Nothing is reduced while a backward pass runs: `DistributedOptimizer`, whose hooks see each
    gradient when it arrives, is faster where it can be used.

    Ranks may have gradients of different parameters. A rank contributes zeros for those that it
    does not have.

    Args:
        reduction: what to do with the gradients.
        process_set: the ranks to reduce over; on others gradients stay as they are.
        context: further lines that must be the same on every rank, for the errors' sake first.
        passes: backward passes that the gradients are the sum of; the result is their mean.
    """

    def __init__(
        self,
        reduction: Reduction,
        process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
        context: Sequence[str] = (),
        passes: int = 1,
    ) -> None:
        self._reduction = reduction
        self._window = Window(passes)
        self._context = tuple(context)
        self._collectives = TorchCollectives(process_set)
        self._synchronizers: dict[tuple[int, ...], _Held] = {}
        self._resumed: list[ReductionState] = []

    def state(self) -> list[dict[str, Any]]:
        """What must be the same for sums to be the same once more, for each set of gradients.

        The same on every rank.
        """
        found = [synchronizer.state for synchronizer, _ in self._synchronizers.values()]
        return [asdict(state) for state in [*found, *self._resumed] if state is not None]

    def adopt_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on with what `state()` gave, maybe in another process. No collective.

        For gradients that have not been reduced yet it counts as soon as they are.
        """
        self._resumed = [ReductionState(**each) for each in state]
        for synchronizer, _ in self._synchronizers.values():
            synchronizer.resume(self._resumed.pop(0) if self._resumed else None)

    # A compiled step leaves its graph here: collectives are no part of it.
    @torch.compiler.disable
    def __call__(
        self,
        gradients: Sequence[torch.Tensor | None],
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
    ) -> list[torch.Tensor | None]:
        """The reduced gradients. A collective: every rank calls it with the same parameters.

        Args:
            gradients: of the parameters; None where there is none.
            parameters: leaf tensors that need gradients. Afterwards a reduced gradient is its
                parameter's `grad`.
            names: of the parameters, for errors.

        Returns:
            As many, in the same order; None where no rank has a gradient.

        Raises:
            RanksDisagree: on every rank, when they are to reduce different things.
        """
        key = tuple(map(id, parameters))
        if key not in self._synchronizers:
            self._synchronizers[key] = self._synchronizer(list(parameters), unique_names(names))
        synchronizer, own = self._synchronizers[key]
        for parameter, gradient in zip(own, gradients, strict=True):
            parameter.grad = gradient
        # As a backward pass would deliver them.
        for i in reversed(range(len(own))):
            if gradients[i] is not None:
                synchronizer.mark_ready(i)
        if not synchronizer.agreed:
            synchronizer.agree()
        used = self._collectives.start_sum(
            [int(gradient is not None) for gradient in gradients], f"{synchronizer.name}.used"
        )
        synchronizer.send()
        synchronizer.wait()
        for parameter, ranks in zip(own, used(), strict=True):
            if not ranks:
                parameter.grad = None
        return [parameter.grad for parameter in own]

    def _synchronizer(self, parameters: list[torch.Tensor], names: Sequence[str]) -> _Held:
        specs = [spec(name, p) for name, p in zip(names, parameters, strict=True)]
        backend = TorchBackend(parameters, self._collectives)
        synchronizer = Synchronizer(
            specs, backend, self._collectives, self._reduction, self._window, self._context
        )
        if self._resumed:
            # In the order in which they came up before; where it is of others, it is dropped.
            synchronizer.resume(self._resumed.pop(0))
        return synchronizer, parameters
