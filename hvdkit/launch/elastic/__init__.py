"""`hvdkit run --elastic`: a job whose hosts change while it runs.

    job          connect the two below with the launcher of the ranks
    members      watch the hosts, and keep on each an agent, which owns the memory for commits
    supervisor   start the ranks, and start them again after a failure or a change of the hosts

The ranks' side is `hvdkit.core.elastic`.
"""
