"""`hvd.shard` for Keras: give every rank a share of arrays, of batches or of a `DataLoader`."""

import contextlib
import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdkit.agreement.consistency import RankMismatchError, are_equal, check_consistency
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.data import ResumableSampler
from hvdkit.training.sharding import Division

log = logging.getLogger("hvdkit.keras")

#: The ranks compare this many rows, because two shuffles may begin with the same row.
_COMPARED = 8

_SUBJECT = "the data to shard"
_ADVICE = (
    "Pass the same data in the same order on every rank: shuffle and augment after hvd.shard, or "
    "with the same seed on every rank."
)


def shard(
    data: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool | int = False,
    seed: int | None = None,
    tail: str = "drop",
    reader: Any = None,
    process_set: Any = None,
) -> Any:
    """Return this rank's share of the data. All ranks' shares have the same number of steps.

    A collective: every rank calls it with the same data, in the same order.

        x, y = hvd.shard((x, y))  # NumPy arrays: rows r, r + n, r + 2n, ... for rank r of n
        model.fit(x, y, batch_size=32)

        model.fit(hvd.shard(batches))  # a keras.utils.PyDataset: batches r, r + n, r + 2n, ...

        model.fit(hvd.shard(loader))  # a torch DataLoader, with the PyTorch backend

        model.fit(hvd.shard(examples, batch_size=32, shuffle=True))  # a tf.data.Dataset

    A `tf.data.Dataset`, or names of files with a `reader`, need the TensorFlow backend: see
    `hvdkit.tensorflow.shard`.

    The ranks compare the shapes, dtypes and first rows of arrays, and the length of other data. A
    `PyDataset` that shuffles, also in `on_epoch_end`, needs the same seed on every rank: otherwise
    some rows are used twice in an epoch, and others never. If the targets of the first batch
    differ, the first rank logs a warning.

    A `DataLoader` must have a dataset with a length, and no custom sampler. The returned loader has
    a `ResumableSampler`, shuffles if the given loader does, and uses the given batch size on each
    rank. `fit` counts the epochs. In a custom loop, iterate `loader.sampler.batches(loader)`. Pass
    the sampler to `hvd.callbacks.Checkpoint` as `data=loader.sampler`. With `drop_last`, samples
    that do not fill a batch on every rank are dropped. Otherwise the last batches are smaller, and
    a rank that would have an empty batch repeats one sample.

    Gradients are averaged over the ranks' batches. If one rank's last batch is smaller, its rows
    therefore have a larger weight. This can happen with a `PyDataset`, and with a `DataLoader`
    without `drop_last`.

    Args:
        data: an array of shape [rows, ...]; a list, tuple or dict of such arrays; a
            `keras.utils.PyDataset`; a `torch.utils.data.DataLoader`; or a `tf.data.Dataset`.
        batch_size: only for a `tf.data.Dataset`. For arrays, pass it to `fit`.
        shuffle: only for a `tf.data.Dataset`. For arrays, pass it to `fit`.
        seed: seed of the order of a `DataLoader` or `tf.data.Dataset` that shuffles. None: 0 for a
            `DataLoader`, a new order in each run for a dataset.
        tail: what to do with up to n - 1 rows or batches that remain when each of n ranks has the
            same number. "drop": do not use them. "pad": some ranks repeat a row or batch with
            sample weight 0; data must be (x, y) or (x, y, sample_weight), and the result is (x, y,
            sample_weight). Not for a `DataLoader`.
        reader: returns the `tf.data.Dataset` of a file name.
        process_set: the ranks that share the data; default: all.

    Returns:
        The same kind of data: arrays in the same structure, a `PyDataset`, a `DataLoader` or a
        `tf.data.Dataset`.

    Raises:
        UsageError: on every rank, if the data are of another kind, infinite or fewer than ranks, or
            an argument is invalid.
        RankMismatchError: on every rank, if the compared data or an argument differ between ranks.
    """
    if not backend.hvd.is_initialized():
        raise UsageError("Horovod is not initialised: call hvd.init() before this")
    process_set = backend.hvd.global_process_set if process_set is None else process_set
    if backend.NAME == "tensorflow" and (reader is not None or _is_of(data, "tensorflow")):
        options = {"shuffle": shuffle, "seed": seed, "tail": tail, "reader": reader}
        return backend.hvd.shard(data, batch_size, process_set=process_set, **options)
    if not process_set.included():
        raise UsageError(
            f"rank {backend.hvd.rank()} is not in the process set whose ranks share the data; "
            f"expected a call on ranks {process_set.ranks} only"
        )
    group = backend.collectives(process_set)
    problem = _argument_problem(data, batch_size, shuffle, tail, reader)
    kind = type(data).__name__
    _check(group, problem, [f"data of type {kind}, tail={tail!r}"])
    if isinstance(data, keras.utils.PyDataset):
        return _share_of_batches(data, group, tail == "pad")
    if _is_of(data, "torch"):
        return _share_of_loader(data, group, seed, process_set)
    return _share_of_arrays(data, group, tail == "pad")


def _argument_problem(data: Any, batch_size: Any, shuffle: Any, tail: Any, reader: Any) -> str:
    """Return why an argument is invalid; empty if all are valid. Not for datasets of tf.data."""
    if batch_size is not None and not isinstance(batch_size, int):
        return (
            f"batch_size is of type {type(batch_size).__name__}: expected an integer. To shard "
            f"several arrays, pass them as one argument: hvd.shard((x, y))"
        )
    if batch_size is not None or shuffle or reader is not None:
        return (
            f"batch_size, shuffle and reader are for a tf.data.Dataset on the TensorFlow backend, "
            f"and the data are of type {type(data).__name__}: omit these arguments. fit batches "
            f"and shuffles arrays; a PyDataset or DataLoader itself batches and shuffles"
        )
    if tail not in ("drop", "pad"):
        return f"tail is {tail!r}: expected 'drop' or 'pad'"
    if tail == "pad" and _is_of(data, "torch"):
        return (
            "tail is 'pad', but samples of a DataLoader have no weights: omit tail, and set the "
            "loader's drop_last"
        )
    return ""


def _is_of(data: Any, framework: str) -> bool:
    """Return whether `data` is a dataset of a framework, without importing the framework."""
    kinds = {"tensorflow": "DatasetV2", "torch": "DataLoader"}
    return any(
        c.__name__ == kinds[framework] and c.__module__.split(".")[0] == framework
        for c in type(data).__mro__
    )


def _check(group: Any, problem: str, lines: Sequence[str], cause: Exception | None = None) -> None:
    """Raise on every rank if one rank has a problem, or if `lines` differ. A collective."""
    try:
        check_consistency(group, [problem or "no problem", *lines], _SUBJECT, _ADVICE)
    except RankMismatchError as error:
        raise error from cause
    if problem:
        raise UsageError(problem) from cause


def _warn_if_targets_differ(group: Any, batch: Any) -> None:
    """Log a warning on the first rank if the targets of (x, y) differ. A collective."""
    content = b""
    if isinstance(batch, tuple | list) and len(batch) > 1:
        # Targets that are not arrays, for example before `collate_fn`, are not compared.
        with contextlib.suppress(Exception):
            content = b"".join(map(_content, keras.tree.flatten(batch[1])))
    digest = int(hashlib.sha256(content).hexdigest()[:6], 16)
    if not are_equal(group, digest, "hvdkit.shard.targets") and group.is_first:
        log.warning(
            "hvd.shard: the first targets differ between ranks. Shuffle with the same seed on "
            "every rank: otherwise some rows are used twice in an epoch, and others never."
        )


def _content(array: Any) -> bytes:
    if array is None:
        return b""
    if not hasattr(array, "iloc"):
        array = keras.ops.convert_to_numpy(array)
    array = np.asarray(array)
    return repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()


def _divide(group: Any, count: int, padded: bool, elements: str) -> tuple[Division, int]:
    """Return the division of `count` elements, and this rank's index in it."""
    ranks = list(group.ranks)
    division = Division(count, len(ranks), padded)
    index = ranks.index(group.rank)
    if index == 0:
        division.log_tail(elements)
    return division, index


def _too_few(count: int, elements: str, group: Any) -> str:
    ranks = len(group.ranks)
    return (
        f"the data have {count} {elements} for {ranks} ranks: expected at least one each"
        if count < ranks
        else ""
    )


# --- arrays -------------------------------------------------------------------------------------


def _share_of_arrays(data: Any, group: Any, padded: bool) -> Any:
    arrays = [array for array in keras.tree.flatten(data) if array is not None]
    shapes = [tuple(getattr(array, "shape", ())) for array in arrays]
    counts = sorted({int(shape[0]) for shape in shapes if shape})
    problem = ""
    if not arrays or not all(shapes):
        problem = (
            f"the data are of type {type(data).__name__}: expected arrays of shape [rows, ...], a "
            f"keras.utils.PyDataset, on the TensorFlow backend a tf.data.Dataset or names of files "
            f"with reader=, or on the PyTorch backend a torch DataLoader"
        )
    elif len(counts) > 1:
        problem = f"the arrays have {counts} rows: expected the same number in all arrays"
    else:
        problem = _too_few(counts[0], "rows", group) or (_weight_problem(data) if padded else "")
    digest, cause = "", None
    if not problem:
        try:
            digest = _digest(arrays)
        except Exception as error:
            # Keras accepts kinds of arrays that cannot be sliced.
            problem = f"rows cannot be taken from the data: {type(error).__name__}: {error}"
            cause = error
    _check(group, problem, [] if problem else [*map(_described, arrays), digest], cause)
    division, index = _divide(group, counts[0], padded, "rows")
    if not padded:
        rows = slice(index, division.used, division.size)
        return keras.tree.map_structure(lambda a: _rows(a, rows), data)
    own = np.arange(index, division.used, division.size)
    missing = division.per_rank - len(own)
    weights = np.concatenate([np.ones(len(own), "float32"), np.zeros(missing, "float32")])
    numbers = np.concatenate([own, np.zeros(missing, own.dtype)])
    x, y, *given = keras.tree.map_structure(lambda a: _rows(a, numbers), tuple(data))
    if given and given[0] is not None:
        return x, y, keras.tree.map_structure(lambda w: _scaled_rows(w, weights), given[0])
    return x, y, weights


def _rows(array: Any, rows: Any) -> Any:
    if array is None:
        return None
    # Indexing a pandas object directly would select columns.
    found = getattr(array, "iloc", array)
    if isinstance(rows, slice) or isinstance(array, np.ndarray) or found is not array:
        return found[rows]
    return keras.ops.take(array, rows, axis=0)


def _scaled_rows(array: Any, weights: np.ndarray) -> np.ndarray:
    array = keras.ops.convert_to_numpy(array)
    return array * weights.reshape(-1, *[1] * (array.ndim - 1)).astype(array.dtype)


def _described(array: Any) -> str:
    return f"array of shape {tuple(array.shape)}, {getattr(array, 'dtype', 'of several dtypes')}"


def _digest(arrays: Sequence[Any]) -> str:
    """Return a description with a digest of the first rows."""
    content = hashlib.sha256()
    for array in arrays:
        content.update(_content(_rows(array, slice(0, _COMPARED))))
    return f"first rows with digest {content.hexdigest()[:16]}"


def _weight_problem(data: Any) -> str:
    """Return why data like this cannot have sample weights; empty if they can."""
    if isinstance(data, tuple | list) and len(data) in (2, 3):
        return ""
    return (
        f"with tail='pad' data must be (x, y) or (x, y, sample_weight), but are of type "
        f"{type(data).__name__}: convert them, or use tail='drop'"
    )


# --- batches ------------------------------------------------------------------------------------


class ShareOfBatches(keras.utils.PyDataset):
    """Every n-th batch of a `PyDataset`.

    Args:
        dataset: the dataset with all batches.
        division: the division of the batches.
        index: the rank's index in the division.
    """

    def __init__(self, dataset: Any, division: Division, index: int) -> None:
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self._division = division
        self._index = index

    def __len__(self) -> int:
        return self._division.per_rank

    def __getitem__(self, index: int) -> Any:
        """Return a batch; the last one may be repeated, with sample weights 0."""
        repeated = index >= self._division.of_rank(self._index)
        batch = self._dataset[0 if repeated else index * self._division.size + self._index]
        if not self._division.padded:
            return batch
        x, y, *weights = batch
        if not weights or weights[0] is None:
            rows = keras.tree.flatten(x)[0].shape[0]
            weights = [np.ones(rows, "float32")]
        if repeated:
            weights = [keras.tree.map_structure(np.zeros_like, weights[0])]
        return x, y, weights[0]

    def on_epoch_begin(self) -> None:
        """Call the dataset's method."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Call the dataset's method, which may shuffle its batches."""
        self._dataset.on_epoch_end()


def _share_of_batches(dataset: Any, group: Any, padded: bool) -> ShareOfBatches:
    count, problem, first, cause = 0, "", None, None
    try:
        batches = dataset.num_batches
        if batches is None:
            problem = (
                "the PyDataset is infinite: give it a __len__, or do not shard it and pass "
                "steps_per_epoch to fit"
            )
        else:
            count = int(batches)
            problem = _too_few(count, "batches", group)
        if not problem:
            first = dataset[0]
            problem = _weight_problem(first) if padded else ""
    except Exception as error:
        # User code may raise anything, and the other ranks must raise too.
        problem = f"the PyDataset cannot be read: {type(error).__name__}: {error}"
        cause = error
    _check(group, problem, [f"{count} batches"], cause)
    _warn_if_targets_differ(group, first)
    return ShareOfBatches(dataset, *_divide(group, count, padded, "batches"))


# --- a DataLoader -------------------------------------------------------------------------------

_LOADER_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def _share_of_loader(loader: Any, group: Any, seed: int | None, process_set: Any) -> Any:
    if backend.NAME != "torch":
        raise UsageError(
            "the data are a torch DataLoader, and Keras runs on TensorFlow: set "
            "KERAS_BACKEND=torch, or pass a tf.data.Dataset, a PyDataset or arrays"
        )
    from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

    shuffled = type(loader.sampler) is RandomSampler
    count = 0
    if isinstance(loader.dataset, IterableDataset):
        problem = (
            "the DataLoader has an IterableDataset, whose samples have no indices: do not shard "
            "it, and let its __iter__ yield a different part on each rank"
        )
    elif loader.batch_size is None:
        problem = (
            "the DataLoader has no batch_size: expected one made with batch_size= and shuffle=. "
            "If it has a batch_sampler, do not shard it, and let the batch_sampler yield a "
            "different part on each rank"
        )
    elif not (shuffled or type(loader.sampler) is SequentialSampler):
        problem = (
            f"the DataLoader has a custom sampler ({type(loader.sampler).__name__}): expected one "
            f"made with batch_size= and shuffle=. Otherwise do not shard it, and let the sampler "
            f"yield a different part on each rank"
        )
    elif shuffled and (loader.sampler.replacement or len(loader.sampler) != len(loader.dataset)):
        problem = (
            "the sampler of the DataLoader draws with replacement, or draws only some samples: "
            "expected a DataLoader made with shuffle=True and without a sampler"
        )
    else:
        count = len(loader.dataset)
        problem = _too_few(count, "samples", group)
    settings = f"batch_size={loader.batch_size}, shuffle={shuffled}, seed={seed or 0}"
    first, cause = None, None
    if not problem:
        try:
            first = loader.dataset[0]
        except Exception as error:
            problem = f"the dataset cannot be read: {type(error).__name__}: {error}"
            cause = error
    _check(group, problem, [f"{count} samples", settings, f"drop_last={loader.drop_last}"], cause)
    _warn_if_targets_differ(group, first)
    sampler = ResumableSampler(
        loader.dataset,
        loader.batch_size,
        shuffle=shuffled,
        seed=seed or 0,
        drop_last=loader.drop_last,
        process_set=process_set,
    )
    options = {name: getattr(loader, name) for name in _LOADER_OPTIONS if hasattr(loader, name)}
    return DataLoader(loader.dataset, loader.batch_size, sampler=sampler, **options)
