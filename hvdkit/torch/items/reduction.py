"""The state of the gradient reduction, needed to resume with bit-identical sums."""

import logging
from collections.abc import Mapping

import torch

from hvdkit.checkpoint.state import Tree
from hvdkit.reduction.plan import ReductionState
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer
from hvdkit.training.tuning import Candidate, Tuner

_log = logging.getLogger("hvdkit.torch")


class ReductionItem:
    """The reduction states of wrapped optimizers, needed to resume with bit-identical sums."""

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
                    **_tuned(optimizer),
                }
                for state in optimizer.reducer.reduction_states()
            ]
            for name, optimizer in self._optimizers.items()
        }

    def plan_restore(self, tree: Tree) -> Tree:
        """Return the tree: there are no tensors."""
        return tree

    def restore(self, tree: Tree) -> None:
        """Restore the states. Optimizers ignore incompatible state."""
        for name, optimizer in self._optimizers.items():
            tuned = [state for state in tree.get(name, []) if state and "tuned" in state]
            if tuned and optimizer.hvdkit_tuner is not None:
                _use(optimizer.hvdkit_tuner, tuned[0])
            optimizer.reducer.resume_reduction(
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


def _tuned(optimizer: WrappedOptimizer) -> Tree:
    """Return the choice of `hvd.autotune`; empty if it has chosen nothing."""
    tuner = optimizer.hvdkit_tuner
    if tuner is None or not tuner.tuned:
        return {}
    return {"tuned": tuner.bucket_bytes, "tuned_format": tuner.wire_format}


def _use(tuner: Tuner, state: Tree) -> None:
    """Use the choice in a checkpoint, which is the same on every rank."""
    size = int(state["tuned"])
    wire_format = str(state.get("tuned_format", tuner.current.wire_format))
    if wire_format not in tuner.wire_formats:
        _log.warning(
            "the checkpoint was trained with the wire format %s, which hvd.autotune had chosen, "
            "but wire_formats has only %s. hvd.autotune measures again, and sums may differ",
            *(wire_format, ", ".join(sorted(tuner.wire_formats))),
        )
        return
    tuner.use(Candidate(size, wire_format))
