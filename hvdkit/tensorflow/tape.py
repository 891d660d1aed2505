"""Gradient tapes that reduce gradients over all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from horovod import tensorflow as horovod
from horovod.tensorflow import mpi_ops

from hvdkit.agreement.collectives import check_process_set
from hvdkit.errors import UsageError
from hvdkit.reduction import bucketing
from hvdkit.reduction.compression import check_adasum
from hvdkit.reduction.nonfinite import IGNORE, SKIP, check_policy
from hvdkit.reduction.plan import predivide
from hvdkit.tensorflow.compression import Compression, wire_format
from hvdkit.tensorflow.graphs import trace_position
from hvdkit.tensorflow.reduction.equal_gradients import by_tapes
from hvdkit.tensorflow.tape_reducers import reducer_of, trial_of
from hvdkit.tensorflow.unwrapped import handled
from hvdkit.tensorflow.variables import tf_variable_or_none

#: Reduces gradients; called with the gradients and their sources.
Reduce = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = mpi_ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
    scale_local_gradients: bool = True,
    *,
    bucket_bytes: int = bucketing.BUCKET_BYTES,
    check_parameters: bool = True,
    on_nonfinite: str = IGNORE,
) -> Any:
    """Return a tape whose `gradient()` reduces the gradients over all ranks.

    The tape is an instance of the original tape's class and has its recordings. It can also record
    operations: `with hvd.DistributedGradientTape(tf.GradientTape()) as tape`. Gradients are reduced
    in buckets. In a graph the reduction overlaps with the backward pass.

    Args:
        gradtape: the tape to wrap.
        device_dense: the device to reduce on, as for `tf.device`. Default: the gradients' device.
        device_sparse: another name for `device_dense`; used if `device_dense` is not given.
        compression: the wire format: `"none"`, `"fp16"`, `"bf16"`, `"int8"`, one of
            `hvd.Compression`, a `hvdkit.reduction.wire_format.WireFormat` such as `hvd.Int8()`, or
            a class with the interface of Horovod's compressors, which gets gradients one by one.
        sparse_as_dense: reduce `tf.IndexedSlices` as dense gradients. Otherwise gather their rows,
            and add up rows of the same index.
        op: `Average` or `Sum` over the ranks, or Horovod's `Adasum`, which reduces gradients one by
            one.
        gradient_predivide_factor: with `Average`, gradients are divided by this factor before the
            sum and by size / factor after the sum. 1.0, the default: the wire format decides.
        num_groups: older name for an integer `groups`; used if `groups` is None.
        groups: the number of buckets, or one list of variables for each bucket. None or 0: only
            `bucket_bytes` divides the gradients into buckets.
        process_set: the ranks to reduce over. On other ranks gradients are not reduced.
        scale_local_gradients: divide the gradients of local sources by the number of ranks, which
            keeps their ratio to averaged gradients.
        bucket_bytes: the largest size in bytes of a bucket with several gradients.
        check_parameters: compare the variables' values between ranks before the second reduction
            and some later ones. The first rank logs a difference as a warning. From the 171st
            reduction on, a difference is an error on every rank.
            Also compare the times that the ranks need, every 100 reductions, and log a rank that is
            slow.
        on_nonfinite: `"raise"`: if a rank's gradients contain NaN or infinity before the reduction,
            raise `NonFiniteGradients` on every rank; the error names the ranks and the variables.
            In a graph, the error is one of TensorFlow with the same text. `"ignore"`: do not check
            the gradients. A tape cannot skip a step, so there is no `"skip"`. Do not use `"raise"`
            for float16 with loss scaling, which expects infinity.

    Raises:
        UsageError: an argument is invalid, or arguments contradict each other. Nothing has been
            communicated.

    Example:
        with tf.GradientTape() as tape:
            loss = loss_of(model(batch))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
    """
    _check_arguments(gradtape, op, process_set)
    _check_nonfinite(on_nonfinite, op)
    bucketing.check_bucket_bytes(bucket_bytes)
    divisor = predivide(gradient_predivide_factor, op == mpi_ops.Average)
    resolved = wire_format(compression)
    if op == mpi_ops.Adasum:
        check_adasum(resolved)
    make_groups = _group_maker(groups if groups is not None else num_groups)

    def reduce(gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        if op == mpi_ops.Adasum:
            handled.note(sources)
            return _adasum(gradients, compression, sparse_as_dense)
        key = (
            compression,
            op == mpi_ops.Average,
            divisor,
            bucket_bytes,
            make_groups(sources),
            sparse_as_dense,
            process_set,
            check_parameters,
            on_nonfinite,
        )
        reducer = reducer_of(*key, trace_position(key))
        reduced = reducer(gradients, sources, check_parameters)
        in_trial = trial_of(reducer, reduced)
        return reduced if in_trial is None else in_trial.after_reduction(reduced)

    cls = type(gradtape)
    wrapped_class: type[_DistributedTape] = type(
        cls.__name__, (_DistributedTape, cls), {"__doc__": cls.__doc__}
    )
    wrapped = wrapped_class.__new__(wrapped_class)
    wrapped.__dict__.update(gradtape.__dict__)
    # The original tape may still be recording; the wrapped tape is not.
    wrapped._recording = False
    wrapped._reduce = reduce
    wrapped._op = op
    wrapped._device = device_dense or device_sparse or None
    wrapped._local_sources = {}
    wrapped.process_set = process_set
    wrapped.scale_local_gradients = scale_local_gradients
    return wrapped


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = mpi_ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    *,
    bucket_bytes: int = bucketing.BUCKET_BYTES,
    check_parameters: bool = True,
    on_nonfinite: str = IGNORE,
) -> Any:
    """Return a `DistributedGradientTape` that does not reduce the gradients of local layers.

    Args:
        local_layers: a built Keras layer or a list of them, whose weights differ between ranks.

    Raises:
        UsageError: an element of `local_layers` is not a Keras layer.
    """
    if local_layers is None:
        local_layers = ()
    elif isinstance(local_layers, keras.layers.Layer):
        local_layers = (local_layers,)
    for layer in local_layers:
        if not isinstance(layer, keras.layers.Layer):
            raise UsageError(
                f"local_layers contains a {type(layer).__name__}: expected Keras layers"
            )
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        bucket_bytes=bucket_bytes,
        check_parameters=check_parameters,
        on_nonfinite=on_nonfinite,
    )
    for layer in local_layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


class _DistributedTape(tf.GradientTape):
    """Mixin of `DistributedGradientTape` for a tape's class."""

    _reduce: Reduce
    _op: int
    _device: str | None
    #: `_identity` of a source -> the source. The dict keeps the sources alive, so that no other
    #: object gets the same id.
    _local_sources: dict[int, Any]
    process_set: mpi_ops.ProcessSet
    scale_local_gradients: bool

    def register_local_source(self, source: Any) -> None:
        """Exclude the variable `source` from the reduction."""
        self._local_sources[_identity(source)] = source
        handled.note([source])

    # No code here depends on tensors, so AutoGraph's conversion would only cost time.
    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,  # noqa: ARG002
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Compute gradients like the tape's own method, and reduce them over all ranks.

        A collective: every rank calls it for the same sources.

        Args:
            use_generic_names: for compatibility with Horovod; ignored, because names are the same
                on every rank.
        """
        computed = super().gradient(target, sources, output_gradients, unconnected_gradients)
        gradients = tf.nest.flatten(computed)
        flat = tf.nest.flatten(sources)
        # A repeated source is reduced once.
        shared = {
            _identity(source): k
            for k, source in enumerate(flat)
            if _identity(source) not in self._local_sources
        }
        indices = list(shared.values())
        if indices:
            with tf.device(self._device):
                reduced = self._reduce([gradients[k] for k in indices], [flat[k] for k in indices])
            by_tapes.note([flat[k] for k in indices], self.process_set.ranks)
            by_source = dict(zip(shared, reduced, strict=True))
            for k, source in enumerate(flat):
                gradients[k] = by_source.get(_identity(source), gradients[k])
        if self._local_sources and self.scale_local_gradients and self.process_set.included():
            for k, source in enumerate(flat):
                if _identity(source) in self._local_sources:
                    gradients[k] = _divided(gradients[k], self.process_set.size())
        return tf.nest.pack_sequence_as(sources, gradients)

    @tf.autograph.experimental.do_not_convert
    def jacobian(self, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
        """Compute a jacobian like the tape's own method, and reduce it over all ranks.

        With `op=hvd.Average`, the result is the jacobian of the mean of the ranks' targets. It is
        reduced in its own dtype. On several ranks, it is zero, not None, for sources that the
        target does not depend on.

        A collective: every rank calls it with a target of the same shape, for the same sources.
        """
        computed = tf.nest.flatten(self._plain().jacobian(target, sources, *args, **options))
        if not self.process_set.included() or self.process_set.size() == 1:
            return tf.nest.pack_sequence_as(sources, computed)
        flat = tf.nest.flatten(sources)
        shared = [s for s in flat if _identity(s) not in self._local_sources]
        handled.note(shared)
        by_tapes.note(shared, self.process_set.ranks)
        name = f"hvdkit.jacobian.{trace_position('jacobian')}"
        for k, source in enumerate(flat):
            if _identity(source) not in self._local_sources:
                computed[k] = self._allreduce(computed[k], target, source, f"{name}.{k}")
            elif self.scale_local_gradients:
                computed[k] = _divided(computed[k], self.process_set.size())
        return tf.nest.pack_sequence_as(sources, computed)

    def _allreduce(self, jacobian: Any, target: Any, source: Any, name: str) -> Any:
        with tf.device(self._device):
            if jacobian is None:
                shape = tf.concat([tf.shape(target), source.shape], 0)
                jacobian = tf.zeros(shape, target.dtype)
            return horovod.allreduce(
                jacobian,
                name=name,
                op=self._op,
                process_set=self.process_set,
                ignore_name_scope=True,
            )

    def batch_jacobian(self, *args: Any, **options: Any) -> Any:
        """Compute the jacobian of each sample of this rank's batch. Not reduced."""
        return self._plain().batch_jacobian(*args, **options)

    def _plain(self) -> Any:
        """Return this tape as one of its original class, whose `gradient` does not reduce."""
        cls: Any = type(self).__bases__[1]
        plain = cls.__new__(cls)
        # The same dict, because a tape that is not persistent forgets its recordings.
        plain.__dict__ = self.__dict__
        return plain

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Compute and reduce gradients like `gradient()`, and separate those of local sources.

        Returns:
            Two lists of (source, gradient) pairs: of the local sources, and of the other sources.
        """
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if _identity(pair[0]) in self._local_sources]
        others = [pair for pair in pairs if _identity(pair[0]) not in self._local_sources]
        return local, others


def _identity(source: Any) -> int:
    # A keras.Variable and its tf.Variable are the same source.
    variable = tf_variable_or_none(source)
    return id(source if variable is None else variable)


def _divided(gradient: Any, size: int) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(size, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size, gradient.dtype)


def _adasum(gradients: Sequence[Any], compression: Any, sparse_as_dense: bool) -> list[Any]:
    if isinstance(compression, str):
        compression = getattr(Compression, compression)
    if sparse_as_dense:
        gradients = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
    if mpi_ops.size() == 1:
        return list(gradients)
    return [
        None
        if gradient is None
        else horovod.allreduce(gradient, compression=compression, op=mpi_ops.Adasum)
        for gradient in gradients
    ]


def _group_maker(
    groups: int | Sequence[Sequence[Any]],
) -> Callable[[Sequence[Any]], tuple[tuple[int, ...], ...]]:
    """Return a function that maps sources to groups of their indices.

    Raises:
        UsageError: `groups` is invalid.
    """
    bucketing.check_groups(
        groups, "variables", _identity, lambda variable: getattr(variable, "name", variable)
    )
    if isinstance(groups, int):
        number = groups
        return lambda sources: tuple(map(tuple, bucketing.even_groups(len(sources), number)))
    members = [[_identity(variable) for variable in group] for group in groups]

    def look_up(sources: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        # A tape may be called for only some of a model's variables.
        index = {_identity(source): k for k, source in enumerate(sources)}
        found = (tuple(index[i] for i in group if i in index) for group in members)
        return tuple(group for group in found if group)

    return look_up


def _check_nonfinite(policy: str, op: int) -> None:
    check_policy(policy)
    if policy == SKIP:
        raise UsageError(
            "on_nonfinite is 'skip', but a tape cannot skip a step of the script: use 'raise', or "
            "hvd.DistributedOptimizer(optimizer, on_nonfinite='skip') and a plain tf.GradientTape"
        )
    if policy != IGNORE and op == mpi_ops.Adasum:
        raise UsageError("on_nonfinite is 'raise' with op=hvd.Adasum: use another op, or omit it")


def _check_arguments(gradtape: Any, op: int, process_set: mpi_ops.ProcessSet) -> None:
    if not isinstance(gradtape, tf.GradientTape):
        raise UsageError(f"gradtape is a {type(gradtape).__name__}: expected a tf.GradientTape")
    if isinstance(gradtape, _DistributedTape):
        raise UsageError("gradtape is a DistributedGradientTape already: wrap it once")
    if op not in (mpi_ops.Average, mpi_ops.Sum, mpi_ops.Adasum):
        raise UsageError(f"op is {op!r}: expected hvd.Average, hvd.Sum or hvd.Adasum")
    check_process_set(process_set)
    if not mpi_ops.is_initialized():
        raise UsageError("Horovod is not initialised: call hvd.init() before this")
    if op == mpi_ops.Adasum:
        if process_set is not mpi_ops.global_process_set:
            raise UsageError("op is hvd.Adasum, which needs all ranks: omit process_set")
        if mpi_ops.size() > 1 and not mpi_ops.mpi_enabled():
            raise UsageError(
                "op is hvd.Adasum, which Horovod implements over MPI only: start the job with "
                "mpirun, or use hvd.Average"
            )
