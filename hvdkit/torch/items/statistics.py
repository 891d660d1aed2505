"""The running statistics of normalisation layers."""

from collections.abc import Mapping

import numpy as np
import torch
from horovod.torch import SyncBatchNorm

from hvdkit.checkpoint.items import LARGEST_STATISTICS
from hvdkit.checkpoint.state import Tree
from hvdkit.torch.items import compiled
from hvdkit.torch.items.tensors import TorchTensor


class Statistics:
    """A `RankItem`: the running statistics of normalisation layers, from this rank's batches.

    Training does not depend on the statistics, but validation does. Above `LARGEST_STATISTICS`
    bytes, they are not saved for each rank: all ranks get the first rank's statistics, which are
    part of the model.

    Args:
        models: name -> model.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        self._models = models

    def save(self) -> Tree:
        """Return the statistics of this rank."""
        own = self._buffers()
        if sum(buffer.nbytes for buffer in own.values()) > LARGEST_STATISTICS:
            return {}
        return {name: TorchTensor(buffer).content() for name, buffer in own.items()}

    def restore(self, tree: Tree) -> None:
        """Restore the statistics."""
        own = self._buffers()
        # Earlier versions saved prefixes of torch.compile.
        saved = {compiled.PREFIX.sub("", name): content for name, content in tree.items()} | tree
        for name in own.keys() & saved.keys():
            TorchTensor(own[name]).write(np.frombuffer(bytearray(saved[name]), np.uint8))

    def _buffers(self) -> dict[str, torch.Tensor]:
        found = {}
        for model, module in self._models.items():
            plain = compiled.without_prefixes(module)
            for layer, norm in module.named_modules():
                if isinstance(norm, torch.nn.modules.batchnorm._NormBase) and not isinstance(
                    norm, torch.nn.SyncBatchNorm | SyncBatchNorm
                ):
                    for name, buffer in norm.named_buffers(recurse=False):
                        found[f"{model}.{plain(f'{layer}.{name}')}"] = buffer
        return found
