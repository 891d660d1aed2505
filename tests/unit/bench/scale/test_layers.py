"""The tables of layers have the gradients of the models."""

import pytest

from hvdkit.bench.scale.layers import MODELS


def elements(name):
    return [count for layer in MODELS[name]() for count in layer.elements]


@pytest.mark.parametrize(
    ("name", "parameters", "count"),
    [
        # Of torchvision, and of BertForPreTraining of transformers with 30,528 words.
        ("resnet50", 161, 25_557_032),
        ("resnet101", 314, 44_549_160),
        ("resnet152", 467, 60_192_808),
        ("vgg16", 32, 138_357_544),
        ("inception3", 284, 23_834_568),
        ("bert-base", 206, 110_111_042),
        ("bert-large", 398, 336_232_258),
    ],
)
def test_numbers_of_parameters_and_elements(name, parameters, count):
    found = elements(name)
    assert (len(found), sum(found)) == (parameters, count)


@pytest.mark.parametrize(
    ("name", "work"),
    [("resnet50", 4.09e9), ("resnet101", 7.80e9), ("vgg16", 15.47e9), ("inception3", 5.71e9)],
)
def test_multiply_adds_are_those_of_the_literature(name, work):
    """Of torchvision's table of models, in GFLOPS."""
    assert sum(layer.work for layer in MODELS[name]()) == pytest.approx(work, rel=0.01)


@pytest.mark.parametrize(
    "name",
    [
        "many-small",
        "transformer",
        "resnet50",
        *[pytest.param(name, marks=pytest.mark.long) for name in ("vgg16", "one-huge")],
    ],
)
def test_models_of_bench_step_have_the_same_gradients(name):
    pytest.importorskip("torch")
    from hvdkit.bench.step.torch_models import MODELS as TORCH_MODELS

    expected = [parameter.numel() for parameter in TORCH_MODELS[name][0]().parameters()]
    assert sorted(elements(name)) == sorted(expected)
