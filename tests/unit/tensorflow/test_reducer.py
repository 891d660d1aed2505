"""The gradient reducer on one rank."""


def test_one_rank_divides_by_the_number_of_passes(hvd):
    import tensorflow as tf

    from hvdkit.reduction.compression import NoCompression
    from hvdkit.reduction.plan import Reduction
    from hvdkit.tensorflow.reduction.reducer import GradientReducer

    variable = tf.Variable([0.0, 0.0])
    reduce = GradientReducer(Reduction(NoCompression()), passes=4)
    (reduced,) = reduce([tf.constant([4.0, 8.0])], [variable])
    assert reduced.numpy().tolist() == [1.0, 2.0]
