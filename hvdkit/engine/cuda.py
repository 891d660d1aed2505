"""The CUDA tool chain and the NCCL that an engine would be built with."""

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
class Cuda:
    """What a build with NCCL is made of.

    Attributes:
        home: the toolkit's folder, with bin/nvcc.
        version: nvcc's, such as 13.0.
        nccl_include: the folder with nccl.h.
        nccl_library: the folder with libnccl.so or libnccl.so.2.
        nccl_version: what nccl.h says.
        architectures: compute capabilities to compile for, such as `80` or `90`.
    """

    home: Path
    version: str
    nccl_include: Path
    nccl_library: Path
    nccl_version: str
    architectures: tuple[str, ...]


def find(frameworks: Sequence[Framework], gpu: str) -> tuple[Cuda | None, str]:
    """What a build for `frameworks` can use of CUDA, and the reason in a few words.

    Args:
        gpu: `auto` (NCCL where all that it takes is there), `nccl` (it has to be there) or `none`.

    Raises:
        UsageError: `nccl` is asked for, and something is missing.
    """
    if gpu == "none":
        return None, "not asked for"
    try:
        return _find(frameworks), "found"
    except LookupError as error:
        if gpu == "nccl":
            raise UsageError(f"--gpu nccl: {error.args[0]}") from error
        return None, str(error.args[0])


def _find(frameworks: Sequence[Framework]) -> Cuda:
    for framework in frameworks:
        if framework.cuda is None:
            raise LookupError(
                f"{framework.name} {framework.version} is a CPU build; install a CUDA build of it, "
                "or leave it out of --frameworks"
            )
    nvcc = _nvcc()
    if nvcc is None:
        raise LookupError("nvcc is not found; put it on PATH, or set CUDA_HOME to the toolkit")
    version = _match(r"release (\d+\.\d+)", _run([str(nvcc), "--version"])) or "unknown"
    for framework in frameworks:
        assert framework.cuda is not None
        if framework.cuda.split(".")[0] != version.split(".")[0]:
            raise LookupError(
                f"nvcc is CUDA {version}, {framework.name} {framework.version} is built for CUDA "
                f"{framework.cuda}; the major versions must agree: set CUDA_HOME"
            )
    include, library = _nccl(nvcc.parent.parent)
    header = (include / "nccl.h").read_text(encoding="utf-8", errors="replace")
    parts = [_match(rf"#define NCCL_{part} +(\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    return Cuda(
        home=nvcc.parent.parent,
        version=version,
        nccl_include=include,
        nccl_library=library,
        nccl_version=".".join(part or "?" for part in parts),
        architectures=_architectures(frameworks, nvcc),
    )


def _nvcc() -> Path | None:
    for variable in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home and os.access(Path(home) / "bin" / "nvcc", os.X_OK):
            return Path(home) / "bin" / "nvcc"
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return Path(found).resolve() if found else None


def _nccl(cuda_home: Path) -> tuple[Path, Path]:
    """The folders with nccl.h and with the library: the user's choice, the wheel, the system."""
    candidates: list[tuple[Path, Path]] = []
    home = os.environ.get("HOROVOD_NCCL_HOME")
    include = os.environ.get("HOROVOD_NCCL_INCLUDE") or (home and f"{home}/include")
    library = os.environ.get("HOROVOD_NCCL_LIB") or (home and f"{home}/lib")
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
            return headers, libraries
    raise LookupError(
        "NCCL is not found (nccl.h and libnccl.so); a CUDA build of PyTorch brings it, or install "
        "nvidia-nccl-cu12 / -cu13, or set HOROVOD_NCCL_HOME"
    )


def _architectures(frameworks: Iterable[Framework], nvcc: Path) -> tuple[str, ...]:
    """What the frameworks carry code for and nvcc can compile; the user's own list wins."""
    chosen = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST")
    if chosen:
        return tuple(part.strip() for part in chosen.split(","))
    known = set(re.findall(r"sm_(\d+[af]?)", _run([str(nvcc), "--help"])))
    wanted = {a for framework in frameworks for a in framework.cuda_architectures}
    both = (wanted & known) or known
    return tuple(sorted(both, key=lambda a: (int(a.rstrip("af")), a)))


def _run(command: list[str]) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return answer.stdout


def _match(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None
