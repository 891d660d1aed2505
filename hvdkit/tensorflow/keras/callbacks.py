"""`horovod.tensorflow.keras.callbacks`, for scripts that import it: hvdkit.keras.callbacks."""

from hvdkit.keras.callbacks import *  # noqa: F403
