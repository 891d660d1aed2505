"""Reduction during the backward pass, on Keras's PyTorch backend.

Keras's own `train_step` scales the loss, calls `backward()`, and gives the optimizer the gradients
that this has left. So each gradient is final when it arrives, and its bucket can be sent while the
backward pass goes on. A `train_step` of one's own may change gradients before it applies them: it
has them reduced when they are applied. On TensorFlow both overlap, because the order of operations
follows from the graph.
"""

import functools
from typing import Any

from hvdkit.keras import backend
from hvdkit.keras.optimizer import distribution_of


def overlap_steps() -> None:
    """Let Keras's own `train_step` tell the optimizer of the model that it runs."""
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
        with distribution.in_step_of(self):
            return original(self, data)

    TorchTrainer.train_step = train_step
