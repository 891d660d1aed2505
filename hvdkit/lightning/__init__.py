"""Strategies for Lightning: its `Trainer` and `Fabric` train with hvdkit's reduction.

`HvdkitStrategy` is for `lightning.Trainer`, and `hvdkit.lightning.fabric.HvdkitStrategy` is for
`lightning.Fabric`. Their collectives are those of Horovod; torch.distributed is not used.

Example:
    # Start: hvdkit run -np 2 python train.py
    from hvdkit.lightning import HvdkitStrategy

    trainer = lightning.Trainer(strategy=HvdkitStrategy())
"""

from hvdkit.lightning.strategy import HvdkitStrategy

__all__ = ["HvdkitStrategy"]
