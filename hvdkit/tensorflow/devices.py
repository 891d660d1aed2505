"""Select the GPU of a rank."""

import logging

import tensorflow as tf


def use_own_gpu(local_rank: int) -> None:
    """Let TensorFlow see only the GPU whose number is the local rank.

    TensorFlow allocates all memory of every visible GPU. This function does nothing if the script
    has selected GPUs. It does nothing if there are fewer GPUs than local ranks, because then a
    launcher has selected them.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if local_rank >= len(gpus) or tf.config.get_visible_devices("GPU") != gpus:
        return
    try:
        tf.config.set_visible_devices(gpus[local_rank], "GPU")
    except RuntimeError:
        # TensorFlow has started and keeps the memory.
        logging.getLogger("hvdkit.tensorflow").warning(
            "TensorFlow was in use before hvd.init(), so this rank has allocated memory on all %d "
            "GPUs of its host: call hvd.init() first to use only GPU %d.",
            len(gpus),
            local_rank,
        )
