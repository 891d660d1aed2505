"""The smoke test rejects a broken engine, and then nothing is installed."""

import shutil
import sys
from pathlib import Path

import pytest

from hvdkit.engine import describe, smoke_test
from hvdkit.errors import HvdkitError


@pytest.fixture
def copy_of_engine(tmp_path, monkeypatch):
    engine = describe.installed()
    if engine is None or "torch" not in engine.frameworks:
        pytest.skip("no engine with torch is installed: run `hvdkit build`")
    shutil.copytree(engine.path, tmp_path / "horovod")
    # The libraries look for MPI relative to site-packages, which the copy has left, and in the
    # environment of the build, which is gone if the engine came from the cache.
    monkeypatch.setenv("LD_LIBRARY_PATH", str(Path(sys.prefix) / "lib"))
    return tmp_path


def test_a_working_engine_passes(copy_of_engine):
    lines = []
    smoke_test.run(copy_of_engine, ["torch"], ["gloo"], None, lines.append)
    assert lines == ["torch over gloo: allreduce, broadcast, allgather on 2 ranks (cpu)"]


@pytest.mark.parametrize(
    ("operations", "gpus", "local_rank", "expected"),
    [
        ("none", 4, 1, (None, "")),
        ("staged", 0, 1, (None, "no GPU is visible")),
        ("staged", 1, 1, (0, "through host memory")),
        ("staged", 2, 1, (1, "through host memory")),
        ("nccl", 0, 1, (None, "no GPU is visible")),
        ("nccl", 1, 0, (None, "NCCL needs one GPU per rank; 1 for 2 ranks")),
        ("nccl", 2, 1, (1, "NCCL")),
    ],
)
def test_ranks_share_a_gpu_except_with_nccl(operations, gpus, local_rank, expected):
    assert smoke_test.choose_gpu(operations, gpus, local_rank, local_size=2) == expected


def test_an_engine_with_wrong_results_is_rejected(copy_of_engine):
    with (copy_of_engine / "horovod/torch/__init__.py").open("a") as source:
        source.write("\n_right = allreduce\ndef allreduce(*a, **k): return _right(*a, **k) + 1\n")
    with pytest.raises(HvdkitError, match=r"(?s)does not work with torch over gloo.*expected"):
        smoke_test.run(copy_of_engine, ["torch"], ["gloo"], None, lambda line: None)


def test_an_engine_that_does_not_load_is_rejected(copy_of_engine):
    (library,) = (copy_of_engine / "horovod/torch").glob("mpi_lib_v2*.so")
    library.write_bytes(b"not a library")
    with pytest.raises(HvdkitError, match="nothing was installed"):
        smoke_test.run(copy_of_engine, ["torch"], ["gloo"], None, lambda line: None)
