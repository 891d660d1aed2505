"""`horovod.tensorflow.keras`, for scripts that import it by this name: hvdkit.keras."""

from hvdkit.keras import *  # noqa: F403
from hvdkit.keras import __all__  # noqa: F401
