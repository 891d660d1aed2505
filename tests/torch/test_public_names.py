"""hvdkit.torch has all public names of horovod.torch 0.28.1, with compatible arguments."""

import importlib
import inspect

import pytest

MODULES = [
    "",
    ".compression",
    ".elastic",
    ".elastic.sampler",
    ".elastic.state",
    ".functions",
    ".mpi_ops",
    ".optimizer",
    ".sync_batch_norm",
]

# Names that users of each module use, as documented by horovod.torch 0.28.1.
DOCUMENTED = {
    "": {
        "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max",
        "Min", "ProcessSet", "Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather",
        "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async",
        "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
        "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state",
        "broadcast_parameters", "ccl_built", "check_extension", "cross_rank", "cross_size",
        "cuda_built", "ddl_built", "elastic", "global_process_set", "gloo_built", "gloo_enabled",
        "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
        "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
        "grouped_reducescatter_async", "init", "is_initialized", "join", "local_rank",
        "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "poll",
        "rank", "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built",
        "shutdown", "size", "sparse_allreduce_async", "start_timeline", "stop_timeline",
        "synchronize",
    },
    ".compression": {"Compression", "Compressor", "FP16Compressor", "NoneCompressor"},
    ".elastic": {"ElasticSampler", "TorchState", "run"},
    ".elastic.sampler": {"ElasticSampler"},
    ".elastic.state": {
        "ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler", "StateHandler",
        "TorchState", "get_handler_registry", "set_handler_registry",
    },
    ".functions": {
        "allgather_object", "broadcast_object", "broadcast_optimizer_state",
        "broadcast_parameters",
    },
    ".mpi_ops": {"allreduce_async_", "join", "rank", "size", "synchronize", "ProcessSet"},
    ".optimizer": {"DistributedOptimizer"},
    ".sync_batch_norm": {"SyncBatchNorm"},
}  # fmt: skip


def both(module):
    return (
        importlib.import_module(f"{package}.torch{module}") for package in ("horovod", "hvdkit")
    )


def own_names(module):
    """Return the public functions and classes that a module of Horovod defines."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    }


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_there(hvd, module):
    horovods, ours = both(module)
    documented = DOCUMENTED[module]
    assert not {name for name in documented if not hasattr(ours, name)}
    if module == "":
        listed = set(ours.__all__)
        assert documented <= listed
        assert not {name for name in listed if not hasattr(ours, name)}
        return
    # Horovod's modules have no __all__: the names that each defines itself, except the classes
    # behind DistributedOptimizer and mpi_ops' autograd functions.
    wanted = {name for name in own_names(horovods) if not name.startswith("Horovod")}
    assert not {name for name in wanted if not hasattr(ours, name)}


def accepts(ours, horovods):
    """Return whether `ours` accepts all positional and keyword arguments of `horovods`."""
    theirs = list(inspect.signature(horovods).parameters.values())
    mine = inspect.signature(ours).parameters
    variadic = {p.kind for p in mine.values()}
    places = [p for p in mine.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    for place, parameter in enumerate(theirs):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in mine:
            if parameter.kind != parameter.KEYWORD_ONLY and (
                place >= len(places) or places[place].name != parameter.name
            ):
                return False
            if parameter.default is not parameter.empty and (
                mine[parameter.name].default is parameter.empty
            ):
                return False
        elif not {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD} <= variadic:
            return False
    required = {p.name for p in theirs if p.default is p.empty}
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(
        p.name in required for p in mine.values() if p.default is p.empty and p.kind not in kinds
    )


@pytest.mark.parametrize("module", MODULES)
def test_every_function_takes_horovods_arguments(hvd, module):
    horovods, ours = both(module)
    for name in sorted(DOCUMENTED[module] | (own_names(horovods) if module else set())):
        theirs, mine = getattr(horovods, name), getattr(ours, name, None)
        if mine is None or theirs is mine or not callable(theirs):
            continue
        try:
            assert accepts(mine, theirs), (
                f"{name}{inspect.signature(mine)} for {name}{inspect.signature(theirs)}"
            )
        except ValueError as error:
            assert "no signature" in str(error)  # noqa: PT017


def test_constants_and_errors_are_horovods(hvd):
    import horovod.torch

    for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product", "HorovodInternalError"):
        assert getattr(hvd, name) is getattr(horovod.torch, name)
    assert hvd.global_process_set is horovod.torch.global_process_set
    for name in ("init", "join", "shutdown"):
        assert getattr(hvd.mpi_ops, name) is getattr(hvd, name)


def test_methods_of_horovods_optimizer(hvd):
    import torch

    model = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    names = ("step", "synchronize", "skip_synchronize", "zero_grad", "load_state_dict")
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    for name in (*names, "set_backward_passes_per_step"):
        assert callable(getattr(optimizer, name))
    assert optimizer.backward_passes_per_step == 1
    assert optimizer.op == hvd.Average
    assert optimizer.process_set is hvd.global_process_set


def test_the_function_that_runs_a_function_on_several_ranks():
    import horovod

    import hvdkit

    assert hvdkit.run is horovod.run
    with pytest.raises(AttributeError, match="no attribute 'walk'"):
        hvdkit.walk  # noqa: B018
