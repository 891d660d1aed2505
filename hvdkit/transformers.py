"""The `Trainer` of transformers, with gradients that hvdkit reduces.

Example:
    # Start: hvdkit run -np 2 python train.py
    trainer = HvdkitTrainer(model, TrainingArguments(...), train_dataset=data)
    trainer.train()
"""

from collections.abc import Mapping
from typing import Any

import transformers

import hvdkit.torch as hvd
from hvdkit.accelerate import adopt


class HvdkitTrainerMixin:
    """A mixin for `transformers.Trainer` and its subclasses. It must be the first base class.

    Attributes:
        reduction: options of `hvd.DistributedOptimizer`, such as `{"compression": "fp16"}`.

    Example:
        class MyTrainer(HvdkitTrainerMixin, Seq2SeqTrainer):
            reduction = {"compression": "bf16"}
    """

    reduction: Mapping[str, Any] = {}
    accelerator: Any
    model: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator of transformers, and give it hvdkit's reduction."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        adopt(self.accelerator, self.reduction)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict with the buffers of rank 0, so that all ranks have one model."""
        hvd.broadcast_parameters(dict(self.model.named_buffers()), root_rank=0)
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]


class HvdkitTrainer(HvdkitTrainerMixin, transformers.Trainer):
    """`transformers.Trainer` without DistributedDataParallel: hvdkit averages the gradients."""
