"""Distributed gradient tapes on one rank: arguments, values, structure."""

import pytest

from hvdkit.errors import UsageError


def test_invalid_arguments_raise(hvd):
    import tensorflow as tf

    plain, v = tf.GradientTape, tf.Variable(1.0)
    for arguments, message in (
        ({"op": hvd.Max}, "op is"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "pass op=hvd.Average"),
        ({"gradient_predivide_factor": 0.0}, "expected a finite number above 0"),
        ({"bucket_bytes": 0}, "bucket_bytes is 0"),
        ({"process_set": [0]}, r"process_set is \[0\]"),
        ({"compression": "fp8"}, "compression is 'fp8'"),
        ({"compression": 16}, "compression is 16"),
        ({"groups": -1}, "groups is -1"),
        ({"groups": [v]}, "a list of lists of variables"),
        ({"groups": [[v], [v]]}, "contains .* twice"),
        ({"op": hvd.Adasum, "process_set": hvd.ProcessSet([0])}, "omit process_set"),
    ):
        with pytest.raises(UsageError, match=message):
            hvd.DistributedGradientTape(plain(), **arguments)
    with pytest.raises(UsageError, match="gradtape is a float"):
        hvd.DistributedGradientTape(1.0)
    with pytest.raises(UsageError, match="already"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(plain()))
    with pytest.raises(UsageError, match="local_layers contains a ResourceVariable"):
        hvd.PartialDistributedGradientTape(plain(), local_layers=[v])


@pytest.mark.parametrize("op", ["Average", "Sum", "Adasum"])
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_gradients_on_one_rank_are_unchanged(hvd, op, compression):
    import tensorflow as tf

    v = tf.Variable([1 / 3, 1e-6])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v**3)
    tape = hvd.DistributedGradientTape(tape, compression=compression, op=getattr(hvd, op))
    assert tape.gradient(loss, v).numpy().tolist() == (3 * v**2).numpy().tolist()


def test_gradients_have_the_structure_of_the_sources(hvd):
    import tensorflow as tf

    a, b, c = (tf.Variable(float(k)) for k in (1, 2, 3))
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = 2 * a + 3 * b
    gradients = tape.gradient(loss, {"one": a, "others": (b, [c])})
    assert gradients["one"].numpy() == 2
    assert gradients["others"][0].numpy() == 3
    assert gradients["others"][1] == [None]
    zeros = tape.gradient(loss, [c], unconnected_gradients=tf.UnconnectedGradients.ZERO)
    assert zeros[0].numpy() == 0
    assert [g.numpy() for g in tape.gradient(loss, [a, b, a])] == [2, 3, 2]
    assert tape.gradient(loss, [a], output_gradients=tf.constant(5.0))[0].numpy() == 10
    assert tape.jacobian(loss, b).numpy() == 3


def test_a_subclass_of_tape_keeps_its_behaviour(hvd):
    import tensorflow as tf

    class Doubling(tf.GradientTape):
        def __init__(self):
            super().__init__()
            self.factor = 2.0

        def gradient(self, *args, **kwargs):
            gradients = super().gradient(*args, **kwargs)
            return [self.factor * gradient for gradient in gradients]

    v = tf.Variable(1.0)
    with Doubling() as tape:
        loss = 3 * v
    wrapped = hvd.DistributedGradientTape(tape)
    assert isinstance(wrapped, Doubling)
    assert wrapped.gradient(loss, [v])[0].numpy() == 6
