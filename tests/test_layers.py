"""The imports that each package may make (docs/architecture.md). No import makes a circle."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.engine.describe import installed

PACKAGE = Path(__file__).parents[1] / "hvdkit"
FRAMEWORKS = {"torch", "tensorflow", "keras", "horovod"}

#: Package or module of hvdkit -> the others that it may import. The first ones import no framework.
FRAMEWORK_FREE = {
    "errors": "",
    "exit_statuses": "errors",
    "system": "errors",
    "console": "errors system",
    "mpi": "errors system",
    "rendezvous": "errors",
    "ranks": "errors mpi rendezvous system",
    "engine": "console errors ranks system",
    "runtime": "engine errors system",
    "agreement": "errors system",
    "reduction": "agreement engine errors runtime",
    "training": "agreement errors reduction runtime system",
    "keras_variables": "agreement errors",
    "checkpoint": "agreement console errors runtime system",
    "elastic": "agreement checkpoint errors runtime training",
    "faults": "errors runtime system",
    "profiling": "agreement errors faults runtime system",
    "monitor": "agreement errors runtime system training",
    "launch": "console engine errors exit_statuses faults mpi rendezvous runtime system",
    "migrate": "console errors system",
    "report": "checkpoint console errors faults monitor system",
    "doctor": "console engine errors runtime system",
}
ADAPTERS = {
    "torch": "agreement checkpoint elastic engine errors launch monitor profiling reduction "
    "rendezvous runtime system training",
    "tensorflow": "agreement checkpoint elastic engine errors keras_variables monitor profiling "
    "reduction runtime system training",
    # It imports one of the two adapters, for the user's Keras backend.
    "keras": "agreement checkpoint elastic engine errors keras_variables monitor profiling "
    "reduction runtime system tensorflow torch training",
    "torchmetrics": "agreement errors torch",
    "accelerate": "errors torch",
    "transformers": "accelerate torch",
    "lightning": "agreement errors runtime torch torchmetrics",
}
COMMANDS = {
    "bench": "console engine errors keras launch ranks reduction rendezvous system torch",
    "tune": "bench console errors faults launch reduction runtime system training",
    "cli": "bench checkpoint console doctor engine errors faults launch migrate report system tune",
}
MAY_IMPORT = {
    package: set(others.split())
    for part in (FRAMEWORK_FREE, ADAPTERS, COMMANDS)
    for package, others in part.items()
}
#: A folder that belongs to another package than its parent. Scripts import it by Horovod's path.
BELONGS_TO = {"tensorflow/keras": "keras"}
#: Module -> the package of a higher layer that its functions import when they are called.
LAZY_IMPORTS = {"tensorflow/optimizer.py": "keras"}


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


def module_name(path):
    return ".".join(["hvdkit", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
        ".__init__"
    )


def test_every_package_is_in_the_table():
    assert packages() == MAY_IMPORT.keys()


@pytest.mark.parametrize("package", sorted(packages()))
def test_a_package_imports_only_what_the_table_says(package):
    wrong = []
    for path in modules_of(package):
        module = path.relative_to(PACKAGE).as_posix()
        for name, in_function in imports_of(path):
            parts = name.split(".")
            if parts[0] != "hvdkit" or len(parts) < 2 or parts[1] not in MAY_IMPORT:
                continue
            other = BELONGS_TO.get("/".join(parts[1:3]), parts[1])
            if LAZY_IMPORTS.get(module) == other and in_function:
                continue
            if other not in {package, *MAY_IMPORT[package]}:
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_packages_make_no_circle():
    assert [*graphlib.TopologicalSorter(MAY_IMPORT).static_order()]


def test_modules_make_no_circle_also_not_for_types():
    paths = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    graph = {
        name: {other for other, _ in imports_of(path) if other in paths} - {name, "hvdkit"}
        for name, path in paths.items()
        if path != PACKAGE / "__init__.py"  # it imports `run` when it is used
    }
    # Scripts import Horovod's path hvdkit.tensorflow.keras; the optimizer there is Keras's.
    graph["hvdkit.tensorflow.optimizer"] -= {"hvdkit.keras", "hvdkit.keras.optimizer"}
    # A name in a package's `__init__` is no module, but makes an import of the package.
    for name, others in graph.items():
        others -= {other for other in others if name.startswith(f"{other}.")}
    assert [*graphlib.TopologicalSorter(graph).static_order()]


@pytest.mark.parametrize("package", sorted(packages() & FRAMEWORK_FREE.keys()))
def test_framework_free_packages_load_no_framework(package):
    code = "; ".join(f"import {module_name(path)}" for path in modules_of(package))
    loaded = run_python(f"{code}; import sys; print(*sys.modules)").split()
    assert not FRAMEWORKS & {name.split(".")[0] for name in loaded}


def test_the_launcher_and_its_agents_import_little():
    """Each start of `hvdkit run` and of an agent would take longer."""
    loaded = run_python(
        "import hvdkit.launch.agent.main, hvdkit.cli, sys;"
        "hvdkit.cli.main(['run', '-np', '1', '--dry-run', 'true']); print(*sys.modules)"
    )
    others = {"numpy", "rich", "hvdkit.bench", "hvdkit.checkpoint", "hvdkit.migrate"}
    assert not others & set(loaded.split())


def test_adapters_do_not_import_slow_packages_at_the_top():
    """Each of these packages imports SymPy, which takes a second in each rank."""
    slow = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "torch.fx")
    for package in ("reduction", "agreement", "runtime", "training", "torch", "keras"):
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
    for path in (Path(__file__).parent / "ranks" / adapter).rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert not any(m.startswith(f"hvdkit.{adapter}") for m in modules), path
