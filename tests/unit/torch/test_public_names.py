"""hvdkit.torch has all public names of horovod.torch 0.28.1, with compatible arguments."""

import pytest

from tests import public_names

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


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_takes_horovods_arguments(hvd, module):
    public_names.check(f"torch{module}")


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

    assert public_names.accepts(hvdkit.run, horovod.run)
    with pytest.raises(AttributeError, match="no attribute 'walk'"):
        hvdkit.walk  # noqa: B018
