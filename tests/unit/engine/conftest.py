"""Horovod's sources, pristine and patched, and libraries of single headers."""

import ctypes
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

from hvdkit.engine import install, patches, sdist
from hvdkit.engine.toolchain import find_compiler


@pytest.fixture(scope="session")
def compile_header(tmp_path_factory):
    """Compile a header of `hvdkit/engine/sources` with a C++ file of tests; warnings are errors."""

    def compile_check(check):
        built = tmp_path_factory.mktemp("check") / f"{check}.so"
        sources = resources.files("hvdkit.engine").joinpath("sources")
        strict = ["-Wall", "-Wextra", "-Werror", "-pedantic"]
        paths = [f"-I{sources}", str(Path(__file__).with_name(check)), "-o", str(built)]
        done = subprocess.run(
            [find_compiler().path, "-std=c++17", "-O3", *strict, "-shared", "-fPIC", *paths],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(built))

    return compile_check


@pytest.fixture(scope="session")
def build_driver(tmp_path_factory):
    """Build a program of tests with the engine's headers; warnings are errors."""

    def build(name, *flags, compiler=None):
        folder = tmp_path_factory.mktemp(name)
        for patch in patches.series():
            for path, content in patch.adds.items():
                (folder / Path(path).name).write_text(content)
        sources = resources.files("hvdkit.engine").joinpath("sources")
        built = folder / name
        source = Path(__file__).with_name(f"{name}.cc")
        paths = [f"-I{folder}", f"-I{sources}", str(source), "-o", str(built)]
        strict = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
        done = subprocess.run(
            [compiler or find_compiler().path, *strict, *flags, *paths, "-pthread"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return built

    return build


@pytest.fixture(scope="session")
def sdist_file(tmp_path_factory):
    tools = tmp_path_factory.mktemp("tools")
    install.install_tools(["setuptools>=61,<81", "wheel"], tools)
    return sdist.obtain(None, tools, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def pristine(sdist_file, tmp_path_factory):
    """The unpacked sdist. Tests must not change it."""
    return sdist.unpack(sdist_file, tmp_path_factory.mktemp("pristine"))


@pytest.fixture(scope="session")
def patched(pristine, tmp_path_factory):
    """The sdist with all patches. Tests must not change it."""
    tree = tmp_path_factory.mktemp("patched") / "horovod"
    shutil.copytree(pristine, tree)
    patches.apply(patches.series(), tree)
    return tree
