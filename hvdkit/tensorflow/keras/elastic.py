"""`horovod.tensorflow.keras.elastic`, for scripts that import it: hvdkit.keras.elastic."""

from hvdkit.keras.elastic import *  # noqa: F403
