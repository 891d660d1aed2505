import pytest

from hvdkit.engine import frameworks
from hvdkit.errors import HvdkitError, UsageError


def module(folder, name, text):
    (folder / f"{name}.py").write_text(text)


@pytest.fixture
def other_torch(tmp_path, monkeypatch):
    """Put another module `torch` before the real one, in new interpreters."""

    def put(text):
        module(tmp_path, "torch", text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return put


def test_an_unknown_name_is_rejected():
    with pytest.raises(UsageError, match="unknown framework 'mxnet'; expected some of: torch"):
        frameworks.find(["mxnet"])


def test_a_missing_framework_is_named(monkeypatch):
    monkeypatch.setattr(frameworks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="framework torch was requested, but .* cannot import it"):
        frameworks.find(["torch"])


def test_without_frameworks_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(frameworks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HvdkitError, match="no framework is importable.*pip install torch"):
        frameworks.find()


def test_a_framework_that_does_not_import_is_named(other_torch):
    other_torch("raise ImportError('libc10.so: cannot open shared object file')")
    with pytest.raises(HvdkitError, match=r"torch is installed, but importing it fails: .*libc10"):
        frameworks.find(["torch"])


def test_an_old_framework_is_rejected(other_torch):
    other_torch(
        "__version__ = '2.0.1'\n"
        "class version: cuda = None\n"
        "def compiled_with_cxx11_abi(): return False\n"
    )
    with pytest.raises(HvdkitError, match=r"torch 2\.0\.1 is too old.*>= 2\.1"):
        frameworks.find(["torch"])


def test_the_installed_torch_is_described():
    pytest.importorskip("torch")
    (found,) = frameworks.find(["torch", "torch"])
    assert found.name == "torch"
    assert found.version.startswith("2.")
    assert found.cuda is None or found.cuda_architectures
