"""`hvdkit run`: from a command and a list of hosts to the ranks of a running job.

`hosts` says where ranks may run, and `plan` gives each its place. `prepare` asks the hosts through
an `agent` on each, chooses their `network` and gives ranks their `environment`; `preflight` looks
whether the hosts are ready. Then a launcher, `gloo`, `mpi` or, inside an `allocation`, `slurm`, has
the agents start the ranks, and `job` watches them until they have ended. `generate` writes files
for what starts jobs itself.
"""
