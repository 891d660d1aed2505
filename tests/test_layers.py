"""hvdkit is a house of floors (see CONTRIBUTING): what may import what, checked."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.engine.describe import installed

PACKAGE = Path(__file__).parents[1] / "hvdkit"
FRAMEWORKS = {"torch", "tensorflow", "keras", "horovod"}

#: Room -> the floor it is on. A room imports from lower floors, and from those that ALLOWED names.
FLOORS = {
    "errors": 0,
    "findings": 0,
    "mesh": 0,
    "processes": 0,
    "ranks": 0,
    "rendezvous": 0,
    "core": 1,
    "engine": 1,
    "checkpoint": 1,
    "launch": 1,
    "monitor": 1,
    "doctor": 2,
    "torch": 2,
    "tensorflow": 2,
    "bench": 3,
    "keras": 3,
    "cli": 3,
}
ALLOWED = {
    ("mesh", "errors"),
    ("processes", "errors"),
    ("ranks", "errors"),
    ("ranks", "processes"),
    ("ranks", "rendezvous"),
    ("rendezvous", "mesh"),
    ("checkpoint", "core"),
    ("cli", "bench"),
    ("launch", "engine"),
    # Keras runs on either framework's adapter only at its user's choice, never both.
    ("keras", "torch"),
    ("keras", "tensorflow"),
}
#: A folder that belongs to another room than the one that it is in: a path of horovod's that
#: scripts import, kept for them.
BELONGS_TO = {"tensorflow/keras": "keras"}
#: Module -> the room above it that its functions import from, each only when it is called.
SEAMS = {"tensorflow/optimizer.py": "keras"}
FRAMEWORK_FREE = {room for room, floor in FLOORS.items() if floor < 2}


def rooms():
    found = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    return found | {p.stem for p in PACKAGE.glob("*.py")} - {"__init__", "__main__"}


def modules_of(room):
    single = PACKAGE / f"{room}.py"
    if single.exists():
        return [single]
    folders = [PACKAGE / room, *(PACKAGE / f for f, owner in BELONGS_TO.items() if owner == room)]
    others = [PACKAGE / f for f, owner in BELONGS_TO.items() if owner != room]
    return sorted(
        path
        for folder in folders
        for path in folder.rglob("*.py")
        if not any(path.is_relative_to(other) for other in others)
    )


def imports_of(path):
    """Absolute names of what a module imports, wherever in it, and whether a function does it."""
    package = ["hvdkit", *path.relative_to(PACKAGE).parent.parts]
    tree = ast.parse(path.read_text())
    in_functions = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        in_function = id(node) in in_functions
        if isinstance(node, ast.Import):
            yield from ((alias.name, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield start, in_function
            yield from ((f"{start}.{alias.name}", in_function) for alias in node.names)


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_every_room_has_a_floor():
    assert rooms() <= FLOORS.keys()


@pytest.mark.parametrize("room", sorted(rooms()))
def test_a_room_imports_only_from_rooms_below(room):
    wrong = []
    for path in modules_of(room):
        module = path.relative_to(PACKAGE).as_posix()
        for name, in_function in imports_of(path):
            parts = name.split(".")
            if parts[0] != "hvdkit" or len(parts) < 2 or parts[1] not in FLOORS:
                continue
            other = BELONGS_TO.get("/".join(parts[1:3]), parts[1])
            if SEAMS.get(module) == other and in_function:
                continue
            below = FLOORS[other] < FLOORS[room] or (room, other) in ALLOWED
            if other != room and not below:
                wrong.append(f"{module} imports {name}")
    assert not wrong


@pytest.mark.parametrize("room", sorted(rooms() & FRAMEWORK_FREE))
def test_framework_free_rooms_load_no_framework(room):
    names = [
        ".".join(["hvdkit", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
            ".__init__"
        )
        for path in modules_of(room)
    ]
    code = "; ".join(f"import {name}" for name in names)
    loaded = run_python(f"{code}; import sys; print(*sys.modules)").split()
    assert not FRAMEWORKS & {name.split(".")[0] for name in loaded}


def test_hvdkit_is_imported_in_a_fifth_of_a_second():
    code = (
        "import time; began = time.perf_counter(); import hvdkit;"
        "print(time.perf_counter() - began); import sys; print(*sys.modules)"
    )
    runs = [run_python(code).split() for _ in range(3)]
    assert min(float(run[0]) for run in runs) < 0.2
    assert not FRAMEWORKS & {name.split(".")[0] for name in runs[0][1:]}


def test_the_tensorflow_adapter_loads_neither_pytorch_nor_the_room_above():
    engine = installed()
    if engine is None or "tensorflow" not in engine.frameworks:
        pytest.skip("no Horovod for TensorFlow here: run `hvdkit build`")
    loaded = run_python("import hvdkit.tensorflow, sys; print(*sys.modules)").split()
    assert "horovod.tensorflow.mpi_ops" in loaded
    assert not {"torch", "horovod.torch", "hvdkit.torch", "hvdkit.keras"} & set(loaded)
