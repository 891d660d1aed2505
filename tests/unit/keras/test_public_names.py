"""hvdkit.keras has all public names of horovod.keras and horovod.tensorflow.keras 0.28.1."""

import importlib
import inspect

import pytest

from tests.public_names import own_names, public_names

MODULES = ["", ".callbacks", ".elastic"]
# These arguments are keyword-only, because their positions differ between Horovod's two modules.
BY_NAME = {"BestModelCheckpoint": {"save_weights_only", "mode", "save_freq"}}


def arguments(value):
    return [
        name
        for name, parameter in inspect.signature(value).parameters.items()
        if name not in ("args", "kwargs") and parameter.kind is not parameter.VAR_KEYWORD
    ]


@pytest.mark.parametrize("package", ["horovod.keras", "horovod.tensorflow.keras"])
@pytest.mark.parametrize("module", MODULES)
def test_arguments_are_those_of_horovod(hvd, package, module):
    from hvdkit.keras import backend

    if backend.NAME != "tensorflow":
        pytest.skip("it would load Horovod's other extension")
    theirs = importlib.import_module(package + module)
    ours = importlib.import_module(f"hvdkit.keras{module}")
    wanted = own_names(theirs) if module else public_names(theirs)
    # A function of Horovod for itself.
    assert wanted - {"is_version_greater_equal_than"} <= set(dir(ours))
    assert set(ours.__all__) <= set(dir(ours))
    for name in own_names(theirs):
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
