"""Store the commits of elastic training on every host, and select the newest one at a start.

`hvdkit.core.elastic` makes a `Committer` for each elastic state. A commit is the state at the last
`state.commit()`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn

import numpy as np

from hvdkit.core.collectives import Collectives
from hvdkit.core.commits import Commit, CommitId, CommitStore
from hvdkit.core.consistency import group_by_text
from hvdkit.core.elastic_start import ElasticStart
from hvdkit.core.progress import report_saved
from hvdkit.errors import HvdkitError

_CHUNK_BYTES = 64 << 20
_COMMIT = "hvdkit.elastic.commit"

_log = logging.getLogger("hvdkit.elastic")


class Committer:
    """Store the commits of one state, on one rank. All methods are collectives.

    Args:
        start: the start of the ranks.
        collectives: the collectives of all ranks.
        key: the number of the state: 0 for the first call of an elastic training function.
        writes: whether this rank writes the commits of its host. True for one rank of each host.
    """

    def __init__(
        self, start: ElasticStart, collectives: Collectives, key: int, writes: bool
    ) -> None:
        self._start = start
        self._collectives = collectives
        self._store = CommitStore(start.folders, key)
        self._writes = writes
        self._number = 0

    def commit(self, write: Callable[[IO[bytes]], None]) -> bool:
        """Store a commit on each host.

        Args:
            write: writes the content to a file.

        Returns:
            Whether the hosts have changed, as `hosts_changed` does.

        Raises:
            HvdkitError: on every rank, if a host could not store the commit.
        """
        self._number += 1
        identity = CommitId(self._start.number, self._number)
        failure = self._try(lambda: self._store.write(identity, write)) if self._writes else ""
        changed = self._start.current_hosts() > self._start.hosts
        failed, anywhere = self._collectives.max([int(bool(failure)), int(changed)], _COMMIT)
        if failed:
            self._raise(failure, f"commit {self._number} of the elastic state was not stored")
        report_saved()
        return bool(anywhere)

    def hosts_changed(self) -> bool:
        """Return whether the ranks should end, to be started on other hosts. Equal on all ranks."""
        changed = self._start.current_hosts() > self._start.hosts
        (anywhere,) = self._collectives.max([int(changed)], "hvdkit.elastic.hosts")
        return bool(anywhere)

    def resume(self) -> Path | None:
        """Return this host's file with the newest complete commit of all hosts.

        Hosts that lack this commit get a copy. None if no host has a commit.

        Raises:
            HvdkitError: on every rank, if a host could not store the copy.
        """
        own = self._store.newest()
        id_of_rank = self._held(own)
        best = max((identity for identity in id_of_rank if identity), default=None)
        if best is None:
            if self._start.committed and self._collectives.rank == 0:
                _log.warning(
                    "every host that held a commit of the elastic state is lost, so the training "
                    "starts from its beginning. To keep a state on disk, use hvd.Checkpointer"
                )
            return None
        self._number = best.number
        if any(identity != best for identity in id_of_rank):
            self._copy(best, self._collectives.ranks[id_of_rank.index(best)], own)
            own = self._store.newest()
        assert own is not None
        return own.path

    def _held(self, own: Commit | None) -> list[CommitId | None]:
        """Return the newest commit on the host of each rank."""
        text = json.dumps(None if own is None else [own.id.start, own.id.number])
        gathered = self._collectives.allgather(text.encode(), "hvdkit.elastic.held")
        held = [json.loads(data) for data in gathered]
        return [None if found is None else CommitId(*found) for found in held]

    def _copy(self, identity: CommitId, root: int, own: Commit | None) -> None:
        """Copy a commit of rank `root` to the hosts that lack it."""
        is_root = self._collectives.rank == root
        lacks = own is None or own.id != identity
        (size,) = self._collectives.max(
            [own.path.stat().st_size if is_root and own is not None else 0],
            "hvdkit.elastic.size",
        )
        failure = ""
        chunks = _Chunks(self._collectives, own.path if is_root and own else None, root, size)
        if self._writes and lacks:
            failure = self._try(lambda: self._store.write(identity, chunks.write))
        # A rank that writes nothing, or could not write, takes part in the remaining broadcasts.
        chunks.receive_rest()
        (failed,) = self._collectives.max([int(bool(failure))], _COMMIT)
        if failed:
            self._raise(failure, "a commit of the elastic state was not copied to a new host")

    @staticmethod
    def _try(action: Callable[[], None]) -> str:
        """Return the error of `action` as text; "" if there is none."""
        try:
            action()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _raise(self, failure: str, what: str) -> NoReturn:
        """Raise with the failures of all ranks. A collective."""
        texts = group_by_text(self._collectives, failure, f"{_COMMIT}.failures")
        raise HvdkitError(
            f"{what}: {'; '.join(text for text in texts if not text.endswith(': '))}. Two commits "
            f"must fit into {' or '.join(map(str, self._start.folders))}, and a state must be "
            f"picklable"
        )


class _Chunks:
    """A file of one rank, as pieces that all ranks receive in the same order.

    Args:
        collectives: the collectives of all ranks.
        path: the file; None on other ranks.
        root: the rank that has the file.
        size: its size in bytes.
    """

    def __init__(self, collectives: Collectives, path: Path | None, root: int, size: int) -> None:
        self._collectives = collectives
        self._content = None if path is None else np.memmap(path, np.uint8, "c", shape=(size,))
        self._root = root
        self._starts = range(0, size, _CHUNK_BYTES)
        self._size = size
        self._done = 0
        self._received: list[np.ndarray] = []

    def write(self, file: IO[bytes]) -> None:
        """Write the content to `file`. A second call begins with the pieces received before."""
        for piece in self._received:
            file.write(piece.data)
        while self._done < len(self._starts):
            # Keep the piece: `CommitStore.write` calls this again if the folder has no space.
            self._received.append(self._receive())
            file.write(self._received[-1].data)

    def receive_rest(self) -> None:
        """Receive the pieces that were not received."""
        self._received.clear()
        while self._done < len(self._starts):
            self._receive()

    def _receive(self) -> np.ndarray:
        begin = self._starts[self._done]
        end = min(begin + _CHUNK_BYTES, self._size)
        own = self._content
        piece = np.empty(end - begin, np.uint8) if own is None else np.array(own[begin:end])
        self._collectives.broadcast_into(piece, self._root, "hvdkit.elastic.copy")
        self._done += 1
        return piece
