"""Which GPU is a rank's."""

import logging

import tensorflow as tf


def use_own_gpu(local_rank: int) -> None:
    """Let TensorFlow see the GPU with the local rank's number, and no other.

    TensorFlow takes all memory of all the GPUs that it sees. Not where the script has chosen, and
    not where there are fewer GPUs, because then a launcher has.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if local_rank >= len(gpus) or tf.config.get_visible_devices("GPU") != gpus:
        return
    try:
        tf.config.set_visible_devices(gpus[local_rank], "GPU")
    except RuntimeError:
        # TensorFlow has started; what it has taken stays taken.
        logging.getLogger("hvdkit.tensorflow").warning(
            "TensorFlow was in use before hvd.init(), so this rank has taken memory on all %d "
            "GPUs of its host: call hvd.init() first, and it takes GPU %d only.",
            len(gpus),
            local_rank,
        )
