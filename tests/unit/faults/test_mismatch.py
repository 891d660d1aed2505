"""The ranks that differ are named."""

from dataclasses import replace

from hvdkit.faults.mismatch import mismatch
from hvdkit.faults.records import Call, Record


def record(rank, size, dtype="float32", error="failed: Mismatched ALLREDUCE tensor shapes: One …"):
    calls = [
        Call("allreduce.loss", n, "allreduce", 0, kind, length, float(n), n + 0.5)
        for n, kind, length in ((1, "float32", 4), (2, "float32", 4), (3, dtype, size))
    ]  # fmt: skip
    return Record(rank, 3, f"host{rank}", 1, "error", 9.0, error=error, failed="allreduce.loss",
                  calls={(0, "allreduce.loss"): 3}, done=calls)  # fmt: skip


def test_the_rank_with_another_size():
    records = {0: record(0, 4), 1: record(1, 12), 2: record(2, 4)}
    assert mismatch(records) == (
        "Ranks differ in the allreduce 'loss': rank 1 on host1: allreduce of 12 bytes of float32; "
        "ranks 0, 2: allreduce of 4 bytes of float32."
    )


def test_the_rank_with_another_type():
    text = mismatch({0: record(0, 8, "int64"), 1: record(1, 4), 2: record(2, 4)})
    assert "'loss': rank 0 on host0: allreduce of 8 bytes of int64; ranks 1, 2: " in text


def test_another_process_set_has_a_later_call_of_the_same_name():
    # The engine writes the record while the call that fails is still open.
    records = {0: record(0, 4), 1: record(1, 12)}
    for rank, each in records.items():
        other = replace(each.done[0], group=1, enqueued=8.0, ended=None)
        failed = [replace(each.done[-1], group=2), other]
        records[rank] = replace(each, done=each.done[:-1], open=failed, groups={2: [0, 1]})
    assert "'loss' of process set 2 (ranks 0, 1): rank 0 on host0: allreduce of 4 bytes" in (
        mismatch(records)
    )


def test_ranks_that_do_not_differ():
    assert mismatch({0: record(0, 4), 1: record(1, 4)}) is None
    lost = "failed: Connection closed by peer"
    assert mismatch({0: record(0, 4, error=lost), 1: record(1, 12, error=lost)}) is None


def test_the_rank_that_has_joined_alone():
    error = "failed: Broadcast is not supported with Join at this time."
    broadcast = Call("broadcast.best", 1, "broadcast", 0, "float32", 4, 1.0, 1.5)
    join = Call("join.noname", 1, "join", 0, "float32", 0, 0.5, None)
    records = {
        0: Record(0, 2, "a", 1, "error", 9.0, error=error, failed="broadcast.best",
                  done=[broadcast]),
        1: Record(1, 2, "a", 2, "request", 9.0, open=[join]),
    }  # fmt: skip
    assert mismatch(records) == (
        "Rank 1 has called hvd.join(). Before all ranks have called it, other ranks cannot call "
        "the broadcast 'best', 4 bytes of float32."
    )
    assert mismatch({0: records[0]}) is None
