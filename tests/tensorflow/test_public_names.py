"""hvdkit.tensorflow has all public names of horovod.tensorflow 0.28.1, with their arguments."""

import importlib
import inspect

import pytest

from tests.torch.test_public_names import accepts, own_names

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

# The documented public names of each module.
DOCUMENTED = {
    "": {
        "Adasum", "Average", "BroadcastGlobalVariablesHook", "Compression",
        "DistributedGradientTape", "DistributedOptimizer", "Max", "Min",
        "PartialDistributedGradientTape", "ProcessSet", "Product", "Sum", "SyncBatchNormalization",
        "add_process_set", "allgather", "allgather_object", "allreduce", "alltoall", "broadcast",
        "broadcast_", "broadcast_global_variables", "broadcast_object", "broadcast_object_fn",
        "broadcast_variables", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built",
        "elastic", "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather",
        "grouped_allreduce", "grouped_reducescatter", "init", "is_homogeneous", "is_initialized",
        "join", "local_rank", "local_rank_op", "local_size", "local_size_op", "mpi_built",
        "mpi_enabled", "mpi_threads_supported", "nccl_built", "process_set_included_op", "rank",
        "rank_op", "reducescatter", "remove_process_set", "rocm_built", "shutdown", "size",
        "size_op", "start_timeline", "stop_timeline",
    },
    ".compression": {"Compression", "Compressor", "FP16Compressor", "NoneCompressor"},
    ".elastic": {"TensorFlowKerasState", "TensorFlowState", "run"},
    ".functions": {
        "allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables",
    },
    ".gradient_aggregation": {"LocalGradientAggregationHelper"},
    ".mpi_ops": {"allgather", "join", "rank", "size", "ProcessSet", "init", "shutdown"},
    ".sync_batch_norm": {"SyncBatchNormalization"},
    ".util": {"refs_to_vars", "vars_to_refs"},
}  # fmt: skip

# Modules that horovod.tensorflow imports.
IMPORTED_MODULES = {"os", "tf", "version", "warnings"}


def both(module):
    return (
        importlib.import_module(f"{package}.tensorflow{module}")
        for package in ("horovod", "hvdkit")
    )


def test_names_of_horovods_namespace_exist(hvd):
    import horovod.tensorflow

    public = {name for name in dir(horovod.tensorflow) if not name.startswith("_")}
    assert not {name for name in public - IMPORTED_MODULES if not hasattr(hvd, name)}
    assert set(hvd.__all__) <= set(dir(hvd))
    assert hvd._executing_eagerly()


@pytest.mark.parametrize("module", MODULES)
def test_public_names_exist(hvd, module):
    horovods, ours = both(module)
    assert not {name for name in DOCUMENTED[module] if not hasattr(ours, name)}
    if module == "":
        assert set(ours.__all__) >= DOCUMENTED[module]
        return
    assert not {name for name in own_names(horovods) if not hasattr(ours, name)}


@pytest.mark.parametrize("module", MODULES)
def test_functions_accept_horovods_arguments(hvd, module):
    horovods, ours = both(module)
    for name in sorted(DOCUMENTED[module] | own_names(horovods)):
        theirs, mine = getattr(horovods, name, None), getattr(ours, name, None)
        if theirs is None or mine is None or theirs is mine or not callable(theirs):
            continue
        assert accepts(mine, theirs), (
            f"{name}{inspect.signature(mine)} for {name}{inspect.signature(theirs)}"
        )


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
