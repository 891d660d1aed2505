"""An optimizer's state in a checkpoint: its contents and devices."""

import numpy as np
import pytest


def there_and_back(saved, restored):
    """Save one optimizer's state, and restore it into another."""
    from hvdkit.checkpoint import tree
    from hvdkit.checkpoint.tensors import nbytes
    from hvdkit.torch.items.optimizer import OptimizerItem

    encoded, tensors = tree.encode(OptimizerItem(saved).save(), "optimizer")
    part = OptimizerItem(restored)
    prepared = part.plan_restore(
        tree.decode(encoded, {name: t.spec for name, t in tensors.items()})
    )
    _, places = tree.encode(prepared, "optimizer")
    for name, tensor in tensors.items():
        content = np.empty(nbytes(tensor.spec), np.uint8)
        tensor.read(content)
        if places[name].tensor.device.type != "meta":
            places[name].write(content)
    part.restore(prepared)


def stepped(name, device="cpu", **options):
    import torch

    weight = torch.ones(3, device=device, requires_grad=True)
    optimizer = getattr(torch.optim, name)([weight], lr=0.1, **options)
    weight.grad = torch.full((3,), 0.5, device=device)
    optimizer.step()
    return optimizer


def test_state_of_no_parameter(hvd):
    """Custom optimizers have entries such as `state["global"]`."""
    import torch

    saved, restored = stepped("Adam"), stepped("Adam")
    saved.state["global"] = {"norms": torch.arange(4.0), "seen": 3}
    there_and_back(saved, restored)
    assert restored.state["global"]["seen"] == 3
    assert torch.equal(restored.state["global"]["norms"], torch.arange(4.0))


@pytest.mark.parametrize(
    ("name", "options", "on_host"),
    [
        ("Adam", {}, {"step"}),
        ("Adam", {"capturable": True}, set()),
        ("SGD", {"momentum": 0.9}, set()),
    ],
)
def test_state_that_was_saved_on_the_host_goes_to_the_device(hvd, name, options, on_host):
    """Moments are restored on the parameters' device, as by torch's own load_state_dict."""
    import torch

    weight = torch.ones(3, device="meta", requires_grad=True)
    restored = getattr(torch.optim, name)([weight], lr=0.1, **options)
    saved = stepped(name, **{key: value for key, value in options.items() if key == "momentum"})
    saved.param_groups[0].update(options)
    there_and_back(saved, restored)
    (state,) = restored.state.values()
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    assert tensors
    assert {key for key, value in tensors.items() if value.device.type == "cpu"} == on_host


def test_state_keeps_its_memory_order(hvd):
    """A product with a column-major matrix, as SOAP has it, would have other last bits."""
    import torch

    def optimizer_of(*bases):
        weight = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
        optimizer = torch.optim.Adam([weight])
        optimizer.state[weight]["bases"] = list(bases)
        return optimizer

    square, moment = torch.arange(16.0).view(4, 4), torch.arange(120.0).view(2, 3, 4, 5)
    of_layer = moment.to(memory_format=torch.channels_last)
    bases = square.t(), square, of_layer, moment, moment.permute(3, 1, 0, 2)
    for held in ((), [torch.zeros(basis.shape) for basis in bases]):
        restored = optimizer_of(*held)
        there_and_back(optimizer_of(*bases), restored)
        (state,) = restored.state.values()
        for found, basis in zip(state["bases"], bases, strict=True):
            assert torch.equal(found, basis)
            assert found.stride() == basis.stride()


def test_tensors_that_are_one_tensor_stay_one(hvd):
    """As with `torch.save`: a step may change a counter that all parameters share in place."""
    import torch

    def optimizer_of(*counters):
        weights = [torch.ones(3, requires_grad=True) for _ in range(2)]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        for weight, counter in zip(weights, counters, strict=False):
            optimizer.state[weight] = {"count": counter, "flat": torch.ones(0)}
        return optimizer

    def counters_of(optimizer):
        return [state["count"] for state in optimizer.state.values()]

    def separate():
        return torch.tensor(1.0), torch.tensor(2.0)

    one = torch.tensor(3.0)
    for before in ((), separate(), (torch.tensor(0.0),) * 2):
        restored = optimizer_of(*before)
        there_and_back(optimizer_of(one, one), restored)
        first, second = counters_of(restored)
        first += 1
        assert float(second) == 4
        restored = optimizer_of(*before)
        there_and_back(optimizer_of(*separate()), restored)
        first, second = counters_of(restored)
        first += 1
        assert [float(first), float(second)] == [2, 2]
