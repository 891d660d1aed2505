"""hvdkit.keras has all public names of horovod.keras and horovod.tensorflow.keras 0.28.1."""

import importlib
import inspect

import pytest

# The documented public names of each module.
DOCUMENTED = {
    "": {
        "Adasum", "Average", "Compression", "DistributedOptimizer", "PartialDistributedOptimizer",
        "ProcessSet", "Sum", "add_process_set", "allgather", "allreduce", "broadcast",
        "broadcast_global_variables", "callbacks", "ccl_built", "cross_rank", "cross_size",
        "cuda_built", "ddl_built", "elastic", "global_process_set", "gloo_built", "gloo_enabled",
        "init", "is_initialized", "load_model", "local_rank", "local_size", "mpi_built",
        "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "reducescatter",
        "remove_process_set", "rocm_built", "shutdown", "size", "start_timeline", "stop_timeline",
    },
    ".callbacks": {
        "BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback",
        "LearningRateWarmupCallback", "MetricAverageCallback",
    },
    ".elastic": {
        "CommitStateCallback", "KerasState", "UpdateBatchStateCallback",
        "UpdateEpochStateCallback", "run",
    },
}  # fmt: skip
# These arguments are keyword-only, because their positions differ between Horovod's two modules.
BY_NAME = {"BestModelCheckpoint": {"save_weights_only", "mode", "save_freq"}}


def own_names(module):
    """Return the names of the public functions and classes that a Horovod module defines."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    }


def arguments(value):
    return [
        name
        for name, parameter in inspect.signature(value).parameters.items()
        if name not in ("args", "kwargs") and parameter.kind is not parameter.VAR_KEYWORD
    ]


@pytest.mark.parametrize("module", list(DOCUMENTED))
def test_public_names_exist(hvd, module):
    ours = importlib.import_module(f"hvdkit.keras{module}")
    assert DOCUMENTED[module] <= set(ours.__all__)
    assert not {name for name in ours.__all__ if not hasattr(ours, name)}


@pytest.mark.parametrize("package", ["horovod.keras", "horovod.tensorflow.keras"])
@pytest.mark.parametrize("module", list(DOCUMENTED))
def test_arguments_are_those_of_horovod(hvd, package, module):
    from hvdkit.keras import backend

    if backend.NAME != "tensorflow":
        pytest.skip("it would load Horovod's other extension")
    theirs = importlib.import_module(package + module)
    ours = importlib.import_module(f"hvdkit.keras{module}")
    names = own_names(theirs)
    assert names <= DOCUMENTED[module]
    for name in names:
        wanted = [
            argument
            for argument in arguments(getattr(theirs, name))
            if argument not in BY_NAME.get(name, ())
        ]
        found = arguments(getattr(ours, name))
        missing = [argument for argument in wanted if argument not in found]
        # `**options` are checked by the function that receives them.
        accepts_more = any(
            parameter.kind is parameter.VAR_KEYWORD
            for parameter in inspect.signature(getattr(ours, name)).parameters.values()
        )
        assert not missing or accepts_more, (name, missing)
        common = [argument for argument in wanted if argument in found]
        assert found[: len(common)] == common or name.endswith("Optimizer"), name


def test_only_the_horovod_of_the_backend_is_loaded(hvd):
    import sys

    from hvdkit.keras import backend

    other = {"torch": "tensorflow", "tensorflow": "torch"}[backend.NAME]
    assert f"horovod.{backend.NAME}" in sys.modules
    assert not [
        name for name in sys.modules if name.startswith((f"horovod.{other}", f"hvdkit.{other}"))
    ]
    if backend.NAME == "tensorflow":
        assert "torch" not in sys.modules
