"""`hvd.ResumableSampler` for tf.data: shard an epoch over ranks, resumable at any batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.errors import UsageError
from hvdkit.tensorflow.collectives import TensorFlowCollectives
from hvdkit.training.sampling import Batches, Epochs


class ResumableSampler(Epochs):
    """Select this rank's samples of an indexed dataset, resumable at any batch.

    In every epoch each sample goes to one rank (exceptions: see below), in an order that depends
    only on the seed and the epoch. All ranks have the same number of batches. A checkpoint keeps
    one number: how many samples all ranks together have consumed. A job can therefore resume at any
    batch without reading earlier samples, with the same or another number of ranks.

        sampler = hvd.ResumableSampler(len(labels), batch_size=32, seed=1)
        data = sampler.dataset(lambda i: (images[i], labels[i]))

        checkpointer = hvd.Checkpointer(folder, model=model, optimizer=optimizer, data=sampler)
        checkpointer.restore()
        for epoch in range(sampler.epoch, epochs):
            for x, y in sampler.batches(data):
                train_step(x, y)
                checkpointer.maybe_save(int(optimizer.iterations))

    In Keras's `fit` the checkpoint callback counts the batches: `model.fit(data, callbacks=[
    hvd.callbacks.Checkpoint(folder, data=sampler)])`.

    Without `drop_last` the last batches may be smaller on some ranks. A rank that would have one
    batch less than the other ranks gets one sample that another rank has, too. The first rank logs
    this.

    Attributes:
        epoch: the current epoch, or the next one between two epochs; from 0 on.
        batches_per_epoch: batches of a whole epoch, the same on every rank.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
    ) -> None:
        """
        Args:
            count: number of samples; their indices are 0 to count - 1.
            batch_size: samples per rank and step.
            shuffle: draw a new order for each epoch; otherwise always 0, 1, 2, ...
            seed: seed of the orders, an integer >= 0; the same on every rank.
            drop_last: drop the last samples that do not fill a batch on every rank.
            process_set: the ranks that share the data.

        Raises:
            UsageError: an argument is invalid, or no rank would have a batch.
        """
        collectives = TensorFlowCollectives(process_set)
        self._all_ranks = process_set is mpi_ops.global_process_set
        super().__init__(
            count,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            rank=0 if collectives.single_rank else process_set.rank(),
            ranks=1 if collectives.single_rank else process_set.size(),
            how_to_count="iterate them with `for batch in sampler.batches(dataset)`, or give fit's "
            "hvd.callbacks.Checkpoint data=sampler",
        )

    def _current_place(self) -> tuple[int, int]:
        if self._all_ranks and mpi_ops.is_initialized():
            return mpi_ops.rank(), mpi_ops.size()
        return super()._current_place()

    def dataset(
        self, load: Callable[..., Any] | None = None, *, seeds: bool = False
    ) -> "tf.data.Dataset":
        """Return a dataset. An iteration over it yields the remaining batches of the current epoch.

        Its `cardinality()` is always the number of batches in a whole epoch, because `fit` needs
        this number. Iterate the dataset with `batches`, or pass it to `fit`.

        Args:
            load: maps the index of a sample, an int64 scalar, to the sample. Samples are loaded in
                parallel, batched and prefetched. None: the batches contain indices, for a `map`
                that loads a batch at once, such as `lambda i: (tf.gather(x, i), tf.gather(y, i))`.
            seeds: also pass `load` (or the function of the `map`) a seed for each sample, int64 of
                shape [2]. Operations such as `tf.image.stateless_random_crop` need it. The seed
                depends on the sampler's seed, the epoch and the sample. A checkpoint cannot keep
                the state of other random operations in tf.data.

        Returns:
            Batches of `batch_size`; the last ones may be smaller, unless `drop_last`.
        """
        dataset = tf.data.Dataset.range(1).flat_map(lambda _: self._rest(seeds))
        if load is not None:
            dataset = dataset.map(load, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        dataset = dataset.batch(self.batch_size, drop_remainder=self.drop_last)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.batches_per_epoch))
        return dataset if load is None else dataset.prefetch(tf.data.AUTOTUNE)

    def _rest(self, seeds: bool) -> "tf.data.Dataset":
        """Return the remaining samples, looked up at each iteration."""
        numbers, seed = tf.numpy_function(self._look_up, [], [tf.int64, tf.int64])
        numbers = tf.ensure_shape(numbers, [None])
        samples = tf.data.Dataset.from_tensor_slices(numbers)
        if not seeds:
            return samples
        seed = tf.ensure_shape(seed, [])
        return samples.map(lambda number: (number, tf.stack([seed, number])))

    def _look_up(self) -> tuple[np.ndarray, np.ndarray]:
        self.uncounted = True
        epoch, mine = self.left()
        # The 1 makes this sequence of random numbers different from the one for the epoch's order.
        drawn = np.random.SeedSequence([self._seed, epoch, 1]).generate_state(1, np.uint64)
        return mine, drawn.view(np.int64)[0]

    def batches(self, dataset: Any = None) -> Batches:
        """Yield the remaining batches of this epoch and count them.

        Args:
            dataset: made from `dataset()`, with the same batches in the same order. A `map` with
                `deterministic=False` changes the order, so that a resume loses samples. None:
                `dataset()` itself, which yields the numbers of the samples.

        Returns:
            An iterator with a length: the number of batches of this loop, which does not change
            during the loop. At its end, `epoch` is the next epoch. If a loop ends early by `break`,
            the next call begins the next epoch. Call `end_epoch()` before such a `break` if a
            checkpoint is saved between the two loops.

        Raises:
            UsageError: the options of `dataset` have `deterministic=False`; in the loop: `dataset`
                has fewer batches, another loop has begun, or the sampler was restored.
        """
        if isinstance(dataset, tf.data.Dataset) and dataset.options().deterministic is False:
            raise UsageError(
                "the options of the dataset have deterministic=False: expected True or None. A "
                "ResumableSampler counts batches in order, and would lose and repeat samples after "
                "a resume"
            )
        return Batches(self, partial(iter, self.dataset() if dataset is None else dataset))
