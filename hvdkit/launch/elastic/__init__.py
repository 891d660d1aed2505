"""`hvdkit run --elastic`: a job whose hosts change while it runs.

    job       start the ranks, and start them again after a failure or a change of the hosts
    members   watch the hosts, and keep on each an agent, which owns the memory for commits
    member    one host and its agent
    choice    the hosts of a start

The ranks' side is `hvdkit.elastic`.
"""
