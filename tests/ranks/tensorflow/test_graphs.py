"""Collectives in graphs, which TensorFlow optimizes on each rank by itself."""

import numpy as np
import pytest

from tests.ranks.frameworks import tf

STEPS = 3
KINDS = ["allreduce", "allgather", "broadcast", "reducescatter", "alltoall"]


def call(hvd, kind, x, name):
    """Call a collective; return a tensor."""
    options = {
        "allreduce": {"op": hvd.Sum},
        "reducescatter": {"op": hvd.Sum},
        "broadcast": {"root_rank": 0},
    }
    return getattr(hvd, kind)(x, name=name, **options.get(kind, {}))


def expected(hvd, kind, own):
    """Return the result of `call` if rank r passes `own(r)`."""
    everyone = [own(rank) for rank in range(hvd.size())]
    part = slice(hvd.rank(), hvd.rank() + 1)
    return {
        "allreduce": lambda: np.sum(everyone, axis=0),
        "allgather": lambda: np.concatenate(everyone),
        "broadcast": lambda: everyone[0],
        "reducescatter": lambda: np.sum(everyone, axis=0)[part],
        "alltoall": lambda: np.concatenate([each[part] for each in everyone]),
    }[kind]()


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_on_some_ranks(hvd, kind):
    """TensorFlow would call the collective of a constant only once, while it optimizes."""
    variable = tf.Variable(tf.zeros(hvd.size()))
    constant = np.arange(hvd.size(), dtype="float32")

    @tf.function
    def run():
        x = variable.read_value() if hvd.rank() == 0 else tf.constant(constant)
        return call(hvd, kind, x, "constant")

    for step in range(STEPS):
        variable.assign(tf.fill([hvd.size()], float(step)))

        def own(rank, step=step):
            return constant if rank else np.full(hvd.size(), step, "float32")

        np.testing.assert_array_equal(run().numpy(), expected(hvd, kind, own))


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_that_some_ranks_do_not_use(hvd, kind):
    """TensorFlow would not call the collective on these ranks."""
    variable = tf.Variable(tf.range(float(hvd.size())))

    @tf.function
    def run():
        result = call(hvd, kind, variable.read_value(), "unused")
        return result if hvd.rank() == 0 else tf.constant(0.0)

    for _ in range(STEPS):
        result = run().numpy()
    if hvd.rank() == 0:
        values = np.arange(hvd.size(), dtype="float32")
        np.testing.assert_array_equal(result, expected(hvd, kind, lambda rank: values))
    # Ranks that have called less often would be behind here.
    hvd.allreduce(variable, name=f"after_{kind}")


def test_equal_inputs_on_some_ranks(hvd):
    """TensorFlow would make one call of two with the same input."""
    variable = tf.Variable(1.0)

    @tf.function
    def run():
        x = variable.read_value()
        return [
            hvd.allreduce(x + (hvd.rank() == 0) * number, op=hvd.Sum, name=f"number_{number}")
            for number in (1.0, 2.0)
        ]

    for _ in range(STEPS):
        assert [float(each) for each in run()] == [hvd.size() + 1, hvd.size() + 2]


def test_collectives_of_a_graph_do_not_wait_for_each_other(hvd):
    """The order of the calls may differ between the ranks."""

    @tf.function
    def run(x):
        names = ["first", "second"] if hvd.rank() % 2 else ["second", "first"]
        found = {name: hvd.allreduce(x, op=hvd.Sum, name=name) for name in names}
        return found["first"] + found["second"]

    assert float(run(tf.constant(1.0))) == 2 * hvd.size()


@pytest.mark.parametrize("place", ["function", "condition", "loop"])
def test_a_result_in_a_nested_graph_that_some_ranks_do_not_use(hvd, place):
    variable = tf.Variable(1.0)

    def reduced():
        found = hvd.allreduce(variable.read_value(), op=hvd.Sum, name=f"in_{place}")
        return found if hvd.rank() == 0 else tf.constant(0.0)

    def in_loop():
        total = tf.constant(0.0)
        for _ in tf.range(2):
            total += reduced()
        return total / 2

    nested = {
        "function": tf.function(reduced),
        "condition": lambda: tf.cond(variable > 0, reduced, lambda: tf.constant(0.0)),
        "loop": tf.autograph.to_graph(in_loop) if place == "loop" else None,
    }[place]

    @tf.function
    def run():
        found = nested()
        return found if hvd.rank() == 0 else tf.constant(0.0)

    for _ in range(STEPS):
        assert float(run()) == (hvd.size() if hvd.rank() == 0 else 0)
    # Ranks that have called less often would be behind here.
    assert float(hvd.allreduce(variable, op=hvd.Sum, name=f"after_{place}")) == hvd.size()
