"""Errors for unsupported backends and versions of Keras."""

import subprocess
import sys

import pytest

from hvdkit.engine.describe import installed

# A fake Keras on another backend, which is not installed here.
OTHER_KERAS = """
import sys, types
keras = types.ModuleType("keras")
keras.__version__ = {version!r}
keras.backend = types.SimpleNamespace(backend=lambda: {name!r})
sys.modules["keras"] = keras
import hvdkit.keras
"""


@pytest.mark.parametrize(
    ("version", "name", "message"),
    [
        ("3.15.0", "jax", "Keras runs on its jax backend"),
        ("3.15.0", "openvino", "KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch"),
        ("2.15.0", "tensorflow", "this is Keras 2.15.0, and hvdkit.keras needs Keras 3"),
        ("3.11.3", "tensorflow", "needs 3.12 or newer: pip install 'keras>=3.12'"),
    ],
)
def test_another_backend_or_version_raises(version, name, message):
    if installed() is None:
        pytest.skip("no Horovod here: run `hvdkit build`")
    code = OTHER_KERAS.format(version=version, name=name)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("hvdkit.errors.HvdkitError: ")
    assert message in last
