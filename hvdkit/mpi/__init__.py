"""What hvdkit knows of an installed MPI: its launcher and its shared memory."""
