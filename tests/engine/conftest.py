"""Horovod's sources, pristine and patched, for the tests of the engine."""

import shutil

import pytest

from hvdkit.engine import install, patches, sdist


@pytest.fixture(scope="session")
def sdist_file(tmp_path_factory):
    tools = tmp_path_factory.mktemp("tools")
    install.install_tools(["setuptools>=61,<81", "wheel"], tools)
    return sdist.obtain(None, tools)


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
