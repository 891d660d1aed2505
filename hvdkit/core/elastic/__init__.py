"""Elastic training on the side of a rank.

`hvdkit run --elastic` starts all ranks again, as new processes, after a failure and when the hosts
have changed. So no state of a broken engine is left. The last commit of the script's state is kept
in the memory of each host.

- `state`: the part of a state class that all adapters share.
- `run`: the decorator of training functions.
- `committer`: stores commits on every host, and selects the newest one at a start.
"""
