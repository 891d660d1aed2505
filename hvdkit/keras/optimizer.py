"""`hvd.DistributedOptimizer` and related functions for Keras optimizers.

Keras 3 applies gradients in one method, `optimizer.apply`: from `fit`, from a custom `train_step`
and from a custom loop. hvdkit replaces this method of the optimizer object and reduces gradients
there. The optimizer keeps its class and configuration, so a saved model loads without hvdkit.
"""

from collections.abc import Sequence
from typing import Any

import keras

from hvdkit.agreement.collectives import check_process_set
from hvdkit.agreement.replicas import INTERVAL, STOP, CheckSettings
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.distribution import Distribution, distribution_of
from hvdkit.keras.model_state import buffers_of
from hvdkit.keras_variables.loss_scaling import inner_optimizers, innermost
from hvdkit.reduction import bucketing
from hvdkit.reduction.accumulation import window_of
from hvdkit.reduction.nonfinite import IGNORE, check_policy
from hvdkit.reduction.plan import Reduction, predivide
from hvdkit.training.trial import with_candidate

hvd = backend.hvd


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,  # noqa: ARG001
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = hvd.Average,
    *,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    accumulation_steps: int = 1,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    bucket_bytes: int = bucketing.BUCKET_BYTES,
    check_parameters: bool = True,
    check_interval: int = INTERVAL,
    on_mismatch: str = STOP,
    on_nonfinite: str = IGNORE,
) -> Any:
    """Make `optimizer` reduce gradients over all ranks before it applies them.

    Gradients are reduced before clipping, and before a `LossScaleOptimizer` checks whether they are
    finite. All ranks therefore take the same steps.

    Args:
        optimizer: an instance of any class of `keras.optimizers`, including `LossScaleOptimizer`.
        name: for compatibility with Horovod; ignored.
        device_dense: for compatibility with Horovod; ignored. Gradients are reduced on their
            device.
        device_sparse: for compatibility with Horovod; ignored.
        compression: the wire format: `"none"`, `"fp16"`, `"bf16"`, `"int8"`, one of
            `hvd.Compression`, a `hvdkit.reduction.wire_format.WireFormat` such as `hvd.Int8()`, or
            a class with the interface of Horovod's compressors, which gets gradients one by one.
        sparse_as_dense: reduce `tf.IndexedSlices` as dense gradients. Otherwise gather their rows,
            and add up rows of the same index.
        gradient_predivide_factor: with `Average`, gradients are divided by this factor before the
            sum and by size / factor after the sum. 1.0, the default: the wire format chooses the
            factor.
        op: `Average` or `Sum` over the ranks.
        num_groups: older name for an integer `groups`; used if `groups` is None.
        groups: the number of buckets, or one list of variables for each bucket. None or 0: only
            `bucket_bytes` divides the gradients into buckets.
        accumulation_steps: batches per update. The optimizer gets the mean over ranks and batches.
            Only the last batch of an accumulation window communicates. If an epoch ends within a
            window, `fit` updates with the mean over the batches so far. In a custom loop, call
            `hvd.flush(optimizer)` instead.
        backward_passes_per_step: Horovod's name for `accumulation_steps`. The optimizer gets the
            sum over the batches, unless `average_aggregated_gradients`.
        average_aggregated_gradients: see `backward_passes_per_step`.
        process_set: the ranks to reduce over. On other ranks gradients are not reduced.
        scale_local_gradients: divide the gradients of local variables by the number of ranks. See
            `PartialDistributedOptimizer`.
        bucket_bytes: the largest size in bytes of a bucket with several gradients.
        check_parameters: compare the variables' values between ranks after the first batch of each
            `fit`, and raise on every rank if they differ.
        check_interval: the number of batches of `fit` between two comparisons of the trained
            variables and the optimizer's variables. The first comparisons are earlier: after
            batches 10, 20, 40 and so on. `fit` also compares at its end. 0: never. Needs
            `check_parameters`.
        on_mismatch: what to do if a comparison of `check_interval` finds a difference. `"stop"`
            raises `RankMismatchError` on every rank; a difference as small as rounding is only
            logged. `"repair"` copies the values of the majority of ranks to all ranks. Without a
            majority, as with two ranks, it raises.
        on_nonfinite: what to do if a rank's gradients contain NaN or infinity before the reduction.
            `"ignore"` does not check the gradients. `"raise"` raises `NonFiniteGradients` on every
            rank; the error names the ranks and the variables. `"skip"` logs these names and skips
            the update on every rank. In a TensorFlow graph, `"raise"` raises an error of
            TensorFlow with the same text. Not for a `LossScaleOptimizer`, which expects infinity
            and skips such updates itself.

    Arguments after `op` are keyword-only, because their positions differ between `horovod.keras`
    and `horovod.tensorflow.keras`.

    Returns:
        `optimizer` itself.

    Raises:
        UsageError: the optimizer cannot be wrapped, or arguments contradict each other.
    """
    window = window_of(accumulation_steps, backward_passes_per_step)
    _check_optimizer(optimizer, window.size)
    if op not in (hvd.Average, hvd.Sum):
        raise UsageError(f"op is {op!r}: expected hvd.Average or hvd.Sum")
    if not hvd.is_initialized():
        raise UsageError("Horovod is not initialised: call hvd.init() before this")
    check_process_set(process_set)
    reduction = Reduction(
        format=backend.wire_format(compression),
        average=op == hvd.Average,
        predivide=predivide(gradient_predivide_factor, op == hvd.Average),
        bucket_bytes=bucket_bytes,
        sparse_as_dense=sparse_as_dense,
    )
    Distribution(
        optimizer,
        with_candidate(reduction, backend.wire_format),
        process_set,
        groups=groups if groups is not None else num_groups,
        accumulation_steps=window.size,
        averaged=window.mean or average_aggregated_gradients,
        scale_local_gradients=scale_local_gradients,
        check_parameters=check_parameters,
        check_settings=CheckSettings(check_interval, on_mismatch),
        on_nonfinite=check_policy(on_nonfinite),
    )
    return optimizer


def PartialDistributedOptimizer(
    optimizer: Any,
    *args: Any,
    local_layers: Any = None,
    **options: Any,
) -> Any:
    """Call `DistributedOptimizer`, and keep the weights of some layers local to each rank.

    Args:
        optimizer: as for `DistributedOptimizer`.
        args: further arguments of `DistributedOptimizer`.
        local_layers: a built layer or several, whose gradients are not reduced.
        options: further arguments of `DistributedOptimizer`.

    Raises:
        UsageError: as for `DistributedOptimizer`, or `local_layers` contains other objects, or the
            optimizer has a `global_clipnorm`.
    """
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else local_layers or []
    if not all(isinstance(layer, keras.layers.Layer) for layer in layers):
        raise UsageError(f"local_layers is {local_layers!r}: expected Keras layers")
    if layers and getattr(innermost(optimizer), "global_clipnorm", None):
        raise UsageError(
            "the optimizer has a global_clipnorm, and local_layers are given: gradients of local "
            "layers differ between ranks, so the norm of all gradients would differ, and the ranks "
            "would clip the shared gradients differently. Use clipnorm or clipvalue, which clip "
            "each gradient separately"
        )
    wrapped = DistributedOptimizer(optimizer, *args, **options)
    distribution = distribution_of(wrapped)
    assert distribution is not None
    for layer in layers:
        for local in (*layer.variables, *buffers_of(layer), *layer._flatten_layers()):
            distribution.keep_local(local)
    return wrapped


def flush(optimizer: Any) -> bool:
    """Update with the gradients of an incomplete accumulation window, for example after an epoch.

    A collective: every rank calls it, outside of `tf.function`. The gradient is the mean over the
    batches so far. With `backward_passes_per_step` and no `average_aggregated_gradients`, it is
    the sum over these batches.

    Returns:
        Whether there were gradients to apply.

    Raises:
        PassesDiffer: on every rank, if ranks have accumulated different numbers of batches.
        UsageError: the optimizer is not a `DistributedOptimizer`.
    """
    distribution = distribution_of(optimizer)
    if distribution is None:
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__} that is not wrapped: expected the result "
            f"of hvd.DistributedOptimizer"
        )
    return distribution.flush()


def _check_optimizer(optimizer: Any, passes: int) -> None:
    kind = type(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"optimizer is {optimizer!r}: expected an instance, such as "
            f"keras.optimizers.get({optimizer!r})"
            if isinstance(optimizer, str)
            else f"optimizer is a {kind.__module__}.{kind.__qualname__}: expected an instance of "
            f"keras.optimizers.Optimizer of Keras {keras.__version__}. For optimizers of tf_keras, "
            f"use hvdkit.tensorflow's DistributedGradientTape"
        )
    if distribution_of(optimizer) is not None:
        raise UsageError(
            "the optimizer is already a DistributedOptimizer: wrap the plain optimizer, once"
        )
    inside = inner_optimizers(optimizer)
    for path, each in inside.items():
        if distribution_of(each) is not None:
            raise UsageError(
                f"the optimizer {path} in the {kind.__name__} is already a DistributedOptimizer, "
                f"so gradients would be reduced twice: pass plain optimizers to {kind.__name__}"
            )
    steps = [getattr(e, "gradient_accumulation_steps", None) for e in (optimizer, *inside.values())]
    own = next(filter(None, steps), None)
    if own and passes > 1:
        raise UsageError(
            f"the optimizer has gradient_accumulation_steps={own}, and DistributedOptimizer was "
            f"called with {passes} batches per update: use accumulation_steps only, which "
            f"communicates once per update and not in every batch"
        )
    backend.check_no_strategy()
