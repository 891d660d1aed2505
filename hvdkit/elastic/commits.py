"""Store the commits of an elastic state in the memory of every host, and find the newest one.

A commit is a step in the folders that the agent of the host owns, see
`hvdkit.checkpoint.host_steps`. One rank of each host writes it, while the training continues. The
commit before stays until it is complete.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Collection, Sequence

import hvdkit
from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.rank_errors import attempt, raise_on_all_ranks, raise_together
from hvdkit.checkpoint import calls
from hvdkit.checkpoint.calls import StepWord
from hvdkit.checkpoint.coordination import exchange
from hvdkit.checkpoint.errors import CheckpointError, Damaged
from hvdkit.checkpoint.host_steps import HostSteps, Key, content_of, key_of
from hvdkit.checkpoint.reading import OpenCheckpoint
from hvdkit.checkpoint.saving import parts_of_first
from hvdkit.checkpoint.step_files import Snapshot, rank_to_bytes
from hvdkit.elastic.parts import Parts, read
from hvdkit.runtime.elastic_start import ElasticStart
from hvdkit.runtime.progress import report_committed, report_saved

_COMMIT = "hvdkit.elastic.commit"
#: The beginning of the names of the folders of states; the number of the state follows.
_PREFIX = "commits-"

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


class Commits:
    """The commits of one state. The methods are collectives.

    The order of commits is that of the starts of the job, and then of their numbers: a host that
    was left out of a start may have commits of an earlier start with higher numbers, which the job
    does not use.

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
        self._key = key
        folders = [folder / f"{_PREFIX}{key}" for folder in start.folders]
        self._steps = HostSteps(folders, self._stored) if writes else None
        self._number = 0
        self._warnings: set[bool] = set()
        # Equal on all ranks, set by `newest`: whether a rank other than the first one writes, and
        # whether a host has commits of a later state, which are newer than those of this one.
        self._others_write = self._is_earlier = False

    def begin(self, own: StepWord) -> StepWord:
        """Begin `commit` or `check_host_updates`, as `own` says, and return the sum of the words.

        Raises:
            UsageError: on all ranks that are in a call: the calls differ. Or a rank waits in
                `join`: it would contribute zeros to the collectives of the commit, and its host
                would store nothing.
        """
        call = "check_host_updates" if own.checks else "commit"
        return calls.begin(self._collectives, call, own)

    def warn_of_window(self, stores: bool) -> None:
        """Log once, on the first rank, that a commit is not at a step boundary.

        Args:
            stores: whether the commit is stored, without the gradients that wait.
        """
        if stores not in self._warnings and self._collectives.is_first:
            _log.warning("%s", _STORED_IN_WINDOW if stores else _NOT_STORED)
        self._warnings.add(stores)

    @property
    def writes(self) -> bool:
        """Whether this rank writes the commits of its host. Not a collective."""
        return self._steps is not None

    @property
    def restarted(self) -> bool:
        """Whether the ranks were started before. Not a collective."""
        return self._start.number > 0

    def hosts_changed(self) -> bool:
        """Return whether the ranks should end, to be started on other hosts. Equal on all ranks."""
        changed = self._start.current_hosts() > self._start.hosts
        return self.begin(StepWord(checks=1, stops=int(changed))).stops > 0

    def newest(self) -> tuple[int, Parts] | None:
        """Find the newest commit of all hosts, read it, and report it as progress if it is new.

        If a host cannot read its commit, the newest commit of the other hosts counts.

        A commit with the content that was restored before is no progress: the script may fail after
        its training function, again and again, and must not restart forever.

        Returns:
            A rank that has the commit, and on this rank the commit; None if no host has one, or all
            are damaged.

        Raises:
            CheckpointError: on all ranks: see `_read`.
        """
        opened, problem = attempt(self._open)
        told = exchange(
            self._collectives,
            {
                "id": key_of(opened.manifest) if opened else [],
                "content": content_of(opened.manifest) if opened else "",
                "restored": self._steps.restored()[2:] if self._steps else [],
                "writes": self._steps is not None,
                "states": self._states(),
            },
            problem,
            "the commits of the elastic state cannot be read",
        )
        self._others_write = any(each["writes"] for each in told[1:])
        states = {state for each in told for state in each["states"]}
        self._is_earlier = max(states, default=self._key) > self._key
        found = self._read([each["id"] for each in told], opened)
        if opened is not None:
            opened.close()
        if found is None:
            # If a host has a commit of another state, this state was never committed.
            if self._start.committed and not states - {self._key} and self._collectives.is_first:
                _log.warning(
                    "every host that held a commit of the elastic state is lost or cannot take "
                    "part, or its commit is damaged. So the training starts from its beginning. To "
                    "keep a state on disk, use hvd.Checkpointer"
                )
            return None
        place, own = found
        holder, best = self._collectives.ranks[place], told[place]
        self._number = best["id"][1]
        if self._steps is not None:
            self._steps.note_restored([*best["id"], best["content"]])
        if self._collectives.is_first and all(
            best["content"] not in each["restored"] for each in told
        ):
            report_saved()
        return holder, own

    def _read(self, ids: Sequence[Key], opened: OpenCheckpoint | None) -> tuple[int, Parts] | None:
        """Read the newest commit that its host can read. A collective.

        Args:
            ids: for each rank, the place of its commit in the order of commits; empty without one.
            opened: the commit of this rank.

        Returns:
            The place of the rank that has read its commit, and on this rank the commit; None if
            there is no commit, or all are damaged.

        Raises:
            CheckpointError: on all ranks: no host could read its commit, and not only because of
                damage.
        """
        left = {place: id_ for place, id_ in enumerate(ids) if id_}
        failure: Exception | None = None
        while left:
            place = max(left, key=left.__getitem__)
            is_holder = self._collectives.ranks[place] == self._collectives.rank
            own, problem = attempt(read, opened) if is_holder else ({}, None)
            if not self._collectives.sum([int(problem is not None)], _COMMIT)[0]:
                return place, own
            if problem is not None:
                _log.warning("the commit in the memory of this host cannot be read: %s", problem)
                # A damaged commit is lost.
                failure = None if isinstance(problem, Damaged) else problem
            del left[place]
        text = "the newest commit cannot be read"
        raise_on_all_ranks(self._collectives, failure, text, _COMMIT, CheckpointError)
        return None

    def _open(self) -> OpenCheckpoint | None:
        return self._steps.newest() if self._steps is not None else None

    def _states(self) -> list[int]:
        """Return the numbers of the states that have commits on this host."""
        found = [p for folder in self._start.folders for p in folder.glob(f"{_PREFIX}*")]
        return [int(path.name.removeprefix(_PREFIX)) for path in found if path.is_dir()]

    def store(
        self,
        parts: Parts,
        differing: Collection[str] = (),
        problem: Exception | None = None,
        ends: bool = False,
    ) -> bool:
        """Begin to store a commit on each host.

        Args:
            parts: the state, on the ranks that write. It must not change until `wait` has returned.
            differing: the names of parts that may differ between ranks. The first rank may be lost,
                so that another host continues with its values.
            problem: the error of this rank in making the parts.
            ends: whether the ranks end after this commit, the same on all ranks.

        Returns:
            Whether the hosts have changed, as `hosts_changed` does. Then, or if the ranks end, the
            commit is complete.

        Raises:
            HvdkitError: on every rank, if a rank had an error, or a host could not store this
                commit or the one before.
        """
        self._number += 1
        of_first: Parts | None = {}
        if self._others_write:
            of_first = parts_of_first(self._collectives, parts, differing, problem)
        # Not if the first rank has an error: the commit would have values of another rank.
        if problem is None and of_first is not None:
            _, problem = attempt(self._begin, {**parts, **of_first})
        changed = self._agree(problem, self._start.current_hosts() > self._start.hosts)
        if changed or ends:
            self._agree(attempt(self._finish)[1])
        return changed

    def _stored(self) -> None:
        """Tell the launcher that this host has the newest commit. Called in another thread."""
        if not self._is_earlier:
            report_committed()

    def store_restored(self, parts: Parts) -> None:
        """Store the state that was restored on each host, and wait until it is complete.

        The objects were pickled again, and may have another content than in the restored commit,
        because the order of a set differs between processes. So note this content as well.

        Args:
            parts: the state, equal on all ranks.

        Raises:
            HvdkitError: on every rank, if a host could not store it.
        """
        self._number += 1
        self._agree(attempt(self._keep_restored, parts)[1])

    def _keep_restored(self, parts: Parts) -> None:
        self._begin(parts)
        if self._steps is not None:
            self._steps.finish()
            noted = self._steps.restored()
            self._steps.note_restored([*noted, self._steps.newest_content()])

    def _begin(self, parts: Parts) -> None:
        if self._steps is None:
            return
        self._steps.finish()
        ranks = len(self._collectives.ranks)
        snapshot = Snapshot(
            step=self._number,
            epoch=None,
            metrics={},
            versions={"hvdkit": hvdkit.__version__, "python": platform.python_version()},
            parts=parts,
            ranks=[rank_to_bytes({}, ranks)] * ranks,
        )
        self._steps.begin(snapshot, self._start.number + 1)

    def _finish(self) -> None:
        if self._steps is not None:
            self._steps.finish()

    def _agree(self, problem: Exception | None, changed: bool = False) -> bool:
        failed, anywhere = self._collectives.max([int(bool(problem)), int(changed)], _COMMIT)
        if failed:
            folders = " or ".join(map(str, self._start.folders))
            raise_together(
                self._collectives,
                problem,
                f"commit {self._number} of the elastic state was not stored in {folders}",
                _COMMIT,
            )
        return bool(anywhere)

    def wait(self) -> None:
        """Wait until the last commit is complete. Not a collective.

        A failure is raised by the next `store`.
        """
        if self._steps is not None:
            self._steps.settle()

    def close(self) -> None:
        """Wait until the last commit is complete, and log a failure. Not a collective."""
        if self._steps is not None:
            self._steps.close()
