"""Every public name of horovod.keras and horovod.tensorflow.keras 0.28.1 is here."""

import importlib
import inspect

import pytest

# What a user of each module writes, as Horovod documents it.
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
# Where Horovod's two modules give an argument different places, it must be given by its name here.
BY_NAME = {"BestModelCheckpoint": {"save_weights_only", "mode", "save_freq"}}


def own_names(module):
    """The public functions and classes that a module of Horovod defines itself."""
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
def test_every_public_name_is_there(hvd, module):
    ours = importlib.import_module(f"hvdkit.keras{module}")
    assert DOCUMENTED[module] <= set(ours.__all__)
    assert not {name for name in ours.__all__ if not hasattr(ours, name)}


@pytest.mark.parametrize("package", ["horovod.keras", "horovod.tensorflow.keras"])
@pytest.mark.parametrize("module", list(DOCUMENTED))
def test_what_horovod_defines_takes_the_same_arguments_here(hvd, package, module):
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
        # What it takes by the name of options is checked where it comes to.
        accepts_more = any(
            parameter.kind is parameter.VAR_KEYWORD
            for parameter in inspect.signature(getattr(ours, name)).parameters.values()
        )
        assert not missing or accepts_more, (name, missing)
        common = [argument for argument in wanted if argument in found]
        assert found[: len(common)] == common or name.endswith("Optimizer"), name


def test_each_backend_loads_its_own_horovod_alone(hvd):
    import sys

    from hvdkit.keras import backend

    other = {"torch": "tensorflow", "tensorflow": "torch"}[backend.NAME]
    assert f"horovod.{backend.NAME}" in sys.modules
    assert not [
        name for name in sys.modules if name.startswith((f"horovod.{other}", f"hvdkit.{other}"))
    ]
    if backend.NAME == "tensorflow":
        assert "torch" not in sys.modules
