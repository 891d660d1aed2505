import dataclasses

import pytest

from hvdkit.engine import cuda
from hvdkit.engine.frameworks import Framework
from hvdkit.errors import UsageError

CPU = Framework("torch", "2.13.0+cpu", True, None)
GPU = Framework("torch", "2.13.0+cu130", True, "13.0", ("75", "90", "120"))


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """The files of a simulated CUDA toolkit and NCCL that a build examines."""
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        "#!/bin/sh\n"
        "if [ $1 = --version ]; then echo 'Cuda compilation tools, release 13.0, V13.0.88'\n"
        f"elif [ $1 = --dryrun ]; then echo '#$ TOP={tmp_path}/cuda/bin/..' >&2\n"
        "else echo \"Allowed values: 'sm_75','sm_80','sm_90','sm_90a'\"; fi\n"
    )
    nvcc.chmod(0o755)
    for name, text in (
        ("include/nccl.h", "#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 3\n"),
        ("lib/libnccl.so.2", ""),
    ):
        file = tmp_path / "nccl" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    monkeypatch.delenv("HOROVOD_CUDA_HOME", raising=False)
    monkeypatch.delenv("HOROVOD_BUILD_CUDA_CC_LIST", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(tmp_path / "nccl"))
    return tmp_path


def test_auto_with_a_cpu_framework_builds_for_the_cpu():
    found = cuda.find([CPU], "auto")
    assert found == cuda.Gpu(None, None, "torch 2.13.0+cpu is a CPU build")
    assert found.operations == "none"


def test_nccl_with_a_cpu_framework_is_an_error():
    with pytest.raises(UsageError, match=r"--gpu nccl: torch 2.13.0\+cpu is a CPU build"):
        cuda.find([CPU], "nccl")


def test_without_nccl_tensors_go_through_host_memory(toolkit):
    found = cuda.find([GPU], "none")
    assert found.toolkit is not None
    assert found.operations == "staged"
    assert cuda.find([GPU, dataclasses.replace(CPU, name="tensorflow")], "auto").operations == (
        "staged"
    )


def test_a_complete_tool_chain_is_found(toolkit):
    found = cuda.find([GPU], "auto")
    assert found.operations == "nccl"
    assert found.toolkit.home == toolkit / "cuda"
    assert found.toolkit.version == "13.0"
    assert found.nccl.version == "2.27.3"
    assert found.nccl.library == toolkit / "nccl/lib"
    # The architectures of the framework that this nvcc supports.
    assert found.toolkit.architectures == ("75", "90")


def test_the_users_architectures_take_precedence(toolkit, monkeypatch):
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "80, 90a")
    assert cuda.find([GPU], "nccl").toolkit.architectures == ("80", "90a")


def test_an_nvcc_of_another_major_version_is_rejected(toolkit):
    old = Framework("torch", "2.5.1+cu124", False, "12.4", ("80",))
    with pytest.raises(UsageError, match=r"nvcc is CUDA 13\.0.*is built for CUDA 12\.4"):
        cuda.find([old], "nccl")
    assert cuda.find([old], "auto").operations == "none"


def test_missing_nccl_says_where_to_get_it(toolkit, monkeypatch):
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(toolkit / "gone"))
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cuda, "_SYSTEM_ROOTS", ())
    with pytest.raises(UsageError, match="NCCL is not found.*HOROVOD_NCCL_HOME"):
        cuda.find([GPU], "nccl")
