"""hvdkit: Horovod-based ring-allreduce training on the PyTorch and TensorFlow of today."""

__version__ = "0.1.0.dev0"
