"""`hvd.elastic.run` after errors."""

from tests.alone import run_alone

CODE = """
import tensorflow as tf, hvdkit.tensorflow as hvd
from hvdkit.tensorflow import runtime
hvd.init()
v = tf.Variable(0.0)
state = hvd.elastic.TensorFlowState([v], tries=0)
errors = [
    tf.errors.UnknownError(None, None, "[[{{node hvdkit.0123.0}}]] Connection closed by peer"),
    tf.errors.UnknownError(None, None, "{{function_node __wrapped__HorovodAllreduce}} lost"),
    tf.errors.UnknownError(None, None, "out of something else"),
]

@hvd.elastic.run
def train(state, by):
    v.assign_add(by)
    print("try", v.numpy(), runtime.generation())
    raise errors.pop(0)

try:
    train(state, 2.0)
except tf.errors.UnknownError as error:
    print("ended with:", error.message)
"""


def test_run_restores_and_retries_after_an_error_of_horovod():
    lines = run_alone(CODE, framework="tensorflow").splitlines()
    printed = [line for line in lines if line.startswith(("try", "ended"))]
    # Each time with the initial variable, after another initialisation of Horovod.
    assert printed == ["try 2.0 1", "try 2.0 2", "try 2.0 3", "ended with: out of something else"]
