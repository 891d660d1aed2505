"""`hvd.ResumableSampler` for Keras, and the samplers whose epochs `fit` counts."""

from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import keras
import numpy as np

from hvdkit.checkpoint.replaced_state import keep_position, take_position
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.training.sampling import Batches

#: Sampler -> its epoch in commits.
_samplers: WeakKeyDictionary[Any, "_CommittedEpoch"] = WeakKeyDictionary()
#: How many samplers were made for the same data in the same order.
_made: Counter[str] = Counter()
_saved: WeakSet[Any] = WeakSet()


class ResumableSampler(backend.hvd.ResumableSampler):
    """The backend's `ResumableSampler`; `fit` counts its epochs.

    `arrays()` works on both backends. On PyTorch a `DataLoader` can also have the sampler; on
    TensorFlow there is also `dataset()`. A `hvd.callbacks.Checkpoint` with `data=sampler` counts
    the sampler's batches. Without it, `fit` counts the sampler's epochs, and each commit of an
    elastic job contains the epoch. A restart knows equal samplers by the order of their creation.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._read_by_fit = False
        _samplers[self] = _CommittedEpoch(self)

    def batches(self, *args: Any, **options: Any) -> Batches:
        """Yield the remaining batches of this epoch, and count them; see the backend's method."""
        self._read_by_fit = False
        return super().batches(*args, **options)

    def committed(self) -> dict[str, Any]:
        """Return the position for a commit of an elastic state.

        In `fit`, it is the beginning of the epoch. A resumed `fit` needs this for its number of
        steps. It skips the trained batches itself, or a `Checkpoint` moves the sampler.
        """
        return {**self._saved(), "consumed": 0} if self._read_by_fit else self.save()

    def arrays(self, data: Any) -> Any:
        """Return this rank's batches of arrays, for `fit(..., shuffle=False)`.

        Rows are looked up batch by batch, so the arrays may also be memory maps.

        Args:
            data: NumPy arrays, such as `(x, y)` or `({"text": a, "places": b}, y, weights)`. Each
                has one row for each sample of the sampler.

        Returns:
            A `tf.data.Dataset` on TensorFlow, and a `DataLoader` on PyTorch.

        Raises:
            UsageError: an array has another number of rows.

        Example:
            sampler = hvd.ResumableSampler(len(y), batch_size=32)
            model.fit(
                sampler.arrays((x, y)),
                shuffle=False,  # the sampler shuffles
                callbacks=[hvd.callbacks.Checkpoint(folder, data=sampler)],
            )
        """
        data = keras.tree.map_structure(np.asanyarray, data)
        for array in keras.tree.flatten(data):
            if array.ndim == 0 or len(array) != self.samples:
                raise UsageError(
                    f"an array has the shape {array.shape}, but the ResumableSampler has "
                    f"{self.samples} samples: expected one row for each sample"
                )
        if backend.NAME == "torch":
            return _loader_of(data, self)
        return _dataset_of(data, self)


class _CommittedEpoch:
    """The epoch of a sampler in the commits of an elastic job."""

    def __init__(self, sampler: ResumableSampler) -> None:
        identity = f"ResumableSampler {sampler._identity()}"
        _made[identity] += 1
        self._sampler = ref(sampler)
        self._name = f"{identity} {_made[identity]}"
        keep_position(self._name, self)

    def position(self) -> int | None:
        """Return the epoch now."""
        sampler = self._sampler()
        return None if sampler is None else sampler.epoch

    def restore(self) -> None:
        """Begin the epoch of the restored commit, if there is one."""
        sampler, epoch = self._sampler(), take_position(self._name)
        if sampler is not None and epoch is not None:
            sampler.set_epoch(epoch)


def restore_epochs() -> None:
    """Begin the epochs that a restored commit of an elastic job contains. `fit` begins."""
    for sampler, epoch in _samplers.items():
        # The script reads it in a loop of its own, which has called `fit` of another model.
        if sampler._loop is not None:
            continue
        sampler._read_by_fit = True
        epoch.restore()


def _dataset_of(data: Any, sampler: Any) -> Any:
    import tensorflow as tf

    flat = keras.tree.flatten(data)

    def rows(numbers: Any) -> Any:
        found = tf.numpy_function(
            lambda n: [array[n] for array in flat], [numbers], [array.dtype for array in flat]
        )
        shaped = [
            tf.ensure_shape(part, [numbers.shape[0], *array.shape[1:]])
            for part, array in zip(found, flat, strict=True)
        ]
        return keras.tree.pack_sequence_as(data, shaped)

    return sampler.dataset().map(rows).prefetch(tf.data.AUTOTUNE)


def _loader_of(data: Any, sampler: Any) -> Any:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset[Any]):
        """Looks up the rows of a whole batch at once."""

        def __len__(self) -> int:
            return sampler.samples

        def __getitems__(self, numbers: list[int]) -> Any:
            return keras.tree.map_structure(
                lambda array: torch.as_tensor(array[numbers], device="cpu"), data
            )

    return DataLoader(
        Rows(),
        sampler.batch_size,
        sampler=sampler,
        drop_last=sampler.drop_last,
        collate_fn=lambda batch: batch,
    )


def forget_reads() -> None:
    """Ignore samples that were read before `fit`, for example one batch to build the model.

    Otherwise these samples would count as an epoch.
    """
    for sampler in samplers_read():
        sampler.uncounted = False


def samplers_read() -> list[ResumableSampler]:
    """Return the samplers with samples that were read and not counted."""
    return [sampler for sampler in _samplers if sampler.uncounted]


def any_samplers() -> bool:
    """Return whether any sampler exists."""
    return len(_samplers) > 0


def check_loaders_of(sampler: Any) -> None:
    """Make `fit` check a `DataLoader` with this sampler, whose position a checkpoint keeps."""
    _saved.add(sampler)


def check_data(adapter: Any) -> None:
    """Check the data of a `fit` whose sampler was given to `check_loaders_of`.

    Args:
        adapter: Keras's `DataAdapter`.

    Raises:
        UsageError: a resume with this `DataLoader` would lose samples.
    """
    if backend.NAME != "torch" or not _saved:
        return
    from torch.utils.data import DataLoader

    from hvdkit.torch.data.sampling import check_loader, sampler_of

    # Keras's adapter of a DataLoader has no public attribute for the loader.
    loader = getattr(adapter, "_dataloader", None)
    if not isinstance(loader, DataLoader):
        return
    sampler = sampler_of(loader)
    if any(sampler is saved for saved in _saved):
        check_loader(loader, sampler)


def check_steps(sampler: ResumableSampler, steps: int | None) -> None:
    """Check that an epoch of `fit` has the batches of the sampler.

    Args:
        sampler: of the data.
        steps: batches of an epoch; None if unknown.

    Raises:
        UsageError: an epoch may have another number of batches.
    """
    batches = sampler.batches_per_epoch
    if steps is None:
        raise UsageError(
            f"the number of batches of fit's data is unknown, as after filter() or "
            f"from_generator(): the ResumableSampler counts {batches} "
            f"batches in an epoch. Do not filter the sampler's dataset: give the sampler only "
            f"the samples to train. If the dataset has all of the sampler's batches, call "
            f"dataset.apply(tf.data.experimental.assert_cardinality(sampler.batches_per_epoch))"
        )
    if steps != batches:
        raise UsageError(
            f"an epoch of fit has {steps} steps, and the ResumableSampler has "
            f"{batches} batches: omit steps_per_epoch, or give the "
            f"sampler fewer samples"
        )
