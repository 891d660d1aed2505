"""Data that a job can go on with at any step: `hvd.ResumableSampler` for tf.data."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.core.sampling import Epochs
from hvdkit.tensorflow.collectives import TensorFlowCollectives


class ResumableSampler(Epochs):
    """Which sample this rank sees when, for data that have a number each.

    In every epoch each sample goes to one rank, in an order that follows from the seed and the
    epoch alone. All ranks have the same number of batches. A checkpoint keeps one number, how many
    samples all ranks together have had, so a job goes on at any batch without reading what came
    before, with the same number of ranks or another one.

        sampler = hvd.ResumableSampler(len(labels), batch_size=32, seed=1)
        data = sampler.dataset(lambda i: (images[i], labels[i]))

        checkpointer = hvd.Checkpointer(folder, model=model, optimizer=optimizer, data=sampler)
        checkpointer.restore()
        for epoch in range(sampler.epoch, epochs):
            for x, y in sampler.batches(data):
                train_step(x, y)
                checkpointer.maybe_save(int(optimizer.iterations))

    In Keras's `fit` the callback that it is given to counts: `model.fit(data, callbacks=[
    hvd.callbacks.Checkpoint(folder, data=sampler)])`.

    What does not come out even at the end of an epoch is said in the log: without `drop_last` the
    last batches may be smaller on some ranks, and a rank that would have a batch fewer than others
    gets one sample that another has, too.

    Attributes:
        epoch: the epoch that the job is in, or that comes next; from 0 on.
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
            count: how many samples there are; they are called 0 to count - 1.
            batch_size: samples per rank and step.
            shuffle: a new order in each epoch; otherwise always 0, 1, 2, ...
            seed: of the orders, a whole number from 0 on; the same on every rank.
            drop_last: leave out what does not fill a batch on every rank.
            process_set: the ranks that share the data.

        Raises:
            UsageError: an argument makes no sense, or no rank would have a batch.
        """
        collectives = TensorFlowCollectives(process_set)
        super().__init__(
            count,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            rank=0 if collectives.alone else process_set.rank(),
            ranks=1 if collectives.alone else process_set.size(),
            how_to_count="iterate them with `for batch in sampler.batches(dataset)`, or give fit's "
            "hvd.callbacks.Checkpoint data=sampler",
        )

    def dataset(
        self, load: Callable[..., Any] | None = None, *, seeds: bool = False
    ) -> "tf.data.Dataset":
        """What is left of an epoch, in batches; at each iteration of the epoch that it is then.

        Its `cardinality()` is that of a whole epoch, which is what `fit` wants to know. Iterate it
        with `batches`, or give it to `fit`.

        Args:
            load: the number of a sample, an int64 scalar -> the sample. Samples are loaded side by
                side, batched and prefetched. None: batches are those of the numbers, for a `map`
                that loads a batch at once, such as `lambda i: (tf.gather(x, i), tf.gather(y, i))`.
            seeds: hand `load` (or the `map`) a seed for each sample as well, int64 of shape [2],
                for `tf.image.stateless_random_crop` and the like. It follows from the sampler's
                seed, the epoch and the sample. What other random operations do in tf.data no
                checkpoint can keep.

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
        """The samples from where the job is, looked up when it is iterated."""
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
        # Not the sequence that the order is drawn from.
        drawn = np.random.SeedSequence([self._seed, epoch, 1]).generate_state(1, np.uint64)
        return mine, drawn.view(np.int64)[0]

    def batches(self, dataset: Any) -> Iterator[Any]:
        """The batches that are left of this epoch, counted as they are handed out.

        Args:
            dataset: made of `dataset()`, with as many batches.

        Returns:
            An iterator. Once it has ended, `epoch` is the next one. After a loop that has left it
            before its end, the next call begins the next epoch. Call `end_epoch()` before such a
            `break`, so that a checkpoint that is saved after it has the next epoch, too.

        Raises:
            UsageError: `dataset` has fewer batches.
        """
        if not self.begin_iteration():
            return
        yield from self.count(iter(dataset))
