"""The buffers that each rank computes from its own batches, such as the statistics of BatchNorm."""

import logging
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import torch
from horovod.torch import SyncBatchNorm

from hvdkit.checkpoint.items import LARGEST_STATISTICS, smallest
from hvdkit.checkpoint.state import Tree
from hvdkit.torch.digests import digests
from hvdkit.torch.dtensors import local
from hvdkit.torch.items import compiled
from hvdkit.torch.items.tensors import TorchTensor, memory
from hvdkit.torch.keras_variables import is_own
from hvdkit.torch.plain_tensors import is_plain

log = logging.getLogger("hvdkit.torch")


class Statistics:
    """A `DifferingRankItem`: running statistics of normalisation layers, and other buffers.

    Normalisation layers have their own statistics on each rank, unless they synchronize them. Other
    buffers of the `state_dict` are saved if they differ between the ranks: for example, a running
    mean of the inputs.

    The smallest buffers are saved for each rank, up to a limit (`smallest`). Of the others, all
    ranks get the first rank's, which are part of the model.

    Args:
        models: name -> model.
        warns: whether this rank logs a warning if buffers are too large.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module], warns: bool = True) -> None:
        self._models = models
        self._differing: Collection[str] = ()
        self._warns = warns

    def digests(self) -> dict[str, int]:
        """Return a digest of each buffer that may be equal on all ranks."""
        others = {name: b for name, _, b, of_norm in self._buffers() if not of_norm}
        return dict(zip(others, digests(list(others.values())), strict=True))

    def select(self, differing: Collection[str]) -> None:
        """Set the buffers that differ between ranks."""
        self._differing = differing

    def save(self) -> Tree:
        """Return the buffers of this rank."""
        buffers = list(self._buffers())
        norms = {name: buffer for name, _, buffer, of_norm in buffers if of_norm}
        own = norms | {name: buffer for name, _, buffer, _ in buffers if name in self._differing}
        sizes = {name: buffer.nbytes for name, buffer in own.items()}
        chosen = smallest(sizes)
        if (left := own.keys() - chosen) and self._warns:
            self._warns = False
            log.warning(
                "The buffers that differ between ranks have %.1f MB, and a checkpoint saves up to "
                "%.0f MB for each rank. It has only the first rank's %s%s, so a resumed training "
                "may differ from an undisturbed one. Before each save, call "
                "hvd.broadcast_parameters(model.named_buffers(), root_rank=0) to make the buffers "
                "equal.",
                *(sum(sizes.values()) / 1e6, LARGEST_STATISTICS / 1e6),
                *(min(left), ", ..." if len(left) > 1 else ""),
            )
        return {name: TorchTensor(local(own[name])).content() for name in own if name in chosen}

    def restore(self, tree: Tree) -> None:
        """Restore the buffers."""
        # Earlier versions saved prefixes of torch.compile, and `..` before the model's own buffers.
        old = {compiled.PREFIX.sub("", n).replace("..", "."): tree[n] for n in tree}
        saved = old | tree
        for name, path, buffer, _ in self._buffers():
            # Earlier versions saved the path.
            content = saved.get(name, saved.get(path))
            if content is not None:
                TorchTensor(local(buffer)).write(np.frombuffer(bytearray(content), np.uint8))

    def _buffers(self) -> Iterator[tuple[str, str, torch.Tensor, bool]]:
        """Yield name, path, buffer, and whether it is a statistic that each rank has for itself.

        The name is that in the `state_dict`. It differs from the path if the `state_dict` of a
        wrapper, such as Fabric's, is that of the wrapped module.
        """
        for model, module in self._models.items():
            plain = compiled.without_prefixes(module)
            # A model may leave out buffers. They may have no content, or differ in their shapes.
            state = module.state_dict()
            in_state = {plain(name) for name in state}
            by_memory = {
                memory(value): plain(name)
                for name, value in reversed(state.items())
                if isinstance(value, torch.Tensor) and is_plain(value) and value.numel()
            }
            for path, parameter in module.named_parameters():
                if is_own(path):
                    yield f"{model}.{plain(path)}", f"{model}.{path}", parameter, True
            for prefix, layer in module.named_modules():
                of_norm = isinstance(
                    layer, torch.nn.modules.batchnorm._NormBase
                ) and not isinstance(layer, torch.nn.SyncBatchNorm | SyncBatchNorm)
                for own_name, buffer in layer.named_buffers(recurse=False):
                    path = plain(f"{prefix}.{own_name}".removeprefix("."))
                    name = path if path in in_state else None
                    if name is None and is_plain(buffer):
                        name = by_memory.get(memory(buffer))
                    if of_norm or name is not None:
                        yield f"{model}.{name or path}", f"{model}.{path}", buffer, of_norm
