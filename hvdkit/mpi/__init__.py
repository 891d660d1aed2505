"""The installed MPI: its launcher and its shared memory."""
