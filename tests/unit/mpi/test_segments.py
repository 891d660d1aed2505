"""The files of MPI in /dev/shm."""

import mmap
import os
from pathlib import Path

from hvdkit.mpi.segments import mpich_files


def test_the_files_of_mpich_that_a_process_has_mapped():
    file = Path(f"/dev/shm/mpich_shm_{os.getpid()}_0")
    file.write_bytes(bytes(mmap.PAGESIZE))
    try:
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0):
            assert mpich_files(os.getpid()) == {file}
            file.unlink()
            assert mpich_files(os.getpid()) == set()
    finally:
        file.unlink(missing_ok=True)
    assert mpich_files(2**22 + 1) == set()  # no process has this number
