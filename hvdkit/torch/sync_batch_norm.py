"""`hvd.SyncBatchNorm`: batch normalization over the batches of all ranks, on GPUs and CPUs."""

from typing import Any, Self

import torch
from horovod.torch import mpi_ops, sync_batch_norm
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from hvdkit.agreement.collectives import check_process_set, is_single_rank
from hvdkit.errors import UsageError
from hvdkit.torch.reduction.records import owner_of

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(sync_batch_norm.SyncBatchNorm):
    """Normalize with the mean and the variance over the batches of all ranks.

    It takes the arguments of `torch.nn.BatchNorm2d`, and inputs of shape [samples, channels, ...].
    In training, each forward and each backward pass needs one collective, so all ranks must run the
    layer in the same order. Ranks may have different numbers of samples. Some may have none. A
    batch without a sample on any rank does not change the running statistics. Evaluation (`eval()`)
    does not communicate.

    A copy of the layer has the same `process_set`. A pickled layer has none: set
    `layer.process_set` after loading.

    For tensors on a GPU, without a `process_set`, this class calls Horovod's layer, which supports
    GPUs only and makes several collectives in each pass.

    Args:
        *args: arguments of `torch.nn.BatchNorm2d`.
        process_set: the ranks whose batches are normalized together. A `DistributedOptimizer` of
            the layer's parameters must reduce gradients over these ranks, and maybe over others.
            Otherwise the forward pass raises `UsageError`. On other ranks, the layer is a plain
            `BatchNorm`.
        **kwargs: arguments of `torch.nn.BatchNorm2d`.

    Raises:
        UsageError: `process_set` is not a process set.
    """

    def __init__(
        self,
        *args: Any,
        process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
        **kwargs: Any,
    ) -> None:
        # Horovod's constructor lacks some of these arguments.
        _BatchNorm.__init__(self, *args, **kwargs)
        self.process_set = process_set

    @property
    def process_set(self) -> mpi_ops.ProcessSet:
        """The ranks whose batches are normalized together."""
        # Layers that earlier versions have pickled have no reference.
        return self.__dict__.get("_set", _ALL).process_set

    @process_set.setter
    def process_set(self, process_set: mpi_ops.ProcessSet) -> None:
        check_process_set(process_set)
        self._set = _Reference(process_set)

    @classmethod
    def convert_sync_batchnorm(
        cls,
        module: nn.Module,
        process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
    ) -> nn.Module:
        """Replace all batch normalization layers of a model, as PyTorch's class does for DDP.

        The new layers have the parameters, buffers, hooks and other attributes of the old ones. A
        layer with several names in the model is one layer afterwards, too.

        Args:
            module: the model, which is changed.
            process_set: the ranks whose batches are normalized together, see the class. Layers that
                are a `hvd.SyncBatchNorm` already keep theirs.

        Returns:
            `module`; or its replacement, if `module` itself is such a layer.

        Raises:
            UsageError: a layer is not initialised, or has a `forward` of its own, or `process_set`
                is not a process set. The model is not changed.

        Example:
            model = hvd.SyncBatchNorm.convert_sync_batchnorm(resnet)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """
        check_process_set(process_set)
        # By layer, because a layer may have several names.
        new = {
            layer: cls._like(layer, process_set)
            for name, layer in module.named_modules()
            if _is_convertible(layer, name)
        }
        for parent in list(module.modules()):
            for name, child in list(parent._modules.items()):
                if child in new:
                    setattr(parent, name, new[child])
        return new.get(module, module)

    @classmethod
    def _like(cls, layer: _BatchNorm, process_set: mpi_ops.ProcessSet) -> Self:
        new = cls.__new__(cls)
        new.__dict__.update(layer.__dict__)
        new.process_set = process_set
        return new

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # As in PyTorch's class, no evaluation communicates: a script may evaluate on one rank.
        if not self.training or is_single_rank(self.process_set):
            return self._run_alone(input)
        self._check_ranks()
        if input.is_cuda and self.process_set is mpi_ops.global_process_set:
            return super().forward(input)
        self._check_input_dim(input)
        momentum = self._count_batch()
        output, mean, variance, count = _Normalization.apply(
            input, self.weight, self.bias, self.eps, self.process_set
        )
        # Without a sample on any rank there are no statistics. The count is equal on all ranks.
        if count and self.track_running_stats:
            with torch.no_grad():
                unbiased = variance * (count / max(count - 1, 1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        return output

    def _check_ranks(self) -> None:
        """Check that the ranks of the layer train one model.

        Raises:
            UsageError: gradients of the layer are not reduced over all ranks of the layer. The same
                on every rank, because the ranks of an optimizer run the same model.
        """
        for parameter in self.parameters(recurse=False):
            owner = owner_of(parameter)
            ranks = None if owner is None else list(owner.collectives.ranks)
            if ranks is not None and not set(self.process_set.ranks) <= set(ranks):
                raise UsageError(
                    f"a SyncBatchNorm normalizes over ranks {self.process_set.ranks}, but its "
                    f"gradients are reduced over ranks {ranks}, so the statistics would be those "
                    f"of different models: pass the process_set of the optimizer to "
                    f"hvd.SyncBatchNorm or convert_sync_batchnorm, too"
                )

    def _count_batch(self) -> float:
        """Count a batch in training; return the weight of its statistics in the running ones."""
        if not self.training or not self.track_running_stats:
            return 0.0
        self.num_batches_tracked.add_(1)
        return 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum

    def _run_alone(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        return functional.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            self._count_batch(),
            self.eps,
        )


class _Reference:
    """Refers to a process set. A copy refers to the same set; a pickled one to all ranks."""

    def __init__(self, process_set: mpi_ops.ProcessSet) -> None:
        self.process_set = process_set

    def __deepcopy__(self, _: dict[int, Any]) -> "_Reference":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _all_ranks, ()


_ALL = _Reference(mpi_ops.global_process_set)


def _all_ranks() -> _Reference:
    return _ALL


def _is_convertible(layer: nn.Module, name: str) -> bool:
    """Return whether `SyncBatchNorm` replaces a layer.

    Raises:
        UsageError: it is a batch normalization that `SyncBatchNorm` cannot replace.
    """
    if not isinstance(layer, _BatchNorm) or isinstance(layer, sync_batch_norm.SyncBatchNorm):
        return False
    kind = type(layer).__name__
    if layer.num_features == 0:
        raise UsageError(
            f"the {kind} {name!r} is not initialised, so its number of channels is not known: call "
            f"the model on one batch before convert_sync_batchnorm"
        )
    own_forward = type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    if own_forward or is_parametrized(layer):
        raise UsageError(
            f"the {kind} {name!r} has a forward() or a parametrization of its own, which "
            f"hvd.SyncBatchNorm does not have. Replace it in the model, for example by "
            f"hvd.SyncBatchNorm and an activation"
        )
    return True


class _Normalization(torch.autograd.Function):
    """(input, weight, bias, eps, process set) -> output, mean, variance, values per channel."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        process_set: mpi_ops.ProcessSet,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        channels = input.shape[1]
        # Sums in float64, so that E[x^2] - E[x]^2 keeps the digits of float32.
        sums = input.new_zeros(2 * channels + 1, dtype=torch.float64)
        count = input.numel() // channels
        if count:
            variance, mean = torch.var_mean(_wide(input), _all_but_channels(input), correction=0)
            mean, variance = mean.double(), variance.double()
            sums[0] = count
            sums[1 : channels + 1] = count * mean
            sums[channels + 1 :] = count * (variance + mean.square())
        # Horovod caches a collective by its name and shape, so the name contains the channels.
        name = f"sync_batch_norm.{channels}.sums"
        sums = mpi_ops.allreduce(sums, op=mpi_ops.Sum, name=name, process_set=process_set)
        total = sums[0].item()
        divisor = max(total, 1)
        mean = sums[1 : channels + 1] / divisor
        variance = (sums[channels + 1 :] / divisor - mean.square()).clamp_(min=0)
        ctx.save_for_backward(input, weight, mean, (variance + eps).rsqrt())
        ctx.divisor = divisor
        ctx.process_set = process_set
        ctx.mark_non_differentiable(mean, variance)
        kind = _wide(input).dtype
        output = functional.batch_norm(
            _wide(input),
            mean.to(kind),
            variance.to(kind),
            None if weight is None else weight.to(kind),
            None if bias is None else bias.to(kind),
            eps=eps,
        )
        return output.to(input.dtype), mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, inverse_std = ctx.saved_tensors
        kind = _wide(input).dtype
        shape = (1, -1) + (1,) * (input.dim() - 2)
        inverse_std = inverse_std.to(kind).view(shape)
        normalized = (_wide(input) - mean.to(kind).view(shape)) * inverse_std
        gradient = grad_output.to(kind)
        dims = _all_but_channels(input)
        of_bias, of_weight = gradient.sum(dims), (gradient * normalized).sum(dims)
        of_input = None
        if ctx.needs_input_grad[0]:
            name = f"sync_batch_norm.{len(of_bias)}.gradients"
            own = torch.stack([of_bias, of_weight])
            sums = mpi_ops.allreduce(own, op=mpi_ops.Sum, name=name, process_set=ctx.process_set)
            by_bias, by_weight = (sums / ctx.divisor).view(2, *shape).unbind()
            of_input = inverse_std * (gradient - by_bias - normalized * by_weight)
            if weight is not None:
                of_input *= weight.to(kind).view(shape)
            of_input = of_input.to(input.dtype)
        needed = ctx.needs_input_grad  # False also for a weight or a bias that does not exist
        # PyTorch casts the gradients to the dtypes of the parameters.
        of_parameters = (of_weight if needed[1] else None, of_bias if needed[2] else None)
        return of_input, *of_parameters, None, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return `x` in float32, or in float64 if it has this dtype."""
    return x if x.dtype == torch.float64 else x.float()


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]
