"""Each rank's share of a dataset: as many elements on every rank, so that all run as many steps."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.core.collectives import Collectives
from hvdkit.core.consistency import check_consistency
from hvdkit.core.sharding import Division
from hvdkit.errors import UsageError
from hvdkit.tensorflow.collectives import TensorFlowCollectives

log = logging.getLogger("hvdkit.tensorflow")

#: How many elements the ranks compare: with one alone, two shuffles may well begin alike.
_COMPARED = 8
# Fixed, unlike tf.data's default, which follows the number of cores: with it, the same seed would
# give another order on another machine.
_FILES_AT_ONCE = 4
_BATCHED = {"_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset"}
_TRANSPARENT = {"_PrefetchDataset", "_OptionsDataset"}

Reader = Callable[[Any], "tf.data.Dataset"]


def shard(
    dataset: "tf.data.Dataset | Sequence[str | os.PathLike[str]]",
    batch_size: int | None = None,
    *,
    shuffle: bool | int = False,
    seed: int | None = None,
    tail: str = "drop",
    reader: Reader | None = None,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
) -> "tf.data.Dataset":
    """This rank's share of a dataset; every rank's has the same number of elements.

    Every rank calls it with the same dataset of single examples, before shuffling and batching:

        train = hvd.shard(examples, batch_size=32, shuffle=True)  # shuffled, batched, prefetched
        model.fit(train)

        train = hvd.shard(examples).shuffle(10_000).map(augment, tf.data.AUTOTUNE)
        train = train.batch(32).prefetch(tf.data.AUTOTUNE)

    Rank r of n gets the elements r, r + n, r + 2n, ..., so without a shuffle step s of all ranks
    together has what `dataset.batch(n * batch_size)` has in its step s, also when the last batch
    is smaller. What comes after `shard` may shuffle, map, batch and repeat as it likes, with any
    seed or none. It must not change the number of elements by what they are (`filter`): that would
    be another number on each rank, and the ranks with more steps would wait for ever.

    What comes before it runs on every rank for all elements, so `map` belongs behind it. What is
    costly to read should come as files: given a list of them and a `reader`, each rank reads a
    contiguous range of the examples in all files (sorted by name), and nearly no file is read by
    two. For that the examples are counted once, by all ranks together; nothing else knows where
    the ranges begin.

    Also a dataset that does not know its size (`cardinality()`: from a generator, from TFRecords,
    behind a `filter`) is read through once and counted. `tf.data.experimental.assert_cardinality`
    saves that.

    **The tail.** Up to n - 1 elements may be left when each rank has the same number.

    - `"drop"`: nobody gets them, which is said in the log with their number. Everything else is
      exact: shapes, loss, metrics and gradients are those of the elements that are used.
    - `"pad"`: ranks that would have one less repeat an element with sample weight 0. Elements are
      (x, y) or (x, y, sample_weight), and become (x, y, sample_weight), where it is 1 for (x, y).
      For Keras (3.15) that means:

      - `weighted_metrics=` in `compile` are exact, they divide by the sum of the weights, and
        `fit` with hvdkit.keras shows those of all ranks. `metrics=` get no weights and count a
        repeated element as any other.
      - Gradients: a repeated element has none. The usual reduction of a loss,
        "sum_over_batch_size", divides by the number of rows, not by the sum of the weights. So
        the mean over ranks gives each real element 1 / (n * rows), as in any batch of that size,
        and the optimizer sees what one process with those rows and weights would see.
      - The `loss` in the logs is, for the same reason, (elements) / (elements + repeated ones)
        times the mean over the real ones. The mean itself: the loss as a `weighted_metrics`.
      - Not "mean_with_sample_weight", which divides by each rank's own sum of weights: where
        these differ, the mean over ranks is not the mean over examples.
      - Layers that look across the batch (batch normalisation in training) see repeated rows;
        `fit(class_weight=...)` refuses a dataset with sample weights.

    Evaluation that has to count each element exactly once: `"pad"` with `weighted_metrics`.

    Args:
        dataset: single examples, the same on every rank, in the same order: without a shuffle, or
            with one that has a seed. With such a seed and tf.data's default of another order in
            each epoch, all ranks must also begin as many iterations; a shuffle behind `shard`
            knows no such rule. With `reader`: the names of files that every rank can read.
        batch_size: examples per rank and step. None: the share is neither batched nor prefetched,
            because more is to come. The last batch may be smaller, and then is on all ranks alike.
        shuffle: True to shuffle the whole share in each epoch, or the number of examples that
            are held in memory to draw from. A rank always draws from its own share.
        seed: of that shuffle; the same on every rank is fine. None: another order in each run.
        tail: "drop" or "pad".
        reader: makes a dataset of one file's name, e.g. `tf.data.TFRecordDataset`. For "pad", one
            of (x, y).
        process_set: the ranks that share the dataset.

    Returns:
        A dataset whose `cardinality()` is known and the same on every rank.

    Raises:
        UsageError: on every rank: the dataset is infinite, is batched, or has fewer elements than
            there are ranks; elements cannot carry a weight; an argument is not as above.
        RankMismatchError: on every rank: the dataset, or an argument, is not the same on all ranks,
            or cannot be read on one of them.
    """
    if not process_set.included():
        raise UsageError(
            f"rank {mpi_ops.rank()} is not in the process set whose ranks share the dataset; "
            f"expected a call on ranks {process_set.ranks} only"
        )
    _check_arguments(dataset, batch_size, shuffle, tail, reader)
    collectives = TensorFlowCollectives(process_set)
    settings = f"batch_size={batch_size}, tail={tail!r}, reader={'given' if reader else None}"
    rank, size = process_set.rank(), process_set.size()
    if reader is None:
        count, first = _agree_on_examples(dataset, collectives, rank, tail, settings)
    else:
        names = sorted(os.fspath(name) for name in dataset)
        counts = _count_together(names, reader, collectives, rank, settings)
        count = sum(counts)
    if count < size:
        raise UsageError(
            f"the dataset has {count} elements for {size} ranks: expected at least one each"
        )
    division = Division(count, size, tail == "pad")
    if rank == 0:
        division.log_tail()
    if reader is None:
        share = share_of_examples(dataset, division, rank, first)
    else:
        if tail == "pad" and (problem := _unweightable(reader(names[0]).element_spec)):
            raise UsageError(problem)
        share = share_of_files(names, counts, reader, division, rank)
    if shuffle:
        share = share.shuffle(division.per_rank if shuffle is True else shuffle, seed=seed)
    if batch_size is not None:
        share = share.batch(batch_size).prefetch(tf.data.AUTOTUNE)
    return share


def share_of_examples(
    dataset: "tf.data.Dataset", division: Division, rank: int, filler: Any
) -> "tf.data.Dataset":
    """Every size-th element from the one with the rank's number on."""
    share = dataset.take(division.used).shard(division.size, rank)
    return _filled(share, division, rank, filler)


def share_of_files(
    names: Sequence[str], counts: Sequence[int], reader: Reader, division: Division, rank: int
) -> "tf.data.Dataset":
    """The rank's range of the elements of all files, of which `counts` says how many each has."""
    begin = division.before_rank(rank)
    end = begin + division.of_rank(rank)
    parts = []
    passed = 0
    for name, count in zip(names, counts, strict=True):
        skipped, stop = max(begin - passed, 0), min(end - passed, count)
        if skipped < stop:
            parts.append((name, skipped, stop - skipped))
        passed += count
    files, skips, takes = map(list, zip(*parts, strict=True))
    share = tf.data.Dataset.from_tensor_slices(
        (files, tf.constant(skips, tf.int64), tf.constant(takes, tf.int64))
    ).interleave(
        lambda name, skipped, taken: reader(name).skip(skipped).take(taken),
        cycle_length=_FILES_AT_ONCE,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    filler = next(iter(share)) if division.padded else None
    return _filled(share, division, rank, filler)


def _filled(
    share: "tf.data.Dataset", division: Division, rank: int, filler: Any
) -> "tf.data.Dataset":
    """`share` with as many elements as every rank's, weighted if it may need a repeated one."""
    if division.padded:
        share = share.map(_weighted)
        if division.of_rank(rank) < division.per_rank:
            # A constant: a second iteration of the dataset would set a shuffle in it one epoch
            # ahead of the other ranks'.
            repeated = tf.data.Dataset.from_tensors(filler).map(_weighted).map(_weightless)
            share = share.concatenate(repeated)
    # An error, and not fewer steps than the other ranks, should it once yield less than counted.
    return share.apply(tf.data.experimental.assert_cardinality(division.per_rank))


def _weighted(x: Any, y: Any, *weight: Any) -> tuple[Any, Any, Any]:
    return x, y, weight[0] if weight else tf.constant(1.0)


def _weightless(x: Any, y: Any, weight: Any) -> tuple[Any, Any, Any]:
    return x, y, tf.nest.map_structure(tf.zeros_like, weight)


def _check_arguments(
    dataset: Any, batch_size: Any, shuffle: Any, tail: Any, reader: Reader | None
) -> None:
    """Raise for what is wrong whatever the data are."""
    if tail not in ("drop", "pad"):
        raise UsageError(f"tail is {tail!r}: expected 'drop' or 'pad'")
    whole = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    if batch_size is not None and not (whole and batch_size >= 1):
        raise UsageError(f"batch_size is {batch_size!r}: expected a whole number, at least 1")
    if not isinstance(shuffle, int) or shuffle < 0:
        raise UsageError(f"shuffle is {shuffle!r}: expected True, False or a number of elements")
    if reader is None:
        if not isinstance(dataset, tf.data.Dataset):
            raise UsageError(
                f"dataset is of type {type(dataset).__name__}: expected a tf.data.Dataset, or the "
                f"names of files and a reader"
            )
    elif isinstance(dataset, str | bytes | tf.data.Dataset) or not dataset:
        raise UsageError(
            f"with a reader, dataset is {dataset!r}: expected a list with the names of files"
        )


def _agree_on_examples(
    dataset: "tf.data.Dataset", collectives: Collectives, rank: int, tail: str, settings: str
) -> tuple[int, Any]:
    """The number of elements, and the first of them, once all ranks have the same."""
    count, first, digest = 0, None, ""
    try:
        problem = _unsuitable(dataset, tail)
        if not problem:
            count = _count(dataset, rank)
            first, digest = _look_at(dataset)
    except Exception as error:
        # The user's own code and files: whatever it is, the other ranks must learn of it.
        problem = f"the dataset cannot be read: {type(error).__name__}: {error}"
    lines = [problem or f"{count} elements", settings, str(dataset.element_spec), digest]
    check_consistency(collectives, lines, _SUBJECT)
    if problem:
        raise UsageError(problem)
    return count, first


_SUBJECT = (
    "the dataset to shard, which must have the same elements in the same order on all of them "
    "(shuffle and augment after hvd.shard, not before)"
)


def _unsuitable(dataset: "tf.data.Dataset", tail: str) -> str:
    """Why `dataset` cannot be sharded; empty where it can."""
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        return "the dataset is infinite: call repeat() on what hvd.shard returns, not before"
    outermost = dataset
    while type(outermost).__name__ in _TRANSPARENT:
        (outermost,) = outermost._inputs()
    if type(outermost).__name__ in _BATCHED:
        return (
            "the dataset is batched: expected single examples, because the last batch would be "
            "smaller on some ranks. Give hvd.shard what there was before, and batch_size=; Keras's "
            "..._dataset_from_directory makes single examples with batch_size=None, shuffle=False"
        )
    return _unweightable(dataset.element_spec) if tail == "pad" else ""


def _unweightable(spec: Any) -> str:
    """Why an element like this cannot carry a weight; empty where it can."""
    if isinstance(spec, tuple) and len(spec) in (2, 3):
        return ""
    return (
        f"with tail='pad' elements must be (x, y) or (x, y, sample_weight), and are {spec}: make "
        f"them such (in the reader, where there is one), or use tail='drop'"
    )


def _count(dataset: "tf.data.Dataset", rank: int) -> int:
    """How many elements the dataset has, which may mean to read it through."""
    known = int(dataset.cardinality())
    if known >= 0:
        return known
    began = time.monotonic()
    count = _read_through(dataset)
    if rank == 0:
        log.info(
            "hvd.shard counted %d elements in %.1f s; a dataset that knows its number, by "
            "tf.data.experimental.assert_cardinality, is not read for that",
            count,
            time.monotonic() - began,
        )
    return count


def _read_through(dataset: "tf.data.Dataset") -> int:
    return int(dataset.reduce(tf.constant(0, tf.int64), lambda count, *_: count + 1))


def _look_at(dataset: "tf.data.Dataset") -> tuple[Any, str]:
    """The first element, and a digest of the first few."""
    first = None
    content = hashlib.sha256()
    for i, element in enumerate(dataset.take(_COMPARED)):
        first = element if i == 0 else first
        for component in tf.nest.flatten(element, expand_composites=True):
            content.update(tf.io.serialize_tensor(component).numpy())
    return first, f"first elements with digest {content.hexdigest()[:16]}"


def _count_together(
    names: Sequence[str],
    reader: Reader,
    collectives: Collectives,
    rank: int,
    settings: str,
) -> list[int]:
    """How many elements each file has. Each rank counts every size-th file."""
    check_consistency(
        collectives,
        # Hosts may have their disks at different places.
        [settings, *(f"file {os.path.basename(name)}" for name in names)],
        "the files to shard",
    )
    size = len(collectives.ranks)
    began = time.monotonic()
    found: dict[str, Any] = {"problem": "", "counts": []}
    try:
        for name in names[rank::size]:
            examples = reader(tf.constant(name))
            known = int(examples.cardinality())
            if known == tf.data.INFINITE_CARDINALITY:
                raise UsageError(f"reader makes an infinite dataset of {name}: remove its repeat()")
            found["counts"].append(known if known >= 0 else _read_through(examples))
    except Exception as error:
        found["problem"] = f"{type(error).__name__}: {error}"
    answers = collectives.allgather(json.dumps(found).encode(), "hvdkit.shard.counts")
    everyones = [json.loads(answer) for answer in answers]
    for teller, answer in enumerate(everyones):
        if answer["problem"]:
            raise UsageError(f"rank {teller} cannot count its files: {answer['problem']}")
    counts = [everyones[i % size]["counts"][i // size] for i in range(len(names))]
    if rank == 0:
        seconds = time.monotonic() - began
        log.info(
            "hvd.shard counted %d elements in %d files in %.1f s", sum(counts), len(names), seconds
        )
    return counts
