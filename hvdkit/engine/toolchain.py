"""Find the compiler, the build tools and the disk space for a build."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from packaging.version import Version

from hvdkit.errors import HvdkitError
from hvdkit.system.processes import run_python

SUPPORTED_PYTHON = ((3, 11), (3, 13))

#: The oldest CMake with all policies that Horovod's files set; CUDA 13 needs 3.18.
OLDEST_CMAKE = "3.18"

#: The oldest gcc that compiles the C++17 in the frameworks' headers.
OLDEST_GCC = "9"

#: The memory of one compiler, and the disk space of a build.
BYTES_PER_JOB = 2 * 10**9
DISK_BYTES = 2 * 10**9

_SECONDS = 60


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its path, and the first line of its `--version`."""

    path: str
    version: str


@dataclass(frozen=True)
class BuildTool:
    """CMake or a make program.

    Attributes:
        path: None if the tool must be installed for the build.
        version: for people; with `path` None, where the tool is installed from.
    """

    path: str | None
    version: str


def check_python() -> None:
    """Raise HvdkitError if this Python is not supported."""
    lowest, highest = SUPPORTED_PYTHON
    if not lowest <= sys.version_info[:2] <= highest:
        raise HvdkitError(
            f"Python {platform.python_version()} is not supported; expected "
            f"{lowest[0]}.{lowest[1]} to {highest[0]}.{highest[1]}."
        )
    if sys.platform != "linux":
        raise HvdkitError(f"{sys.platform} is not supported; hvdkit builds on Linux.")


def check_headers() -> None:
    """Raise HvdkitError if Python's headers are missing."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.exists():
        raise HvdkitError(
            f"{headers} is missing, so nothing can be compiled for this Python. Install its "
            f"headers: apt-get install python3-dev, dnf install python3-devel."
        )


def find_compiler() -> Compiler:
    """Return the C++ compiler: $CXX, or the first of c++, g++, clang++ on PATH.

    Raises:
        HvdkitError: there is none, it does not run, or it is too old.
    """
    named = os.environ.get("CXX")
    path = next(
        filter(None, map(shutil.which, [named] if named else ["c++", "g++", "clang++"])), None
    )
    if path is None:
        candidates = f"CXX={named}" if named else "c++, g++ and clang++"
        raise HvdkitError(
            f"no C++ compiler found (looked for {candidates} on PATH). Install one: "
            "apt-get install g++, dnf install gcc-c++, module load gcc; or set CXX."
        )
    first = _first_line([path, "--version"])
    if first is None:
        raise HvdkitError(f"{path} --version fails; expected a C++ compiler. Set CXX to one.")
    if "clang" not in first.lower():
        number = _first_line([path, "-dumpfullversion"])
        if number and Version(number) < Version(OLDEST_GCC):
            raise HvdkitError(
                f"{path} is gcc {number}; C++17 in the frameworks' headers needs gcc >= "
                f"{OLDEST_GCC}. Install or load a newer one, and set CXX to its g++."
            )
    return Compiler(path, first)


def find_cmake() -> BuildTool:
    """Return CMake from the environment or PATH; without a path if it must be installed."""
    path = which("cmake")
    first = _first_line([path, "--version"]) if path else None
    match = re.search(r"(\d+(?:\.\d+)+)", first or "")
    if path and match and Version(match[1]) >= Version(OLDEST_CMAKE):
        return BuildTool(path, match[1])
    return BuildTool(None, "from the package index")


def find_make() -> BuildTool:
    """Return `make`; without a path if Ninja must be installed instead."""
    path = shutil.which("make") or shutil.which("gmake")
    if path:
        return BuildTool(path, _first_line([path, "--version"]) or "")
    return BuildTool(None, "Ninja from the package index")


def which(program: str) -> str | None:
    """Return the path of `program` in this Python's environment, or else on PATH."""
    beside = Path(sys.prefix) / "bin" / program
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(program)


def jobs(requested: int | None = None) -> int:
    """Return the number of compilers to run at once: one per core, at most RAM / 2 GB."""
    # Unlike cpu_count(), the affinity mask has the cores of the container or batch job.
    cores = len(os.sched_getaffinity(0))
    return max(1, min(requested or cores, psutil.virtual_memory().total // BYTES_PER_JOB))


def check_disk(folder: Path) -> None:
    """Raise HvdkitError if the file system of `folder` has too little space for a build."""
    existing = next(p for p in [folder, *folder.parents] if p.exists())
    free = shutil.disk_usage(existing).free
    if free < DISK_BYTES:
        raise HvdkitError(
            f"{existing} has {free / 1e9:.1f} GB free; a build needs {DISK_BYTES / 1e9:.0f} GB. "
            "Free some space, or set TMPDIR and HVDKIT_CACHE_DIR to folders with enough space."
        )


def output(command: Sequence[str]) -> str:
    """Return what a program prints.

    Raises:
        HvdkitError: it does not run, fails, or prints nothing.
    """
    shown = f"`{shlex.join(command)}`"
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HvdkitError(f"{shown} does not run: {error}.") from error
    text = answer.stdout.strip() or answer.stderr.strip()
    if answer.returncode != 0 or not text:
        raise HvdkitError(f"{shown} fails: {text or 'no output'}.")
    return text


def _first_line(command: Sequence[str]) -> str | None:
    try:
        return output(command).splitlines()[0].strip()
    except HvdkitError:
        return None


def ask_python(code: str, seconds: float) -> dict[str, Any]:
    """Return the JSON object that code prints in its last line, in a new interpreter.

    Raises:
        HvdkitError: the code fails; the message is the last line of its errors.
        subprocess.TimeoutExpired: it has not ended within `seconds`.
    """
    answer = run_python("-c", code, seconds=seconds)
    if answer.returncode != 0:
        raise HvdkitError((answer.stderr.strip().splitlines() or ["no message"])[-1])
    found: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    return found


def python_path(first: Path) -> str:
    """Return PYTHONPATH with the folder `first` in front.

    The rest is kept: environment modules use it to provide a framework.
    """
    return os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])
