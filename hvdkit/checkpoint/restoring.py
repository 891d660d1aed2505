"""Restoring on all ranks together: the first rank reads, checks and broadcasts."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.checkpoint.broadcast import Broadcast
from hvdkit.checkpoint.coordination import compare, exchange, scatter
from hvdkit.checkpoint.errors import CheckpointError, Damaged
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.reading import OpenCheckpoint, Outline, rank_tree
from hvdkit.checkpoint.state import (
    CheckedRankItem,
    PartialItem,
    RankItem,
    RequiredRankItem,
    StatefulItem,
    Tree,
)
from hvdkit.checkpoint.store import Search
from hvdkit.core.collectives import Collectives
from hvdkit.core.consistency import digest
from hvdkit.errors import UsageError

_log = logging.getLogger("hvdkit.checkpoint")

#: What an error of a restore adds before the state has changed, and after.
NOTHING_RESTORED = "nothing was restored"
_HALF_RESTORED = "the state is half restored: end the job"


@dataclass(frozen=True)
class _Prepared:
    """The state that this rank restores from a step.

    Attributes:
        outline: of the step.
        parts: name -> the saved tree, with this rank's tensors in it.
        broadcast: of these tensors.
        own: rank part -> the tree that this rank saved.
        left: what stays as it is, for people.
    """

    outline: Outline
    parts: dict[str, Tree]
    broadcast: Broadcast
    own: dict[str, Tree]
    left: list[str]


class Restoring:
    """One call of `Manager.restore`, whose arguments it has.

    Args:
        collectives: of the ranks of the job.
        parts: what all ranks hold alike, by name.
        rank_parts: what each rank has for itself, by name.
        of_this_size: names of parts that are restored in a job of the same size only.
        wanted: names of the parts and rank parts to restore.
        strict: whether all of them must fit.
    """

    def __init__(
        self,
        collectives: Collectives,
        parts: Mapping[str, StatefulItem],
        rank_parts: Mapping[str, RankItem],
        of_this_size: Collection[str],
        *,
        wanted: Collection[str],
        strict: bool,
    ) -> None:
        self._collectives = collectives
        self._parts = parts
        self._rank_parts = rank_parts
        self._of_this_size = set(of_this_size)
        self._wanted = set(wanted)
        self._strict = strict
        # What an error adds: changes once a step was begun and proved to be damaged.
        self._consequence = NOTHING_RESTORED

    @property
    def _first(self) -> bool:
        return self._collectives.rank == self._collectives.ranks[0]

    def run(self, search: Search | None) -> Manifest | None:
        """Restore the newest step that proves to be good while it is read. A collective.

        Args:
            search: on the first rank, what finds the steps.

        Returns:
            The manifest of the step; None if there are no steps, and nothing has changed.

        Raises:
            UsageError: on all ranks: no such step, or it does not fit.
            CheckpointError: on all ranks: no step is good, or one of them cannot be read.
        """
        damaged: list[str] | None = None
        while True:
            opened, sent, own = self._open(search, damaged)
            try:
                if not sent:
                    return None
                prepared = self._agree(sent, own)
                damaged = self._fill(opened, prepared)
            finally:
                if opened is not None:
                    opened.close()
            if damaged is None:
                break
            self._consequence = _HALF_RESTORED
            if not self._strict:
                # An older step may lack tensors that this one has overwritten.
                raise CheckpointError(f"{Damaged(*damaged)} ({_HALF_RESTORED})")
            # Its tensors may be memory that the next step needs.
            del prepared
        self._adopt(prepared)
        if search is not None:
            self._end(search)
        return prepared.outline.manifest

    def _open(
        self, search: Search | None, damaged: list[str] | None
    ) -> tuple[OpenCheckpoint | None, bytes, bytes]:
        """Open a step on the first rank. All ranks get its outline, or b"" if there is none.

        Each rank also gets what it has saved for itself, or b"" if the job had another size.

        Args:
            search: on the first rank, what finds the steps.
            damaged: the file and the reason, if the step before this one proved to be damaged.
        """
        opened: OpenCheckpoint | None = None
        sent, own = b"", b""
        ranks: Sequence[bytes] = [b""] * len(self._collectives.ranks)
        problem: Exception | None = None
        try:
            if search is not None:
                if damaged is not None:
                    search.reject(Damaged(*damaged))
                opened = search.open_next(whole=not self._strict)
                sent = opened.outline.to_bytes() if opened else b""
                if opened and opened.manifest.world_size == len(ranks):
                    ranks = opened.ranks
        except Exception as error:
            problem = error
        try:
            exchange(self._collectives, {}, problem, self._consequence)
            first = self._collectives.ranks[0]
            sent = self._collectives.broadcast(sent, first, "hvdkit.checkpoint.outline")
            if sent:
                own = scatter(self._collectives, ranks, "hvdkit.checkpoint.ranks")
            return opened, sent, own
        except BaseException:
            if opened is not None:
                opened.close()
            raise

    def _agree(self, sent: bytes, own: bytes) -> _Prepared:
        """Prepare the parts, and check that all ranks restore the same of the step.

        Args:
            sent: the step's outline.
            own: what this rank has saved for itself.
        """
        problem: Exception | None = None
        message: dict[str, Any] = {}
        try:
            # Everything that may fail on one rank alone comes before the first broadcast.
            prepared = self._prepare(Outline.from_bytes(sent), own)
            message = {
                "left": digest(prepared.left).hex(),
                "tensors": digest(list(map(str, prepared.broadcast.names))).hex(),
            }
        except Exception as error:
            problem = error
        gathered = exchange(self._collectives, message, problem, self._consequence)
        for subject in message:
            told = [each[subject] for each in gathered]
            compare(*(self._collectives, told, "what of the checkpoint fits"), self._consequence)
        return prepared

    def _fill(self, opened: OpenCheckpoint | None, prepared: _Prepared) -> list[str] | None:
        """Read the tensors on the first rank, and broadcast them.

        Returns:
            On all ranks, the file and the reason if a chunk is not what was written.

        Raises:
            CheckpointError: on all ranks: one of them could not read or write.
        """
        message: dict[str, Any] = {}
        problem: Exception | None = None
        try:
            prepared.broadcast.run(self._collectives, opened)
        except Exception as error:
            if opened is not None and isinstance(error, Damaged):
                message = {"damaged": [error.file, error.reason]}
            else:
                problem = error
        gathered = exchange(self._collectives, message, problem, _HALF_RESTORED)
        damaged: list[str] | None = gathered[0].get("damaged")
        return damaged

    def _adopt(self, prepared: _Prepared) -> None:
        """Let the parts take over what was filled."""
        problem: Exception | None = None
        try:
            for name, content in prepared.parts.items():
                self._parts[name].restore(content)
            # Last, because what comes before may draw random numbers.
            for name, tree in prepared.own.items():
                self._rank_parts[name].restore(tree)
        except Exception as error:
            problem = error
        exchange(self._collectives, {}, problem, _HALF_RESTORED)
        if self._first:
            self._report(prepared)

    def _end(self, search: Search) -> None:
        """Quarantine what was found damaged. The state is restored, whatever comes of it."""
        try:
            search.end()
        except Exception:
            _log.exception("damaged steps were not quarantined")

    def _report(self, prepared: _Prepared) -> None:
        manifest, ranks = prepared.outline.manifest, len(self._collectives.ranks)
        if prepared.left:
            _log.warning(
                "step %d was restored in part; left as they are: %s",
                *(manifest.step, "; ".join(prepared.left)),
            )
        if manifest.world_size != ranks:
            _log.warning(
                "step %d was saved by %d ranks, and this job has %d: %srandom numbers start anew",
                *(manifest.step, manifest.world_size, ranks),
                "the rest of its epoch is divided anew, and " if "data" in prepared.parts else "",
            )

    def _prepare(self, outline: Outline, own_state: bytes) -> _Prepared:
        same_size = outline.manifest.world_size == len(self._collectives.ranks)
        parts: dict[str, Tree] = {}
        left: list[str] = []
        for name in self._names(outline, same_size):
            try:
                parts[name] = self._prepare_part(name, outline, left)
            except UsageError as error:
                if self._strict:
                    raise
                left.append(f"{name}: {error}")
        wanted = self._wanted
        if left:
            # Those of layers that may be others now.
            wanted = wanted - {"statistics"}
        saved = rank_tree(own_state) if same_size else {}
        own = {name: saved[name] for name in self._rank_parts if name in saved and name in wanted}
        for name, part in self._rank_parts.items():
            required = isinstance(part, RequiredRankItem)
            if not isinstance(part, CheckedRankItem) or not (name in own or required):
                continue
            try:
                if required and name in wanted:
                    self._expect_rank_part(name, saved, outline.manifest)
                if name in own:
                    part.check(own[name])
            except UsageError as error:
                if self._strict:
                    raise
                if required:
                    own.pop(name, None)
                left.append(str(error))
        return _Prepared(outline, parts, Broadcast(parts, outline), own, left)

    def _prepare_part(self, name: str, outline: Outline, left: list[str]) -> Tree:
        """Prepare a part for its saved state.

        Args:
            name: of the part.
            outline: of the checkpoint.
            left: what stays as it is; gets longer.

        Raises:
            UsageError: the state does not fit.
        """
        part, tree = self._parts[name], outline.tree(name)
        if self._strict or not isinstance(part, PartialItem):
            return part.plan_restore(tree)
        prepared, lines = part.plan_partial_restore(tree)
        left += [f"{name}: {line}" for line in lines]
        return prepared

    def _expect_rank_part(self, name: str, saved: Mapping[str, Tree], manifest: Manifest) -> None:
        """Check that this rank's state of a part was saved.

        Raises:
            UsageError: it was saved by another number of ranks, or not at all.
        """
        size = len(self._collectives.ranks)
        if manifest.world_size != size:
            plural = "" if manifest.world_size == 1 else "s"
            raise UsageError(
                f"step {manifest.step} was saved by {manifest.world_size} rank{plural}, and this "
                f"job has {size}: {name} has a position of each rank, which no other number of "
                f"ranks can resume from. Resume with {manifest.world_size} rank{plural}, or "
                f"restore with strict=False, which leaves {name} as it is"
            )
        if name not in saved:
            raise UsageError(
                f"the checkpoint of step {manifest.step} has no {name} of each rank. Restore with "
                f"what it was saved with, or with strict=False"
            )

    def _names(self, outline: Outline, same_size: bool) -> list[str]:
        """The parts to restore of those that the step has."""
        step, saved = outline.manifest.step, outline.trees.keys()
        lacking = (self._parts.keys() & self._wanted) - saved - self._of_this_size
        if lacking and self._strict:
            raise UsageError(
                f"the checkpoint of step {step} has no {', '.join(sorted(lacking))}; it has "
                f"{', '.join(sorted(saved))}. Restore with what it was saved with, or with "
                f"strict=False"
            )
        if lacking and self._first:
            _log.warning("step %d has no %s; left as they are", step, ", ".join(sorted(lacking)))
        unused = saved - self._parts.keys() - self._of_this_size
        unused |= outline.rank_parts - self._rank_parts.keys()
        if unused and self._first:
            _log.warning(
                "step %d has %s, which this job does not ask for", step, ", ".join(sorted(unused))
            )
        return [
            name
            for name in self._parts
            if name in self._wanted
            and name in saved
            and (same_size or name not in self._of_this_size)
        ]
