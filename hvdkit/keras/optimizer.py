"""Keras optimizers that apply the gradients of all ranks.

Keras 3 applies gradients in one place, `optimizer.apply`: from `fit`, from a `train_step` of one's
own and from a hand-written loop. That is where they are reduced. The optimizer stays what it is,
an instance of its own class with its own configuration; only this one method of this one object is
replaced. What is saved therefore opens without hvdkit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras

from hvdkit.core import bucketing
from hvdkit.core.accumulation import Window, check_passes
from hvdkit.core.reduction import Reduction
from hvdkit.errors import UsageError
from hvdkit.keras import backend

hvd = backend.hvd

_ATTRIBUTE = "_hvdkit_distribution"


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,  # noqa: ARG001
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = hvd.Average,
    *,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    accumulation_steps: int = 1,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    bucket_bytes: int = bucketing.BUCKET_BYTES,
    check_parameters: bool = True,
) -> Any:
    """Make `optimizer` apply the gradients of all ranks.

    The gradients are reduced before anything else happens to them: before clipping, before a
    `LossScaleOptimizer` looks whether they are finite. All ranks therefore take the same steps.

    Args:
        optimizer: an instance of any of `keras.optimizers`, also a `LossScaleOptimizer`.
        name: accepted because Horovod's function has it, as are `device_dense` and
            `device_sparse`: gradients are reduced where they are.
        compression: what gradients travel as: `"none"`, `"fp16"`, `"bf16"`, the same of
            `hvd.Compression`, a `hvdkit.core.wire_format.WireFormat`, or a class like Horovod's
            compressors, which sees gradients one by one.
        sparse_as_dense: reduce `tf.IndexedSlices` as dense gradients. Otherwise their rows are
            gathered.
        gradient_predivide_factor: with `Average`, gradients are divided by this before the sum
            and by size / this after it. Default: as suits the wire format.
        op: `Average` or `Sum` over the ranks.
        num_groups: older name of an integer `groups`.
        groups: reduce gradients in this many buckets, or in these lists of variables.
        accumulation_steps: batches per update. The optimizer sees the mean over ranks and
            batches; only the last batch of a window communicates, and in between `apply` does
            nothing but add. `fit` ends a window that an epoch has cut short with the mean over the
            batches that there were; in a loop of your own, `hvd.flush(optimizer)` does.
        backward_passes_per_step: as `accumulation_steps`, with Horovod's meaning: the sum over
            the passes, unless `average_aggregated_gradients`.
        process_set: the ranks to reduce over; on other ranks `apply` is a local one.
        scale_local_gradients: divide what `PartialDistributedOptimizer` does not reduce by the
            number of ranks.
        bucket_bytes: the largest bucket of several gradients, in bytes.
        check_parameters: compare the variables' values between ranks after the first batch of each
            `fit`, and raise on every rank if they differ.

    Arguments after `op` are keyword-only: `horovod.keras` and `horovod.tensorflow.keras` have
    different ones there.

    Returns:
        `optimizer` itself.

    Raises:
        UsageError: it cannot be wrapped, or the settings contradict each other.
    """
    passes, averaged = _passes(
        accumulation_steps, backward_passes_per_step, average_aggregated_gradients
    )
    _check_optimizer(optimizer, passes)
    if op not in (hvd.Average, hvd.Sum):
        raise UsageError(f"op is {op!r}: expected hvd.Average or hvd.Sum")
    if not hvd.is_initialized():
        raise UsageError("Horovod is not initialised: call hvd.init() before this")
    if gradient_predivide_factor != 1.0 and op != hvd.Average:
        raise UsageError(
            f"gradient_predivide_factor is {gradient_predivide_factor}, which divides an average "
            f"in two parts, and op is hvd.Sum"
        )
    Distribution(
        optimizer,
        Reduction(
            format=backend.wire_format(compression),
            average=op == hvd.Average,
            predivide=None if gradient_predivide_factor == 1.0 else gradient_predivide_factor,
            bucket_bytes=bucket_bytes,
            sparse_as_dense=sparse_as_dense,
        ),
        process_set,
        groups=groups if groups is not None else num_groups,
        accumulation_steps=passes,
        averaged=averaged,
        scale_local_gradients=scale_local_gradients,
        check_parameters=check_parameters,
    )
    return optimizer


def PartialDistributedOptimizer(
    optimizer: Any,
    *args: Any,
    local_layers: Any = None,
    **options: Any,
) -> Any:
    """`DistributedOptimizer`, except that the weights of some layers are each rank's own.

    Args:
        optimizer: as for `DistributedOptimizer`, which takes the other arguments, too.
        local_layers: a layer or layers, built, whose gradients are not reduced.

    Raises:
        UsageError: as for `DistributedOptimizer`, or they are no layers.
    """
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else local_layers or []
    if not all(isinstance(layer, keras.layers.Layer) for layer in layers):
        raise UsageError(f"local_layers is {local_layers!r}: expected Keras layers")
    wrapped = DistributedOptimizer(optimizer, *args, **options)
    distribution = distribution_of(wrapped)
    assert distribution is not None
    for layer in layers:
        for variable in layer.variables:
            distribution.keep_local(variable)
    return wrapped


def flush(optimizer: Any) -> bool:
    """End a window of accumulation that has been cut short, for instance with the data.

    A collective, whether or not there is anything to do: every rank calls it, outside of
    `tf.function`. The gradient is the mean over the batches that there were.

    Returns:
        Whether there was anything to apply.

    Raises:
        PassesDiffer: on every rank, when they have accumulated different numbers of batches.
        UsageError: the optimizer is not a `DistributedOptimizer`.
    """
    distribution = distribution_of(optimizer)
    if distribution is None:
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__} that is not wrapped: expected what "
            f"hvd.DistributedOptimizer returned"
        )
    return distribution.flush()


def distribution_of(optimizer: Any) -> "Distribution | None":
    """How `optimizer` reduces; None where it does not."""
    return getattr(optimizer, _ATTRIBUTE, None)


def _passes(accumulation: int, passes: int, averaged: bool) -> tuple[int, bool]:
    """Batches per update, and whether their gradients are averaged."""
    if accumulation != 1 and passes != 1:
        raise UsageError(
            f"accumulation_steps is {accumulation} and backward_passes_per_step {passes}: the one "
            f"averages over passes, the other sums; use one of the two"
        )
    if not isinstance(passes, int) or passes < 1:
        raise UsageError(f"backward_passes_per_step is {passes!r}: expected an integer >= 1")
    # Which refuses what is no whole number.
    return (passes, averaged) if passes > 1 else (Window(accumulation).size, True)


def _check_optimizer(optimizer: Any, passes: int) -> None:
    kind = type(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"optimizer is {optimizer!r}: expected an instance, such as "
            f"keras.optimizers.get({optimizer!r})"
            if isinstance(optimizer, str)
            else f"optimizer is a {kind.__module__}.{kind.__qualname__}: expected an instance of "
            f"keras.optimizers.Optimizer (of Keras {keras.__version__}; tf_keras is another "
            f"library, whose optimizers can be used with hvdkit.tensorflow's "
            f"DistributedGradientTape)"
        )
    inner = getattr(optimizer, "inner_optimizer", None)
    if distribution_of(optimizer) is not None or distribution_of(inner) is not None:
        raise UsageError(
            "the optimizer is a DistributedOptimizer already: wrap the plain one, once"
        )
    own = getattr(inner or optimizer, "gradient_accumulation_steps", None)
    if own and passes > 1:
        raise UsageError(
            f"the optimizer has gradient_accumulation_steps {own}, and {passes} batches per update "
            f"are asked for here: use accumulation_steps alone, which communicates once per update "
            f"and not for every batch"
        )
    backend.check_no_strategy()


class Distribution:
    """Reduces and accumulates the gradients of an optimizer.

    Attributes:
        process_set: the ranks that it reduces over.
        collectives: core's, of these ranks.
        accumulation_steps: batches per update.
        check_parameters: `fit` compares the variables' values between ranks.
        in_fit: whether a coordinated `fit` has begun, and has not ended without an error.
    """

    def __init__(
        self,
        optimizer: Any,
        reduction: Reduction,
        process_set: Any,
        *,
        groups: int | Sequence[Sequence[Any]],
        accumulation_steps: int,
        averaged: bool,
        scale_local_gradients: bool,
        check_parameters: bool,
    ) -> None:
        self.check_parameters = check_parameters
        self.in_fit = False
        self.process_set = process_set
        self.collectives = backend.collectives(process_set)
        self.accumulation_steps = accumulation_steps
        self._reduction = reduction
        self._groups = groups
        self._averaged = averaged
        self._scale_local = scale_local_gradients
        self._local: set[int] = set()
        self._reducer: Any = None
        self._reducer_state: Any = None
        self._window: _Window | None = None
        self._applying = False
        self._model_in_step: Any = None
        self.hook(optimizer)

    def hook(self, optimizer: Any) -> None:
        """Reduce gradients where `optimizer` applies them.

        Args:
            optimizer: the wrapped one, or one around it, such as a `LossScaleOptimizer`, which
                decides by the gradients whether it calls the inner one, and must see reduced ones.
                Where both are hooked, the one that is called first reduces.
        """
        self._optimizer = optimizer

        def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            self._apply(optimizer, list(grads), trainable_variables)

        def scale_loss(loss: Any) -> Any:
            self._expect_gradients()
            return type(optimizer).scale_loss(optimizer, loss)

        for method in (apply, scale_loss):
            method.__doc__ = getattr(type(optimizer), method.__name__).__doc__
            # Past Keras, which would look for variables in them.
            object.__setattr__(optimizer, method.__name__, method)
        object.__setattr__(optimizer, _ATTRIBUTE, self)

    def keep_local(self, variable: Any) -> None:
        """Leave a variable to each rank: its gradient, or its moving statistics."""
        self._local.add(id(variable))

    def is_local(self, variable: Any) -> bool:
        """Return whether each rank has the variable for itself."""
        return id(variable) in self._local

    @contextmanager
    def in_step_of(self, model: Any) -> Iterator[None]:
        """Within it, gradients are applied as the backward pass after `scale_loss` leaves them.

        Args:
            model: the gradients are those of its trainable variables.
        """
        self._model_in_step = model
        try:
            yield
        finally:
            self._model_in_step = None

    def _expect_gradients(self) -> None:
        if self._model_in_step is not None and self.accumulation_steps == 1:
            variables = self._shared(self._model_in_step.trainable_weights)
            backend.expect(self._get_reducer(variables), variables)

    def end_interrupted(self) -> None:
        """Complete a reduction that a backward pass has begun which raised; see `expect`."""
        if self._reducer is not None:
            backend.end_interrupted(self._reducer)

    def _apply(self, optimizer: Any, gradients: list[Any], given: Sequence[Any] | None) -> None:
        variables = optimizer._trainable_variables if given is None else list(given)
        if self._applying or not variables or len(gradients) != len(variables):
            # Reduced already, or nothing, or Keras's to complain about.
            type(optimizer).apply(optimizer, gradients, given)
            return
        self._optimizer = optimizer
        backend.check_no_strategy()
        if self.accumulation_steps == 1:
            self._apply_reduced(self._reduce(gradients, variables), variables)
            return
        if not optimizer.built:
            with backend.outside_of_graphs():
                optimizer.build(variables)
        if self._window is None:
            self._window = _Window(variables, self.accumulation_steps)
        window = self._window
        placed = window.placed(gradients, variables)
        # What is added is added in the branches: so in a graph nothing but its own gradients stands
        # before the reduction of a bucket, and it runs beside the rest of the backward pass.
        keras.ops.cond(
            window.one_missing,
            lambda: self._step(window.sums(placed)),
            lambda: window.add(placed),
        )

    def _apply_reduced(self, gradients: list[Any], variables: Sequence[Any]) -> None:
        optimizer = self._optimizer
        self._applying = True
        try:
            type(optimizer).apply(optimizer, gradients, variables)
        finally:
            self._applying = False

    def _step(self, sums: list[Any], scale: float = 1.0) -> None:
        """Apply the sums of a window, times `scale`; the next window begins."""
        window = self._window
        assert window is not None
        reduced = self._reduce(sums, window.variables)
        if scale != 1.0:
            reduced = [backend.scaled(g, scale) for g in reduced]
        self._apply_reduced(reduced, window.variables)
        # Last, because what has been reduced may lie in the same memory.
        window.clear()

    def flush(self) -> bool:
        """Apply what has been accumulated; see the function `flush`."""
        passes = int(self._window.passes) if self._window else 0
        check_passes(self.collectives, passes)
        if self._window is None or not passes:
            return False
        scale = self.accumulation_steps / passes if self._averaged else 1.0
        self._step(self._window.sums(), scale)
        return True

    def discard(self) -> None:
        """Forget what has been accumulated since the last update. No collective."""
        if self._window is not None:
            self._window.clear()

    @property
    def window_open(self) -> bool:
        """Whether batches have been accumulated that no update has used yet."""
        return self._window is not None and int(self._window.passes) > 0

    @property
    def local_variables(self) -> list[Any]:
        """The trainable variables that each rank has for itself."""
        return [v for v in self._variables if self.is_local(v)]

    @property
    def shared_variables(self) -> list[Any]:
        """The trainable variables whose gradients are reduced; none before the first batch."""
        return [v for v in self._variables if not self.is_local(v)]

    @property
    def _variables(self) -> list[Any]:
        optimizer = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        return list(optimizer._trainable_variables)

    def reduction_state(self) -> Any:
        """What must be the same for sums to be the same once more; for a checkpoint."""
        return self._reducer_state if self._reducer is None else self._reducer.state()

    def adopt_reduction_state(self, state: Any) -> None:
        """Go on with what `reduction_state` gave, maybe in another process. No collective."""
        self._reducer_state = state
        if self._reducer is not None and state is not None:
            self._reducer.adopt_state(state)

    def _shared(self, variables: Sequence[Any]) -> list[Any]:
        return [v for v in variables if not self.is_local(v)]

    def _get_reducer(self, shared: Sequence[Any]) -> Any:
        """Return the reducer; the first call decides on the groups.

        Args:
            shared: the variables whose gradients it reduces.
        """
        if self._reducer is None:
            self._reducer = backend.GradientReducer(
                replace(self._reduction, groups=self._group_indices(shared)),
                self.process_set,
                context=[f"optimizer: {type(self._optimizer).__name__}"],
                passes=self.accumulation_steps if self._averaged else 1,
            )
            if self._reducer_state is not None:
                self._reducer.adopt_state(self._reducer_state)
        return self._reducer

    def _reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        shared = self._shared(variables)
        places = [k for k, v in enumerate(variables) if not self.is_local(v)]
        reduced = backend.reduce(self._get_reducer(shared), [gradients[k] for k in places], shared)
        result = list(gradients)
        if self._local and self._scale_local:
            share = 1.0 / len(self.collectives.ranks)
            result = [backend.scaled(g, share) for g in result]
        for k, gradient in zip(places, reduced, strict=True):
            result[k] = gradient
        return result

    def _group_indices(self, shared: Sequence[Any]) -> list[list[int]]:
        if isinstance(self._groups, int):
            return bucketing.even_groups(len(shared), self._groups)
        index = {id(v): i for i, v in enumerate(shared)}
        unknown = [v for group in self._groups for v in group if id(v) not in index]
        if unknown:
            raise UsageError(
                f"groups has {getattr(unknown[0], 'path', unknown[0])!r}, which is not one of the "
                f"variables that are reduced"
            )
        return [[index[id(v)] for v in group] for group in self._groups]


class _Window:
    """The sums of gradients since the last update.

    Attributes:
        variables: what they are the gradients of.
        passes: how many batches are in them; a variable, because a graph counts it.
    """

    def __init__(self, variables: Sequence[Any], size: int) -> None:
        self.variables = list(variables)
        self._size = size
        self._places = {id(variable): k for k, variable in enumerate(variables)}
        self._seen = [False] * len(self.variables)
        with backend.outside_of_graphs():
            self.passes = keras.Variable(0, dtype="int32", trainable=False)
            self._sums = [
                keras.Variable("zeros", shape=v.shape, dtype=v.dtype, trainable=False)
                for v in variables
            ]

    def placed(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """A batch's gradients in the order of the window's variables; None where there is none."""
        placed: list[Any] = [None] * len(self.variables)
        for gradient, variable in zip(gradients, variables, strict=True):
            k = self._places.get(id(variable))
            if k is None:
                raise UsageError(
                    f"{variable.path!r} was not among the variables of the first batch: with "
                    f"accumulation_steps all batches must be about the same ones"
                )
            if gradient is not None:
                self._seen[k] = True
                placed[k] = gradient
        return placed

    def add(self, placed: Sequence[Any]) -> None:
        """One batch's gradients, as `placed` returns them."""
        for total, gradient in zip(self._sums, placed, strict=True):
            if gradient is not None:
                total.assign_add(backend.dense(gradient))
        self.passes.assign_add(1)

    @property
    def one_missing(self) -> Any:
        """Whether the update is due with the next batch."""
        return keras.ops.equal(self.passes, self._size - 1)

    def sums(self, placed: Sequence[Any] | None = None) -> list[Any]:
        """The sums, with `placed` added to them; None where no gradient ever came.

        Args:
            placed: a batch's gradients, as the method of this name returns them.
        """
        sums: list[Any] = [
            keras.ops.convert_to_tensor(total) if seen else None
            for total, seen in zip(self._sums, self._seen, strict=True)
        ]
        for k, gradient in enumerate(placed or ()):
            if gradient is not None:
                sums[k] = sums[k] + backend.dense(gradient)
        return sums

    def clear(self) -> None:
        """The next window begins."""
        for total in self._sums:
            total.assign(keras.ops.zeros_like(total))
        self.passes.assign(0)
