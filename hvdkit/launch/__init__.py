"""`hvdkit run`: start the ranks of a job on one or several hosts, and watch them.

The steps of `hvdkit run -np 2 python x.py`:

1. `cli` parses the options (`arguments`, `config_file`) and calls `command.run`.
2. `command` reads the `hosts` (or an `allocation`), and `plan` gives each rank its place on a host.
3. `command` chooses a `launcher`: `gloo`, `mpi` or `slurm`. Steps 4 to 7 are those of `gloo`.
4. `prepare` starts an `agent` on each host, through the `agent_pool`. A `connection` to an agent is
   a local process, or a process over `ssh`. `messages` is their protocol.
5. Each agent answers with its `host_facts`. `prepare` chooses the `network` from them, and makes
   the `environment` of each rank. `preflight` checks several hosts (`inspection`).
6. `gloo` starts the rendezvous server and sends `start`. The agents start the ranks.
7. `job` shows the `output` of the ranks, handles signals and `failures`, and returns the outcome.

With `mpi`, `slurm` and `--nodes` (`nodes`), other programs start the agents, which connect to the
`listener` of the launcher. `generate` writes job files for Slurm and Kubernetes. `run_function` is
`hvdkit.run`, and `horovods_launcher` protects Horovod's own launcher.
"""
