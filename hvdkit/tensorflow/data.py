"""`hvd.shard` for tf.data: give every rank a share of a dataset with equally many elements."""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import check_consistency, gather
from hvdkit.errors import UsageError
from hvdkit.tensorflow.collectives import TensorFlowCollectives
from hvdkit.training.sharding import Division

log = logging.getLogger("hvdkit.tensorflow")

#: The ranks compare this many elements, because two shuffles may begin with the same element.
_COMPARED = 8
# tf.data's default depends on the number of cores, so the same seed would give another order on
# another machine.
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
    """Return this rank's share of a dataset. All ranks' shares have the same number of elements.

    Call it on every rank with the same dataset of single examples, before shuffling and batching:

        train = hvd.shard(examples, batch_size=32, shuffle=True)  # shuffled, batched, prefetched
        model.fit(train)

        train = hvd.shard(examples).shuffle(10_000).map(augment, tf.data.AUTOTUNE)
        train = train.batch(32).prefetch(tf.data.AUTOTUNE)

    Rank r of n gets the elements r, r + n, r + 2n, ... Without a shuffle, step s of all ranks
    together therefore has the elements of step s of `dataset.batch(n * batch_size)`, also if the
    last batch is smaller. After `shard` you may shuffle, map, batch and repeat, with any seed or
    none. Do not `filter` after it: ranks would have different numbers of elements, and ranks with
    more steps would wait for the others.

    Operations before `shard` run on every rank for all elements, so call `map` after it. Read
    large data from files: with a list of files and a `reader`, each rank reads a contiguous range
    of the examples in all files (sorted by name), and few files are read by two ranks. To find the
    ranges, the ranks together count the examples once.

    If the `cardinality()` of the dataset is unknown (from a generator, from TFRecords, after a
    `filter`), the dataset is read once to count its elements. To avoid this, declare the size with
    `tf.data.experimental.assert_cardinality`.

    **The tail.** Up to n - 1 elements may remain when each rank has the same number.

    - `"drop"`: these elements are not used, and rank 0 logs their number. Shapes, loss, metrics
      and gradients are exactly those of the used elements.
    - `"pad"`: a rank that would have one element less repeats an element with weight 0. Elements
      (x, y) or (x, y, sample_weight) become (x, y, sample_weight), with weight 1 for (x, y). With
      Keras (3.15):

      - `weighted_metrics=` of `compile` are exact, because they divide by the sum of the weights.
        With hvdkit.keras, `fit` shows them over all ranks. `metrics=` get no weights and count
        repeated elements.
      - Repeated elements have no gradient. The default reduction of a loss,
        "sum_over_batch_size", divides by the number of rows. The mean over ranks therefore gives
        each real element 1 / (n * rows), as one process with the same rows and weights would.
      - For the same reason, the `loss` in the logs is elements / (elements + repeated elements)
        times the mean over the real elements. To log the mean itself, add the loss to
        `weighted_metrics`.
      - Do not use "mean_with_sample_weight". It divides by each rank's own sum of weights; if
        these differ, the mean over ranks is not the mean over examples.
      - Layers that compute across the batch (batch normalization in training) see repeated rows.
      - `fit(class_weight=...)` refuses a dataset with sample weights.

    To evaluate each element exactly once, use `"pad"` with `weighted_metrics`.

    Args:
        dataset: single examples, the same on every rank and in the same order: not shuffled, or
            shuffled with a seed. tf.data by default reshuffles in each iteration; with such a
            shuffle all ranks must also begin the same number of iterations. Shuffles after `shard`
            have no such limit. With `reader`: the names of files that every rank can read.
        batch_size: examples per rank and step. None: do not batch or prefetch, so that the script
            can do it later. The last batch may be smaller, and then has the same size on all ranks.
        shuffle: True: shuffle the whole share in each epoch. A number: the size of the shuffle
            buffer, in examples. A rank shuffles only its own share.
        seed: the seed for `shuffle`; may be the same on every rank. None: a new order in each run.
        tail: "drop" or "pad".
        reader: returns the dataset of a file name, e.g. `tf.data.TFRecordDataset`. For "pad", a
            dataset of (x, y) or (x, y, sample_weight).
        process_set: the ranks that share the dataset.

    Returns:
        A dataset whose `cardinality()` is known and the same on every rank.

    Raises:
        UsageError: on every rank, if the dataset is infinite, is batched or has fewer elements
            than there are ranks; if elements cannot have a weight; or if an argument is invalid.
        RankMismatchError: on every rank, if the dataset or an argument differs between ranks, or
            the dataset cannot be read on one of them.
    """
    if not process_set.included():
        raise UsageError(
            f"rank {mpi_ops.rank()} is not in the process set whose ranks share the dataset; "
            f"expected a call on ranks {process_set.ranks} only"
        )
    collectives = TensorFlowCollectives(process_set)
    settings = f"batch_size={batch_size}, tail={tail!r}, reader={'given' if reader else None}"
    problem = _argument_problem(dataset, batch_size, shuffle, tail, reader)
    # If an argument is invalid on one rank only, all ranks must raise.
    check_consistency(collectives, [problem or "no problem", settings], _SUBJECT, _ADVICE)
    if problem:
        raise UsageError(problem)
    rank, size = process_set.rank(), process_set.size()
    if reader is None:
        count, first = _check_examples(dataset, collectives, rank, tail)
    else:
        names = sorted(os.fspath(name) for name in dataset)
        counts = _count_files(names, reader, collectives, rank)
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
        if tail == "pad" and (problem := _weight_problem(reader(names[0]).element_spec)):
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
    """Return every size-th element, beginning with element `rank`.

    Args:
        dataset: all elements.
        division: the division of the elements among the ranks.
        rank: the index of this rank in the division.
        filler: the element to repeat with weight 0 for tail="pad".
    """
    share = dataset.take(division.used).shard(division.size, rank)
    return _padded(share, division, rank, filler)


def share_of_files(
    names: Sequence[str], counts: Sequence[int], reader: Reader, division: Division, rank: int
) -> "tf.data.Dataset":
    """Return the rank's range of the elements of all files. File k has `counts[k]` elements."""
    begin = division.before_rank(rank)
    end = begin + division.of_rank(rank)
    ranges = []
    offset = 0
    for name, count in zip(names, counts, strict=True):
        skipped, stop = max(begin - offset, 0), min(end - offset, count)
        if skipped < stop:
            ranges.append((name, skipped, stop - skipped))
        offset += count
    files, skips, takes = map(list, zip(*ranges, strict=True))
    share = tf.data.Dataset.from_tensor_slices(
        (files, tf.constant(skips, tf.int64), tf.constant(takes, tf.int64))
    ).interleave(
        lambda name, skipped, taken: reader(name).skip(skipped).take(taken),
        cycle_length=_FILES_AT_ONCE,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    filler = next(iter(share)) if division.padded else None
    return _padded(share, division, rank, filler)


def _padded(
    share: "tf.data.Dataset", division: Division, rank: int, filler: Any
) -> "tf.data.Dataset":
    """Return `share` with the same number of elements on every rank; weighted for tail="pad"."""
    if division.padded:
        share = share.map(_with_weight)
        if division.of_rank(rank) < division.per_rank:
            # `filler` is a constant. To read it from the dataset again would advance the dataset's
            # shuffle by one epoch on this rank only.
            repeated = tf.data.Dataset.from_tensors(filler).map(_with_weight).map(_with_zero_weight)
            share = share.concatenate(repeated)
    # Raise an error if the dataset yields fewer elements than were counted. Otherwise this rank
    # would run fewer steps than the other ranks, which would wait for it.
    return share.apply(tf.data.experimental.assert_cardinality(division.per_rank))


def _with_weight(x: Any, y: Any, *weight: Any) -> tuple[Any, Any, Any]:
    return x, y, weight[0] if weight else tf.constant(1.0)


def _with_zero_weight(x: Any, y: Any, weight: Any) -> tuple[Any, Any, Any]:
    return x, y, tf.nest.map_structure(tf.zeros_like, weight)


def _argument_problem(
    dataset: Any, batch_size: Any, shuffle: Any, tail: Any, reader: Reader | None
) -> str:
    """Return why an argument is invalid; empty if all are valid. Does not read the data."""
    if tail not in ("drop", "pad"):
        return f"tail is {tail!r}: expected 'drop' or 'pad'"
    is_int = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    if batch_size is not None and not (is_int and batch_size >= 1):
        return f"batch_size is {batch_size!r}: expected an integer >= 1"
    if not isinstance(shuffle, int) or shuffle < 0:
        return f"shuffle is {shuffle!r}: expected True, False or a number of elements"
    if reader is None:
        if not isinstance(dataset, tf.data.Dataset):
            return (
                f"dataset is of type {type(dataset).__name__}: expected a tf.data.Dataset, or the "
                f"names of files and a reader"
            )
    elif isinstance(dataset, str | bytes | tf.data.Dataset) or not dataset:
        return f"with a reader, dataset is {dataset!r}: expected a list with the names of files"
    return ""


def _check_examples(
    dataset: "tf.data.Dataset", collectives: Collectives, rank: int, tail: str
) -> tuple[int, Any]:
    """Check that all ranks have the same dataset; return its size and its first element."""
    count, first, digest = 0, None, ""
    try:
        problem = _dataset_problem(dataset, tail)
        if not problem:
            count = _count(dataset, rank)
            first, digest = _first_and_digest(dataset)
    except Exception as error:
        # User code may raise anything, and the other ranks must raise too.
        problem = f"the dataset cannot be read: {type(error).__name__}: {error}"
    lines = [problem or f"{count} elements", str(dataset.element_spec), digest]
    check_consistency(collectives, lines, _SUBJECT, _ADVICE)
    if problem:
        raise UsageError(problem)
    return count, first


_SUBJECT = "the dataset to shard"
_ADVICE = (
    "Pass the same elements in the same order on every rank, with the same arguments: shuffle and "
    "augment after hvd.shard, or with the same seed on every rank."
)


def _dataset_problem(dataset: "tf.data.Dataset", tail: str) -> str:
    """Return why `dataset` cannot be sharded; empty if it can."""
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        return "the dataset is infinite: call repeat() after hvd.shard, not before"
    outermost = dataset
    while type(outermost).__name__ in _TRANSPARENT:
        (outermost,) = outermost._inputs()
    if type(outermost).__name__ in _BATCHED:
        return (
            "the dataset is batched: expected single examples, because the last batch would be "
            "smaller on some ranks. Call hvd.shard before batching and pass batch_size=. Keras's "
            "..._dataset_from_directory gives single examples with batch_size=None, shuffle=False"
        )
    return _weight_problem(dataset.element_spec) if tail == "pad" else ""


def _weight_problem(spec: Any) -> str:
    """Return why an element like this cannot have a weight; empty if it can."""
    if isinstance(spec, tuple) and len(spec) in (2, 3):
        return ""
    return (
        f"with tail='pad' elements must be (x, y) or (x, y, sample_weight), and are {spec}: map "
        f"them to one of these (in the reader, if there is one), or use tail='drop'"
    )


def _count(dataset: "tf.data.Dataset", rank: int) -> int:
    """Return the number of elements; read the whole dataset if the number is unknown."""
    known = int(dataset.cardinality())
    if known >= 0:
        return known
    began = time.monotonic()
    count = _read_through(dataset)
    if rank == 0:
        log.info(
            "hvd.shard counted %d elements in %.1f s; to avoid this, apply "
            "tf.data.experimental.assert_cardinality to the dataset",
            count,
            time.monotonic() - began,
        )
    return count


def _read_through(dataset: "tf.data.Dataset") -> int:
    return int(dataset.reduce(tf.constant(0, tf.int64), lambda count, *_: count + 1))


def _first_and_digest(dataset: "tf.data.Dataset") -> tuple[Any, str]:
    """Return the first element, and a description with a digest of the first few."""
    first = None
    content = hashlib.sha256()
    for i, element in enumerate(dataset.take(_COMPARED)):
        first = element if i == 0 else first
        for component in tf.nest.flatten(element, expand_composites=True):
            content.update(tf.io.serialize_tensor(component).numpy())
    return first, f"first elements with digest {content.hexdigest()[:16]}"


def _count_files(
    names: Sequence[str],
    reader: Reader,
    collectives: Collectives,
    rank: int,
) -> list[int]:
    """Return the number of elements of each file. Each rank counts every size-th file."""
    check_consistency(
        collectives,
        # Without folders, because hosts may mount the files at different paths.
        [f"file {os.path.basename(name)}" for name in names],
        "the files to shard",
        "Pass the names of the same files on every rank.",
    )
    size = len(collectives.ranks)
    began = time.monotonic()
    found: dict[str, Any] = {"problem": "", "counts": []}
    try:
        for name in names[rank::size]:
            examples = reader(tf.constant(name))
            known = int(examples.cardinality())
            if known == tf.data.INFINITE_CARDINALITY:
                raise UsageError(
                    f"reader returns an infinite dataset for {name}: remove its repeat()"
                )
            found["counts"].append(known if known >= 0 else _read_through(examples))
    except Exception as error:
        found["problem"] = f"{type(error).__name__}: {error}"
    by_rank = list(gather(collectives, found, "hvdkit.shard.counts").values())
    for index, answer in enumerate(by_rank):
        if answer["problem"]:
            raise UsageError(
                f"rank {collectives.ranks[index]} cannot count its files: {answer['problem']}"
            )
    counts = [by_rank[i % size]["counts"][i // size] for i in range(len(names))]
    if rank == 0:
        seconds = time.monotonic() - began
        log.info(
            "hvd.shard counted %d elements in %d files in %.1f s", sum(counts), len(names), seconds
        )
    return counts
