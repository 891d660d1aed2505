"""Elastic training on the side of a rank.

`hvdkit run --elastic` starts all ranks again, as new processes, after a failure and when the hosts
have changed. So no state of a broken engine is left. A commit of the script's state is a step in
the memory of each host, with the same items, files and hashes as a checkpoint on disk.

- `state`: the part of a state class that all adapters share.
- `run`: the decorator of training functions.
- `commits`: stores commits on every host, and finds the newest one at a start.
- `parts`: copies, broadcasts and restores the items of a state.

`hvdkit.runtime.elastic_start` is what the launcher tells the ranks.
"""
