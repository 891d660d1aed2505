"""The architecture (see CONTRIBUTING): each package imports only from layers below its own."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.engine.describe import installed

PACKAGE = Path(__file__).parents[1] / "hvdkit"
FRAMEWORKS = {"torch", "tensorflow", "keras", "horovod"}

#: Package or module -> its layer. It may import from lower layers, and as ALLOWED.
LAYERS = {
    "errors": 0,
    "cgroups": 0,
    "console": 0,
    "diagnostics": 0,
    "exit_statuses": 0,
    "flags": 0,
    "mesh": 0,
    "mpi_segments": 0,
    "mpirun": 0,
    "owned_folders": 0,
    "plain_files": 0,
    "process_limit": 0,
    "processes": 0,
    "ranks": 0,
    "record_files": 0,
    "rendezvous": 0,
    "sealed": 0,
    "signals": 0,
    "trusted_paths": 0,
    "whole_files": 0,
    "core": 1,
    "engine": 1,
    "faults": 1,
    "checkpoint": 1,
    "elastic": 1,
    "launch": 1,
    "migrate": 1,
    "monitor": 1,
    "profiling": 1,
    "doctor": 2,
    "report": 2,
    "torch": 2,
    "tensorflow": 2,
    "accelerate": 3,
    "bench": 3,
    "keras": 3,
    "lightning": 3,
    "torchmetrics": 3,
    "transformers": 3,
    "tune": 3,
    "cli": 3,
}
ALLOWED = {
    ("console", "plain_files"),
    ("exit_statuses", "errors"),
    ("mesh", "errors"),
    ("mpi_segments", "owned_folders"),
    ("owned_folders", "trusted_paths"),
    ("mpirun", "errors"),
    ("process_limit", "cgroups"),
    ("process_limit", "errors"),
    ("processes", "errors"),
    ("processes", "process_limit"),
    ("ranks", "errors"),
    ("ranks", "mpi_segments"),
    ("ranks", "mpirun"),
    ("ranks", "owned_folders"),
    ("ranks", "processes"),
    ("ranks", "rendezvous"),
    ("rendezvous", "mesh"),
    ("signals", "errors"),
    ("whole_files", "plain_files"),
    ("checkpoint", "core"),
    ("elastic", "checkpoint"),
    ("elastic", "core"),
    ("cli", "bench"),
    ("cli", "tune"),
    ("tune", "bench"),
    ("launch", "core"),
    ("monitor", "core"),
    ("profiling", "core"),
    ("profiling", "faults"),
    ("launch", "engine"),
    ("launch", "faults"),
    # Ranks of a benchmark measure the optimizer of hvdkit.keras.
    ("bench", "keras"),
    # A Trainer logs metrics.
    ("lightning", "torchmetrics"),
    # A Trainer of transformers uses an Accelerator.
    ("transformers", "accelerate"),
    # hvdkit.keras imports one of the two adapters, for the user's Keras backend.
    ("keras", "torch"),
    ("keras", "tensorflow"),
}
#: A folder that belongs to another package than its parent. Scripts import it by Horovod's path.
BELONGS_TO = {"tensorflow/keras": "keras"}
#: Module -> the package of a higher layer that its functions import when they are called.
LAZY_IMPORTS = {"tensorflow/optimizer.py": "keras"}
FRAMEWORK_FREE = {package for package, layer in LAYERS.items() if layer < 2}


def packages():
    found = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    return found | {p.stem for p in PACKAGE.glob("*.py")} - {"__init__", "__main__"}


def modules_of(package):
    single = PACKAGE / f"{package}.py"
    if single.exists():
        return [single]
    folders = [
        PACKAGE / package,
        *(PACKAGE / f for f, owner in BELONGS_TO.items() if owner == package),
    ]
    others = [PACKAGE / f for f, owner in BELONGS_TO.items() if owner != package]
    return sorted(
        path
        for folder in folders
        for path in folder.rglob("*.py")
        if not any(path.is_relative_to(other) for other in others)
    )


def imports_of(path):
    """Yield the absolute names that a module imports, and whether a function imports them."""
    parents = ["hvdkit", *path.relative_to(PACKAGE).parent.parts]
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
            base = parents[: len(parents) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield start, in_function
            yield from ((f"{start}.{alias.name}", in_function) for alias in node.names)


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    ).stdout


def test_every_package_has_a_layer():
    assert packages() <= LAYERS.keys()


@pytest.mark.parametrize("package", sorted(packages()))
def test_a_package_imports_only_from_lower_layers(package):
    wrong = []
    for path in modules_of(package):
        module = path.relative_to(PACKAGE).as_posix()
        for name, in_function in imports_of(path):
            parts = name.split(".")
            if parts[0] != "hvdkit" or len(parts) < 2 or parts[1] not in LAYERS:
                continue
            other = BELONGS_TO.get("/".join(parts[1:3]), parts[1])
            if LAZY_IMPORTS.get(module) == other and in_function:
                continue
            below = LAYERS[other] < LAYERS[package] or (package, other) in ALLOWED
            if other != package and not below:
                wrong.append(f"{module} imports {name}")
    assert not wrong


@pytest.mark.parametrize("package", sorted(packages() & FRAMEWORK_FREE))
def test_framework_free_packages_load_no_framework(package):
    names = [
        ".".join(["hvdkit", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
            ".__init__"
        )
        for path in modules_of(package)
    ]
    code = "; ".join(f"import {name}" for name in names)
    loaded = run_python(f"{code}; import sys; print(*sys.modules)").split()
    assert not FRAMEWORKS & {name.split(".")[0] for name in loaded}


def test_the_launcher_and_its_agents_import_little():
    """Each start of `hvdkit run` and of an agent would take longer."""
    loaded = run_python(
        "import hvdkit.launch.agent, hvdkit.cli, sys;"
        "hvdkit.cli.main(['run', '-np', '1', '--dry-run', 'true']); print(*sys.modules)"
    )
    others = {"numpy", "rich", "hvdkit.bench", "hvdkit.checkpoint", "hvdkit.migrate"}
    assert not others & set(loaded.split())


def test_adapters_do_not_import_slow_packages_at_the_top():
    """Each of these packages imports SymPy, which takes a second in each rank."""
    slow = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "torch.fx")
    for package in ("core", "torch", "keras"):
        for path in modules_of(package):
            for name, in_function in imports_of(path):
                assert in_function or not name.startswith(slow), f"{path} imports {name}"


def test_hvdkit_is_imported_in_a_fifth_of_a_second():
    code = (
        "import time; began = time.perf_counter(); import hvdkit;"
        "print(time.perf_counter() - began); import sys; print(*sys.modules)"
    )
    runs = [run_python(code).split() for _ in range(3)]
    assert min(float(run[0]) for run in runs) < 0.2
    assert not FRAMEWORKS & {name.split(".")[0] for name in runs[0][1:]}


def test_the_tensorflow_adapter_loads_neither_pytorch_nor_keras():
    engine = installed()
    if engine is None or "tensorflow" not in engine.frameworks:
        pytest.skip("no Horovod for TensorFlow here: run `hvdkit build`")
    loaded = run_python("import hvdkit.tensorflow, sys; print(*sys.modules)").split()
    assert "horovod.tensorflow.mpi_ops" in loaded
    assert not {"torch", "horovod.torch", "hvdkit.torch", "hvdkit.keras"} & set(loaded)


@pytest.mark.parametrize("adapter", ["torch", "tensorflow"])
def test_ranks_tests_do_not_import_an_adapter_at_the_top(adapter):
    """One pytest process collects all tests (`scripts/test --long`), but may load one adapter."""
    for path in (Path(__file__).parent / "parallel" / adapter).rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert not any(m.startswith(f"hvdkit.{adapter}") for m in modules), path
