"""`shard`, where there is a tf.data under Keras."""

from typing import Any, NoReturn

from hvdkit.errors import UsageError
from hvdkit.keras import backend

__all__ = ["shard"]


def _no_shard(dataset: Any, *args: Any, **options: Any) -> NoReturn:  # noqa: ARG001
    """Not on this backend.

    Raises:
        UsageError: always; the message says what to use.
    """
    raise UsageError(
        "hvd.shard shares out tf.data datasets, and Keras runs on PyTorch: give fit a "
        "torch.utils.data.DataLoader with a DistributedSampler(num_replicas=hvd.size(), "
        "rank=hvd.rank(), drop_last=True), or this rank's rows of an array"
    )


shard: Any = backend.hvd.shard if backend.NAME == "tensorflow" else _no_shard
