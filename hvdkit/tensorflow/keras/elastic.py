"""Alias of hvdkit.keras.elastic, named as `horovod.tensorflow.keras.elastic`."""

from hvdkit.keras.elastic import *  # noqa: F403
