"""Selection of a rank's GPU, with simulated GPUs."""

from contextlib import contextmanager

import pytest

from tests.logs import recorded

GPUS = ["GPU:0", "GPU:1", "GPU:2"]


@contextmanager
def simulated(gpus, visible, error=None):
    """Simulate physical and visible GPUs; yield the calls of `set_visible_devices`."""
    import tensorflow as tf

    asked = []

    def set_visible_devices(device, kind):
        asked.append((device, kind))
        if error is not None:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
        patch.setattr(tf.config, "get_visible_devices", lambda kind: visible)
        patch.setattr(tf.config, "set_visible_devices", set_visible_devices)
        yield asked


@pytest.mark.parametrize(
    ("local_rank", "gpus", "visible", "asked"),
    [
        (1, GPUS, GPUS, [("GPU:1", "GPU")]),
        (1, GPUS, ["GPU:0"], []),
        (1, ["GPU:0"], ["GPU:0"], []),
        (0, [], [], []),
    ],
    ids=["its own", "chosen by the script", "pinned by a launcher", "no GPU"],
)
def test_a_rank_sees_its_gpu(hvd, local_rank, gpus, visible, asked):
    from hvdkit.tensorflow.devices import use_own_gpu

    with simulated(gpus, visible) as seen:
        use_own_gpu(local_rank)
    assert seen == asked


def test_use_of_tensorflow_before_init_logs_a_warning(hvd):
    from hvdkit.tensorflow.devices import use_own_gpu

    error = RuntimeError("Visible devices cannot be modified")
    with recorded("hvdkit.tensorflow") as records, simulated(GPUS, GPUS, error):
        use_own_gpu(2)
    assert "call hvd.init() first to use only GPU 2" in records[0].getMessage()
