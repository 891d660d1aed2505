"""Keep what an elastic state has saved in a file, for another state, as of a restarted process."""

import pickle
from pathlib import Path

from hvdkit.elastic import parts
from hvdkit.elastic.state import POSITIONS, CommittedState


def write_commit(state: CommittedState, path: Path) -> None:
    """Write what `state.save` has saved."""
    path.write_bytes(pickle.dumps(state._saved))


def read_commit(state: CommittedState, path: Path) -> None:
    """Read what `write_commit` has written, for the next `restore`."""
    state._saved = pickle.loads(path.read_bytes())
    parts.restore(state._saved, POSITIONS)
