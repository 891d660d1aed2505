"""The state of the gradient reduction, needed to resume with bit-identical sums."""

from collections.abc import Mapping

import torch

from hvdkit.checkpoint.state import Tree
from hvdkit.core.reduction import ReductionState
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer


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
            tuned = [state["tuned"] for state in tree.get(name, []) if state and "tuned" in state]
            if tuned and optimizer.tuner is not None:
                optimizer.tuner.use(int(tuned[0]))
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


def _tuned(optimizer: WrappedOptimizer) -> Tree:
    """Return the bucket size that `hvd.autotune` has chosen; empty if it has chosen none."""
    tuner = optimizer.tuner
    return {"tuned": tuner.bucket_bytes} if tuner is not None and tuner.tuned else {}
