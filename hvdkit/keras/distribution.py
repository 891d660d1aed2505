"""Reduce and accumulate the gradients of a Keras optimizer in its `apply` method."""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras

from hvdkit.agreement.replicas import CheckSettings, ReplicaCheck
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.accumulation import AccumulationWindow, overwritten
from hvdkit.keras.fit.fit_call import fitted_model
from hvdkit.keras.replicas import has_begun, keras_replicas
from hvdkit.keras_variables.loss_scaling import innermost
from hvdkit.reduction import bucketing
from hvdkit.reduction.accumulation import check_passes
from hvdkit.reduction.nonfinite import IGNORE
from hvdkit.reduction.plan import Reduction
from hvdkit.training.stragglers import StragglerReport

_ATTRIBUTE = "_hvdkit_distribution"

# The ids of the variables that each `Distribution` is applying reduced gradients to, in `apply`.
_being_applied: "dict[Distribution, set[int]]" = {}

_used: "weakref.WeakKeyDictionary[Any, dict[Distribution, None]]" = weakref.WeakKeyDictionary()


class Distribution:
    """Reduce and accumulate the gradients of one optimizer.

    Attributes:
        reduction: the settings of the reduction.
        process_set: the ranks to reduce over.
        collectives: the `hvdkit.agreement.collectives.Collectives` of these ranks.
        accumulation_steps: batches per update.
        check_parameters: whether `fit` compares the variables' values between ranks.
        replicas: compares trained variables and the optimizer's variables every few batches.
        times: the time that this rank spends in each section of its steps, in `fit`.
        stragglers: compares `times` between the ranks every few batches.
        batches: the number of batches of distributed `fit` calls since the start.
        applied: whether the optimizer was given gradients, which it reduces.
        in_fit: True during a distributed `fit`, and after a `fit` that ended with an error.
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
        check_settings: CheckSettings,
        on_nonfinite: str,
    ) -> None:
        self._on_nonfinite = on_nonfinite
        bucketing.check_groups(groups, "variables", name=lambda v: getattr(v, "path", v))
        self.check_parameters = check_parameters
        self.in_fit = False
        self.process_set = process_set
        self.collectives = backend.collectives(process_set)
        self.check_settings = check_settings
        self.batches = 0
        self.exempt: set[int] = set()
        self.applied = False
        self.replicas = ReplicaCheck(
            self.collectives,
            check_settings,
            lambda: keras_replicas(
                [v for v in self.shared_variables if id(v) not in self.exempt], self._optimizer
            ),
            has_begun=lambda: has_begun(self._optimizer),
        )
        self.times = backend.step_times()
        self.stragglers = StragglerReport(self.collectives, self.times)
        self.accumulation_steps = accumulation_steps
        self.reduction = reduction
        self._groups = groups
        self._averaged = averaged
        self._scale_local = scale_local_gradients
        self._local: set[int] = set()
        self._reducer: Any = None
        self._reducer_state: Any = None
        self._window: AccumulationWindow | None = None
        self._update: Callable[..., None] = optimizer.apply
        self._model_in_step: Any = None
        self._wrapped = optimizer
        self.hook(optimizer)

    def hook(self, optimizer: Any) -> None:
        """Replace methods of an optimizer, to reduce gradients in `apply`.

        Also in `apply_gradients`, if the optimizer's class has its own, which may change gradients
        before it calls `apply`, or not call `apply`.

        Args:
            optimizer: the wrapped optimizer, or a `LossScaleOptimizer` around it. A
                `LossScaleOptimizer` needs reduced gradients, because it calls the inner optimizer
                only if the gradients are finite. If both optimizers are hooked, the first `apply`
                that runs reduces the gradients.

        Raises:
            UsageError: the optimizer scales the loss, and `on_nonfinite` checks gradients.
        """
        if self._on_nonfinite != IGNORE and isinstance(
            optimizer, keras.optimizers.LossScaleOptimizer
        ):
            raise UsageError(
                f"on_nonfinite is {self._on_nonfinite!r} with a LossScaleOptimizer, which Keras "
                f"adds for mixed_float16. A LossScaleOptimizer itself skips updates with NaN or "
                f"infinity, on all ranks: omit on_nonfinite"
            )
        self._optimizer = optimizer

        kind = type(optimizer)

        def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            update = functools.partial(kind.apply, optimizer)
            self._apply(optimizer, update, list(grads), trainable_variables)

        def apply_gradients(grads_and_vars: Any, *args: Any, **options: Any) -> Any:
            result = None

            def update(grads: Sequence[Any], variables: Sequence[Any]) -> None:
                nonlocal result
                pairs = zip(grads, variables, strict=True)
                result = kind.apply_gradients(optimizer, pairs, *args, **options)

            grads, variables = zip(*grads_and_vars, strict=True)
            self._apply(optimizer, update, list(grads), list(variables))
            # With a condition, a result in a graph exists in one branch only.
            conditional = self.accumulation_steps > 1 or self._on_nonfinite != IGNORE
            return optimizer.iterations if conditional else result

        def scale_loss(loss: Any) -> Any:
            self._expect_gradients()
            return kind.scale_loss(optimizer, loss)

        methods: list[Callable[..., Any]] = [apply, scale_loss]
        if kind.apply_gradients is not keras.optimizers.Optimizer.apply_gradients:
            methods.append(apply_gradients)
        for method in methods:
            method.__doc__ = getattr(kind, method.__name__).__doc__
            # Bypass Keras's `__setattr__`, which would search the value for variables.
            object.__setattr__(optimizer, method.__name__, method)
        object.__setattr__(optimizer, _ATTRIBUTE, self)

    @property
    def optimizer(self) -> Any:
        """The wrapped optimizer, or the `LossScaleOptimizer` around it."""
        return self._optimizer

    def keep_local(self, item: Any) -> None:
        """Keep a variable or a layer local to each rank.

        The gradient and the statistics of a variable are not reduced. The state of a layer that is
        not in variables is not compared.
        """
        self._local.add(id(item))

    def is_local(self, item: Any) -> bool:
        """Return whether a variable or a layer is local to each rank."""
        return id(item) in self._local

    @contextmanager
    def train_step_of(self, model: Any) -> Iterator[None]:
        """Return a context for a `train_step` that does not change gradients before `apply`.

        In this context, `scale_loss` prepares the reduction of each bucket during the backward
        pass.

        Args:
            model: the model, whose trainable variables get the gradients.
        """
        self._model_in_step = model
        try:
            yield
        finally:
            self._model_in_step = None

    def _expect_gradients(self) -> None:
        backend.begin_backward(self.times)
        if self._model_in_step is not None and self.accumulation_steps == 1:
            variables = self._shared(self._model_in_step.trainable_weights)
            backend.expect(self._get_reducer(variables), variables)

    def end_interrupted(self) -> None:
        """Complete the reduction of a backward pass that has raised; see `backend.expect`."""
        if self._reducer is not None:
            backend.end_interrupted(self._reducer)

    def _apply(
        self,
        optimizer: Any,
        update: Callable[..., None],
        gradients: list[Any],
        given: Sequence[Any] | None,
    ) -> None:
        """Reduce gradients and pass them to a method of the optimizer's class.

        Args:
            optimizer: the optimizer.
            update: the method; called with gradients and variables.
            gradients: the gradients of this rank.
            given: the variables; None for those that the optimizer was built with.
        """
        variables = optimizer._trainable_variables if given is None else list(given)
        if self in _being_applied or not variables or len(gradients) != len(variables):
            # The gradients are reduced already, or there are none, or Keras reports an error.
            update(gradients, given)
            return
        if being_applied(variables):
            kind = type(optimizer).__name__
            raise UsageError(
                f"an optimizer that is wrapped with hvd.DistributedOptimizer passes its reduced "
                f"gradients to another wrapped optimizer ({kind}), so they would be reduced twice: "
                f"wrap only one of the two"
            )
        self._optimizer, self._update = optimizer, update
        self.applied = True
        if (model := fitted_model()) is not None:
            used_by(model)[self] = None
        backend.check_no_strategy()
        if self.accumulation_steps == 1:
            self._apply_reduced(*self._reduce(gradients, variables), variables)
            return
        if not optimizer.built:
            with backend.outside_of_graphs():
                optimizer.build(variables)
        if self._window is None:
            self._window = AccumulationWindow(variables, self.accumulation_steps)
        window = self._window
        ordered = window.ordered(gradients, variables)
        with backend.after_backward(ordered):
            is_last_batch = window.is_last_batch
        # The branches contain the additions. In a graph the reduction of a bucket then depends only
        # on its own gradients, and overlaps with the rest of the backward pass.
        keras.ops.cond(
            is_last_batch,
            lambda: self._step(window.sums(ordered)),
            lambda: window.add(ordered),
        )

    def _apply_reduced(self, gradients: list[Any], skips: Any, variables: Sequence[Any]) -> None:
        """Update with reduced gradients of `variables`, unless all ranks skip the update.

        Args:
            skips: whether they do: a tensor in a graph.
        """
        optimizer = self._optimizer
        update = functools.partial(self._update, gradients, variables)
        _being_applied[self] = {id(v) for v in variables if not self.is_local(v)}
        try:
            if self._on_nonfinite == IGNORE:
                update()
                return
            if not optimizer.built:
                with backend.outside_of_graphs():
                    optimizer.build(variables)
            # `cond` is needed even if the policy is to raise an error. Without it, a graph could
            # change variables that do not depend on gradients, such as the number of steps, before
            # the error.
            keras.ops.cond(skips, lambda: None, update)
        finally:
            del _being_applied[self]

    def _step(self, sums: list[Any], scale: float = 1.0) -> None:
        """Clear the window, and apply its sums, times `scale`."""
        window = self._window
        assert window is not None
        # Begin the next window first. Otherwise this window would keep its gradients if the
        # reduction raises because they are not finite.
        window.clear()
        with backend.after_assignment(window.passes):
            reduced, skips = self._reduce(sums, window.variables)
        if scale != 1.0:
            reduced = [
                g if overwritten(v) else backend.scaled(g, scale)
                for g, v in zip(reduced, window.variables, strict=True)
            ]
        self._apply_reduced(reduced, skips, window.variables)

    def flush(self) -> bool:
        """Apply the accumulated gradients; see the function `flush`."""
        passes = self.window_passes
        check_passes(self.collectives, passes)
        if self._window is None or not passes:
            return False
        scale = self.accumulation_steps / passes if self._averaged else 1.0
        self._step(self._window.sums(), scale)
        return True

    def discard(self) -> None:
        """Discard the gradients accumulated since the last update. Not a collective."""
        if self._window is not None:
            self._window.clear()

    @property
    def window_passes(self) -> int:
        """The number of batches that have been accumulated since the last update."""
        return int(self._window.passes) if self._window else 0

    @property
    def updates(self) -> int:
        """The number of updates."""
        return int(self._optimizer.iterations)

    @property
    def local_variables(self) -> list[Any]:
        """The trainable variables that are local to each rank."""
        return [v for v in self._variables if self.is_local(v)]

    @property
    def shared_variables(self) -> list[Any]:
        """The trainable variables whose gradients are reduced; empty before the first batch."""
        return [v for v in self._variables if not self.is_local(v)]

    @property
    def gradient_bytes(self) -> int:
        """The size of the gradients that are reduced in a step, in bytes."""
        return sum(backend.bytes_of(variable) for variable in self.shared_variables)

    @property
    def _variables(self) -> list[Any]:
        # An optimizer around the wrapped one, which `hook` has got, may have no such list.
        return list(innermost(self._wrapped)._trainable_variables)

    def reduction_state(self) -> Any:
        """Return the state needed to resume with bit-identical sums."""
        return self._reducer_state if self._reducer is None else self._reducer.state()

    def restore_reduction_state(self, state: Any) -> None:
        """Restore a value of `reduction_state`, possibly in another process. Not a collective.

        Args:
            state: the value; None for the state before the first reduction.

        Gradients of an open accumulation window are discarded: they are from another state.
        """
        self.discard()
        self._reducer_state = state
        if self._reducer is not None:
            self._reducer.restore_state(state or ())

    @property
    def _divisor(self) -> int:
        """The number of batches by which the sum of an accumulation window is divided."""
        return self.accumulation_steps if self._averaged else 1

    def _shared(self, variables: Sequence[Any]) -> list[Any]:
        """Return the variables whose gradients are averaged or added up."""
        return [v for v in variables if not self.is_local(v) and not overwritten(v)]

    def _get_reducer(self, shared: Sequence[Any]) -> Any:
        """Return the reducer; the first call makes it.

        Args:
            shared: the variables whose gradients are reduced.
        """
        if self._reducer is None:
            self._reducer = backend.GradientReducer(
                replace(self.reduction, groups=self._group_indices(shared)),
                self.process_set,
                context=[
                    f"optimizer: {type(self._optimizer).__name__}",
                    f"on_nonfinite: {self._on_nonfinite}",
                ],
                passes=self._divisor,
                on_nonfinite=self._on_nonfinite,
                times=self.times,
            )
            if self._reducer_state is not None:
                self._reducer.restore_state(self._reducer_state)
        return self._reducer

    def _reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the reduced gradients, and whether all ranks skip the step."""
        shared = self._shared(variables)
        known = {id(v) for v in shared}
        indices = [k for k, v in enumerate(variables) if id(v) in known]
        reduced, skips = backend.reduce(
            self._get_reducer(shared), [gradients[k] for k in indices], shared
        )
        result = list(gradients)
        # The reducer divides only what it reduces.
        ranks = len(self.collectives.ranks) if self._scale_local else 1
        divisor = self._divisor * ranks
        if self._local and divisor > 1:
            factor = 1.0 / divisor
            result = [
                g if overwritten(v) else backend.scaled(g, factor)
                for g, v in zip(result, variables, strict=True)
            ]
        for k, gradient in zip(indices, reduced, strict=True):
            result[k] = gradient
        self._maximize(result, variables)
        return result, skips

    def _maximize(self, gradients: list[Any], variables: Sequence[Any]) -> None:
        """Replace new values of variables, see `overwritten`, by their maximum over the ranks."""
        indices = [k for k, v in enumerate(variables) if overwritten(v) and not self.is_local(v)]
        if not indices or self.collectives.single_rank:
            return
        # A rank that has not used a layer keeps the values.
        own = [variables[k].value if gradients[k] is None else gradients[k] for k in indices]
        largest = backend.maximum(own, "hvdkit.keras.maximum", self.process_set)
        for k, value in zip(indices, largest, strict=True):
            gradients[k] = value

    def _group_indices(self, shared: Sequence[Any]) -> list[list[int]]:
        if isinstance(self._groups, int):
            return bucketing.even_groups(len(shared), self._groups)
        index = {id(v): i for i, v in enumerate(shared)}
        unknown = [v for group in self._groups for v in group if id(v) not in index]
        if unknown:
            raise UsageError(
                f"groups contains {getattr(unknown[0], 'path', unknown[0])!r}: expected only "
                f"variables whose gradients are reduced"
            )
        return [[index[id(v)] for v in group] for group in self._groups]


def being_applied(variables: Sequence[Any]) -> bool:
    """Return whether a wrapped optimizer is applying reduced gradients to some variables."""
    return any(id(v) in applied for applied in _being_applied.values() for v in variables)


def used_by(model: Any) -> dict[Distribution, None]:
    """Return the `Distribution`s that `fit` has used since `compile`, also of global optimizers."""
    return _used.setdefault(model, {})


def distribution_of(optimizer: Any) -> Distribution | None:
    """Return the `Distribution` of `optimizer`; None if it is not wrapped."""
    return getattr(optimizer, _ATTRIBUTE, None)
