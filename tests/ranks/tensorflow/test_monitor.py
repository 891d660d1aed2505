"""`hvd.Monitor` for TensorFlow on real ranks."""

import time

import pytest

from hvdkit.errors import UsageError
from hvdkit.monitor import metrics
from hvdkit.runtime.counters import counters
from tests.ranks.frameworks import tf
from tests.ranks.tensorflow.test_tape import data_of, loss_of, variables_of
from tests.unit.monitor.simulated import Kept


@pytest.mark.parametrize(
    ("compression", "size", "where"),
    [
        ("none", 8.0, "eager"),
        ("fp16", 2.0, "graph"),
    ],
)
def test_records_of_a_loop(hvd, where, compression, size):
    kept = Kept()
    counters.wire_formats.clear()  # of earlier tests in this process
    variables = variables_of()

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    train_step = tf.function(step) if where == "graph" else step

    def batches():
        for number in range(8):
            if hvd.rank() == 1:
                time.sleep(0.02)
            yield tf.constant(data_of(hvd.rank(), number))

    with hvd.Monitor([kept], every=4) as monitor:
        for x in monitor.batches(batches()):
            monitor.step({"loss": train_step(x)}, samples=len(x))
    if hvd.rank() != 0:
        return
    assert [record.step for record in kept.records] == [4, 8]
    assert kept.runs[0].wire_formats == (compression,)
    record = kept.records[1]
    found = record.metrics
    assert record.samples == 4 * 6 * hvd.size()
    assert found["loss"].by_rank.keys() == set(range(hvd.size()))
    assert found[metrics.DATA].by_rank[1] >= 0.02
    assert found[metrics.COMMUNICATION].by_rank[0] > 0
    numbers = sum(int(tf.size(variable)) for variable in variables)
    # float16 needs one step in float64, to learn the magnitude, which is in the first record.
    # TensorFlow pads buckets.
    payload = found[metrics.PAYLOAD]
    assert size * numbers <= payload.min == payload.max < size * (numbers + 16)
    assert metrics.OVERFLOWS not in found
    sections = sum(found[name].by_rank[1] for name in metrics.SECTIONS if name in found)
    assert sections <= found[metrics.STEP].by_rank[1] * 1.05 + 1e-3


def test_values_of_graphs_and_wrong_optimizers(hvd):
    monitor = hvd.Monitor([Kept()])

    @tf.function
    def traced(x):
        monitor.log({"loss": x})

    with pytest.raises(UsageError, match="call Monitor outside of tf.function"):
        traced(tf.constant(1.0))
    with pytest.raises(UsageError, match="expected one real number"):
        monitor.log({"loss": tf.zeros(2)})
    monitor.abandon()
    with pytest.raises(UsageError, match="is a object that is not wrapped"):
        hvd.Monitor([], optimizer=object())
