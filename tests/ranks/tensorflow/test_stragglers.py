"""A rank that makes all others wait in a custom loop is named."""

import time

import pytest

from hvdkit.training import stragglers
from tests.logs import recorded
from tests.ranks.frameworks import tf
from tests.ranks.tensorflow.test_tape import WHERE, data_of, loss_of, variables_of

INTERVAL, SECONDS = 8, 0.1


@pytest.mark.parametrize("where", WHERE)
def test_a_slow_rank_is_named(hvd, where):
    from hvdkit.tensorflow import step_times

    variables = variables_of()

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x)
        # Other settings than those of other tests, so that the count begins here.
        tape = hvd.DistributedGradientTape(tape, bucket_bytes=1234 + len(where))
        return tape.gradient(loss, variables)

    step = tf.function(step) if where == "graph" else step
    with pytest.MonkeyPatch.context() as patch, recorded("hvdkit") as log:
        patch.setattr(step_times, "INTERVAL", INTERVAL)
        patch.setattr(stragglers, "_PERSISTENT_SECONDS", 0.0)
        for number in range(4 * INTERVAL):
            if hvd.rank() == 1:
                time.sleep(SECONDS)
            step(tf.constant(data_of(hvd.rank(), number)))
    lines = [record.getMessage() for record in log if "is slow" in record.getMessage()]
    if hvd.rank() != 1:
        # On a busy machine, another rank may be slow, too.
        return
    (line,) = lines
    assert line.startswith("rank 1 on host ")
    assert "The largest difference is in data and forward." in line
