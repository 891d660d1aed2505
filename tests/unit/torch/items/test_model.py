"""A model's state in a checkpoint that was saved by another model."""

import numpy as np
import pytest


def take_over(saved, restored):
    """Restore the matching tensors of one model in another; return the differences."""
    from hvdkit.checkpoint import tree
    from hvdkit.checkpoint.tensors import nbytes
    from hvdkit.torch.items.model import ModelItem

    encoded, tensors = tree.encode(ModelItem(saved).save(), "model")
    part = ModelItem(restored)
    prepared, lines = part.plan_partial_restore(
        tree.decode(encoded, {name: t.spec for name, t in tensors.items()})
    )
    _, places = tree.encode(prepared, "model")
    for name, tensor in tensors.items():
        content = np.empty(nbytes(tensor.spec), np.uint8)
        tensor.read(content)
        places[name].write(content)
    part.restore(prepared)
    return lines


def test_another_last_layer(hvd):
    import torch

    def model(classes):
        return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, classes))

    saved, restored = model(10), model(2)
    head = restored[1].weight.detach().clone()
    lines = take_over(saved, restored)
    assert torch.equal(restored[0].weight, saved[0].weight)
    assert torch.equal(restored[1].weight, head)
    assert sorted(lines) == [
        "1.bias is F32 [2] here and F32 [10] in the checkpoint",
        "1.weight is F32 [2, 3] here and F32 [10, 3] in the checkpoint",
    ]


def test_hooks_of_modules_that_load_a_state(hvd):
    import torch

    class Scaled(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.update()
            self.register_load_state_dict_post_hook(lambda module, _: module.update())

        def update(self):
            self.norm = self.weight.norm().item()

    saved, restored = Scaled(), Scaled()
    take_over(saved, restored)
    assert torch.equal(restored.weight, saved.weight)
    assert restored.norm == saved.norm


@pytest.mark.parametrize("tied_there", [True, False])
@pytest.mark.parametrize("tied_here", [True, False])
def test_tied_weights(hvd, tied_there, tied_here):
    import torch

    def model(tied, extra):
        made = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
        if tied:
            made["b"].weight = made["a"].weight
        if extra:
            made["c"] = torch.nn.Linear(2, 2)
        return made

    saved, restored = model(tied_there, False), model(tied_here, True)
    lines = take_over(saved, restored)
    two = ["b.weight and a.weight are one tensor here, and two in the checkpoint"]
    own = ["the checkpoint has no c.bias", "the checkpoint has no c.weight"]
    assert sorted(lines) == (two if tied_here and not tied_there else []) + own
    assert torch.equal(restored["a"].bias, saved["a"].bias)
    assert torch.equal(restored["a"].weight, saved["a"].weight)
    if not tied_here or tied_there:
        assert torch.equal(restored["b"].weight, saved["b"].weight)


def test_the_first_of_two_tied_names_is_gone(hvd):
    import torch

    saved = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    saved["b"].weight = saved["a"].weight
    restored = torch.nn.ModuleDict({"b": torch.nn.Linear(3, 3)})
    take_over(saved, restored)
    assert torch.equal(restored["b"].weight, saved["a"].weight)


def test_the_state_of_another_scheduler(hvd):
    import torch

    from hvdkit.errors import UsageError
    from hvdkit.torch.items.state_dict import StateDictItem

    def part(kind, **options):
        weight = torch.ones(1, requires_grad=True)
        return StateDictItem(kind(torch.optim.SGD([weight], lr=0.5), **options), "lr_scheduler")

    schedulers = torch.optim.lr_scheduler
    saved = part(schedulers.StepLR, step_size=3).save()
    prepared, lines = part(schedulers.StepLR, step_size=5).plan_partial_restore(saved)
    assert (prepared["state"]["step_size"], lines) == (3, [])
    # Earlier versions saved the state without its class.
    prepared, lines = part(schedulers.StepLR, step_size=5).plan_partial_restore(saved["state"])
    assert (prepared["step_size"], lines) == (3, [])
    with pytest.raises(UsageError, match="it was saved with .*step_size"):
        part(schedulers.CosineAnnealingLR, T_max=7).plan_partial_restore(saved)


def test_a_model_without_content_is_not_restored(hvd):
    import torch

    with torch.device("meta"):
        restored = torch.nn.Linear(4, 3)
    assert take_over(torch.nn.Linear(4, 3), restored) == [
        f"{name} is on the meta device: first call Module.to_empty()" for name in ("weight", "bias")
    ]
