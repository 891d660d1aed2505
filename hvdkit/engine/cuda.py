"""Find the CUDA toolkit and the NCCL for a build."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.engine.frameworks import Framework
from hvdkit.errors import UsageError

_SYSTEM_ROOTS = (Path("/usr/local"), Path("/usr"))


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit that matches the frameworks.

    Attributes:
        home: its folder, with bin/nvcc.
        version: nvcc's, such as 13.0.
        architectures: compute capabilities to compile for, such as `80` or `90`.
    """

    home: Path
    version: str
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class Nccl:
    """The folders of nccl.h and of libnccl.so (or .so.2), and the version in nccl.h."""

    include: Path
    library: Path
    version: str


@dataclass(frozen=True)
class Gpu:
    """The support for tensors on a GPU in a build.

    With a toolkit and NCCL, NCCL reduces them. With a toolkit only, they go through host memory and
    the controller (PyTorch only). With neither, the engine rejects them.

    Attributes:
        reason: why there is no NCCL; empty if there is.
    """

    toolkit: Toolkit | None = None
    nccl: Nccl | None = None
    reason: str = ""

    @property
    def operations(self) -> str:
        """`nccl`, `staged` (through host memory) or `none`."""
        return "nccl" if self.nccl else "staged" if self.toolkit else "none"


def find(frameworks: Sequence[Framework], gpu: str) -> Gpu:
    """Find the GPU support that a build for `frameworks` can have.

    Args:
        gpu: `auto` (NCCL if all its requirements are found), `nccl` (NCCL is required) or `none`
            (without NCCL).

    Raises:
        UsageError: `gpu` is `nccl`, and a requirement is missing.
    """
    toolkit: Toolkit | None = None
    try:
        toolkit = _toolkit([f for f in frameworks if f.cuda is not None])
        for framework in frameworks:
            if framework.cuda is None:
                raise LookupError(_cpu_build(framework))
        if gpu == "none":
            raise LookupError("not requested")
        return Gpu(toolkit, _nccl(toolkit.home))
    except LookupError as error:
        reason = str(error.args[0])
        if not any(f.cuda for f in frameworks):
            reason = " and ".join(map(_cpu_build, frameworks))
        if gpu == "nccl":
            raise UsageError(f"--gpu nccl: {reason}") from error
        return Gpu(toolkit, None, reason)


def _cpu_build(framework: Framework) -> str:
    return f"{framework.name} {framework.version} is a CPU build"


def _toolkit(frameworks: Sequence[Framework]) -> Toolkit:
    nvcc = _nvcc()
    if nvcc is None or not frameworks:
        raise LookupError("nvcc is not found; put it on PATH, or set CUDA_HOME to the toolkit")
    version = _match(r"release (\d+\.\d+)", _run([str(nvcc), "--version"])) or "unknown"
    for framework in frameworks:
        assert framework.cuda is not None
        if framework.cuda.split(".")[0] != version.split(".")[0]:
            raise LookupError(
                f"nvcc is CUDA {version}, {framework.name} {framework.version} is built for CUDA "
                f"{framework.cuda}; the major versions must agree. Set CUDA_HOME to a toolkit of "
                f"CUDA {framework.cuda.split('.')[0]}"
            )
    return Toolkit(_home(nvcc), version, _architectures(frameworks, nvcc))


def _nvcc() -> Path | None:
    for variable in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home and os.access(Path(home) / "bin" / "nvcc", os.X_OK):
            return Path(home) / "bin" / "nvcc"
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return Path(found).resolve() if found else None


def _home(nvcc: Path) -> Path:
    """Return the toolkit's folder as nvcc reports it: the nvcc on PATH may be a script."""
    top = _match(r"#\$ TOP=(\S+)", _run([str(nvcc), "--dryrun", "-x", "cu", "/dev/null"]))
    return Path(top).resolve() if top else nvcc.parent.parent


def _nccl(cuda_home: Path) -> Nccl:
    """Find NCCL: from the user's variables, a wheel or the system, in this order."""
    candidates: list[tuple[Path, Path]] = []
    home = os.environ.get("HOROVOD_NCCL_HOME")
    include = os.environ.get("HOROVOD_NCCL_INCLUDE") or (home and f"{home}/include")
    library = os.environ.get("HOROVOD_NCCL_LIB") or (home and f"{home}/lib")
    if bool(include) != bool(library):
        raise LookupError(
            "of HOROVOD_NCCL_INCLUDE and HOROVOD_NCCL_LIB, only one is set: set both, or "
            "HOROVOD_NCCL_HOME"
        )
    if include and library:
        candidates.append((Path(include), Path(library)))
    specification = importlib.util.find_spec("nvidia")
    wheels = (specification.submodule_search_locations or []) if specification else []
    candidates += [(Path(w) / "nccl/include", Path(w) / "nccl/lib") for w in wheels]
    for root in (cuda_home, *_SYSTEM_ROOTS):
        for folder in (root / "lib64", root / "lib", *sorted(root.glob("lib/*-linux-gnu"))):
            candidates.append((root / "include", folder))
    for headers, libraries in candidates:
        if (headers / "nccl.h").exists() and any(libraries.glob("libnccl.so*")):
            text = (headers / "nccl.h").read_text(encoding="utf-8", errors="replace")
            parts = (_match(rf"#define NCCL_{p} +(\d+)", text) for p in ("MAJOR", "MINOR", "PATCH"))
            return Nccl(headers, libraries, ".".join(part or "?" for part in parts))
    raise LookupError(
        "NCCL is not found (nccl.h and libnccl.so); a CUDA build of PyTorch brings it, or install "
        "nvidia-nccl-cu12 / -cu13, or set HOROVOD_NCCL_HOME"
    )


def _architectures(frameworks: Iterable[Framework], nvcc: Path) -> tuple[str, ...]:
    """Return the user's architectures, or those of the frameworks that nvcc supports."""
    chosen = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST")
    if chosen:
        return tuple(part.strip() for part in chosen.split(","))
    known = set(re.findall(r"sm_(\d+[af]?)", _run([str(nvcc), "--help"])))
    wanted = {a for framework in frameworks for a in framework.cuda_architectures}
    both = (wanted & known) or known
    return tuple(sorted(both, key=lambda a: (int(a.rstrip("af")), a)))


def _run(command: list[str]) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return answer.stdout + answer.stderr


def _match(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None
