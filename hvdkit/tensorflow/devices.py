"""Select the GPU of a rank."""

import logging

import tensorflow as tf

from hvdkit.runtime.shared_gpus import gpu_of


def use_own_gpu(local_rank: int) -> None:
    """Let TensorFlow see only the GPU of the local rank (`gpu_of`).

    Otherwise TensorFlow allocates all memory of every GPU that it sees. Does nothing if the script
    has selected GPUs. Does nothing either if no GPU has this number, because then a launcher has
    selected the GPUs of each rank.
    """
    gpus = tf.config.list_physical_devices("GPU")
    number = gpu_of(local_rank, len(gpus))
    if number is None or tf.config.get_visible_devices("GPU") != gpus:
        return
    try:
        tf.config.set_visible_devices(gpus[number], "GPU")
    except RuntimeError:
        # TensorFlow has started and keeps the memory.
        logging.getLogger("hvdkit.tensorflow").warning(
            "TensorFlow was in use before hvd.init(), so this rank has allocated memory on all %d "
            "GPUs of its host: call hvd.init() first to use only GPU %d.",
            len(gpus),
            number,
        )
