"""Store the commits of elastic training on every host, and agree on the newest at a start.

`hvdkit run --elastic` describes each start of the ranks in environment variables (`ElasticStart`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

import numpy as np

from hvdkit.core.collectives import Collectives
from hvdkit.core.commits import Commit, CommitId, CommitStore
from hvdkit.core.consistency import group_by_text
from hvdkit.core.progress import report_saved
from hvdkit.errors import HvdkitError

#: The folders for commits on this host, separated by `os.pathsep`.
FOLDERS_VARIABLE = "HVDKIT_ELASTIC_DIR"
#: The number of starts of the ranks before this one.
START_VARIABLE = "HVDKIT_ELASTIC_START"
#: The version of the list of hosts from which this start was planned.
HOSTS_VARIABLE = "HVDKIT_ELASTIC_HOSTS"
#: 1 if a commit was stored before this start.
COMMITTED_VARIABLE = "HVDKIT_ELASTIC_COMMITTED"
#: The file in the first folder with the current version of the list of hosts.
HOSTS_FILE = "hosts"

_CHUNK_BYTES = 64 << 20
_COMMIT = "hvdkit.elastic.commit"

_log = logging.getLogger("hvdkit.elastic")


@dataclass(frozen=True)
class ElasticStart:
    """One start of the ranks of an elastic job.

    Attributes:
        folders: the folders for commits on this host.
        number: the number of starts before this one.
        hosts: the version of the list of hosts from which it was planned.
        committed: whether a commit was stored before.
    """

    folders: Sequence[Path]
    number: int
    hosts: int
    committed: bool

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> ElasticStart | None:
        """Return the start that the launcher has described; None in a job that is not elastic."""
        if not environ.get(FOLDERS_VARIABLE):
            return None
        return cls(
            [Path(text) for text in environ[FOLDERS_VARIABLE].split(os.pathsep)],
            int(environ[START_VARIABLE]),
            int(environ[HOSTS_VARIABLE]),
            environ[COMMITTED_VARIABLE] == "1",
        )

    def variables(self) -> dict[str, str]:
        """Return the environment variables from which `read` reads this start."""
        return {
            FOLDERS_VARIABLE: os.pathsep.join(map(str, self.folders)),
            START_VARIABLE: str(self.number),
            HOSTS_VARIABLE: str(self.hosts),
            COMMITTED_VARIABLE: "1" if self.committed else "0",
        }

    def current_hosts(self) -> int:
        """Return the current version of the list of hosts, as far as this host knows."""
        try:
            return int((self.folders[0] / HOSTS_FILE).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return self.hosts


class Committer:
    """Store the commits of one state, on one rank. All methods are collectives.

    Args:
        start: the start of the ranks.
        collectives: the collectives of all ranks.
        key: the number of the state in the script.
        writes: whether this rank writes the commits of its host: one rank does on each host.
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
            HvdkitError: on every rank, if a host could not store it.
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
        """Return the newest commit that a host holds complete. Other hosts get a copy.

        None if there is no commit.

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
        """Write the content to `file`. A second call gets what the first one has received."""
        for piece in self._received:
            file.write(piece.data)
        while self._done < len(self._starts):
            # Kept, because another folder may have to be tried.
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
