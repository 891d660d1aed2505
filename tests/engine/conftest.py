"""Horovod's sources, pristine and fixed, for the tests of the engine."""

import shutil

import pytest

from hvdkit.engine import fixes, install, sdist

#: Versions that every fix with a condition applies to.
FRAMEWORKS = {"torch": "2.13.0", "tensorflow": "2.21.0"}


@pytest.fixture(scope="session")
def sdist_file(tmp_path_factory):
    tools = tmp_path_factory.mktemp("tools")
    install.install_tools(["setuptools>=61,<81", "wheel"], tools)
    return sdist.obtain(None, tools)


@pytest.fixture(scope="session")
def pristine(sdist_file, tmp_path_factory):
    """The unpacked sdist. Not to be changed."""
    return sdist.unpack(sdist_file, tmp_path_factory.mktemp("pristine"))


@pytest.fixture(scope="session")
def fixed(pristine, tmp_path_factory):
    """The sdist with all fixes. Not to be changed."""
    tree = tmp_path_factory.mktemp("fixed") / "horovod"
    shutil.copytree(pristine, tree)
    fixes.apply(fixes.select(FRAMEWORKS), tree)
    return tree
