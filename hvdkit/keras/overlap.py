"""Overlap the reduction with the backward pass, on Keras's PyTorch backend.

Keras's own `train_step` scales the loss, calls `backward()` and applies the resulting gradients.
Each gradient is therefore final when it is computed, and its bucket can be sent during the backward
pass. A custom `train_step` may change its gradients before it applies them. Its gradients are
therefore reduced when they are applied. On TensorFlow, the graph overlaps the reduction in both
cases. Importing hvdkit.keras calls `wrap_train_step`.
"""

import functools
from typing import Any

from hvdkit.keras import backend
from hvdkit.keras.optimizer import distribution_of


def wrap_train_step() -> None:
    """Wrap Keras's own `train_step`, so that reductions begin during its backward pass."""
    if backend.NAME != "torch":
        return
    from keras.src.backend.torch.trainer import TorchTrainer

    original = TorchTrainer.train_step
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def train_step(self: Any, data: Any) -> Any:
        distribution = distribution_of(getattr(self, "optimizer", None))
        # A compiled step delivers all gradients at its end.
        if distribution is None or self.jit_compile:
            return original(self, data)
        with distribution.train_step_of(self):
            return original(self, data)

    TorchTrainer.train_step = train_step
