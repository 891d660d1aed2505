"""Reduce gradients over all ranks inside a TensorFlow graph.

A wire format is a Python generator. It runs once, while a graph is traced. Afterwards a step
consists of ops, which pack gradients into buckets and start a bucket's collective as soon as its
gradients exist.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops
from tensorflow.python.ops import control_flow_util

from hvdkit.agreement.names import unique_names, without_layer_numbers
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.reduction.bucketing import ParameterSpec
from hvdkit.reduction.int8 import Int8
from hvdkit.reduction.nonfinite import IGNORE
from hvdkit.reduction.plan import ABSENT, PlannedBuckets, Reduction, plan_buckets
from hvdkit.reduction.wire_format import Scaling
from hvdkit.tensorflow.collectives import TensorFlowCollectives
from hvdkit.tensorflow.graphs import retrace_after_init
from hvdkit.tensorflow.reduction.backend import merged, multiply
from hvdkit.tensorflow.reduction.bucket_reduction import engine_sends_int8
from hvdkit.tensorflow.reduction.equal_gradients import EqualGradients
from hvdkit.tensorflow.reduction.nonfinite import NonFiniteCheck
from hvdkit.tensorflow.reduction.plan import CodecStates, Plan
from hvdkit.tensorflow.step_times import GraphTimes, TapeStragglers
from hvdkit.tensorflow.sync_batch_norm import check_ranks
from hvdkit.tensorflow.unwrapped import handled
from hvdkit.tensorflow.value_check import ValueCheck
from hvdkit.training.stragglers import StragglerReport


class GradientReducer:
    """Reduce gradients over the ranks of a process set, eagerly or in a graph.

    The ranks run a consistency check when they reduce a sequence of variables for the first time.
    If a graph is traced again, it uses the earlier result.

    Ranks may have gradients of different variables, and a rank contributes zeros for missing
    gradients. Eagerly, all variables are reduced, because every step may use other variables. A
    trace of a graph has a fixed set of gradients. For each new set the ranks run a check, and omit
    variables for which no rank has a gradient. All ranks must reach a new set in the same call.

    Args:
        reduction: the settings.
        process_set: the ranks to reduce over. On other ranks gradients are not reduced.
        context: further lines that must be the same on every rank; errors show them first.
        passes: the number of backward passes in each gradient; the result is their mean.
        on_nonfinite: what to do about gradients with NaN or infinity, see
            `hvdkit.reduction.nonfinite`.
        times: measures the time that this rank spends in each section of its steps.
        of_tape: whether a tape reduces the gradients. Every few reductions, the ranks then compare
            these times, as `fit` of Keras does for an optimizer.

    Attributes:
        reduction: the settings.
    """

    def __init__(
        self,
        reduction: Reduction,
        process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
        context: Sequence[str] = (),
        passes: int = 1,
        on_nonfinite: str = IGNORE,
        times: GraphTimes | None = None,
        of_tape: bool = False,
    ) -> None:
        self._times = times
        self._of_tape = of_tape
        self._on_nonfinite = on_nonfinite
        self.reduction = reduction
        self._passes = passes
        self._context = tuple(context)
        self._collectives = TensorFlowCollectives(process_set)
        self._generation = self._collectives.generation
        self._plans: dict[tuple[Any, ...], Plan] = {}
        # By generation and digest, because several plans may have the same buckets.
        self._states: dict[tuple[int, str], CodecStates] = {}
        self._saved: dict[str, list[list[int]]] = {}

    def state(self) -> dict[str, list[list[int]]]:
        """Return the codecs' states by plan and bucket, the same on every rank.

        A job needs them to resume with bit-identical sums.
        """
        return self._saved | {digest: s.numbers() for digest, s in self._valid_states().items()}

    def restore_state(self, state: Mapping[str, list[list[int]]] | tuple[()]) -> None:
        """Restore a value of `state()`, possibly in another process. Not a collective.

        The state of a plan that does not exist yet is kept until the plan is made. A plan whose
        state is not in the value gets the state of a new plan.
        """
        self._saved = dict(state)
        for digest, states in self._valid_states().items():
            states.assign(self._saved.pop(digest, None))

    def _valid_states(self) -> dict[str, CodecStates]:
        """Return, by digest, the states of plans that were made since the last `init` or `join`.

        Older states are void: a rank that has just started has none, and all ranks' states must be
        equal.
        """
        current = self._collectives.generation
        return {
            digest: s for (generation, digest), s in self._states.items() if generation == current
        }

    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any], check_values: bool = False
    ) -> list[Any]:
        """Return the reduced gradients, as `reduce` does. A collective."""
        return self.reduce(gradients, variables, check_values)[0]

    @tf.autograph.experimental.do_not_convert
    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], check_values: bool = False
    ) -> tuple[list[Any], Any]:
        """Reduce gradients. A collective: every rank passes the same variables.

        Args:
            gradients: tensors, `tf.IndexedSlices`, or None for a missing gradient.
            variables: `tf.Variable`, `keras.Variable` or tensors, one for each gradient.
            check_values: compare the variables' values in some calls, see `ValueCheck`. The same
                on all ranks and in all calls.

        Returns:
            The gradients, in the same order, None if no rank has a gradient; and whether all ranks
            skip the step, because gradients are not finite: a tensor in a graph.

        Raises:
            RankMismatchError: on every rank, if ranks reduce different gradients, or if variables
                differ (see `ValueCheck`).
            NonFiniteGradients: on every rank, with `on_nonfinite="raise"`.
            UsageError: the call is inside a function that XLA compiles, or a layer normalizes over
                other ranks (see `check_ranks`).
        """
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise UsageError(
                "gradients are reduced in a function with jit_compile=True, but XLA cannot compile "
                "Horovod's operations: use tf.function without jit_compile"
            )
        retrace_after_init()
        handled.note(variables)
        check_ranks(variables, self._collectives.process_set.ranks)
        if self._collectives.single_rank:
            prepared = list(map(self._prepared, gradients, variables))
            checked, skips = self._checked_alone(prepared, variables)
            return [multiply(gradient, 1.0 / self._passes) for gradient in checked], skips
        indices = [
            k
            for k, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if gradient is not None or _can_have_gradient(variable)
        ]
        sources = [variables[k] for k in indices]
        names = _names(sources)
        prepared = [self._prepared(gradients[k], variables[k]) for k in indices]
        plan = self._plan_of(_specs(names, prepared, sources), prepared)
        if self._times is not None and self._generation != self._collectives.generation:
            # The time in `join` does not count.
            self._times.stop()
        self._generation = self._collectives.generation
        begun = self._times.begin_reduction(prepared) if self._times is not None else ()
        reduced, skips = plan.reduce(prepared, sources, check_values)
        if self._times is not None:
            handle = self._times.end_reduction(begun, reduced)
            if plan.stragglers is not None:
                plan.stragglers.count(handle)
        result: list[Any] = [None] * len(gradients)
        for k, gradient in zip(indices, reduced, strict=True):
            result[k] = gradient
        return result, skips

    def _checked_alone(
        self, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> tuple[list[Any], Any]:
        """Check the gradients of a single rank for NaN and infinity; see `reduce`."""
        given = {k: each for k, each in enumerate(gradients) if each is not None}
        if self._on_nonfinite == IGNORE or not given:
            return list(gradients), False
        check = NonFiniteCheck(len(gradients), "", self._collectives, self._on_nonfinite)
        flags = check.flags(given)
        if tf.executing_eagerly():
            skips = check.handle(flags.numpy(), int(tf.reduce_max(flags)), 1, variables)
        else:
            given, skips = check.handle_in_graph(flags, given, variables)
        return [given.get(k) for k in range(len(gradients))], skips

    def _prepared(self, gradient: Any, variable: Any) -> Any:
        if gradient is None:
            return None
        if not isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        static = tf.TensorShape(variable.shape)
        shape = static.as_list() if static.is_fully_defined() else tf.shape(variable, tf.int64)
        gradient = tf.IndexedSlices(
            gradient.values, tf.cast(gradient.indices, tf.int64), tf.cast(shape, tf.int64)
        )
        if self.reduction.sparse_as_dense:
            return tf.convert_to_tensor(gradient)
        # Each index is then sent once. On a single rank, the result is that of several ranks.
        return merged(gradient)

    def _plan_of(self, specs: Sequence[ParameterSpec], gradients: Sequence[Any]) -> Plan:
        """Return the plan for these gradients. Making a new one is a collective."""
        eager = tf.executing_eagerly()
        absent = () if eager else tuple(gradient is None for gradient in gradients)
        key = (self._collectives.generation, eager, absent, tuple(specs))
        if key in self._plans:
            return self._plans[key]
        planned = plan_buckets(
            self._collectives,
            specs,
            self.reduction,
            self._passes,
            [
                int(isinstance(gradient, tf.IndexedSlices))
                if eager or gradient is not None
                else ABSENT
                for gradient in gradients
            ],
            context=[*self._context, *self._path()],
        )
        ranks = len(self._collectives.ranks)
        average = self.reduction.average
        total = 1.0 / self._passes / (ranks if average else 1)
        scaling = Scaling(total, self.reduction.predivide, ranks)
        states = self._states_of(planned)
        process_set = self._collectives.process_set
        values = ValueCheck([spec.name for spec in specs], self._collectives)
        first = EqualGradients(planned.name, process_set, self._of_tape, average)
        nonfinite = None
        if self._on_nonfinite != IGNORE:
            nonfinite = NonFiniteCheck(
                *(len(specs), planned.name, self._collectives, self._on_nonfinite)
            )
        stragglers = None
        if self._times is not None and self._of_tape:
            stragglers = TapeStragglers(
                StragglerReport(self._collectives, self._times),
                *(self._times, self._collectives, f"{planned.name}.times"),
            )
        self._plans[key] = Plan(
            *(planned, scaling, states, process_set, values, first, eager), nonfinite, stragglers
        )
        return self._plans[key]

    def _path(self) -> list[str]:
        """Return a line for the consistency check if ranks could send int8 in different ways."""
        if self.reduction.format.name != Int8.name:
            return []
        in_engine = engine_sends_int8(self._collectives.process_set)
        return [f"int8: sent by {'the engine' if in_engine else 'alltoall'}"]

    def _states_of(self, planned: PlannedBuckets) -> CodecStates:
        """Return the states of an earlier plan with the same buckets, or make them.

        New states are those of a restored checkpoint if it has the same buckets.
        """
        digest = planned.plan.digest
        key = (self._collectives.generation, digest)
        if key not in self._states:
            self._states[key] = CodecStates(planned.codecs, self._saved.pop(digest, None))
        return self._states[key]


def _names(variables: Sequence[Any]) -> list[str]:
    """Return unique names of the variables, after a check that their shapes are known."""
    # Every tf.Variable without a name is called `Variable:0`.
    names = unique_names([_name_of(variable) for variable in variables])
    for name, variable in zip(names, variables, strict=True):
        shape = tf.TensorShape(variable.shape)
        if not shape.is_fully_defined():
            raise HvdkitError(
                f"the gradient of {name!r} has shape {shape}: a bucket needs a known size when the "
                f"graph is traced. Give the variable a static shape."
            )
    return names


def _specs(
    names: Sequence[str], gradients: Sequence[Any], variables: Sequence[Any]
) -> list[ParameterSpec]:
    specs = []
    for name, gradient, variable in zip(names, gradients, variables, strict=True):
        dtype = tf.as_dtype(variable.dtype) if gradient is None else gradient.dtype
        specs.append(ParameterSpec(name, tuple(variable.shape), dtype.name, dtype.size, ""))
    return specs


def _can_have_gradient(variable: Any) -> bool:
    """Return whether `variable` may have a gradient that a bucket can hold."""
    dtype = tf.as_dtype(variable.dtype)
    known = tf.TensorShape(variable.shape).is_fully_defined()
    return bool(known and (dtype.is_floating or dtype.is_complex))


def _name_of(variable: Any) -> str:
    """Return the name of a variable in errors and comparisons."""
    name: str = getattr(variable, "path", None) or getattr(variable, "name", None) or "tensor"
    return without_layer_numbers(name)
