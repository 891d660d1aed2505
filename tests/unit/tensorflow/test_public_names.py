"""hvdkit.tensorflow has all public names of horovod.tensorflow 0.28.1, with their arguments."""

import pytest

from tests import public_names

MODULES = [
    "",
    ".compression",
    ".elastic",
    ".functions",
    ".gradient_aggregation",
    ".mpi_ops",
    ".sync_batch_norm",
    ".util",
]

# Modules that horovod.tensorflow imports.
IMPORTED_MODULES = {"os", "tf", "version", "warnings"}


def test_names_of_horovods_namespace_exist(hvd):
    import horovod.tensorflow

    public = {name for name in dir(horovod.tensorflow) if not name.startswith("_")}
    assert not {name for name in public - IMPORTED_MODULES if not hasattr(hvd, name)}
    assert set(hvd.__all__) <= set(dir(hvd))
    assert hvd._executing_eagerly()


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_takes_horovods_arguments(hvd, module):
    public_names.check(f"tensorflow{module}")


def test_constants_are_those_of_horovod(hvd):
    import horovod.tensorflow

    for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product", "global_process_set"):
        assert getattr(hvd, name) is getattr(horovod.tensorflow, name)


def test_methods_of_horovods_tape(hvd):
    import tensorflow as tf

    tape = hvd.DistributedGradientTape(tf.GradientTape())
    assert isinstance(tape, tf.GradientTape)
    for name in ("gradient", "register_local_source", "get_local_and_global_gradients", "watch"):
        assert callable(getattr(tape, name))
    assert tape.process_set is hvd.global_process_set
    assert tape.scale_local_gradients is True


def test_names_of_tensorflow_1_raise(hvd):
    import tensorflow as tf

    from hvdkit.errors import UsageError

    v1 = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    for call, message in (
        (lambda: hvd.broadcast_global_variables(0), r"use broadcast_variables\(model.variables"),
        (lambda: hvd.BroadcastGlobalVariablesHook(0), r"use broadcast_variables\(\)"),
        (lambda: hvd.DistributedOptimizer(v1), "use hvd.DistributedGradientTape"),
        (lambda: hvd.DistributedOptimizer("adam"), "optimizer is a builtins.str: expected one"),
        (lambda: hvd.broadcast_object(1, session=v1), "was called with a session"),
        (lambda: hvd.allgather_object(1, session=v1), "was called with a session"),
        (lambda: hvd.broadcast_object_fn(session=v1), "was called with a session"),
        (lambda: hvd.elastic.TensorFlowState([], session=v1), "session is given"),
        (lambda: hvd.elastic.TensorFlowState([]), "variables is an empty list"),
    ):
        with pytest.raises(UsageError, match=message):
            call()
