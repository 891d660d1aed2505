"""Temporary files of ranks: TensorFlow writes one for each function that it traces."""

import tempfile
from pathlib import Path

from tests.ranks.frameworks import tf
from tests.ranks.rank_pool import Configuration, RankPool

GENERATED = "__autograph_generated_file*"


def trace_a_function(hvd):
    @tf.function
    def largest(x, y):
        if x > y:
            y = x
        return y

    assert largest(tf.constant(2), tf.constant(1)).numpy() == 2
    assert list(Path(tempfile.gettempdir()).glob(GENERATED))


def test_a_stopped_pool_of_ranks_leaves_no_files():
    pool = RankPool(Configuration("tensorflow", "gloo", 1))
    pool.start()
    try:
        pool.run(__name__, "trace_a_function", {})
        folder = Path(pool.folder)
        assert list(folder.glob(GENERATED))
    finally:
        pool.stop()
    assert not folder.exists()
