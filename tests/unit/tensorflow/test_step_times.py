"""The times of steps when the time of day is set."""

import pytest


@pytest.mark.parametrize("seconds", [3600.0, -3600.0, 0.0])
def test_a_report_after_the_time_of_day_was_set(hvd, seconds):
    import tensorflow as tf

    from hvdkit.tensorflow import step_times

    times = step_times.GraphTimes()
    real = step_times.time.time_ns

    @tf.function
    def take():
        return times.take_in_graph(times._graph.handle())

    taken = []
    for in_graph in (False, True):
        times._graph.set([seconds + 1.0, 2.0, 3.0, 5.0])
        # The clock of the graph has moved by so much.
        moved = seconds * (1 + in_graph)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                step_times.time, "time_ns", lambda moved=moved: real() + round(moved * 1e9)
            )
            taken.append(take().numpy().tolist() if in_graph else [*times.take().values()])
        # After a change, it is not known when the last reduction ended.
        assert times._graph.numpy().tolist() == [0.0, 0.0, 0.0, 0.0 if seconds else 5.0]
    assert taken == [[0.0, 0.0, 0.0] if seconds else [1.0, 2.0, 3.0]] * 2
