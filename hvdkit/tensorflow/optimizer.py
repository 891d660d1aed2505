"""`hvd.DistributedOptimizer`, which calls `hvdkit.keras.DistributedOptimizer`."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.errors import UsageError
from hvdkit.tensorflow.compression import Compression


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,  # noqa: ARG001
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = mpi_ops.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
    scale_local_gradients: bool = True,
    **options: Any,
) -> Any:
    """Wrap a Keras optimizer so that it applies the gradients of all ranks.

    Args:
        optimizer: a `keras.optimizers.Optimizer`.
        use_locking: for compatibility with Horovod; ignored.
        options: further arguments of `hvdkit.keras.DistributedOptimizer`, which documents all
            arguments.

    Raises:
        UsageError: `optimizer` is no optimizer of Keras 3, for example one of TensorFlow 1.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__} of tf.compat.v1: expected one of "
            f"keras.optimizers. In a custom training loop, use hvd.DistributedGradientTape and "
            f"apply its gradients with any optimizer"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        kind = type(optimizer)
        raise UsageError(
            f"optimizer is a {kind.__module__}.{kind.__qualname__}: expected one of "
            f"keras.optimizers of Keras {keras.__version__}. For tf_keras and other libraries, use "
            f"hvd.DistributedGradientTape in a custom training loop and apply its gradients with "
            f"the plain optimizer"
        )
    # Imported on use only, because hvdkit.keras is a higher layer (see tests/test_layers.py).
    from hvdkit.keras import DistributedOptimizer as wrap

    return wrap(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        **options,
    )
