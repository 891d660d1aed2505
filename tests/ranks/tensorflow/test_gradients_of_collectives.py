"""Gradients of collectives are those of one process that has the tensors of all ranks."""

import contextlib
import functools
import operator

import numpy as np
import pytest

from tests.ranks.collective_cases import Case, search
from tests.ranks.frameworks import tf


def scaled(x, factor):
    """The identity, whose gradient is multiplied by a factor."""

    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), lambda gradient: gradient * factor

    return identity(x)


def call(hvd, case: Case, tensors, process_set):
    """Make the call of a case; return the list of its outputs."""
    options = {"process_set": process_set} | case.options(hvd)
    if case.collective != "grouped_reducescatter":  # It has no name in Horovod.
        options["name"] = case.name and case.name.replace(" ", "_")
    function = getattr(hvd, case.collective)
    if case.collective.startswith("grouped_"):
        return list(function(tensors, **options))
    if case.collective == "broadcast":
        return [function(tensors[0], case.root, **options)]
    if case.collective == "alltoall" and case.splits is not None:
        own = case.splits[case.members.index(hvd.rank())]
        return [function(tensors[0], own, **options)[0]]
    return [function(tensors[0], **options)]


def defined(case: Case, tensors):
    """Return what the call of a case is defined as, for each member.

    Args:
        tensors: the same tensor of each member.
    """
    kind = case.collective.removeprefix("grouped_")
    n = case.size
    if kind == "broadcast":
        return [tensors[case.members.index(case.root)]] * n
    if kind in ("allgather", "gather_for_loss"):
        return [tf.concat([x if x.shape.rank else x[tf.newaxis] for x in tensors], 0)] * n
    if kind == "alltoall":
        splits = case.splits or [[len(x) // n] * n for x in tensors]
        parts = [tf.split(x, rows) for x, rows in zip(tensors, splits, strict=True)]
        return [tf.concat([part[i] for part in parts], 0) for i in range(n)]
    stacked = tf.stack(list(tensors)) * case.prescale
    reduction = {
        "Sum": tf.reduce_sum,
        "Average": tf.reduce_mean,
        "Max": tf.reduce_max,
        "Min": tf.reduce_min,
        # Not reduce_prod, whose second derivative is wrong if an element is 0.
        "Product": lambda x, _: functools.reduce(operator.mul, tf.unstack(x)),
    }[case.op]
    reduced = reduction(stacked, 0) * case.postscale
    return [reduced] * n if kind == "allreduce" else tf.split(reduced, case.rows(len(reduced)))


def loss_of(case: Case, member, inputs, outputs):
    """The loss of a member. The inputs are also used without the collective."""
    loss = tf.zeros((), tf.float64)
    for k, (x, y) in enumerate(zip(inputs, outputs, strict=True)):
        weights = case.weights(member, k, y.shape)
        for term in (weights * y, y, y * y, x * x):
            loss += tf.reduce_sum(term)
        if y.shape.rank and y.shape[0]:
            # The gradient of these rows is an IndexedSlices.
            loss += tf.reduce_sum(tf.gather(y, [0, 0]))
    return loss


def differentiated(case: Case, members, run):
    """Return the outputs of `run`, and the gradients of its leaves, both for each member.

    Args:
        members: the members whose tensors this process has.
        run: a function of the members' tensors. It returns the outputs, and the loss.
    """
    leaves = [[tf.constant(x) for x in case.inputs()[i]] for i in members]
    with contextlib.ExitStack() as tapes:
        outer = tapes.enter_context(tf.GradientTape())
        outer.watch(leaves)
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            outputs, loss = run(leaves)
        if not case.second:
            return outputs, tape.gradient(loss, leaves)
        gradients = tape.gradient(loss, leaves)
        total = sum(
            tf.reduce_sum(g * case.weights(member, 10 + k, g.shape))
            for member, own in zip(members, gradients, strict=True)
            for k, g in enumerate(own)
        )
    return outputs, outer.gradient(total, leaves)


def expected(case: Case):
    members = range(case.size)

    def run(leaves):
        entered = [[x * x + x for x in own] for own in leaves]
        by_tensor = [defined(case, each) for each in zip(*entered, strict=True)]
        outputs = [[scaled(y[i], case.factor) for y in by_tensor] for i in members]
        return outputs, sum(loss_of(case, i, entered[i], outputs[i]) for i in members)

    return differentiated(case, members, run)


def check(hvd, case: Case, process_set, graph):
    member = case.members.index(hvd.rank())
    values, all_gradients = expected(case)

    def run(leaves):
        entered = [x * x + x for x in leaves[0]]
        outputs = [
            tf.ensure_shape(y, value.shape)
            for y, value in zip(call(hvd, case, entered, process_set), values[member], strict=True)
        ]
        return outputs, loss_of(case, member, entered, outputs)

    def measured():
        return differentiated(case, [member], run)

    run_once = tf.function(measured, autograph=False) if graph else measured
    found, (gradients,) = run_once()
    for k, (y, gradient) in enumerate(zip(found, gradients, strict=True)):
        np.testing.assert_allclose(y, values[member][k], rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(gradient, all_gradients[member][k], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("graph", "draws"), [(False, 30), (True, 10)])
def test_drawn_calls(hvd, graph, draws):
    search(hvd, range(draws), functools.partial(check, graph=graph))


@pytest.mark.long
@pytest.mark.parametrize(("graph", "draws"), [(False, 400), (True, 100)])
def test_many_drawn_calls(hvd, graph, draws):
    search(hvd, range(1000, 1000 + draws), functools.partial(check, graph=graph))


def test_a_residual_beside_a_reducescatter(hvd):
    u, x = tf.ones([2, 3]), tf.ones([2 * hvd.size(), 3])
    with tf.GradientTape() as tape:
        tape.watch(u)
        loss = tf.reduce_sum(5 * (u + hvd.reducescatter(x, op=hvd.Sum, name="residual")))
    assert tape.gradient(loss, u).numpy().tolist() == [[5.0] * 3] * 2


@pytest.mark.parametrize("graph", [False, True])
def test_an_infinite_gradient_of_a_broadcast(hvd, graph):
    def gradient():
        x = tf.ones([3])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(hvd.broadcast(x, 1, name="infinite") * float("inf"))
        return tape.gradient(loss, x)

    found = (tf.function(gradient) if graph else gradient)()
    assert found.numpy().tolist() == [float("inf") if hvd.rank() == 1 else 0.0] * 3


def test_adasum_has_no_gradient(hvd):
    if not hvd.mpi_enabled() or hvd.size() & (hvd.size() - 1):
        return  # Gloo has no Adasum. It needs a power of two.
    x = tf.ones([3])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = hvd.allreduce(x, op=hvd.Adasum, name="adasum")
    with pytest.raises(NotImplementedError, match="Adasum.*has no gradient: expected Average"):
        tape.gradient(y, x)
