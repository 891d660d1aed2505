"""Random sequences of jobs of different sizes that are interrupted and resume one `fit`."""

import itertools
import tempfile

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from tests.ranks.frameworks import keras, tf
from tests.ranks.keras.job import distributed, of_every_rank
from tests.ranks.keras.test_checkpoint import Interrupted, interrupt_after
from tests.searching import search_settings

EPOCHS = 2
# Number of sequences without and with --long.
_SHORT, _LONG = 2, 200


def epochs_left(hvd, sampler, epoch, consumed, ranks, rank):
    """Return the (epoch, number of the batch, samples) that a rank trains from a position on."""
    from hvdkit.training.share import epoch_order

    def batches(order, begin):
        rest, found = order[begin:], []
        while rest and not (sampler["drop_last"] and len(rest) < ranks * sampler["batch_size"]):
            step = rest[: ranks * sampler["batch_size"]]
            rest = rest[len(step) :]
            found.append(step[rank::ranks] or [order[rank % len(order)]])
        return found

    for number in range(epoch, EPOCHS):
        order = epoch_order(sampler["count"], 3, number).tolist()
        left = batches(order, consumed if number == epoch else 0)
        first = len(batches(order, 0)) - len(left)
        for batch, samples in enumerate(left, first):
            yield number, batch, samples


def fit(hvd, folder, sampler, process_set, interrupted_after):
    """Train on the ranks of a process set; return the (epoch, number, samples) of its batches."""
    seen = []

    class Recorder(keras.Sequential):
        def train_step(self, data):
            numbers = keras.ops.convert_to_numpy(data[0])[:, 0]
            seen.append([*place, numbers.astype(int).tolist()])
            return super().train_step(data)

    class Place(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            place[:] = [epoch]

        def on_train_batch_begin(self, batch, logs=None):
            place[1:] = [batch]

        def on_epoch_end(self, epoch, logs=None):
            # ModelCheckpoint overwrites the best model after an epoch without a loss.
            assert "loss" in logs

    place = []
    keras.utils.set_random_seed(1)
    resumable, data = sampled(hvd, sampler, process_set)
    model = Recorder([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = distributed(hvd, 1e-6, process_set=process_set)
    model.compile(optimizer, loss="mse", run_eagerly=True)
    checkpoint = hvd.callbacks.Checkpoint(folder, every_steps=1, data=resumable, asynchronous=False)
    callbacks = [checkpoint, Place(), interrupt_after(interrupted_after)]
    try:
        model.fit(data, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    except Interrupted:
        checkpoint._running.manager.close()
    return seen


def sampled(hvd, sampler, process_set):
    count, batch_size, drop_last = sampler["count"], sampler["batch_size"], sampler["drop_last"]
    how = {"seed": 3, "drop_last": drop_last, "process_set": process_set}
    resumable = hvd.ResumableSampler(count, batch_size, **how)
    rows = np.arange(count, dtype="float32")[:, None]
    if keras.backend.backend() == "tensorflow":
        return resumable, resumable.dataset().map(lambda i: (tf.gather(rows, i),) * 2)
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.from_numpy(rows), torch.from_numpy(rows))
    return resumable, DataLoader(data, batch_size, sampler=resumable)


def run_jobs(hvd, sampler, jobs, folder):
    """Run jobs of (ranks, batches); each trains the next batches of all ranks together."""
    epoch = consumed = 0
    for ranks, batches in jobs:
        ranks = min(ranks, hvd.size())
        process_set = hvd.global_process_set
        if ranks < hvd.size():
            process_set = hvd.add_process_set(range(ranks))
        if process_set.included():
            left = epochs_left(hvd, sampler, epoch, consumed, ranks, process_set.rank())
            expected = [list(each) for each in itertools.islice(left, batches)]
            seen = fit(hvd, folder, sampler, process_set, batches)
            assert seen == expected, f"job of {ranks} ranks from epoch {epoch}, {consumed} samples"
        of_every_rank("done")
        if ranks < hvd.size():
            hvd.remove_process_set(process_set)
        # The position of all ranks together.
        done = list(itertools.islice(epochs_left(hvd, sampler, epoch, consumed, ranks, 0), batches))
        if not done:
            continue
        in_last = [number for number, *_ in done].count(done[-1][0])
        before = consumed if done[-1][0] == epoch else 0
        epoch = done[-1][0]
        consumed = min(before + in_last * ranks * sampler["batch_size"], sampler["count"])
        if next(epochs_left(hvd, sampler, epoch, consumed, ranks, 0), (EPOCHS,))[0] > epoch:
            epoch, consumed = epoch + 1, 0


_SAMPLERS = st.fixed_dictionaries(
    {
        "count": st.integers(4, 33),
        "batch_size": st.integers(1, 4),
        "drop_last": st.booleans(),
    }
).filter(lambda sampler: sampler["count"] >= 4 * sampler["batch_size"])
_JOBS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=2, max_size=4)


@pytest.mark.long_with("keras-tensorflow")
def test_jobs_of_different_sizes_train_each_sample_of_an_epoch(rank_pool, request):
    @search_settings(_LONG if request.config.getoption("--long") else _SHORT)
    # After one batch of 11, two ranks have 5 of 6 batches left: less than one of their batches is
    # done. After one of 3, they have 2 of 2 left.
    @example({"count": 11, "batch_size": 1, "drop_last": False}, [(1, 1), (2, 20)])
    @example({"count": 12, "batch_size": 4, "drop_last": False}, [(1, 1), (2, 1), (1, 20)])
    # One sample is left, which two ranks drop.
    @example({"count": 5, "batch_size": 1, "drop_last": True}, [(1, 4), (2, 20)])
    @given(_SAMPLERS, _JOBS)
    def run(sampler, jobs):
        rank_pool.start()
        with tempfile.TemporaryDirectory(prefix="hvdkit-test-") as folder:
            parameters = {"sampler": sampler, "jobs": jobs, "folder": folder}
            rank_pool.run(__name__, "run_jobs", parameters)

    run()
