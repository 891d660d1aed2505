"""Store the commits of elastic training on every host, and select the newest one at a start.

`hvdkit.core.elastic.run` makes a `Committer` for each elastic state. A commit is the state at the
last `state.commit()`.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from hvdkit.core.collectives import Collectives
from hvdkit.core.consistency import error_text, gather, grouped
from hvdkit.core.elastic.commits import Commit, CommitId, CommitStore, newest_of_states
from hvdkit.core.elastic.start import ElasticStart
from hvdkit.core.progress import report_committed, report_saved
from hvdkit.core.rank_errors import attempt, errors_of_ranks
from hvdkit.errors import HvdkitError

_CHUNK_BYTES = 64 << 20
_COMMIT = "hvdkit.elastic.commit"

_NOT_STORED = (
    "the elastic state was not committed, because gradients wait for a step, or an accumulation "
    "window is open: a commit cannot contain gradients. The next commit after the step stores the "
    "state. To commit exactly when you call commit(), call it after steps"
)
_STORED_IN_WINDOW = (
    "the elastic state was committed while gradients wait for a step, because all recent calls of "
    "commit() came between a backward pass and its step. The commit does not contain these "
    "gradients: after a restart, the first batches of the step are not trained. Call commit() "
    "after steps"
)

_log = logging.getLogger("hvdkit.elastic")


class Committer:
    """Store the commits of one state, on one rank. All methods are collectives.

    Args:
        start: the start of the ranks.
        collectives: the collectives of all ranks.
        key: the number of the state: 0 for the first call of an elastic training function.
        writes: whether this rank writes the commits of its host. True for one rank of each host.
        loads: unpickles the values of another rank.
    """

    def __init__(
        self,
        start: ElasticStart,
        collectives: Collectives,
        key: int,
        writes: bool,
        loads: Callable[[bytes], Any] = pickle.loads,
    ) -> None:
        self._start = start
        self._collectives = collectives
        self._key = key
        self._store = CommitStore(start.folders, key)
        self._writes = writes
        self._loads = loads
        self._number = 0
        self._warnings: set[bool] = set()
        # Whether a rank other than the first one writes. Set by `resume`, equal on all ranks.
        self._others_write = False
        # On the first rank: the digest of the restored state, until a commit differs from it.
        self._restored: bytes | None = None

    def anywhere(self, own: Sequence[bool], name: str = "hvdkit.elastic.window") -> list[bool]:
        """Return which of the values are true on a rank. Each commit begins with this call.

        Raises:
            HvdkitError: a rank waits in `join`. It would contribute zeros to the collectives of the
                commit, and its host would store nothing.
        """
        present, *found = self._collectives.sum([1, *map(int, own)], name)
        ranks = len(self._collectives.ranks)
        if present < ranks:
            raise HvdkitError(
                f"the elastic state was not committed: {present} of {ranks} ranks have called "
                f"commit() or check_host_updates(), and the others wait in hvd.join(). Expected "
                f"the call on all ranks, after the same batches. Call it before or after hvd.join()"
            )
        return [count > 0 for count in found]

    def warn_of_window(self, stores: bool) -> None:
        """Log once, on the first rank, that a commit is not at a step boundary.

        Args:
            stores: whether the commit is stored, without the gradients that wait.
        """
        if stores not in self._warnings and self._collectives.rank == 0:
            _log.warning("%s", _STORED_IN_WINDOW if stores else _NOT_STORED)
        self._warnings.add(stores)

    def commit(
        self,
        write: Callable[[IO[bytes], Any], None],
        save: Callable[[], None] = lambda: None,
        values: Callable[[], Any] = lambda: None,
        digest: Callable[[], bytes] = bytes,
    ) -> bool:
        """Store a commit on each host.

        Args:
            write: writes the content to a file. Its second argument is what `values` has returned
                on the first rank.
            save: is called first, on every rank.
            values: returns small values that may differ between ranks: a picklable object. The
                first rank may be lost, so that another host continues with these values.
            digest: returns a digest of the state, as for `note_restored`.

        Returns:
            Whether the hosts have changed, as `hosts_changed` does.

        Raises:
            HvdkitError: on every rank, if `save` or `values` failed on a rank, or if a host could
                not store the commit.
        """
        self._number += 1
        identity = CommitId(self._start.number, self._number)
        _, problem = attempt(save)
        writes = self._writes
        if self._others_write:
            content, problem = self._of_first_rank(values, problem)
            values, writes = partial(self._loads, content), writes and bool(content)
        if writes and problem is None:
            _, problem = attempt(self._store.write, identity, lambda file: write(file, values()))
        changed = self._start.current_hosts() > self._start.hosts
        failed, anywhere = self._collectives.max([int(bool(problem)), int(changed)], _COMMIT)
        if failed:
            what = f"commit {self._number} of the elastic state was not stored"
            self._raise(problem, what, self._advice)
        report_committed()
        # A commit that equals the restored one is no progress: the script may fail after its
        # training function, again and again, and must not restart forever.
        if self._is_first_rank:
            if self._restored is not None and digest() != self._restored:
                self._restored = None
            if self._restored is None:
                report_saved()
        return bool(anywhere)

    def note_restored(self, digest: Callable[[], bytes]) -> None:
        """Note the content of the restored state, with which all ranks begin. Not a collective.

        Args:
            digest: returns a digest of the state, which is equal if the content is equal.
        """
        if self._is_first_rank:
            self._restored = digest()

    @property
    def _is_first_rank(self) -> bool:
        return self._collectives.rank == self._collectives.ranks[0]

    def _of_first_rank(
        self, values: Callable[[], Any], problem: Exception | None
    ) -> tuple[bytes, Exception | None]:
        """Return the pickled values of the first rank, and the error of this rank. A collective.

        Args:
            values: see `commit`.
            problem: the error of this rank until now.

        Returns:
            No bytes if the first rank has an error.
        """
        first, content = self._collectives.ranks[0], None
        if self._is_first_rank and problem is None:
            content, problem = attempt(lambda: pickle.dumps(values(), protocol=5))
        return self._collectives.broadcast(content or b"", first, "hvdkit.elastic.values"), problem

    def hosts_changed(self) -> bool:
        """Return whether the ranks should end, to be started on other hosts. Equal on all ranks."""
        changed = self._start.current_hosts() > self._start.hosts
        (anywhere,) = self.anywhere([changed], "hvdkit.elastic.hosts")
        return anywhere

    def resume(self, load: Callable[[Path], None]) -> bool:
        """Load the newest complete commit of all hosts.

        Hosts that lack this commit get a copy first. They also get the commits of other states,
        because the launcher may end the hosts that hold them before the script uses these states.

        Args:
            load: loads the commit from this host's file. It is called on every rank.

        Returns:
            Whether a commit was loaded. False if no host has a commit.

        Raises:
            HvdkitError: on every rank, if a host could not read its commits or store the copy, or
                if `load` failed on a rank.
        """
        own, problem = attempt(newest_of_states, self._start.folders)
        held = self._held(own or {}, problem)
        best_of_state: dict[int, CommitId] = {}
        for key in sorted(set().union(*held)):
            id_of_rank = [each.get(key) for each in held]
            newest = max(identity for identity in id_of_rank if identity)
            best_of_state[key] = newest
            if any(identity != newest for identity in id_of_rank):
                root = self._collectives.ranks[id_of_rank.index(newest)]
                self._copy(key, newest, root, (own or {}).get(key))
        best = best_of_state.get(self._key)
        if best is None:
            # If a host has a commit of another state, this state was never committed.
            if self._start.committed and not best_of_state and self._collectives.rank == 0:
                _log.warning(
                    "every host that held a commit of the elastic state is lost or cannot take "
                    "part, so the training starts from its beginning. To keep a state on disk, use "
                    "hvd.Checkpointer"
                )
            return False
        self._number = best.number
        report_committed()
        # Other ranks wait in the next collective of the script if this rank raises alone.
        _, problem = attempt(self._load, load)
        (failed,) = self._collectives.max([int(bool(problem))], _COMMIT)
        if failed:
            self._raise(
                problem,
                f"commit {best.number} of the elastic state was not restored",
                "Put the same models, optimizers and objects into the state at each start",
            )
        return True

    def _load(self, load: Callable[[Path], None]) -> None:
        newest = self._store.newest()
        if newest is None:
            raise FileNotFoundError("the commit was deleted after it was found")
        load(newest.path)

    def _held(
        self, own: Mapping[int, Commit], problem: Exception | None
    ) -> list[dict[int, CommitId]]:
        """Return the newest commit of each state on the host of each rank.

        Args:
            own: the newest commits on this host, by the number of the state.
            problem: the error of reading the commits.
        """
        told = {
            "ids": [[key, commit.id.start, commit.id.number] for key, commit in own.items()],
            "problem": error_text(problem),
            "writes": self._writes,
        }
        told_by = gather(self._collectives, told, "hvdkit.elastic.held")
        held = list(told_by.values())
        failed = {rank: each["problem"] for rank, each in told_by.items() if each["problem"]}
        # Horovod's `cross_size` may differ between the ranks of a host.
        self._others_write = any(each["writes"] for each in held[1:])
        if failed:
            folders = " and ".join(map(str, self._start.folders))
            raise HvdkitError(
                f"the commits of the elastic state cannot be read: {'; '.join(grouped(failed))}. "
                f"Check {folders} on the hosts of these ranks, or start the job again"
            ) from problem
        return [{key: CommitId(*numbers) for key, *numbers in each["ids"]} for each in held]

    def _copy(self, key: int, identity: CommitId, root: int, own: Commit | None) -> None:
        """Copy a commit of state `key` from rank `root` to the hosts that lack it."""
        lacks = own is None or own.id != identity
        content, problem = None, None
        if self._collectives.rank == root:
            assert own is not None
            content, problem = attempt(_mapped, own.path)
        failed, size = self._collectives.max(
            [int(bool(problem)), 0 if content is None else content.size], "hvdkit.elastic.size"
        )
        what = "a commit of the elastic state was not copied to a new host"
        if failed:
            self._raise(problem, what, "Check the memory and the disk of this rank's host")
        pieces, received = self._pieces(content, root, size), list[np.ndarray]()

        def write(file: IO[bytes]) -> None:
            # `CommitStore.write` calls this again if a folder has no space.
            for piece in received:
                file.write(piece.data)
            for piece in pieces:
                received.append(piece)
                file.write(piece.data)

        if self._writes and lacks:
            _, problem = attempt(CommitStore(self._start.folders, key).write, identity, write)
        received.clear()
        # A rank that writes nothing, or could not write, takes part in the remaining broadcasts.
        for _ in pieces:
            pass
        (failed,) = self._collectives.max([int(bool(problem))], _COMMIT)
        if failed:
            self._raise(problem, what, self._advice)

    def _pieces(self, content: np.ndarray | None, root: int, size: int) -> Iterator[np.ndarray]:
        """Yield the pieces of a file of one rank. Each piece is a collective.

        Args:
            content: the content of the file; None on other ranks.
            root: the rank that has the file.
            size: its size in bytes.
        """
        for begin in range(0, size, _CHUNK_BYTES):
            end = min(begin + _CHUNK_BYTES, size)
            piece = np.empty(end - begin, np.uint8)
            if content is not None:
                piece[:] = content[begin:end]
            self._collectives.broadcast_into(piece, root, "hvdkit.elastic.copy")
            yield piece

    @property
    def _advice(self) -> str:
        folders = " or ".join(map(str, self._start.folders))
        return f"Two commits must fit into {folders}, and a state must be picklable"

    def _raise(self, problem: Exception | None, what: str, advice: str) -> NoReturn:
        """Raise with the errors of all ranks. A collective.

        Args:
            problem: the error of this rank; None if another rank failed.
            what: what was not done.
            advice: what the user can do.
        """
        failed = errors_of_ranks(self._collectives, problem, f"{_COMMIT}.failures")
        raise HvdkitError(f"{what}: {'; '.join(failed)}. {advice}") from problem


def _mapped(path: Path) -> np.ndarray:
    """Return the content of a file.

    Raises:
        OSError: the file cannot be read.
    """
    if not path.stat().st_size:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, "c")
