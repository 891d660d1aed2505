"""The settings of a `DistributedOptimizer`, from the call to where they are used."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from numbers import Real

import torch
from horovod.torch import mpi_ops

from hvdkit.agreement.replicas import CheckSettings
from hvdkit.errors import UsageError
from hvdkit.reduction.nonfinite import IGNORE
from hvdkit.reduction.plan import Reduction


@dataclass(frozen=True)
class Settings:
    """Checked arguments of `hvd.DistributedOptimizer`.

    Attributes:
        optimizer: the name of the optimizer's class.
        reduction: how gradients are reduced, without groups.
        frozen: frozen parameters of the model that the optimizer does not have, by name.
        process_set: the ranks to reduce over.
        check_parameters: compare the parameters before the first reduction.
        replicas: when to compare parameters and optimizer state later.
        on_nonfinite: what to do about gradients with NaN or infinity.
        max_grad_norm: clip reduced gradients to this norm; None to leave them.
        shard: None, or what each rank has a share of: see `hvd.DistributedOptimizer`.
        keep_sparse: make reduced gradients sparse, for an optimizer that needs sparse ones.

    Raises:
        UsageError: `max_grad_norm` is not a number above 0, or `shard` is unknown.
    """

    optimizer: str
    reduction: Reduction
    frozen: Mapping[str, torch.nn.Parameter]
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set
    check_parameters: bool = True
    replicas: CheckSettings = field(default_factory=CheckSettings)
    on_nonfinite: str = IGNORE
    max_grad_norm: float | None = None
    shard: str | None = None
    keep_sparse: bool = False

    def __post_init__(self) -> None:
        norm = self.max_grad_norm
        is_number = isinstance(norm, Real) and not isinstance(norm, bool)
        if norm is not None and not (is_number and 0 < norm < inf):
            raise UsageError(
                f"max_grad_norm is {norm!r}: expected a finite number above 0, or None"
            )
        if self.shard not in (None, "optimizer"):
            raise UsageError(f"shard is {self.shard!r}: expected 'optimizer' or None")

    def lines(self) -> list[str]:
        """Return lines that must be the same on every rank, besides those of `reduction`."""
        return [
            f"check_parameters: {self.check_parameters}",
            f"check_interval: {self.replicas.interval}",
            f"on_mismatch: {self.replicas.on_mismatch}",
            f"on_nonfinite: {self.on_nonfinite}",
            # Not without it, so that restored states of a reduction stay valid.
            *([f"max_grad_norm: {self.max_grad_norm}"] if self.max_grad_norm else []),
            *([f"shard: {self.shard}"] if self.shard else []),
        ]
