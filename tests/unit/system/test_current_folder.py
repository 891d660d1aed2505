"""Commands in a folder of other users: hvdkit imports no module from there."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "hvdkit"
# The modules that children of hvdkit import first: frameworks, the engine, pip, hvdkit itself.
MODULES = ("hvdkit", "torch", "tensorflow", "horovod", "mpi4py", "pip", "setuptools", "json")
HVDKIT = Path(sys.executable).with_name("hvdkit")


@pytest.fixture
def trapped(tmp_path):
    """A folder whose modules add their names to the file `imported`."""
    trap = f"open({str(tmp_path / 'imported')!r}, 'a').write(__name__ + '\\n')\n"
    folder = tmp_path / "shared"
    for name in MODULES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(trap)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        [HVDKIT, "doctor"],
        [HVDKIT, "build", "--dry-run"],
        [HVDKIT, "run", "-np", "1", "true"],
    ],
    ids=lambda command: " ".join(map(str, command[1:])),
)
def test_a_command_imports_nothing_from_the_current_folder(command, trapped, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    answer = subprocess.run(
        command, cwd=trapped, env=environment, capture_output=True, text=True, timeout=100
    )
    imported = tmp_path / "imported"
    assert not imported.exists(), imported.read_text()
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_each_child_of_this_python_gets_safe_paths():
    unsafe = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List | ast.Tuple)
        and any(
            isinstance(word, ast.Constant)
            and word.value in ("-m", "-c")
            and ast.unparse(before).endswith(("sys.executable", "python"))
            for before, word in zip(node.elts, node.elts[1:], strict=False)
        )
    ]
    assert not unsafe, f"use processes.python_command, or -P, in {unsafe}"
