"""`horovod.torch.sync_batch_norm`, for scripts that import it by this name."""

from horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
