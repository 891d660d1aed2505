"""The last stages of gradients: they see reduced gradients before anything else does.

`Gradients.stages` is the ordered list: first those that measure, then those that change gradients.
In each round, `Gradients.end_round` calls `undo` of all stages in reverse order with the bases,
which are the gradients that earlier passes of this step have left in `p.grad`; then it adds the
bases to what this pass has reduced, and calls the stages with the sums. All ranks of the round do
this, with the same gradients. A `GradScaler` unscales gradients later.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.dtensors import local, sharded_over


class Stage:
    """One of the last stages."""

    def __call__(self, gradients: Sequence[torch.Tensor]) -> None:
        """Measure the gradients of an optimizer, or change them in place."""
        raise NotImplementedError

    def undo(self, bases: Sequence[torch.Tensor]) -> None:
        """Undo the change of the last call, in place, before this pass is added to the bases."""

    def forget(self) -> None:
        """Forget the last call: a step has used the gradients, or the script has removed them."""


@dataclass(eq=False)
class Measure(Stage):
    """Call a function with the gradients.

    Attributes:
        function: the function. It does not change the gradients.
    """

    function: Callable[[Sequence[torch.Tensor]], None]

    def __call__(self, gradients: Sequence[torch.Tensor]) -> None:
        self.function(gradients)


class Clip(Stage):
    """Clip the gradients by their norm, like `torch.nn.utils.clip_grad_norm_`.

    Args:
        max_norm: the largest 2-norm that is not clipped.
        report: called with the norm before clipping, a tensor without dimensions.
    """

    def __init__(self, max_norm: float, report: Callable[[torch.Tensor], None]) -> None:
        self._max_norm = max_norm
        self._report = report
        # The factor of the last call in this step.
        self._factor: torch.Tensor | None = None

    @torch.no_grad()
    def __call__(self, gradients: Sequence[torch.Tensor]) -> None:
        norm = norm_of(gradients)
        self._factor = clip(gradients, self._max_norm, norm)
        self._report(norm)

    @torch.no_grad()
    def undo(self, bases: Sequence[torch.Tensor]) -> None:
        """Multiply the gradients by the inverse of the last factor."""
        if self._factor is not None:
            # An infinite norm has no inverse: what it has clipped is lost.
            inverse = 1.0 / self._factor
            _multiply(bases, torch.where(inverse.isfinite(), inverse, torch.ones_like(inverse)))

    def forget(self) -> None:
        """Forget the last factor."""
        self._factor = None


@torch.no_grad()
def norm_of(gradients: Sequence[torch.Tensor], p: float = 2.0) -> torch.Tensor:
    """Return the p-norm of all gradients, dense or sparse: a tensor without dimensions.

    A collective of the ranks that divide a gradient: the norm is that of the whole tensors. It is
    computed in float64, because in float32 it would depend on the division, and then rounded.
    """
    if not gradients:
        return torch.zeros((), device="cpu")
    # The groups of ranks that have different parts of a gradient -> the norms of its local parts.
    norms: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for each in gradients:
        values = each.coalesce().values() if each.is_sparse else local(each)
        norms.setdefault(sharded_over(each), []).append(_norm(values, p))
    first = next(iter(norms.values()))[0].device
    whole = []
    for groups, own in norms.items():
        norm = torch.linalg.vector_norm(torch.stack([each.to(first) for each in own]), p)
        for group in groups:
            norm = torch.linalg.vector_norm(_gathered(norm, group), p)
        whole.append(norm)
    wide = any(each.dtype in (torch.float64, torch.complex128) for each in gradients)
    norm = torch.linalg.vector_norm(torch.stack(whole), p)
    return norm if wide else norm.float()


def _gathered(norm: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the norms of the parts that the ranks of a group have."""
    if isinstance(group, TorchCollectives):
        every: torch.Tensor = mpi_ops.allgather(
            norm.view(1), name="hvdkit.norm", process_set=group.process_set
        )
        return every
    everyone = [torch.empty_like(norm) for _ in range(group.size())]
    torch.distributed.all_gather(everyone, norm, group=group)
    return torch.stack(everyone)


def _norm(tensor: torch.Tensor, p: float) -> torch.Tensor:
    if not tensor.numel():
        p = 2.0  # PyTorch has no maximum of no elements
    # In float64, the norm does not depend on how a tensor is divided, except in its last bits.
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return torch.linalg.vector_norm(tensor, p, dtype=wide)


@torch.no_grad()
def clip(gradients: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> torch.Tensor:
    """Multiply gradients of a norm by a factor, so that it is at most `max_norm`.

    Returns:
        The factor, a tensor without dimensions.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    _multiply(gradients, factor)
    return factor


def _multiply(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    factors = {}
    for gradient in gradients:
        if gradient.device not in factors:
            factors[gradient.device] = factor.to(gradient.device)
        local(gradient).mul_(factors[gradient.device])
