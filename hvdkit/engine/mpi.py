"""Find the MPI for a build."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hvdkit.engine.toolchain import ask_python, output, which
from hvdkit.errors import HvdkitError

_SECONDS = 60

_REPAIR = "Repair this MPI, put another one first on PATH, or build with --controllers gloo."

# Open MPI 5 leaves a file of 16 MB in /dev/shm if a single process starts it, so do not start it.
_MPI4PY = """
import json
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
maps = open("/proc/self/maps").read().split()
print(json.dumps({
    "version": MPI.Get_library_version().splitlines()[0],
    "libraries": sorted({p for p in maps if "/libmpi.so" in p or "/libmpich.so" in p}),
}))
"""


@dataclass(frozen=True)
class Mpi:
    """An MPI installation.

    Attributes:
        mpicxx: its C++ compiler wrapper.
        mpirun: the launcher beside it.
        version: the first line of `mpirun --version`.
        library: the file that programs are linked with, symbolic links resolved.
    """

    mpicxx: str
    mpirun: str
    version: str
    library: Path

    @property
    def in_environment(self) -> bool:
        """Whether it is in this Python's environment, as a wheel from the package index."""
        return self.library.is_relative_to(Path(sys.prefix).resolve())


def find() -> Mpi | None:
    """Return the MPI whose `mpicxx` is in this Python's environment, or else first on PATH.

    Returns:
        The MPI; None without `mpicxx`.

    Raises:
        HvdkitError: the launcher or the library of this `mpicxx` is missing.
    """
    mpicxx = which("mpicxx")
    if mpicxx is None:
        return None
    line = _output([mpicxx, "-show"])
    folders = [word[2:] for word in shlex.split(line) if word.startswith("-L")]
    folders.append(str(Path(mpicxx).resolve().parent.parent / "lib"))
    folders += ["/usr/lib", "/usr/lib64"]
    library = next(
        (
            (Path(folder) / name).resolve()
            for folder in folders
            for name in ("libmpi.so", "libmpich.so")
            if (Path(folder) / name).exists()
        ),
        None,
    )
    if library is None:
        raise HvdkitError(
            f"{mpicxx} exists, but there is no libmpi.so or libmpich.so in {', '.join(folders)}. "
            "Install MPI's development files, or build with --controllers gloo."
        )
    # Take the launcher of the same MPI, from the folder of the compiler wrapper.
    mpirun = Path(mpicxx).with_name("mpirun")
    if not os.access(mpirun, os.X_OK):
        raise HvdkitError(
            f"there is no mpirun in the folder of {mpicxx}. Install the run time of this MPI, or "
            "build with --controllers gloo."
        )
    version = _output([str(mpirun), "--version"]).splitlines()[0].strip()
    return Mpi(mpicxx, str(mpirun), version, library)


def mpi4py_mismatch(mpi: Mpi) -> str | None:
    """Return why mpi4py conflicts with `mpi`; None if it is missing or uses the same MPI.

    Two MPI libraries in one process crash it, and `hvd.init(comm)` loads mpi4py.
    """
    try:
        found = ask_python(_MPI4PY, _SECONDS)
    except subprocess.TimeoutExpired:
        return f"mpi4py does not load its MPI within {_SECONDS} s"
    except HvdkitError as error:
        missing = "No module named 'mpi4py'" in str(error)
        return None if missing else f"mpi4py does not load: {error}"
    libraries = {Path(path).resolve() for path in found["libraries"]}
    # Compare folders, because a wheel has libmpi.so and libmpi.so.40 as two copies.
    if mpi.library.parent in {library.parent for library in libraries}:
        return None
    return (
        f"mpi4py uses {', '.join(map(str, libraries)) or found['version']}, Horovod would use "
        f"{mpi.library}: two MPI libraries in one process crash it. Build mpi4py with this MPI "
        "(pip install --no-binary mpi4py --force-reinstall mpi4py), or put the other MPI's mpicxx "
        "first on PATH"
    )


def _output(command: list[str]) -> str:
    try:
        return output(command)
    except HvdkitError as error:
        raise HvdkitError(f"{error} {_REPAIR}") from error
