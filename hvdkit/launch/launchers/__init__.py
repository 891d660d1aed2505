"""The ways to start ranks: Gloo, MPI, Slurm, nodes that a user starts."""
