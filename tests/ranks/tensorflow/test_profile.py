"""`hvd.profile` with TensorFlow, on real ranks."""

from collections import defaultdict
from pathlib import Path

import pytest

from hvdkit.profiling import trace_file
from tests.ranks.folders import shared_folder
from tests.ranks.frameworks import tf
from tests.ranks.traces import check


@pytest.mark.long
def test_one_trace_of_all_ranks(hvd):
    weights = [tf.Variable(tf.ones((30, 30))) for _ in range(3)]

    @tf.function
    def train(x):
        with tf.GradientTape() as tape:
            for weight in weights:
                x = x @ weight
            loss = tf.reduce_mean(x)
        tape = hvd.DistributedGradientTape(tape, bucket_bytes=4000)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.001 * gradient)

    with shared_folder(hvd) as folder:
        path = Path(folder) / "trace.json.gz"
        with hvd.profile(path, steps=2, wait=2) as profile:
            for step in profile.batches(range(6)):
                train(tf.fill((4, 30), float(step)))
        trace = trace_file.read(path)
        assert "ranks to" in profile.summary
        check(hvd, trace, [3, 4])
        products = defaultdict(int)
        for event in trace["traceEvents"]:
            products[event["pid"] // 1000] += "MatMul" in event["name"] and event["ph"] == "X"
        assert sorted(products) == list(range(hvd.size()))
        assert all(products.values())
