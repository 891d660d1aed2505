"""`hvd.shard` on several ranks: the shares of all ranks, and errors on every rank."""

import os

import numpy as np
import pytest

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import UsageError
from tests.ranks.frameworks import tf


def numbered(count, start=0):
    x = np.arange(start, start + count)
    return tf.data.Dataset.from_tensor_slices((x.astype(np.float32), x))


def of_all_ranks(hvd, values, name):
    """Return the int64 values of all ranks, whose numbers may differ."""
    return hvd.allgather(tf.constant(values, tf.int64), name=name).numpy().tolist()


def steps_labels_and_weights(dataset):
    batches = list(dataset.as_numpy_iterator())
    labels = [y for batch in batches for y in batch[1].tolist()]
    weights = [int(w) for batch in batches for w in batch[2].tolist()] if batches[0][2:] else []
    return [len(batch[1]) for batch in batches], labels, weights


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_shares_of_files(hvd, tmp_path, tail):
    counts = [5, 0, 9, 1, 3, 8]
    begins = np.cumsum([0, *counts]).tolist()
    names = [tmp_path / f"part-{i}" for i in range(len(counts))]
    if hvd.rank() == 0:
        for name, begin, count in zip(names, begins, counts, strict=False):
            with tf.io.TFRecordWriter(str(name)) as writer:
                for number in range(begin, begin + count):
                    writer.write(str(number).encode())
    of_all_ranks(hvd, [0], "written")

    def reader(name):
        records = tf.data.TFRecordDataset(name)
        return records.map(lambda text: (text, tf.strings.to_number(text, tf.int64)))

    # File systems list files in different orders.
    np.random.default_rng(hvd.rank()).shuffle(names)
    share = hvd.shard(names, batch_size=4, reader=reader, tail=tail)
    steps, labels, weights = steps_labels_and_weights(share)
    assert of_all_ranks(hvd, steps, "steps") == steps * hvd.size()
    labels = [y for y, w in zip(labels, weights or [1] * len(labels), strict=True) if w]
    used = 26 if tail == "pad" else 26 - 26 % hvd.size()
    assert sorted(of_all_ranks(hvd, labels, "labels")) == list(range(used))


def test_shard_in_a_process_set(hvd):
    members = hvd.add_process_set(list(range(1, hvd.size())))
    try:
        if members.included():
            share = hvd.shard(numbered(7), process_set=members)
            used = 7 - 7 % members.size()
            expected = range(members.rank(), used, members.size())
            assert [int(y) for _, y in share] == list(expected)
        else:
            with pytest.raises(UsageError, match="is not in the process set"):
                hvd.shard(numbered(7), process_set=members)
    finally:
        hvd.remove_process_set(members)


def broken():
    return numbered(20).map(lambda x, y: (tf.debugging.check_numerics(x / 0.0, "no"), y))


#: What differs on rank 1 -> the arguments of a rank, and a part of the error.
DIFFERENCES = {
    "shuffles": (
        lambda rank: {"dataset": numbered(20).shuffle(20, seed=rank)},
        "rank 0: first elements.*the same order",
    ),
    "sizes": (
        lambda rank: {"dataset": numbered(20 + (rank == 1))},
        "20 elements; rank 1: 21 elements",
    ),
    "elements": (
        lambda rank: {"dataset": numbered(20).map(lambda x, y: (x, x if rank == 1 else y))},
        "rank 1: .*float32.*float32",
    ),
    "values": (
        lambda rank: {"dataset": numbered(20, start=int(rank == 1))},
        "rank 1: first elements",
    ),
    "tails": (
        lambda rank: {"dataset": numbered(20), "tail": "pad" if rank == 1 else "drop"},
        "rank 1: batch_size=None, tail='pad'",
    ),
    "invalid": (
        lambda rank: {"dataset": numbered(20), "batch_size": 0 if rank == 1 else 4},
        "no problem; rank 1: batch_size is 0",
    ),
    "infinite": (
        lambda rank: {"dataset": numbered(20).repeat() if rank == 1 else numbered(20)},
        "rank 1: the dataset is infinite",
    ),
    "unreadable": (
        lambda rank: {"dataset": broken() if rank == 1 else numbered(20)},
        "rank 1: the dataset cannot be read",
    ),
    "file names": (
        lambda rank: {"dataset": [f"a{int(rank == 1)}"], "reader": lambda name: numbered(5)},
        "the files to shard.*rank 1: file a1",
    ),
}


@pytest.mark.parametrize("different", DIFFERENCES)
def test_differences_between_ranks_raise_on_every_rank(hvd, different):
    arguments, message = DIFFERENCES[different]
    with pytest.raises(RankMismatchError, match=message):
        hvd.shard(**arguments(hvd.rank()))


def test_fewer_elements_than_ranks_raise_on_every_rank(hvd):
    for tail in ("drop", "pad"):
        message = f"{hvd.size() - 1} elements for {hvd.size()} ranks"
        with pytest.raises(UsageError, match=message):
            hvd.shard(numbered(hvd.size() - 1), tail=tail)


def test_an_unreadable_file_raises_on_every_rank(hvd, tmp_path):
    names = [tmp_path / f"part-{i}" for i in range(hvd.size())]
    if hvd.rank() == 0:
        for name in names[:-1]:
            tf.io.TFRecordWriter(str(name)).close()
    of_all_ranks(hvd, [0], "written")
    last = hvd.size() - 1
    with pytest.raises(UsageError, match=f"rank {last} cannot count its files: .*part-{last}"):
        hvd.shard(names, reader=tf.data.TFRecordDataset)
    assert not os.path.exists(names[-1])
