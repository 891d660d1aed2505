"""Alias of hvdkit.keras.callbacks, named as `horovod.tensorflow.keras.callbacks`."""

from hvdkit.keras.callbacks import *  # noqa: F403
