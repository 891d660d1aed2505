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
    """A folder whose modules, and UCX's configuration, write to the file `imported`."""
    trap = f"open({str(tmp_path / 'imported')!r}, 'a').write(__name__ + '\\n')\n"
    folder = tmp_path / "shared"
    for name in MODULES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(trap)
    # Open MPI loads UCX, which reads this file in the current folder.
    log = f"UCX_LOG_FILE={tmp_path / 'imported'}\nUCX_LOG_LEVEL=debug\n"
    (folder / "ucx.conf").write_text(log)
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
    check(command, trapped, tmp_path)


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_script_that_imports_hvdkit_reads_nothing_from_the_current_folder(
    framework, trapped, tmp_path
):
    script = tmp_path / "script.py"
    script.write_text(
        f"import os\nfrom hvdkit.{framework} import init\ninit()\n"
        f"assert os.getcwd() == {str(trapped)!r}\n"
    )
    check([sys.executable, script], trapped, tmp_path)


def check(command, trapped, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    answer = subprocess.run(
        command, cwd=trapped, env=environment, capture_output=True, text=True, timeout=100
    )
    imported = tmp_path / "imported"
    assert not imported.exists(), imported.read_text()
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_no_installed_package_adds_a_relative_path():
    """The editable installation of a package without __init__.py would."""
    code = "import sys; print(*(path for path in sys.path if not path.startswith('/')))"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", code]
    assert not subprocess.check_output(command, env=environment, text=True).strip()


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
