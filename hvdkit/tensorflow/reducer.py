"""Gradients reduced over all ranks, inside a graph: what core's synchronizer does step by step.

The journeys of core's wire formats are run once, while a graph is traced. From then on a step is
ops: gradients are brought together in buckets, each bucket's collective begins as soon as its
gradients are there, and no Python runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops
from tensorflow.python.ops import control_flow_util

from hvdkit.core.bucketing import ParameterSpec, uncounted, unique_names
from hvdkit.core.compression import (
    Choose,
    Division,
    Gather,
    Largest,
    Peak,
    Request,
    Sum,
    Travel,
)
from hvdkit.core.numbers import Number
from hvdkit.core.reduction import AgreedBuckets, Reduction, agree_on_buckets
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.tensorflow.backend import GraphMemory, GraphNumbers, Wire, number, peak
from hvdkit.tensorflow.collectives import TensorFlowCollectives


class GradientReducer:
    """Reduces gradients over the ranks of a process set, eagerly or in a graph.

    What the ranks mean to reduce is compared once for each set of gradients, when it is traced for
    the first time, which is a collective; a graph that is traced again takes what was agreed on.

    Args:
        reduction: what to do with the gradients.
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
        self._saved: dict[str, list[list[int]]] = {}

    def state(self) -> dict[str, list[list[int]]]:
        """What the wire formats have learned: for each set of gradients, that of each bucket.

        The same on every rank. Without it sums round differently from there on.
        """
        generation = self._collectives.generation
        plans = [plan for key, plan in self._plans.items() if key[0] == generation]
        return self._saved | {plan.digest: plan.state() for plan in plans}

    def adopt_state(self, state: Mapping[str, list[list[int]]]) -> None:
        """Go on with what `state()` gave, maybe in another process. No collective.

        For gradients that have not been reduced yet it counts as soon as they are.
        """
        self._saved = dict(state)
        for key, plan in self._plans.items():
            if key[0] == self._collectives.generation and plan.digest in self._saved:
                plan.adopt_state(self._saved.pop(plan.digest))

    @tf.autograph.experimental.do_not_convert
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The reduced gradients. A collective: every rank calls it with the same variables.

        Args:
            gradients: tensors, `tf.IndexedSlices`, or None where there is none.
            variables: what they are the gradients of: `tf.Variable`, `keras.Variable` or tensors.

        Returns:
            As many, in the same order; None stays None.

        Raises:
            RanksDisagree: on every rank, when they mean to reduce different things.
            UsageError: inside a function that XLA is to compile.
        """
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise UsageError(
                "gradients are to be reduced in a function with jit_compile=True, and Horovod's "
                "operations cannot be compiled by XLA: use tf.function without jit_compile"
            )
        if self._collectives.alone:
            return [_times(gradient, 1.0 / self._passes) for gradient in gradients]
        held = [k for k, gradient in enumerate(gradients) if gradient is not None]
        present = [self._prepared(gradients[k], variables[k]) for k in held]
        specs = _specs(present, [variables[k] for k in held])
        sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in present]
        reduced = self._plan_of(specs, sparse).reduce(*present)
        result: list[Any] = [None] * len(gradients)
        for k, gradient in zip(held, reduced, strict=True):
            result[k] = gradient
        return result

    def _prepared(self, gradient: Any, variable: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        shape = tf.convert_to_tensor(variable.shape, tf.int64)
        gradient = tf.IndexedSlices(gradient.values, tf.cast(gradient.indices, tf.int64), shape)
        return tf.convert_to_tensor(gradient) if self._reduction.sparse_as_dense else gradient

    def _plan_of(self, specs: Sequence[ParameterSpec], sparse: Sequence[bool]) -> "_Plan":
        generation = self._collectives.generation
        key = (generation, tuple(specs), tuple(sparse))
        if key not in self._plans:
            agreed = agree_on_buckets(
                self._collectives,
                specs,
                self._reduction,
                self._passes,
                [int(is_sparse) for is_sparse in sparse],
                context=[
                    *self._context,
                    *(f"gradient {i} is sparse" for i, s in enumerate(sparse) if s),
                ],
            )
            ranks = len(self._collectives.ranks)
            total = 1.0 / self._passes / (ranks if self._reduction.average else 1)
            division = Division(total, self._reduction.predivide, ranks)
            saved = self._saved.pop(agreed.plan.digest, [[]] * len(agreed.channels))
            for channel, numbers in zip(agreed.channels, saved, strict=True):
                # Those of another wire format are of no use to this one.
                if len(numbers) == len(channel.state):
                    channel.state = tuple(numbers)
            self._plans[key] = _Plan(agreed, division, self._collectives.process_set)
        return self._plans[key]


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
        dtype = gradient.dtype
        specs.append(ParameterSpec(name, shape, dtype.name, dtype.size, ""))
    return specs


def name_of(variable: Any) -> str:
    """What a variable is called in errors, and compared by."""
    name: str = getattr(variable, "path", None) or getattr(variable, "name", None) or "tensor"
    return uncounted(name)


class _Plan:
    """The buckets of one set of gradients, and the ops that reduce them."""

    def __init__(
        self, agreed: AgreedBuckets, division: Division, process_set: mpi_ops.ProcessSet
    ) -> None:
        self._agreed = agreed
        self._division = division
        self._process_set = process_set
        with tf.init_scope():
            self._states = [
                tf.Variable(channel.state, dtype=tf.int32, trainable=False)
                if channel.state
                else None
                for channel in agreed.channels
            ]
        self._traced = tf.function(self._reduce, autograph=False)

    @property
    def digest(self) -> str:
        """Of the buckets and what is in them."""
        return self._agreed.plan.digest

    def state(self) -> list[list[int]]:
        """Each bucket's, empty where its wire format learns nothing."""
        return [[] if s is None else [int(n) for n in s.numpy()] for s in self._states]

    def adopt_state(self, state: Sequence[Sequence[int]]) -> None:
        """As `state` gave it; what is of another wire format is left."""
        for variable, numbers in zip(self._states, state, strict=True):
            if variable is not None and len(numbers) == variable.shape[0]:
                variable.assign(numbers)

    def reduce(self, *gradients: Any) -> list[Any]:
        """This rank's gradients -> those of all."""
        # A graph that is being traced takes the ops as they are.
        return list((self._traced if tf.executing_eagerly() else self._reduce)(*gradients))

    def _reduce(self, *gradients: Any) -> list[Any]:
        plan = self._agreed.plan
        memories = [
            GraphMemory(bucket, plan.specs, [gradients[i] for i in bucket.parameters])
            for bucket in plan.buckets
        ]
        with self._symbolic_states():
            journeys = [
                _Journey(
                    memory,
                    channel.travel(memory, self._division),
                    f"{self._agreed.name}.{index}",
                    self._process_set,
                )
                for index, (memory, channel) in enumerate(
                    zip(memories, self._agreed.channels, strict=True)
                )
            ]
            self._run(journeys)
        reduced = {
            i: gradient
            for bucket, memory in zip(plan.buckets, memories, strict=True)
            for i, gradient in zip(bucket.parameters, memory.gradients(), strict=True)
        }
        return [reduced[i] for i in range(len(gradients))]

    @contextmanager
    def _symbolic_states(self) -> Iterator[None]:
        """Lend the channels what the graph knows of their states, and keep what they make of it."""
        for channel, state in zip(self._agreed.channels, self._states, strict=True):
            channel.numbers = GraphNumbers()
            if state is not None:
                channel.state = tuple(tf.unstack(state.read_value()))
        try:
            yield
            for channel, state in zip(self._agreed.channels, self._states, strict=True):
                if state is not None:
                    state.assign(tf.stack(channel.state))
        finally:
            for channel in self._agreed.channels:
                channel.state = ()

    def _run(self, journeys: Sequence["_Journey"]) -> None:
        """All journeys to their ends, with one collective for what they ask for at once."""
        asked = [journey.run() for journey in journeys]
        rounds = 0
        while waiting := [k for k, value in enumerate(asked) if value is not None]:
            values = tf.stack([tf.cast(asked[k], tf.int32) for k in waiting])
            largest = mpi_ops._allreduce(
                values,
                name=f"{self._agreed.name}.largest.{rounds}",
                op=mpi_ops.Max,
                ignore_name_scope=True,
                process_set=self._process_set,
            )
            for k, answer in zip(waiting, tf.unstack(largest), strict=True):
                asked[k] = journeys[k].run(answer)
            rounds += 1


class _Journey:
    """One bucket's travel, traced."""

    def __init__(
        self, memory: GraphMemory, travel: Travel, name: str, process_set: mpi_ops.ProcessSet
    ) -> None:
        self._memory = memory
        self._travel = travel
        self._name = name
        self._process_set = process_set
        self._collectives = 0

    def run(self, answer: Any = None) -> Number | None:
        """Go on until all buckets are asked for a `Largest`, which is returned, or to the end."""
        try:
            request = self._travel.send(answer)
            while not isinstance(request, Largest):
                request = self._travel.send(self._answer(request))
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
        if isinstance(request, Peak):
            return peak(request.buffer)
        if isinstance(request, Choose):
            return self._choose(request)
        raise HvdkitError(
            f"a wire format asked for {type(request).__name__} where TensorFlow cannot answer it: "
            f"see hvdkit.core.compression.Choose"
        )

    def _choose(self, request: Choose) -> tuple[tf.Tensor, ...]:
        def branch(make: Callable[[], Travel]) -> Callable[[], list[tf.Tensor]]:
            def run() -> list[tf.Tensor]:
                before = self._memory.content
                numbers = self._to_the_end(make())
                after = self._memory.content
                self._memory.content = before
                return [after, *map(tf.convert_to_tensor, numbers)]

            return run

        first, second = branch(request.first), branch(request.second)
        self._memory.content, *numbers = tf.cond(request.condition > 0, first, second)
        return tuple(numbers)

    def _to_the_end(self, travel: Travel) -> Sequence[Number]:
        answer = None
        while True:
            try:
                request = travel.send(answer)
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
        return mpi_ops._allreduce(
            tensor,
            name=self._next_name(),
            op=mpi_ops.Sum,
            prescale_factor=factor,
            ignore_name_scope=True,
            process_set=self._process_set,
        )

    def _gather(self, part: tf.Tensor) -> tf.Tensor:
        return mpi_ops.allgather(
            part, name=self._next_name(), ignore_name_scope=True, process_set=self._process_set
        )


def _times(gradient: Any, factor: float) -> Any:
    if gradient is None or factor == 1.0:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * number(factor, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * number(factor, gradient.dtype)
