"""Initialisation of Horovod with TensorFlow. Each test has its own process."""

from tests.alone import run_alone

REPORT = (
    "import os, hvdkit.tensorflow as hvd; before = dict(os.environ); hvd.init();"
    "print(hvd.rank(), hvd.size(), hvd.local_size(), hvd.mpi_enabled(), hvd.gloo_enabled());"
    "print(*sorted(os.environ.items() - before.items()));"
)


def test_a_plain_script_is_a_job_of_one_rank():
    code = (
        "import tensorflow as tf; hvd.shutdown(); hvd.init();"
        "print(hvd.allreduce(tf.ones(2)).numpy().tolist()); hvd.shutdown()"
    )
    output = run_alone(REPORT + code, framework="tensorflow")
    lines = output.splitlines()
    assert "0 1 1 False True" in lines
    # Other variables in the environment would affect a launcher that the script starts.
    assert "('HOROVOD_STALL_SHUTDOWN_TIME_SECONDS', '1800')" in lines
    assert "[1.0, 1.0]" in lines


def test_calls_before_init_raise():
    code = (
        "import tensorflow as tf, hvdkit.tensorflow as hvd\n"
        "try: hvd.DistributedGradientTape(tf.GradientTape())\n"
        "except ValueError as error: print(error)\n"
        "try: hvd.broadcast_variables([tf.Variable(1.0)], 0)\n"
        "except ValueError as error: print(error)"
    )
    output = run_alone(code, framework="tensorflow")
    assert "call hvd.init() before this" in output
    assert "has not been initialized; use hvd.init()" in output


def test_a_second_framework_raises():
    code = (
        "import hvdkit.tensorflow\n"
        "try: import hvdkit.torch\n"
        "except ImportError as error: print(error)"
    )
    output = run_alone(code, framework="tensorflow")
    assert "either hvdkit.torch or hvdkit.tensorflow" in output or "built for torch" in output
