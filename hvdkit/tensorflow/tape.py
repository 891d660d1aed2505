"""Gradient tapes whose gradients are reduced over all ranks."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from horovod import tensorflow as horovod
from horovod.tensorflow import mpi_ops

from hvdkit.core import bucketing
from hvdkit.core.reduction import Reduction
from hvdkit.errors import UsageError
from hvdkit.tensorflow.compression import Compression, wire_format
from hvdkit.tensorflow.graphs import place
from hvdkit.tensorflow.reducer import GradientReducer
from hvdkit.tensorflow.variables import tf_variable_or_none

#: The gradients of variables, reduced.
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
) -> Any:
    """A tape whose `gradient()` gives the gradients of all ranks.

    It is an instance of the tape's own class and takes over what that has recorded; it may also
    record itself: `with hvd.DistributedGradientTape(tf.GradientTape()) as tape`. Gradients are
    reduced in buckets, in a graph while others are still being computed.

    Args:
        gradtape: the tape to wrap.
        device_dense: where to reduce, as for `tf.device`. Default: where the gradients are.
        device_sparse: the same; Horovod has two, only the first that is given counts.
        compression: what gradients travel as: `"none"`, `"fp16"`, `"bf16"`, the same of
            `hvd.Compression`, a `hvdkit.core.wire_format.WireFormat`, or a class like Horovod's
            compressors, which sees gradients one by one.
        sparse_as_dense: reduce `tf.IndexedSlices` as dense gradients. Otherwise their rows are
            gathered.
        op: `Average` or `Sum` over the ranks, or `Adasum`, Horovod's own, one by one.
        gradient_predivide_factor: with `Average`, gradients are divided by this before the sum
            and by size / this after it. Default: as suits the wire format.
        num_groups: older name of an integer `groups`.
        groups: reduce gradients in this many buckets, or in one for each of these lists of
            variables.
        process_set: the ranks to reduce over; on other ranks gradients stay as they are.
        scale_local_gradients: divide the gradients of sources that are registered as local by the
            number of ranks, which keeps their ratio to averaged ones.
        bucket_bytes: the largest bucket of several gradients.
        check_parameters: compare the variables' values between ranks before the second reduction
            and some later ones. If they differ, the first rank logs a warning, and from the 171st
            reduction on it is an error on every rank.

    Raises:
        UsageError: the arguments do not fit together; nothing has been communicated.

    Example:
        with tf.GradientTape() as tape:
            loss = loss_of(model(batch))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
    """
    _check_arguments(gradtape, op, gradient_predivide_factor, process_set)
    wire_format(compression)
    make_groups = _group_maker(groups if groups is not None else num_groups)
    predivide = None if gradient_predivide_factor == 1.0 else float(gradient_predivide_factor)

    def reduce(gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        if op == mpi_ops.Adasum:
            return _adasum(gradients, compression, sparse_as_dense)
        key = (
            compression,
            op == mpi_ops.Average,
            predivide,
            bucket_bytes,
            make_groups(sources),
            sparse_as_dense,
            process_set,
            check_parameters,
        )
        return _reducer(*key, place(key))(gradients, sources, check_parameters)

    cls = type(gradtape)
    wrapped_class: type[_DistributedTape] = type(
        cls.__name__, (_DistributedTape, cls), {"__doc__": cls.__doc__}
    )
    wrapped = wrapped_class.__new__(wrapped_class)
    wrapped.__dict__.update(gradtape.__dict__)
    # The one that records, if it still does, is the other.
    wrapped._recording = False
    wrapped._reduce = reduce
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
) -> Any:
    """A `DistributedGradientTape` that leaves the gradients of some layers to each rank.

    Args:
        local_layers: a Keras layer or several, built, whose weights belong to this rank alone.

    Raises:
        UsageError: one of them is no Keras layer.
    """
    if local_layers is None:
        local_layers = ()
    elif isinstance(local_layers, keras.layers.Layer):
        local_layers = (local_layers,)
    for layer in local_layers:
        if not isinstance(layer, keras.layers.Layer):
            raise UsageError(
                f"local_layers has a {type(layer).__name__} in it: expected Keras layers"
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
    )
    for layer in local_layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


class _DistributedTape(tf.GradientTape):
    """What `DistributedGradientTape` adds to a tape's class."""

    _reduce: Reduce
    _device: str | None
    #: By `_identity`; the sources themselves, so that no other gets the same.
    _local_sources: dict[int, Any]
    process_set: mpi_ops.ProcessSet
    scale_local_gradients: bool

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of `source`, a variable, to each rank."""
        self._local_sources[_identity(source)] = source

    # TensorFlow would rewrite what it calls as well, to find nothing that depends on tensors.
    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,  # noqa: ARG002
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """As the tape's own, with the gradients of all ranks.

        A collective: every rank calls it, for the same sources.

        Args:
            use_generic_names: accepted because Horovod's method has it; names never differ
                between ranks.
        """
        computed = super().gradient(target, sources, output_gradients, unconnected_gradients)
        gradients = tf.nest.flatten(computed)
        flat = tf.nest.flatten(sources)
        # A source that is given twice is reduced once.
        shared = {
            _identity(source): k
            for k, source in enumerate(flat)
            if _identity(source) not in self._local_sources
        }
        places = list(shared.values())
        if places:
            with tf.device(self._device):
                reduced = self._reduce([gradients[k] for k in places], [flat[k] for k in places])
            by_source = dict(zip(shared, reduced, strict=True))
            for k, source in enumerate(flat):
                gradients[k] = by_source.get(_identity(source), gradients[k])
        if self._local_sources and self.scale_local_gradients and self.process_set.included():
            for k, source in enumerate(flat):
                if _identity(source) in self._local_sources:
                    gradients[k] = _divided(gradients[k], self.process_set.size())
        return tf.nest.pack_sequence_as(sources, gradients)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """As `gradient()`.

        Returns:
            (source, gradient) of the sources that are registered as local, and of the others.
        """
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if _identity(pair[0]) in self._local_sources]
        others = [pair for pair in pairs if _identity(pair[0]) not in self._local_sources]
        return local, others


def _identity(source: Any) -> int:
    # A keras.Variable and the tf.Variable that it holds are the same source.
    variable = tf_variable_or_none(source)
    return id(source if variable is None else variable)


def _divided(gradient: Any, size: int) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(size, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size, gradient.dtype)


#: The reducers of this process's tapes by what they do, and the states of those to come.
_reducers: dict[str, GradientReducer] = {}
_saved_states: dict[str, Any] = {}


def reduction_state() -> dict[str, Any]:
    """What the wire formats of all tapes have learned; see `GradientReducer.state`."""
    return _saved_states | {key: reducer.state() for key, reducer in _reducers.items()}


def adopt_reduction_state(state: Mapping[str, Any]) -> None:
    """Go on with what `reduction_state` gave, maybe in another process of the same program."""
    _saved_states.clear()
    _saved_states.update(state)
    for key in _reducers.keys() & _saved_states.keys():
        _reducers[key].adopt_state(_saved_states.pop(key))


@functools.cache
def _reducer(
    compression: Any,
    average: bool,
    predivide: float | None,
    bucket_bytes: int,
    groups: tuple[tuple[int, ...], ...],
    sparse_as_dense: bool,
    process_set: mpi_ops.ProcessSet,
    check_parameters: bool,
    where: str,
) -> GradientReducer:
    """One for each place in a graph, because two may be at work at the same time."""
    # Kept, because a training loop makes a tape for every step.
    reduction = Reduction(
        format=wire_format(compression),
        average=average,
        predivide=predivide,
        bucket_bytes=bucket_bytes,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
    )
    context = ["DistributedGradientTape", f"check_parameters: {check_parameters}"]
    reducer = GradientReducer(reduction, process_set, context)
    key = "; ".join([*reduction.describe(), f"ranks: {process_set.ranks}", f"place: {where}"])
    # Two ways to say the same wire format make two reducers; only the first one's is kept then.
    if _reducers.setdefault(key, reducer) is reducer and key in _saved_states:
        reducer.adopt_state(_saved_states.pop(key))
    return reducer


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
    """Sources -> the groups of their places.

    Raises:
        UsageError: `groups` are none.
    """
    if isinstance(groups, int):
        if groups < 0:
            raise UsageError(f"groups is {groups}: expected 0 or more")
        wanted = groups

        def split(sources: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
            count = min(wanted, len(sources))
            bounds = [len(sources) * k // count for k in range(count + 1)] if count else []
            return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(bounds))

        return split
    if not all(isinstance(group, list | tuple) for group in groups):
        raise UsageError(
            f"groups is {groups!r}: expected a number, or a list of lists of variables"
        )
    members = [[_identity(variable) for variable in group] for group in groups]
    flat = [identity for group in members for identity in group]
    if len(set(flat)) < len(flat):
        raise UsageError("groups has a variable in it twice: expected each once at most")

    def look_up(sources: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        # Of a model's variables a tape may be asked for some only.
        place = {_identity(source): k for k, source in enumerate(sources)}
        found = (tuple(place[i] for i in group if i in place) for group in members)
        return tuple(group for group in found if group)

    return look_up


def _check_arguments(
    gradtape: Any, op: int, gradient_predivide_factor: float, process_set: mpi_ops.ProcessSet
) -> None:
    if not isinstance(gradtape, tf.GradientTape):
        raise UsageError(f"gradtape is a {type(gradtape).__name__}: expected a tf.GradientTape")
    if isinstance(gradtape, _DistributedTape):
        raise UsageError("gradtape is a DistributedGradientTape already: wrap it once")
    if op not in (mpi_ops.Average, mpi_ops.Sum, mpi_ops.Adasum):
        raise UsageError(f"op is {op!r}: expected hvd.Average, hvd.Sum or hvd.Adasum")
    if gradient_predivide_factor != 1.0 and op != mpi_ops.Average:
        raise UsageError(
            f"gradient_predivide_factor is {gradient_predivide_factor}, which divides an average "
            f"in two: use it with op=hvd.Average, or leave it out"
        )
    if gradient_predivide_factor <= 0:
        raise UsageError(
            f"gradient_predivide_factor is {gradient_predivide_factor}: expected more than 0"
        )
    if not mpi_ops.is_initialized():
        raise UsageError("Horovod is not initialised: call hvd.init() before this")
    if op == mpi_ops.Adasum:
        if process_set is not mpi_ops.global_process_set:
            raise UsageError("op is hvd.Adasum, which is for all ranks: leave process_set out")
        if mpi_ops.size() > 1 and not mpi_ops.mpi_enabled():
            raise UsageError(
                "op is hvd.Adasum, which Horovod implements over MPI only: start the job with "
                "mpirun, or use hvd.Average"
            )
