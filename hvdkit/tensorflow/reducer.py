"""Reduce gradients over all ranks inside a graph, as core's synchronizer does in Python.

The generators of wire formats run once, while a graph is traced. After that a step consists of ops:
they pack gradients into buckets and start each bucket's collective as soon as its gradients exist.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops
from tensorflow.python.ops import control_flow_util

from hvdkit.core.bucketing import ParameterSpec, uncounted, unique_names
from hvdkit.core.reduction import ABSENT, AgreedBuckets, Reduction, agree_on_buckets
from hvdkit.core.scalar_ops import Scalar
from hvdkit.core.wire_format import (
    AbsMax,
    BucketReduction,
    Cond,
    Gather,
    GlobalMax,
    Request,
    Scaling,
    Sum,
    WireFormat,
)
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.tensorflow.backend import GraphMemory, GraphOps, Wire, abs_max, number
from hvdkit.tensorflow.collectives import TensorFlowCollectives
from hvdkit.tensorflow.graphs import new_variable, trace_again_after_init
from hvdkit.tensorflow.initial_values import InitialValues


class GradientReducer:
    """Reduces gradients over the ranks of a process set, eagerly or in a graph.

    The ranks compare what they are to reduce once for each sequence of variables, when they reduce
    it for the first time, which is a collective. A graph that is traced again takes what was agreed
    on.

    Ranks may have gradients of different variables. A rank contributes zeros for those that it does
    not have. Eagerly all variables are reduced, because every step may use others. In a graph the
    ranks compare once for each set of gradients that a trace has, and leave out variables of which
    no rank has one. All ranks must come to a new set in the same call.

    Args:
        reduction: the settings.
        process_set: the ranks to reduce over; on others gradients stay as they are.
        context: further lines that must be the same on every rank, for the errors' sake first.
        passes: backward passes that the gradients are the sum of; the result is their mean.
    """

    def __init__(
        self,
        reduction: Reduction,
        process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
        context: Sequence[str] = (),
        passes: int = 1,
    ) -> None:
        self._reduction = reduction
        self._passes = passes
        self._context = tuple(context)
        self._collectives = TensorFlowCollectives(process_set)
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        # By generation and digest: several plans may be of the same buckets.
        self._states: dict[tuple[int, str], _States] = {}
        self._saved: dict[str, list[list[int]]] = {}

    def state(self) -> dict[str, list[list[int]]]:
        """Return the states of the wire formats: for each set of gradients, that of each bucket.

        The same on every rank. Without it sums round differently from there on.
        """
        return self._saved | {digest: s.numbers() for digest, s in self._valid_states().items()}

    def adopt_state(self, state: Mapping[str, list[list[int]]]) -> None:
        """Continue from what `state()` gave, maybe in another process. No collective.

        For gradients that have not been reduced yet it counts as soon as they are.
        """
        self._saved = dict(state)
        for digest, states in self._valid_states().items():
            if digest in self._saved:
                states.assign(self._saved.pop(digest))

    def _valid_states(self) -> dict[str, "_States"]:
        """Return, by digest, those of plans that ranks agreed on since the last `init` and `join`.

        A rank that has just started has learned nothing, and the states of all ranks are equal.
        """
        generation = self._collectives.generation
        return {digest: s for (of, digest), s in self._states.items() if of == generation}

    @tf.autograph.experimental.do_not_convert
    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any], compares: bool = False
    ) -> list[Any]:
        """The reduced gradients. A collective: every rank calls it with the same variables.

        Args:
            gradients: tensors, `tf.IndexedSlices`, or None where there is none.
            variables: what they are the gradients of: `tf.Variable`, `keras.Variable` or tensors.
            compares: compare the variables' values now and then, see `InitialValues`. The same on
                all ranks and in all calls.

        Returns:
            As many, in the same order; None where no rank has a gradient.

        Raises:
            RankMismatchError: on every rank, when they are to reduce different things, or see
                `InitialValues`.
            UsageError: inside a function that XLA is to compile.
        """
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise UsageError(
                "gradients are to be reduced in a function with jit_compile=True, and Horovod's "
                "operations cannot be compiled by XLA: use tf.function without jit_compile"
            )
        trace_again_after_init()
        if self._collectives.alone:
            return [_times(gradient, 1.0 / self._passes) for gradient in gradients]
        places = [k for k, g in enumerate(gradients) if g is not None or _may_have(variables[k])]
        prepared = [self._prepared(gradients[k], variables[k]) for k in places]
        sources = [variables[k] for k in places]
        plan = self._plan_of(_specs(prepared, sources), prepared)
        reduced = plan.reduce(prepared, sources if compares else None)
        result: list[Any] = [None] * len(gradients)
        for k, gradient in zip(places, reduced, strict=True):
            result[k] = gradient
        return result

    def _prepared(self, gradient: Any, variable: Any) -> Any:
        if gradient is None:
            return None
        if not isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        shape = tf.convert_to_tensor(variable.shape, tf.int64)
        gradient = tf.IndexedSlices(gradient.values, tf.cast(gradient.indices, tf.int64), shape)
        return tf.convert_to_tensor(gradient) if self._reduction.sparse_as_dense else gradient

    def _plan_of(self, specs: Sequence[ParameterSpec], gradients: Sequence[Any]) -> "_Plan":
        """Return the plan for these gradients; make it in agreement with the other ranks."""
        eager = tf.executing_eagerly()
        absent = () if eager else tuple(gradient is None for gradient in gradients)
        key = (self._collectives.generation, eager, absent, tuple(specs))
        if key in self._plans:
            return self._plans[key]
        agreed = agree_on_buckets(
            self._collectives,
            specs,
            self._reduction,
            self._passes,
            [
                int(isinstance(gradient, tf.IndexedSlices))
                if eager or gradient is not None
                else ABSENT
                for gradient in gradients
            ],
            context=self._context,
        )
        ranks = len(self._collectives.ranks)
        total = 1.0 / self._passes / (ranks if self._reduction.average else 1)
        scaling = Scaling(total, self._reduction.predivide, ranks)
        states = self._states_of(agreed)
        process_set = self._collectives.process_set
        values = InitialValues([spec.name for spec in specs], agreed.name, process_set)
        self._plans[key] = _Plan(agreed, scaling, states, process_set, values, eager)
        return self._plans[key]

    def _states_of(self, agreed: AgreedBuckets) -> "_States":
        """Return those of earlier plans of the same buckets, of a checkpoint, or new ones."""
        digest = agreed.plan.digest
        key = (self._collectives.generation, digest)
        if key not in self._states:
            self._states[key] = _States(agreed.codecs, self._saved.pop(digest, None))
        return self._states[key]


def _specs(gradients: Sequence[Any], variables: Sequence[Any]) -> list[ParameterSpec]:
    # Every tf.Variable without a name of its own is called `Variable:0`.
    names = unique_names([name_of(variable) for variable in variables])
    specs = []
    for name, gradient, variable in zip(names, gradients, variables, strict=True):
        shape = tuple(variable.shape)
        if None in shape:
            raise HvdkitError(
                f"the gradient of {name!r} has shape {shape}: a bucket needs to know its size "
                f"when the graph is traced. Give the variable a shape."
            )
        dtype = tf.as_dtype(variable.dtype) if gradient is None else gradient.dtype
        specs.append(ParameterSpec(name, shape, dtype.name, dtype.size, ""))
    return specs


def _may_have(variable: Any) -> bool:
    """Return whether `variable` may have a gradient that a bucket can hold."""
    dtype = tf.as_dtype(variable.dtype)
    known = tf.TensorShape(variable.shape).is_fully_defined()
    return bool(known and (dtype.is_floating or dtype.is_complex))


def name_of(variable: Any) -> str:
    """Return the name of a variable in errors and comparisons."""
    name: str = getattr(variable, "path", None) or getattr(variable, "name", None) or "tensor"
    return uncounted(name)


class _States:
    """The states of the wire formats of some buckets, in variables that graphs read and write.

    Attributes:
        variables: one for each bucket; None where its wire format learns nothing.
    """

    def __init__(self, codecs: Sequence[WireFormat], saved: Sequence[Sequence[int]] | None) -> None:
        """
        Args:
            codecs: of the buckets, as new.
            saved: what `numbers` returned; the states begin there.
        """
        initial: list[Sequence[int]] = [codec.state for codec in codecs]
        if saved is not None:
            initial = list(map(_fitting, initial, saved))
        self.variables = [new_variable(numbers) if numbers else None for numbers in initial]

    def numbers(self) -> list[list[int]]:
        """Return each bucket's, empty where its wire format learns nothing."""
        return [[] if v is None else [int(n) for n in v.numpy()] for v in self.variables]

    def assign(self, numbers: Sequence[Sequence[int]]) -> None:
        """Continue from what `numbers` returned. Outside of graphs only."""
        for variable, own, saved in zip(self.variables, self.numbers(), numbers, strict=True):
            if variable is not None:
                variable.assign(_fitting(own, saved))


def _fitting(own: Sequence[int], saved: Sequence[int]) -> Sequence[int]:
    """Return what was saved; `own` if that was of another wire format."""
    return saved if len(saved) == len(own) else own


class _Plan:
    """The buckets of one sequence of variables, and the ops that reduce their gradients.

    Args:
        agreed: the buckets.
        scaling: of the sums.
        states: of the buckets' wire formats.
        process_set: the ranks to reduce over.
        values: compares those of the variables.
        eager: run eagerly, where each step tells which gradients any rank has.
    """

    def __init__(
        self,
        agreed: AgreedBuckets,
        scaling: Scaling,
        states: _States,
        process_set: mpi_ops.ProcessSet,
        values: InitialValues,
        eager: bool,
    ) -> None:
        self._agreed = agreed
        self._scaling = scaling
        self._values = values
        self._process_set = process_set
        self._eager = eager
        buckets = agreed.plan.buckets
        self._planned = sorted(i for bucket in buckets for i in bucket.parameters)
        self._sparse = {i for bucket in buckets if bucket.sparse_dims for i in bucket.parameters}
        self._states = states.variables
        self._zero = new_variable(0)
        # The rows of a sparse gradient are others in every step.
        self._traced = tf.function(self._reduce_counted, autograph=False, reduce_retracing=True)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any] | None = None) -> list[Any]:
        """Return the reduced gradients; None where no rank has one.

        Args:
            gradients: of this rank; None where it has none.
            variables: compare the values of these, if it is time to. Those that no rank has a
                gradient of are left out.

        Raises:
            RankMismatchError: see `InitialValues`.
        """
        given = {i: self._as_planned(i, gradients[i]) for i in self._planned}
        if not self._eager:
            planned = {} if variables is None else {i: variables[i] for i in self._planned}
            before = [self._values.compare_in_graph(planned)] if planned else []
            with tf.control_dependencies(before):
                reduced = self._reduce(given)
        else:
            has = tf.constant([int(gradient is not None) for gradient in gradients], tf.int32)
            reduced, ranks = self._traced(given, has)
            if variables is not None:
                every = list(variables)
                self._values.compare(
                    lambda: {i: every[i] for i, count in enumerate(ranks.numpy()) if count}
                )
            if any(gradient is None for gradient in gradients):
                ranks = ranks.numpy()
                reduced = {i: gradient for i, gradient in reduced.items() if ranks[i]}
        return [reduced.get(i) for i in range(len(gradients))]

    def _as_planned(self, i: int, gradient: Any) -> Any:
        """Return a gradient as the bucket needs it: zeros if there is none, sparse or dense."""
        spec = self._agreed.plan.specs[i]
        if i not in self._sparse:
            if gradient is None:
                return self._zeros(spec.shape, spec.dtype)
            return tf.convert_to_tensor(gradient)
        if isinstance(gradient, tf.IndexedSlices):
            return gradient
        if gradient is None:
            rows = self._zero.read_value()
            gradient = self._zeros(tf.stack([rows, *spec.shape[1:]]), spec.dtype)
        indices = tf.range(tf.shape(gradient, tf.int64)[0])
        return tf.IndexedSlices(gradient, indices, tf.constant(spec.shape, tf.int64))

    def _zeros(self, shape: Any, dtype: str) -> Any:
        """Return zeros that TensorFlow does not know when it optimizes a graph.

        It runs a collective of constants once, while it optimizes, and never again. The other
        ranks would wait for this one in each step.
        """
        return tf.fill(shape, tf.cast(self._zero.read_value(), dtype))

    def _reduce_counted(self, gradients: Mapping[int, Any], has: tf.Tensor) -> Any:
        """Reduce, and count for each variable the ranks that have its gradient."""
        ranks = _allreduce(has, f"{self._agreed.name}.used", self._process_set)
        return self._reduce(gradients), ranks

    def _reduce(self, gradients: Mapping[int, Any]) -> dict[int, Any]:
        plan = self._agreed.plan
        memories = [
            GraphMemory(bucket, plan.specs, [gradients[i] for i in bucket.parameters])
            for bucket in plan.buckets
        ]
        with self._symbolic_states():
            reductions = [
                _TracedReduction(
                    memory,
                    codec.reduce(memory, self._scaling),
                    f"{self._agreed.name}.{index}",
                    self._process_set,
                )
                for index, (memory, codec) in enumerate(
                    zip(memories, self._agreed.codecs, strict=True)
                )
            ]
            self._run(reductions)
        return {
            i: gradient
            for bucket, memory in zip(plan.buckets, memories, strict=True)
            for i, gradient in zip(bucket.parameters, memory.gradients(), strict=True)
        }

    @contextmanager
    def _symbolic_states(self) -> Iterator[None]:
        """Let the codecs read and write their states in the graph."""
        for codec, state in zip(self._agreed.codecs, self._states, strict=True):
            codec.ops = GraphOps()
            if state is not None:
                codec.state = tuple(tf.unstack(state.read_value()))
        try:
            yield
            for codec, state in zip(self._agreed.codecs, self._states, strict=True):
                if state is not None:
                    state.assign(tf.stack(codec.state))
        finally:
            for codec in self._agreed.codecs:
                codec.state = ()

    def _run(self, reductions: Sequence["_TracedReduction"]) -> None:
        """Run all reductions to their ends, with one collective for simultaneous `GlobalMax`es."""
        asked = [reduction.run() for reduction in reductions]
        rounds = 0
        while waiting := [k for k, value in enumerate(asked) if value is not None]:
            values = tf.stack([tf.cast(asked[k], tf.int32) for k in waiting])
            name = f"{self._agreed.name}.largest.{rounds}"
            largest = _allreduce(values, name, self._process_set, op=mpi_ops.Max)
            for k, answer in zip(waiting, tf.unstack(largest), strict=True):
                asked[k] = reductions[k].run(answer)
            rounds += 1


class _TracedReduction:
    """The reduction of one bucket, while a graph is traced."""

    def __init__(
        self,
        memory: GraphMemory,
        steps: BucketReduction,
        name: str,
        process_set: mpi_ops.ProcessSet,
    ) -> None:
        self._memory = memory
        self._steps = steps
        self._name = name
        self._process_set = process_set
        self._collectives = 0

    def run(self, answer: Any = None) -> Scalar | None:
        """Run until the next `GlobalMax`, and return its value; None at the end."""
        try:
            request = self._steps.send(answer)
            while not isinstance(request, GlobalMax):
                request = self._steps.send(self._answer(request))
        except StopIteration:
            return None
        return request.value

    def _answer(self, request: Request) -> Any:
        if isinstance(request, Sum):
            wire = request.buffer
            if not isinstance(wire, Wire):
                # Of a user's compressor.
                return self._sum(Wire(wire))
            wire.tensor, wire.factor = self._sum(wire), 1.0
            return wire
        if isinstance(request, Gather):
            indices, values = request.rows
            return self._gather(indices), self._gather(values)
        if isinstance(request, AbsMax):
            return abs_max(request.buffer)
        if isinstance(request, Cond):
            return self._choose(request)
        raise HvdkitError(
            f"a wire format asked for {type(request).__name__} where TensorFlow cannot answer it: "
            f"see hvdkit.core.wire_format.Cond"
        )

    def _choose(self, request: Cond) -> tuple[tf.Tensor, ...]:
        def branch(make: Callable[[], BucketReduction]) -> Callable[[], list[tf.Tensor]]:
            def run() -> list[tf.Tensor]:
                before = self._memory.content
                numbers = self._to_the_end(make())
                after = self._memory.content
                self._memory.content = before
                return [after, *map(tf.convert_to_tensor, numbers)]

            return run

        first, second = branch(request.if_true), branch(request.if_false)
        self._memory.content, *numbers = tf.cond(request.condition, first, second)
        return tuple(numbers)

    def _to_the_end(self, steps: BucketReduction) -> Sequence[Scalar]:
        answer = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = self._answer(request)

    def _next_name(self) -> str:
        self._collectives += 1
        return f"{self._name}.{self._collectives}"

    def _sum(self, wire: Wire) -> tf.Tensor:
        tensor, factor = wire.tensor, wire.factor
        if tensor.shape.num_elements() == 0:
            return tensor
        if tensor.dtype == tf.float64:
            # Horovod's factor is an attribute of the op, and those have float32's precision.
            tensor, factor = _times(tensor, factor), 1.0
        return _allreduce(tensor, self._next_name(), self._process_set, prescale_factor=factor)

    def _gather(self, part: tf.Tensor) -> tf.Tensor:
        return mpi_ops.allgather(
            part, name=self._next_name(), ignore_name_scope=True, process_set=self._process_set
        )


def _allreduce(
    tensor: tf.Tensor, name: str, process_set: mpi_ops.ProcessSet, **options: Any
) -> tf.Tensor:
    """Return the sum over the ranks, under this name wherever the op is traced."""
    how = {"op": mpi_ops.Sum, **options}
    return mpi_ops._allreduce(
        tensor, name=name, ignore_name_scope=True, process_set=process_set, **how
    )


def _times(gradient: Any, factor: float) -> Any:
    if gradient is None or factor == 1.0:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * number(factor, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * number(factor, gradient.dtype)
