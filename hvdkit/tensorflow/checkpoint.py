"""`hvd.Checkpointer` for TensorFlow: checkpoints of a custom training loop."""

import functools
import logging
import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.agreement.collectives import check_member
from hvdkit.agreement.process_sets import check_one_model
from hvdkit.checkpoint.items import Variables, data_item, kept_in, named, several
from hvdkit.checkpoint.manager import Manager
from hvdkit.checkpoint.retention import KeepBest
from hvdkit.checkpoint.sharding import Shard, ShardedItem
from hvdkit.checkpoint.signals import STOP_SIGNALS
from hvdkit.checkpoint.state import StatefulItem
from hvdkit.checkpoint.step_boundary import window_boundary
from hvdkit.checkpoint.store import Store
from hvdkit.errors import UsageError
from hvdkit.keras_variables.optimizer_slots import optimizer_variables
from hvdkit.tensorflow import runtime
from hvdkit.tensorflow.collectives import TensorFlowCollectives
from hvdkit.tensorflow.items import Randomness, Statistics, VariableTensor
from hvdkit.tensorflow.reduction_items import distribution_of, reduction_item
from hvdkit.tensorflow.replicas import tape_check
from hvdkit.tensorflow.variables import tf_variable, tf_variable_or_none

log = logging.getLogger("hvdkit.tensorflow")


class Checkpointer(Manager):
    """Save and restore the state of a training loop.

    Every rank creates a `Checkpointer` and calls the same methods in the same order.
        checkpointer = hvd.Checkpointer(
            folder, model=model, optimizer=optimizer, data=sampler, every_steps=1000
        )
        restored = checkpointer.restore()
        step = restored.step if restored else 0
        for epoch in range(sampler.epoch, epochs):
            for x, y in sampler.batches(data):
                train_step(x, y)
                step += 1
                checkpointer.maybe_save(step, epoch)
        checkpointer.save(step)
        checkpointer.close()

    A checkpoint contains:

    - the variables and the optimizer state;
    - the scales of the wire formats, and the position in the data;
    - for each rank, the random states of Python, NumPy, `tf.random.Generator` and Keras's layers.

    Each save compares the ranks first: the variables whose gradients a `DistributedGradientTape` or
    `hvd.DistributedOptimizer` reduces, and the variables of Keras optimizers. If they differ,
    nothing is saved, and all ranks raise an error.

    If the program is reproducible, a run that was killed and resumed ends bit-identical to an
    uninterrupted run. `tf.random.uniform` and similar functions (no generator, no "stateless" in
    the name) make a resume irreproducible, because their state cannot be saved.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: Any = None,
        optimizer: Any = None,
        data: Any = None,
        sharded: Mapping[str, Shard] | None = None,
        metadata: MutableMapping[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        every_steps_in_memory: int | None = None,
        keep_last: int | None = 3,
        keep_best: KeepBest | Sequence[KeepBest] = (),
        keep_every: int | None = None,
        asynchronous: bool = True,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        stop_signals: Sequence[int] = STOP_SIGNALS,
        process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
    ) -> None:
        """
        Args:
            folder: a local or shared folder, or a URL that fsspec knows, such as `s3://bucket/run`.
                Only the first rank reads and writes it.
            model: a built Keras model, a `tf.Module` or a list of variables. Several of them: a
                dict from name to model.
            optimizer: a Keras optimizer whose variables exist (`optimizer.build(variables)`) or a
                list of variables. Several of them: a dict from name to optimizer.
            data: a `ResumableSampler`. None: the position in the data is not saved.
            sharded: name -> this rank's rows of a variable whose rows are divided among the ranks,
                such as `hvd.Shard(embedding, first, total)`. Any number of ranks can restore it.
            metadata: plain values; see `hvdkit.checkpoint.state`. Every save reads them, and
                `restore` updates them.
            generators: name -> your own `tf.random.Generator`s, `numpy.random.Generator`s and
                `random.Random`s, in addition to TensorFlow's global generator.
            every_steps: `maybe_save` saves after this many steps. None: the number of steps does
                not matter.
            every_minutes: `maybe_save` saves after this many minutes. None: the time does not
                matter.
            every_steps_in_memory: `maybe_save` keeps the newest step in the memory of each host,
                after this many steps. In a job of `hvdkit run --restarts N`, `restore` finds it
                after a failure. Not with `sharded`. None: keep steps on disk only.
            keep_last: the number of newest checkpoints to keep; None: all.
            keep_best: also keep the best checkpoints by a metric, such as
                `hvd.KeepBest("val_loss")`.
            keep_every: also keep each checkpoint whose step is a multiple of this number. None: no
                such checkpoints.
            asynchronous: write in the background while training continues.
            overwrite: what to do if `folder` has checkpoints and none was restored. True: begin a
                new run beside them. False: saving raises an error.
            storage_options: for fsspec's file system, such as `{"endpoint_url": …}`; for URLs only.
            stop_signals: signals at which `maybe_save` saves and ends the job with status 75.
            process_set: the ranks of the job.

        Raises:
            UsageError: there is nothing to save, or a model or optimizer is not built.
        """
        if not mpi_ops.is_initialized():
            raise UsageError("Horovod is not initialised: call hvd.init() before this")
        check_member(process_set)
        if model is None and optimizer is None:
            raise UsageError("neither model nor optimizer is given: expected at least one of them")
        self._metadata = {} if metadata is None else metadata
        models, optimizers = several("model", model), several("optimizer", optimizer)
        items: dict[str, StatefulItem] = {}
        for name, given in {**models, **optimizers}.items():
            _check_built(given, name)
            items[name] = Variables(functools.partial(_named, given), name, tensor_of)
        wrapped = {name: distribution_of(each) for name, each in optimizers.items()}
        distributions = {name: found for name, found in wrapped.items() if found is not None}
        items["reduction"] = reduction_item(optimizers)
        if data is not None:
            items["data"] = data_item(data)
        if sharded is not None:
            items["sharded"] = ShardedItem(sharded, lambda variable, _: tensor_of(variable))
        items["metadata"] = kept_in(self._metadata)
        check_one_model(
            {name: each.process_set.ranks for name, each in distributions.items()},
            process_set.ranks,
        )
        collectives = TensorFlowCollectives(process_set)
        first = collectives.is_first
        tapes = tape_check(
            collectives,
            lambda: {name: _named(given) for name, given in models.items()},
            [o for name, o in optimizers.items() if name not in distributions],
        )
        super().__init__(
            Store(
                folder,
                keep_last=keep_last,
                keep_best=keep_best,
                keep_every=keep_every,
                storage_options=storage_options,
            ),
            collectives,
            items,
            rank_parts={
                "statistics": Statistics(models),
                "random": Randomness(generators, lambda: _seeds(models.values())),
            },
            versions={"tensorflow": tf.__version__, "keras": keras.__version__},
            # A process set of some ranks does not use shared memory.
            sum_order=runtime.host_collectives.sum_order
            if process_set.process_set_id == 0
            else str,
            every_steps=every_steps,
            every_minutes=every_minutes,
            every_steps_in_memory=every_steps_in_memory,
            asynchronous=asynchronous,
            overwrite=overwrite,
            stop_signals=stop_signals,
            boundary=window_boundary(distributions.values),
            replicas=lambda: [
                *(d.replicas if d.check_parameters else None for d in distributions.values()),
                tapes,
            ],
            subjects=[v for each in (models | optimizers).values() for v in _variables(each)],
        )
        if first:
            saved = [v for each in (models | optimizers).values() for v in _variables(each)]
            shards = [shard.tensor for shard in (sharded or {}).values()]
            # Only a save calls a function of a shard: its variable may not exist yet.
            saved += [rows for rows in shards if not callable(rows)]
            _warn_of_others(models, saved)

    @property
    def metadata(self) -> MutableMapping[str, Any]:
        """Your own values in the checkpoint: the dict that was given. Change its items."""
        return self._metadata


def _check_built(given: Any, argument: str) -> None:
    if getattr(given, "built", True) is False:
        how = "model.trainable_variables" if argument.startswith("optimizer") else "input_shape"
        raise UsageError(
            f"{argument} is a {type(given).__name__} that is not built and has no variables: "
            f"call its build({how}) before hvd.Checkpointer"
        )
    _variables(given)


def _named(given: Any) -> dict[str, Any]:
    return named(_variables(given))


def _variables(given: Any) -> Sequence[Any]:
    if isinstance(given, list | tuple):
        return given
    if isinstance(given, keras.optimizers.Optimizer):
        return optimizer_variables(given)
    # Without the states of random seeds, which differ between ranks.
    found = given.weights if isinstance(given, keras.layers.Layer) else None
    found = getattr(given, "variables", None) if found is None else found
    # A method until Keras 3.
    found = found() if callable(found) else found
    if found is None:
        raise UsageError(
            f"model or optimizer is a {type(given).__name__}: expected a model or an optimizer of "
            f"Keras, a tf.Module or a list of variables"
        )
    return list(found)


def _warn_of_others(models: Mapping[str, Any], saved: Iterable[Any]) -> None:
    """Warn of variables in models that neither Keras nor `tf.Module` counts as their variables.

    Args:
        models: name -> model.
        saved: the variables that are saved.
    """
    known = {id(tf_variable_or_none(variable)) for variable in saved}
    for name, model in models.items():
        if not isinstance(model, tf.Module | keras.layers.Layer):
            continue
        try:
            found = list(tf.train.TrackableView(model).descendants())
        except ValueError:
            continue  # TensorFlow cannot track all attributes, such as a dict with other keys
        # `compile` makes these.
        others = (keras.optimizers.Optimizer, keras.metrics.Metric)
        skipped = {id(v) for each in found if isinstance(each, others) for v in each.variables}
        left = [
            v.path if isinstance(v, keras.Variable) else v.name
            for v in found
            if isinstance(v, tf.Variable | keras.Variable)
            and id(v) not in skipped
            and id(tf_variable_or_none(v)) not in known
        ]
        if left:
            log.warning(
                "%s is a %s, and its .%s has no %s%s, so a checkpoint does not contain them. A "
                "Keras model has no tf.Variables, and a tf.Module has no variables of Keras "
                "layers. To save them, pass a dict with a list of these variables, such as "
                'model={"model": model, "others": [...]}.',
                *(name, type(model).__name__),
                "weights" if isinstance(model, keras.layers.Layer) else "variables",
                *(", ".join(left[:3]), ", ..." if len(left) > 3 else ""),
            )


def tensor_of(variable: Any) -> VariableTensor:
    """Return the tensor of a variable of TensorFlow or Keras, for a checkpoint."""
    return VariableTensor(tf_variable(variable))


def _seeds(models: Iterable[Any]) -> list[Any]:
    """Return the variables with the random states of Keras layers."""
    found: list[Any] = []
    for model in models:
        if isinstance(model, keras.layers.Layer):
            weights = {id(variable) for variable in model.weights}
            found += [variable for variable in model.variables if id(variable) not in weights]
    return found
