"""The ops that reduce the buckets of one set of gradients, and the states of their wire formats."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.reduction.plan import PlannedBuckets
from hvdkit.reduction.wire_format import Scaling, WireFormat
from hvdkit.tensorflow.graphs import new_variable
from hvdkit.tensorflow.reduction.backend import GraphMemory, GraphOps
from hvdkit.tensorflow.reduction.bucket_reduction import TracedReduction, allreduce
from hvdkit.tensorflow.reduction.equal_gradients import EqualGradients
from hvdkit.tensorflow.reduction.nonfinite import NonFiniteCheck
from hvdkit.tensorflow.replicas import reduced as reduced_variables
from hvdkit.tensorflow.step_times import TapeStragglers, payload_bytes
from hvdkit.tensorflow.value_check import ValueCheck


class CodecStates:
    """The states of the buckets' codecs, in variables that graphs read and write.

    Attributes:
        variables: one for each bucket; None if the codec has no state.
    """

    def __init__(self, codecs: Sequence[WireFormat], saved: Sequence[Sequence[int]] | None) -> None:
        """
        Args:
            codecs: the buckets' new codecs.
            saved: a value of `numbers` to restore. None: begin with the states of new codecs.
        """
        initial: list[Sequence[int]] = [codec.state for codec in codecs]
        self._initial = initial
        if saved is not None:
            initial = list(map(_compatible, initial, saved))
        self.variables = [new_variable(numbers) if numbers else None for numbers in initial]

    def numbers(self) -> list[list[int]]:
        """Return the state of each bucket, integers; empty if its codec has none."""
        return [[] if v is None else [int(n) for n in v.numpy()] for v in self.variables]

    def assign(self, numbers: Sequence[Sequence[int]] | None) -> None:
        """Restore a value of `numbers`; None for the states of new codecs. Outside of graphs."""
        saved = self._initial if numbers is None else numbers
        for variable, initial, new in zip(self.variables, self._initial, saved, strict=True):
            if variable is not None:
                variable.assign(_compatible(initial, new))


def _compatible(own: Sequence[int], saved: Sequence[int]) -> Sequence[int]:
    """Return `saved`, or `own` if `saved` belongs to another wire format."""
    return saved if len(saved) == len(own) else own


class Plan:
    """The buckets of one sequence of variables, and the ops that reduce their gradients.

    Args:
        planned: the buckets.
        scaling: the factors of the sums.
        states: the states of the buckets' codecs.
        process_set: the ranks to reduce over.
        values: the check of the variables' values.
        first: the comparison of the first gradients.
        eager: whether the plan is for eager steps, in which a collective counts the ranks that have
            each gradient.
        nonfinite: the check of the gradients; None for no check.
        stragglers: compares the ranks' times; None if no times are compared here.
    """

    def __init__(
        self,
        planned: PlannedBuckets,
        scaling: Scaling,
        states: CodecStates,
        process_set: mpi_ops.ProcessSet,
        values: ValueCheck,
        first: EqualGradients,
        eager: bool,
        nonfinite: NonFiniteCheck | None,
        stragglers: TapeStragglers | None,
    ) -> None:
        self.stragglers = stragglers
        self._nonfinite = nonfinite
        self._buckets = planned
        self._scaling = scaling
        self._values = values
        self._first = first
        self._process_set = process_set
        self._eager = eager
        buckets = planned.plan.buckets
        self._planned = sorted(i for bucket in buckets for i in bucket.parameters)
        self._sparse = {i for bucket in buckets if bucket.sparse_dims for i in bucket.parameters}
        self._states = states.variables
        self._zero = new_variable(0)
        # The number of rows of a sparse gradient changes, so reduce retracing.
        self._traced = tf.function(self._reduce_counted, autograph=False, reduce_retracing=True)
        # TensorFlow counts the traces of all plans, and would warn.
        self._traced._omit_frequent_tracing_warning = True

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], check_values: bool = False
    ) -> tuple[list[Any], Any]:
        """Reduce gradients.

        Args:
            gradients: this rank's gradients; None for a missing one.
            variables: their variables.
            check_values: compare the values of the variables if a comparison is due. Variables
                that have no gradient on any rank are not compared.

        Returns:
            The reduced gradients, None if no rank has a gradient; and whether all ranks skip the
            step, because gradients are not finite: a tensor in a graph.

        Raises:
            RankMismatchError: see `ValueCheck`.
            NonFiniteGradients: see `NonFiniteCheck`.
        """
        given = {i: self._as_planned(i, gradients[i]) for i in self._planned}
        skips: Any = False
        if not self._eager:
            planned = {i: variables[i] for i in self._planned} if check_values else {}
            reduced_variables.note(planned.values(), self._process_set.ranks)
            before = [self._values.compare_in_graph(planned)] if planned else []
            with tf.control_dependencies(before):
                reduced = self._reduce(given)
            tensors = tf.nest.flatten(dict(reduced), expand_composites=True)
            self._first.compare_in_graph(given, variables, tensors)
            if self._nonfinite is not None:
                flags = self._nonfinite.flags(given)
                reduced, skips = self._nonfinite.handle_in_graph(flags, reduced, variables)
        else:
            has = tf.constant([int(gradient is not None) for gradient in gradients], tf.int32)
            reduced, ranks, flags = self._traced(given, has)
            ranks, found, count = ranks[:-2], ranks[-2], ranks[-1]
            self._first.compare(given, variables)
            if self._nonfinite is not None:
                skips = self._nonfinite.handle(flags.numpy(), int(found), int(count), variables)
            if check_values:
                reduced_by = zip(variables, ranks.numpy(), strict=True)
                compared = {i: v for i, (v, number) in enumerate(reduced_by) if number}
                reduced_variables.note(compared.values(), self._process_set.ranks)
                self._values.compare(compared)
            if any(gradient is None for gradient in gradients):
                ranks = ranks.numpy()
                reduced = {i: gradient for i, gradient in reduced.items() if ranks[i]}
        return [reduced.get(i) for i in range(len(gradients))], skips

    def _as_planned(self, i: int, gradient: Any) -> Any:
        """Return a gradient as the bucket expects it, sparse or dense; zeros if it is missing."""
        spec = self._buckets.plan.specs[i]
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
        """Return zeros that TensorFlow cannot fold into constants.

        TensorFlow runs a collective of constants only once, while it optimizes the graph. The
        other ranks would then wait for this rank in each step.
        """
        return tf.fill(shape, tf.cast(self._zero.read_value(), dtype))

    def _reduce_counted(self, gradients: Mapping[int, Any], has: tf.Tensor) -> Any:
        """Reduce the gradients, and count ranks in the same step.

        Returns:
            The reduced gradients; the counts; the flags of this rank, see `NonFiniteCheck.flags`.
            The counts are the number of ranks that have each gradient, then the number of ranks
            with a gradient that is not finite, then the number of all ranks.
        """
        flags = tf.constant([0])
        if self._nonfinite is not None:
            flags = self._nonfinite.flags(gradients)
        own = tf.concat([has, [tf.reduce_max(flags), 1]], 0)
        ranks = allreduce(own, f"{self._buckets.name}.used", self._process_set)
        return self._reduce(gradients), ranks, flags

    def _reduce(self, gradients: Mapping[int, Any]) -> dict[int, Any]:
        plan = self._buckets.plan
        memories = [
            GraphMemory(bucket, plan.specs, [gradients[i] for i in bucket.parameters])
            for bucket in plan.buckets
        ]
        with self._symbolic_states():
            reductions = [
                TracedReduction(
                    memory,
                    codec.reduce(memory, self._scaling),
                    f"{self._buckets.name}.{index}",
                    self._process_set,
                )
                for index, (memory, codec) in enumerate(
                    zip(memories, self._buckets.codecs, strict=True)
                )
            ]
            self._run(reductions)
            payload_bytes.add(sum(reduction.payload_bytes for reduction in reductions))
        return {
            i: gradient
            for bucket, memory in zip(plan.buckets, memories, strict=True)
            for i, gradient in zip(bucket.parameters, memory.gradients(), strict=True)
        }

    @contextmanager
    def _symbolic_states(self) -> Iterator[None]:
        """Make the codecs read and write their states in the graph."""
        for codec, state in zip(self._buckets.codecs, self._states, strict=True):
            codec.ops = GraphOps()
            if state is not None:
                codec.state = tuple(tf.unstack(state.read_value()))
        try:
            yield
            for codec, state in zip(self._buckets.codecs, self._states, strict=True):
                if state is not None:
                    state.assign(tf.stack(codec.state))
        finally:
            for codec in self._buckets.codecs:
                codec.state = ()

    def _run(self, reductions: Sequence["TracedReduction"]) -> None:
        """Run all reductions, with one collective for simultaneous `GlobalMax` requests."""
        requested = [reduction.run() for reduction in reductions]
        rounds = 0
        while waiting := [k for k, value in enumerate(requested) if value is not None]:
            values = tf.stack([tf.cast(requested[k], tf.int32) for k in waiting])
            name = f"{self._buckets.name}.largest.{rounds}"
            largest = allreduce(values, name, self._process_set, op=mpi_ops.Max)
            for k, result in zip(waiting, tf.unstack(largest), strict=True):
                requested[k] = reductions[k].run(result)
            rounds += 1
