"""An optimizer of a simulated rank: `Rounds`, with gradients that are numpy arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdkit.core.accumulation import Window
from hvdkit.core.bucketing import ParameterSpec
from hvdkit.core.compression import NoCompression
from hvdkit.core.coordination import Coordinator
from hvdkit.core.reduction import Reduction
from hvdkit.core.rounds import Rounds
from hvdkit.core.synchronizer import Synchronizer
from hvdkit.errors import HvdkitError
from tests.core.simulated_framework import NumpyBackend, Rows
from tests.core.simulated_ranks import SimulatedCollectives


@dataclass(eq=False)
class Parameter:
    """A parameter without a value: only its gradient."""

    name: str
    shape: tuple[int, ...] = (2,)
    dtype: str = "float64"
    requires_grad: bool = True
    gradient: Any = None

    @property
    def spec(self) -> ParameterSpec:
        itemsize = np.dtype(self.dtype).itemsize
        return ParameterSpec(self.name, self.shape, self.dtype, itemsize, "cpu")


class _GradientsOf:
    """The gradients of `parameters`, by index."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters

    def __getitem__(self, i: int) -> Any:
        return self._parameters[i].gradient

    def __setitem__(self, i: int, gradient: Any) -> None:
        self._parameters[i].gradient = gradient


class _Backend(NumpyBackend):
    """A backend that records which gradients have been sparse."""

    def __init__(self, collectives: SimulatedCollectives, parameters: Sequence[Parameter]) -> None:
        super().__init__(collectives, [p.spec for p in parameters])
        self.gradients = _GradientsOf(parameters)  # type: ignore[assignment]
        self.sparse_seen = [0] * len(parameters)

    def sparse_dims(self, i: int) -> int:
        self.sparse_seen[i] = max(self.sparse_seen[i], super().sparse_dims(i))
        return self.sparse_seen[i]


def copied(gradient: Any) -> Any:
    """Return the gradient in new memory."""
    if isinstance(gradient, Rows):
        return Rows(gradient.indices.copy(), gradient.values.copy())
    return None if gradient is None else gradient.copy()


def added(a: Any, b: Any, shape: Sequence[int]) -> Any:
    """Return the sum of two gradients, sparse if both are."""
    if isinstance(a, Rows) and isinstance(b, Rows):
        return Rows(np.concatenate([a.indices, b.indices]), np.concatenate([a.values, b.values]))
    dense = [each.dense(shape) if isinstance(each, Rows) else each for each in (a, b)]
    return dense[0] + dense[1]


def same(a: Any, b: Any) -> bool:
    """Return whether two gradients are equal."""
    if isinstance(a, Rows) and isinstance(b, Rows):
        return np.array_equal(a.indices, b.indices) and np.array_equal(a.values, b.values)
    return np.array_equal(a, b)


class SimulatedGradients:
    """`hvdkit.core.rounds.LocalGradients` of some parameters.

    Attributes:
        synchronizers: one for the parameters at the start, and one for each set of later ones.
        invalid_reason: why the gradients cannot be used.
    """

    invalid_reason = ""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        collectives: SimulatedCollectives,
        reduction: Reduction,
        window: Window,
    ) -> None:
        self._all = parameters
        self._collectives = collectives
        self._reduction = reduction
        self._window = window
        self.synchronizers: list[Synchronizer[Any, Any]] = []
        self.backends: list[_Backend] = []
        self.numbers: dict[Parameter, int] = {}
        self._planned: list[Parameter] = []
        self._parts: list[list[Parameter]] = []
        self._dtypes: list[list[str]] = []
        self._left: list[tuple[Any, Any]] = []
        self._new: set[int] = set()
        self._aside: dict[int, Any] = {}
        self._in_round = False
        self.plan_new_parameters()

    def plan_new_parameters(self) -> bool:
        new = [p for p in self._all if p.requires_grad and p not in self.numbers]
        if not new and self.synchronizers:
            return False
        for p in new:
            self.numbers[p] = len(self._planned)
            self._planned.append(p)
            self._left.append((None, None))
        self._plan(new)
        return True

    def _plan(self, part: list[Parameter]) -> None:
        self._parts.append(part)
        self._dtypes.append([p.dtype for p in part])
        backend = _Backend(self._collectives, part)
        self.backends.append(backend)
        self.synchronizers.append(
            Synchronizer(backend.specs, backend, self._collectives, self._reduction, self._window)
        )

    def plan_outdated(self) -> bool:
        return [[p.dtype for p in part] for part in self._parts] != self._dtypes

    def replan(self) -> None:
        parts = list(self._parts)
        for made in (self.synchronizers, self.backends, self._parts, self._dtypes):
            made.clear()
        for part in parts:
            self._plan(part)

    def before(self, number: int, assigned: bool) -> None:
        """Store a reduced gradient as base before a pass adds to it."""
        p = self._planned[number]
        if p.gradient is None:
            self._aside.pop(number, None)
        elif number not in self._new and self._is_reduced(number, assigned):
            self._set_aside(number)

    def arrived(self, number: int) -> None:
        """Record that a gradient has been added to."""
        self._new.add(number)

    def mark_ready(self, number: int) -> None:
        """Tell the synchronizer that a gradient is complete."""
        p = self._planned[number]
        (k,) = (k for k, part in enumerate(self._parts) if p in part)
        self.synchronizers[k].mark_ready(self._parts[k].index(p))

    def _is_reduced(self, number: int, assigned: bool) -> bool:
        return self._planned[number].gradient is self._left[number][0] or not assigned

    def _set_aside(self, number: int) -> None:
        p = self._planned[number]
        self._aside[number], p.gradient = copied(p.gradient), None

    def signature(self, assigned: bool) -> Sequence[object]:
        return [p.requires_grad for p in self._all], self._reduced(assigned)

    def _reduced(self, assigned: bool) -> list[int]:
        return [
            number
            for number, p in enumerate(self._planned)
            if number in self._aside
            or (
                not self._in_round
                and number not in self._new
                and p.gradient is not None
                and self._is_reduced(number, assigned)
            )
        ]

    def has_reduced(self, assigned: bool) -> bool:
        return bool(self._reduced(assigned))

    def describe(self) -> str:
        needing = sum(p.requires_grad for p in self._all)
        held = {p for p in self._all if p.gradient is not None}
        held.update(self._planned[number] for number in self._aside)
        return f"{needing} parameters need gradients, {len(held)} have one"

    def all_removed(self) -> bool:
        left = [
            p
            for p, (gradient, _) in zip(self._planned, self._left, strict=True)
            if gradient is not None
        ]
        return bool(left) and all(p.gradient is None for p in left)

    def has_unreduced(self, assigned: bool) -> bool:
        return bool(self._new) or any(
            p.gradient is not None and not self._is_reduced(number, assigned)
            for number, p in enumerate(self._planned)
        )

    def written_before_pass(self) -> bool:
        return False

    def changed_since_round(self) -> bool:
        for number, (gradient, values) in enumerate(self._left):
            if number in self._aside:
                if not same(self._aside[number], values):
                    return True
            elif values is not None:
                current = self._planned[number].gradient
                if current is not gradient or not same(current, values):
                    return True
        return False

    def begin_round(self, assigned: bool) -> None:
        for number, p in enumerate(self._planned):
            if number in self._new or p.gradient is None:
                continue
            if self._is_reduced(number, assigned):
                self._set_aside(number)
            else:
                self._new.add(number)
        self._in_round = True

    def _add_bases(self) -> None:
        for number, before in self._aside.items():
            p = self._planned[number]
            p.gradient = before if p.gradient is None else added(p.gradient, before, p.shape)
        self._aside.clear()

    def end_round(self) -> None:
        self._add_bases()
        self._new.clear()
        self._in_round = False
        self._left = [(p.gradient, copied(p.gradient)) for p in self._planned]

    def are_equal(self, assigned: bool) -> bool:
        held = set(self._reduced(assigned))
        reduced = [
            self._aside.get(number, p.gradient) if number in held else None
            for number, p in enumerate(self._planned)
        ]
        own = [
            each.dense(p.shape) if isinstance(each, Rows) else each
            for p, each in zip(self._planned, reduced, strict=True)
        ]
        text = repr([None if each is None else each.tolist() for each in own])
        return len(set(self._collectives.allgather(text.encode(), "equal"))) == 1

    def mark_changed_unreduced(self) -> None:
        self._add_bases()
        for number, p in enumerate(self._planned):
            if p.gradient is not None:
                self._new.add(number)

    def end_step(self) -> None:
        for number, p in enumerate(self._planned):
            if number not in self._new and number not in self._aside:
                self._left[number] = p.gradient, copied(p.gradient)

    def needs_sparse_bucket(self) -> bool:
        for synchronizer, backend in zip(self.synchronizers, self.backends, strict=True):
            if synchronizer.plan is None or self._reduction.sparse_as_dense:
                continue
            for bucket in synchronizer.plan.buckets:
                if not bucket.sparse_dims and any(map(backend.sparse_dims, bucket.parameters)):
                    return True
        return False

    def make_sparse(self) -> None:
        for k, (synchronizer, backend) in enumerate(
            zip(self.synchronizers, self.backends, strict=True)
        ):
            backend.sparse_seen = self._collectives.max(backend.sparse_seen, f"sparse.{k}")
            for i, dims in enumerate(backend.sparse_seen):
                gradient = backend.gradients[i]
                if dims and isinstance(gradient, np.ndarray):
                    backend.gradients[i] = Rows(np.arange(len(gradient)), gradient)
            if any(backend.sparse_seen):
                synchronizer.forget()

    def scale(self, factor: float) -> None:
        for number in self._new:
            p = self._planned[number]
            if isinstance(p.gradient, Rows):
                p.gradient.values *= factor
            elif p.gradient is not None:
                p.gradient *= factor

    def check_written(self, assigned: bool) -> None:
        pass

    def nonfinite(self) -> list[str]:
        return []

    def is_busy(self) -> bool:
        return False

    def invalidate(self, reason: str) -> None:
        self.invalid_reason = reason
        self._window.close()
        self.discard()

    def discard(self) -> None:
        """Drop the bases and unreduced parts."""
        self._aside.clear()
        self._new.clear()
        self._in_round = False
        self._left = [(None, None)] * len(self._planned)

    def used_parameters(self) -> Sequence[int]:
        if not self._reduction.find_unused:
            return ()
        return [
            int(p.gradient is not None or number in self._aside)
            for number, p in enumerate(self._planned)
        ]

    def drop_unused(self, used: Sequence[int]) -> None:
        for p, count in zip(self._planned, used, strict=False):
            if not count:
                p.gradient = None


class SimulatedOptimizer:
    """Make backward passes and steps on one simulated rank.

    Args:
        collectives: the rank's collectives.
        count: the number of parameters, named `p0` and so on; two fill a bucket.
        window: the accumulation window.
        compare: see `Rounds`.
        coordinator: the coordinator of all optimizers of the rank; None for a new one.
        how: settings of `Reduction`.

    Attributes:
        parameters: the parameters, which tests may change.
        stepped: the dense gradients of each step.
    """

    def __init__(
        self,
        collectives: SimulatedCollectives,
        count: int = 4,
        window: Window | None = None,
        compare: Callable[[], None] | None = None,
        parameters: Sequence[Parameter] | None = None,
        coordinator: Coordinator | None = None,
        **how: Any,
    ) -> None:
        self.collectives = collectives
        self.parameters = list(parameters or [Parameter(f"p{i}") for i in range(count)])
        self.window = window or Window(1)
        reduction = replace(Reduction(NoCompression(), bucket_bytes=32), **how)
        self.gradients = SimulatedGradients(self.parameters, collectives, reduction, self.window)
        self.rounds = Rounds(collectives, self.gradients, self.window, compare)
        self.coordinator = coordinator or Coordinator(collectives)
        self.coordinator.add(self)
        self.stepped: list[list[Any]] = []

    def backward(
        self,
        values: float | Mapping[int, Any],
        no_sync: bool = False,
        fails: bool = False,
    ) -> None:
        """Make a backward pass.

        Args:
            values: the gradient, or parameter -> its gradient.
            no_sync: whether the pass is under `hvd.no_sync`.
            fails: whether the pass raises after half of its gradients.
        """
        if self.accumulate(values, no_sync, fails):
            entry = self.coordinator.send([self.rounds], [self.rounds] if fails else ())
            self.coordinator.wait(entry)

    def accumulate(
        self, values: float | Mapping[int, Any], no_sync: bool = False, fails: bool = False
    ) -> bool:
        """Add the gradients of a backward pass; return whether to reduce them now.

        Takes the arguments of `backward`.
        """
        window = self.window
        if not no_sync and not window.mean and window.complete:
            raise HvdkitError("a pass too many")
        local = no_sync or not window.next_pass_reduces
        plan_outdated = not local and self.rounds.plan_outdated
        if not isinstance(values, Mapping):
            values = dict.fromkeys(range(len(self.parameters)), values)
        arriving = sorted((i for i in values if self.parameters[i].requires_grad), reverse=True)
        for i in arriving[: len(arriving) // 2] if fails else arriving:
            self._accumulate(self.parameters[i], values[i], ready=not local and not plan_outdated)
        if window.size > 1 and not no_sync and not fails:
            window.count_pass()
        return not local

    def _accumulate(self, p: Parameter, value: Any, ready: bool) -> None:
        number = self.gradients.numbers.get(p)
        if number is not None:
            self.gradients.before(number, assigned=not self.rounds.participated)
        value = value if isinstance(value, Rows) else np.full(p.shape, value, p.dtype)
        if p.gradient is None:
            p.gradient = copied(value)
        else:
            p.gradient = added(p.gradient, value, p.shape)
        if number is not None:
            self.gradients.arrived(number)
            if ready:
                self.gradients.mark_ready(number)

    def synchronize(self) -> None:
        """Reduce all gradients."""
        self.coordinator.reduce_at_step(self.rounds)

    def step(self) -> None:
        """Reduce all gradients and record them as a step, unless more passes must come."""
        if self.window.open:
            self.window.count_call()
            return
        self.synchronize()
        self.stepped.append(self.dense)
        self.rounds.end_step()
        self.window.close()

    def flush(self) -> bool:
        """End a window early; return whether that made a step."""
        self.window.end_early()
        self.coordinator.enter_rounds_of_others(self.rounds)
        ended = self.window.end_early()
        if ended:
            self.step()
        self.window.close()
        return ended

    def zero(self) -> None:
        """Remove the gradients."""
        self.window.close()
        for p in self.parameters:
            p.gradient = None
        self.gradients.discard()
        self.rounds.participated = False

    @property
    def dense(self) -> list[Any]:
        """Each parameter's gradient as a list, or None."""
        found = (
            p.gradient.dense(p.shape) if isinstance(p.gradient, Rows) else p.gradient
            for p in self.parameters
        )
        return [None if gradient is None else gradient.tolist() for gradient in found]

    @property
    def values(self) -> list[Any]:
        """The first element of each parameter's gradient, or None."""
        return [None if gradient is None else gradient[0] for gradient in self.dense]
