"""The launcher of an MPI, `mpirun`: find out which MPI it belongs to."""

import functools
import re
import subprocess
from dataclasses import dataclass

from hvdkit.errors import HvdkitError

_SHOWN_LINES = 20


@dataclass(frozen=True)
class Mpirun:
    """An MPI's launcher.

    Attributes:
        open_mpi: True for Open MPI; False for Hydra, the launcher of MPICH and Intel MPI.
        major: the first number of its version; 0 if unknown.
    """

    path: str
    open_mpi: bool
    major: int


@functools.cache
def identify_mpirun(path: str) -> Mpirun:
    """Return the kind of the MPI launcher at `path`.

    Raises:
        HvdkitError: the launcher does not run, or is of another MPI.
    """
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HvdkitError(f"cannot run {path!r} --version: {error}") from error
    text = answer.stdout + answer.stderr
    version = re.search(r"\b(\d+)\.\d+", text)
    major = int(version[1]) if version else 0
    if any(name in text for name in ("Open MPI", "OpenRTE", "PRRTE")):
        return Mpirun(path, True, major)
    if "HYDRA" in text.upper() or "MPICH" in text or "Intel(R) MPI" in text:
        return Mpirun(path, False, major)
    said = "\n".join(text.splitlines()[-_SHOWN_LINES:])
    raise HvdkitError(
        f"{path!r} is not the launcher of Open MPI or MPICH; its --version says {said!r}. "
        "Give the mpirun of the MPI that Horovod was built with"
    )
