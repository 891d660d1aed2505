"""`hvdkit run`: start the ranks of a job on one or several hosts, and watch them.

docs/architecture.md has the path of a launch, and the path of a job's end. `generate` writes job
files for Slurm and Kubernetes. `run_function` is `hvdkit.run`, and
`horovods_launcher` protects Horovod's own launcher.
"""
