"""`torch.set_default_device` and `torch.device` as a context change no tensor of hvdkit's own."""

import ast
from pathlib import Path

from torch.utils._device import _device_constructors

PACKAGE = Path(__file__).parents[3] / "hvdkit"
CONSTRUCTORS = {function.__name__ for function in _device_constructors()}


def constructions(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "torch"
            and node.func.attr in CONSTRUCTORS
        ):
            yield node


def test_each_new_tensor_has_a_device():
    files = [path for path in PACKAGE.rglob("*.py") if "bench" not in path.parts]
    found = [(path, node) for path in files for node in constructions(path)]
    assert len(found) > 20
    without = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path, node in found
        if not any(keyword.arg == "device" for keyword in node.keywords)
    ]
    assert not without
