"""Alias of hvdkit.keras, named as `horovod.tensorflow.keras`."""

from hvdkit.keras import *  # noqa: F403
from hvdkit.keras import __all__  # noqa: F401
