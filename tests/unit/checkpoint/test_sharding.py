"""Tensors whose rows are divided between simulated ranks."""

import math
import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.checkpoint import chunks, sharding
from hvdkit.checkpoint.arrays import ArrayTensor
from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.manager import Manager
from hvdkit.checkpoint.sharding import Shard, ShardedItem
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.checkpoint.store import Store
from hvdkit.errors import HvdkitError, UsageError
from tests.simulated.ranks import on_every_rank, simulated
from tests.unit.checkpoint.simulated_state import Arrays

ROWS = 23


def whole(seed, dtype=np.float32, shape=(ROWS, 3)):
    random = np.random.default_rng(seed)
    return random.integers(0, 100, shape).astype(dtype)


def part_of(collectives, arrays, cuts):
    """Return this rank's rows of arrays: those between two of the sorted `cuts`."""
    bounds = [0, *sorted(cuts), ROWS]
    first, end = bounds[collectives.rank : collectives.rank + 2]
    own = {name: array[first:end].copy() for name, array in arrays.items()}
    shards = {name: Shard(array, first, ROWS) for name, array in own.items()}
    # The ranks give their tensors in different orders.
    names = sorted(shards, reverse=collectives.rank % 2 == 1)
    return own, ShardedItem({name: shards[name] for name in names}, ArrayTensor)


def manager(collectives, folder, part, **others):
    return Manager(
        Store(str(folder), keep_last=None),
        collectives,
        {"model": Arrays(0, weights=np.zeros(4, np.float32)), "sharded": part},
        **others,
    )


def on_ranks(size, run):
    results = on_every_rank(size, run)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


divisions = st.integers(1, 4).flatmap(
    lambda size: st.lists(st.integers(0, ROWS), min_size=size - 1, max_size=size - 1)
)


@settings(max_examples=25, deadline=None)
@given(
    saved=divisions, restored=divisions, chunk=st.sampled_from([40, 64, 1000]), wait=st.booleans()
)
def test_rows_are_restored_with_any_division(tmp_path_factory, saved, restored, chunk, wait):
    folder = tmp_path_factory.mktemp("sharded")
    arrays = {
        "a": whole(1),
        "b": whole(2, np.int64, (ROWS,)),
        "c": whole(3, np.uint8, (ROWS, 2, 2)),
    }

    def save(collectives):
        _, part = part_of(collectives, arrays, saved)
        with manager(collectives, folder, part) as saving:
            saving.save(1, wait=wait)

    def restore(collectives):
        own, part = part_of(collectives, {name: 0 * a for name, a in arrays.items()}, restored)
        with manager(collectives, folder, part) as restoring:
            assert restoring.restore().step == 1
        return own

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", chunk)
        # Several rounds for each tensor.
        patch.setattr(sharding, "_ROUND_BYTES", 50)
        on_ranks(len(saved) + 1, save)
        found = on_ranks(len(restored) + 1, restore)
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.concatenate([own[name] for own in found]), array)


class Boxes:
    """An item: a rank's box of an array. Ranks with the same place in `grid` have copies."""

    divided = True

    def __init__(self, rank, whole, grid):
        coordinate = np.unravel_index(rank % math.prod(grid), grid)
        self.first, places = [], []
        for length, parts, at in zip(whole.shape, grid, coordinate, strict=True):
            size = -(-length // parts)
            begin = min(size * int(at), length)
            self.first.append(begin)
            places.append(slice(begin, min(begin + size, length)))
        self.shape, self.own = whole.shape, whole[(*places,)].copy()
        self.expected = self.own.copy()

    def save(self):
        return {"a": sharding.Divided(ArrayTensor(self.own), self.shape, self.first, True)}

    def plan_restore(self, tree):
        return self.save()

    def restore(self, tree):
        pass


grids = st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 3, 1), (2, 1, 2), (2, 2, 1), (1, 1, 4)])


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 7)] * 3),
    saved=grids,
    restored=grids,
    chunk=st.sampled_from([1, 5, 64]),
    dtype=st.sampled_from([np.uint8, np.float32, np.complex128]),
    wait=st.booleans(),
)
def test_boxes_are_restored_with_any_division(
    tmp_path_factory, shape, saved, restored, chunk, dtype, wait
):
    folder = tmp_path_factory.mktemp("boxes")
    array = whole(1, dtype, shape)

    def save(collectives):
        with manager(collectives, folder, Boxes(collectives.rank, array, saved)) as saving:
            saving.save(1, wait=wait)

    def restore(collectives):
        item = Boxes(collectives.rank, array, restored)
        item.own[...] = 0
        with manager(collectives, folder, item) as restoring:
            restoring.restore()
        np.testing.assert_array_equal(item.own, item.expected)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", chunk * array.itemsize)
        patch.setattr(sharding, "_ROUND_BYTES", 50)
        on_ranks(4 if math.prod(saved) in (1, 2, 4) else 3, save)
        on_ranks(4 if math.prod(restored) in (1, 2, 4) else 3, restore)


def test_copies_that_differ_are_an_error_on_all_ranks(tmp_path):
    def save(collectives):
        item = Boxes(collectives.rank, whole(1), (2, 1))
        item.own[1, 1] += collectives.rank == 3
        with manager(collectives, tmp_path, item) as saving:
            saving.save(1)

    for result in on_every_rank(4, save):
        assert isinstance(result, RankMismatchError)
        assert "sharded['a']: ranks 1, 3 have the same part of the tensor" in str(result)


def test_boxes_that_do_not_make_up_a_tensor(tmp_path):
    def save(collectives):
        item = Boxes(collectives.rank, whole(1, shape=(4, 4)), [(2, 1), (1, 2)][collectives.rank])
        with manager(collectives, tmp_path, item) as saving:
            saving.save(1)

    for result in on_every_rank(2, save):
        assert isinstance(result, UsageError)
        assert r"do not make up its shape [4, 4]" in str(result)


def test_the_file_has_the_whole_tensors(tmp_path):
    import safetensors.numpy

    arrays = {"a": whole(1)}

    def save(collectives):
        with manager(collectives, tmp_path, part_of(collectives, arrays, [5, 20])[1]) as saving:
            saving.save(1)

    on_ranks(3, save)
    (file,) = tmp_path.glob("step-*/sharded.safetensors")
    np.testing.assert_array_equal(safetensors.numpy.load_file(file)["a"], arrays["a"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rank: {"a": (4 * rank, 4, 8)}, None),
        (lambda rank: {"a": (3 * rank, 4, 8)}, "rank 1 begins at row 3: expected row 4"),
        (lambda rank: {"a": (0, 4, 8)}, "rank 1 begins at row 0: expected row 4"),
        (
            lambda rank: {"a": (4 * rank, 4, 9)},
            r"has 8 rows on all ranks together: expected 9 \(step 1 was not saved\)",
        ),
        (
            lambda rank: {"ab"[rank]: (4 * rank, 4, 8)},
            r"rank 1 has parts of sharded\['b'\] that rank 0 does not have, and lacks sharded",
        ),
        (lambda rank: {"a": (4 * rank, 4, 8 + rank)}, r"F32\[9, 3\] on rank 1, and F32\[8, 3\]"),
        (
            lambda rank: {"a": (6, 4, 8)},
            r"4 rows, first=6 and total=8: expected first \+ rows to be at most total",
        ),
        (lambda rank: {"a": (9, 4, 8)}, "first=9 and total=8: expected first to be at most total"),
        (lambda rank: {"a": (-1, 4, 8)}, "first=-1: expected a whole number from 0"),
        (lambda rank: {"a": (0.0, 4, 8)}, "first=0.0: expected a whole number"),
        (lambda rank: {"a": (False, 4, 8)}, "first=False: expected a whole number"),
        (lambda rank: {"a": (4 * rank, 4, "8")}, "total='8': expected a whole number"),
        (lambda rank: {"a": (4 * rank, 4, 10**15)}, r"rank 0: there is no memory for the whole"),
        (lambda rank: {"a": (np.int64(4 * rank), 4, np.int32(8))}, None),
    ],
)
def test_rows_that_do_not_make_up_a_tensor(tmp_path, change, words):
    def save(collectives):
        part = ShardedItem(
            {
                name: Shard(np.zeros((rows, 3), np.float32), first, total)
                for name, (first, rows, total) in change(collectives.rank).items()
            },
            ArrayTensor,
        )
        with manager(collectives, tmp_path, part) as saving:
            saving.save(1)

    results = on_every_rank(2, save)
    for result in results:
        if words is None:
            assert not isinstance(result, BaseException)
        else:
            with pytest.raises(HvdkitError, match=words):
                raise result
    assert bool([*tmp_path.glob("step-*")]) == (words is None)


def test_missing_memory_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    def none(nbytes):
        raise MemoryError(f"{nbytes} bytes")

    monkeypatch.setattr(sharding, "allocate", none)

    def save(collectives):
        _, part = part_of(collectives, {"a": whole(1)}, [5])
        with manager(collectives, tmp_path, part) as saving:
            saving.save(1)

    for result in on_every_rank(2, save):
        assert isinstance(result, CheckpointError)
        assert "there is no memory for the whole tensor" in str(result)


def test_a_copy_that_fails_on_one_rank_is_an_error_on_all(tmp_path):
    """The error is found before the gather, in which the other ranks would wait for this one."""

    class Unreadable(ArrayTensor):
        def memory(self):
            return None

        def read(self, out):
            raise RuntimeError("out of memory")

    def run(collectives):
        kind = Unreadable if collectives.rank == 1 else ArrayTensor
        rows = whole(1)[2 * collectives.rank : 2 * collectives.rank + 2]
        part = ShardedItem({"a": Shard(rows, 2 * collectives.rank, 4)}, kind)
        with manager(collectives, tmp_path, part) as saving:
            with pytest.raises(CheckpointError, match=r"rank 1: RuntimeError: out of memory"):
                saving.save(1)
            assert saving.latest() is None

    on_ranks(2, run)


@simulated(2)
def test_tensors_that_are_replaced_during_training(collectives, tmp_path):
    """A function returns the tensor of each save and restore."""
    first = 3 * collectives.rank
    state = {}
    part = ShardedItem({"a": Shard(lambda: state["a"], first, 6)}, ArrayTensor)
    with manager(collectives, tmp_path, part) as saving:
        with pytest.raises(UsageError, match=r"function of sharded\['a'\] raised KeyError: 'a'"):
            saving.save(1)
        for step in (1, 2):
            state["a"] = whole(step)[first : first + 3]
            saving.save(step)
        state["a"] = 0 * state["a"]
        saving.restore()
    np.testing.assert_array_equal(state["a"], whole(2)[first : first + 3])


@simulated(2)
def test_a_function_that_returns_copies(collectives, tmp_path):
    """A restore into a copy would be lost."""
    first = 3 * collectives.rank
    part = ShardedItem({"a": Shard(lambda: whole(1)[first : first + 3], first, 6)}, ArrayTensor)
    with manager(collectives, tmp_path, part) as saving:
        saving.save(1)
        with pytest.raises(UsageError, match=r"of sharded\['a'\] returns a new copy at each"):
            saving.restore()


def test_the_memory_of_the_whole_tensors_is_freed_after_the_write(tmp_path, monkeypatch):
    allocated = []

    def recorded(nbytes):
        memory = np.empty(nbytes, np.uint8)
        allocated.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(sharding, "allocate", recorded)

    def run(collectives):
        _, part = part_of(collectives, {"a": whole(1)}, [])
        with manager(collectives, tmp_path, part) as saving:
            saving.save(1)
            deadline = time.monotonic() + 30
            while any(memory() is not None for memory in allocated):
                assert time.monotonic() < deadline
                time.sleep(0.01)

    on_ranks(1, run)
    assert allocated


def test_other_tensors_in_the_checkpoint(tmp_path):
    def run(collectives):
        with manager(
            collectives, tmp_path, part_of(collectives, {"a": whole(1), "b": whole(2)}, [5])[1]
        ) as saving:
            saving.save(1)
        own, part = part_of(collectives, {"a": whole(3), "c": whole(4)}, [7])
        with (
            manager(collectives, tmp_path, part) as restoring,
            pytest.raises(UsageError, match=r"c is F32\[23, 3\] here and missing in the check"),
        ):
            restoring.restore()
        with manager(collectives, tmp_path, part) as restoring:
            restoring.restore(strict=False)
        return own

    found = on_ranks(2, run)
    np.testing.assert_array_equal(np.concatenate([own["a"] for own in found]), whole(1))
    np.testing.assert_array_equal(np.concatenate([own["c"] for own in found]), whole(4))


def test_the_order_of_the_rest_is_the_same_on_all_ranks():
    """The order of a set of texts differs between processes, and ranks compare the texts."""
    part = ShardedItem({}, ArrayTensor)
    names = [f"table{k}" for k in range(12)]
    _, left = part.plan_partial_restore({name: TensorSpec("F32", (1,)) for name in names})
    assert [line.split()[3].rstrip(",") for line in left] == names


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([1], "sharded is a list: expected a dict of hvd.Shard"),
        ({"a": np.zeros(3)}, r"sharded\['a'\] is a ndarray: expected a hvd.Shard"),
        ({"a": Shard(np.zeros(()), 0, 1)}, "has no dimensions"),
        ({"": Shard(np.zeros(3), 0, 3)}, "sharded has the name '': expected a string"),
        ({"__metadata__": Shard(np.zeros(3), 0, 3)}, "the name '__metadata__': expected a string"),
        ({0: Shard(np.zeros(3), 0, 3)}, "the name 0: expected a string"),
    ],
)
def test_invalid_shards(wrong, words):
    with pytest.raises(UsageError, match=words):
        ShardedItem(wrong, ArrayTensor)
