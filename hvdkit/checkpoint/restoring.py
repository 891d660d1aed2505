"""Restore a step on all ranks: the first rank reads, checks and broadcasts."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import digest
from hvdkit.checkpoint.broadcast import Broadcast
from hvdkit.checkpoint.coordination import compare, exchange, scatter
from hvdkit.checkpoint.errors import CheckpointError, Damaged
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.reading import OpenCheckpoint, Outline, rank_tree
from hvdkit.checkpoint.state import (
    CheckedRankItem,
    DependentItem,
    OptionalItem,
    PartialItem,
    RankItem,
    RequiredRankItem,
    StatefulItem,
    Tree,
)
from hvdkit.checkpoint.store import StepSearch
from hvdkit.errors import UsageError
from hvdkit.runtime.host_collectives import describe_sum_order

_log = logging.getLogger("hvdkit.checkpoint")

#: Text that is added to errors: before any state has changed, and after a change.
NOTHING_RESTORED = "nothing was restored"
_HALF_RESTORED = "the state is half restored: restore another step, or end the job"


@dataclass(frozen=True)
class _Prepared:
    """The state that this rank restores from a step.

    Attributes:
        outline: the outline of the step.
        parts: name -> the saved tree, with this rank's tensors in it.
        broadcast: fills these tensors.
        own: name of a rank part -> the tree that this rank saved.
        not_restored: descriptions of the state that is not restored.
    """

    outline: Outline
    parts: dict[str, Tree]
    broadcast: Broadcast
    own: dict[str, Tree]
    not_restored: list[str]


def wanted_parts(only: Collection[str] | None, known: Collection[str]) -> set[str]:
    """Return the names of the parts and rank parts to restore.

    Args:
        only: names of arguments, see `Manager.restore`; None for all.
        known: the names of all parts and rank parts.

    Raises:
        UsageError: an entry of `only` is not the name of a part.
    """
    if only is None:
        return set(known)
    # A dict of models gives the parts `model-NAME`; a single model gives the part `model`.
    wanted = {name for name in known if name in only or name.partition("-")[0] in only}
    arguments = {part for name in known for part in (name, name.partition("-")[0])}
    unknown = [name for name in only if name not in arguments]
    if isinstance(only, str) or unknown:
        raise UsageError(
            f"only is {only!r}: expected some of {', '.join(sorted(arguments))}, such as ('model',)"
        )
    return wanted


def _close(opened: OpenCheckpoint | None) -> None:
    """Close a step. An error is only logged, because the other ranks do not have it."""
    try:
        if opened is not None:
            opened.close()
    except Exception as error:
        _log.warning("a file of the restored step was not closed: %s", error)


class Restoring:
    """One call of `Manager.restore`.

    Args:
        collectives: the collectives of the job's ranks.
        parts: name -> an item that is the same on all ranks.
        rank_parts: name -> an item that has its own state on each rank.
        of_this_size: names of parts that only a job with the same number of ranks restores.
        wanted: names of the parts and rank parts to restore.
        strict: whether all of them must fit.
        sum_order: see `Manifest.sum_order`; of this job.
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
        sum_order: str = "",
    ) -> None:
        self._collectives = collectives
        self._parts = parts
        self._rank_parts = rank_parts
        self._of_this_size = set(of_this_size)
        self._wanted = set(wanted)
        self._strict = strict
        self._sum_order = sum_order
        #: Whether `run` has begun to change the state and has not completed. Equal on all ranks.
        self.half_restored = False
        # Text that is added to errors. It changes if a step is found damaged while it is read.
        self._consequence = NOTHING_RESTORED

    @property
    def _first(self) -> bool:
        return self._collectives.is_first

    def run(self, search: StepSearch | None) -> Manifest | None:
        """Restore the newest good step. A collective.

        Args:
            search: on the first rank, the search for the step; None on the others.

        Returns:
            The manifest of the step; None if there are no steps.

        Raises:
            UsageError: on all ranks. There is no such step, or the step does not fit.
            CheckpointError: on all ranks. All steps are damaged, or a step cannot be read.
        """
        damaged: list[str] | None = None
        while True:
            opened, sent, own = self._open(search, damaged)
            try:
                if not sent:
                    return None
                prepared = self._agree(sent, own)
                self.half_restored = True
                damaged = self._fill(opened, prepared)
            finally:
                _close(opened)
            if damaged is None:
                break
            self._consequence = _HALF_RESTORED
            if not self._strict:
                # An older step may not have tensors that this step has overwritten.
                raise CheckpointError(f"{Damaged(*damaged)} ({_HALF_RESTORED})")
            # Free the tensors of this step before the next step is prepared.
            del prepared
        self._restore_items(prepared)
        self.half_restored = False
        if search is not None:
            self._end(search)
        return prepared.outline.manifest

    def _open(
        self, search: StepSearch | None, damaged: list[str] | None
    ) -> tuple[OpenCheckpoint | None, bytes, bytes]:
        """Open a step on the first rank and send its outline to all ranks. A collective.

        Args:
            search: on the first rank, the search for the step.
            damaged: file and reason, if the previous step turned out to be damaged.

        Returns:
            The open step on the first rank, None on the others; the outline of the step, or b"" if
            there is no step; the state of this rank alone, or b"" if the step was saved by another
            number of ranks.
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
            _close(opened)
            raise

    def _agree(self, sent: bytes, own: bytes) -> _Prepared:
        """Prepare the parts, and check that all ranks restore the same tensors. A collective.

        Args:
            sent: the outline of the step.
            own: the state of this rank alone.
        """
        problem: Exception | None = None
        message: dict[str, Any] = {}
        try:
            # Operations that may fail on a single rank come before the first broadcast.
            prepared = self._prepare(Outline.from_bytes(sent), own)
            message = {
                "not_restored": digest(prepared.not_restored).hex(),
                "tensors": digest(list(map(str, prepared.broadcast.names))).hex(),
            }
        except Exception as error:
            problem = error
        gathered = exchange(self._collectives, message, problem, self._consequence)
        for key in message:
            digests = [each[key] for each in gathered]
            subject = "which parts of the checkpoint fit"
            compare(self._collectives, digests, subject, self._consequence)
        return prepared

    def _fill(self, opened: OpenCheckpoint | None, prepared: _Prepared) -> list[str] | None:
        """Read the tensors on the first rank and broadcast them. A collective.

        Returns:
            On all ranks, file and reason if a chunk is damaged; else None.

        Raises:
            CheckpointError: on all ranks. A rank could not read or write.
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

    def _restore_items(self, prepared: _Prepared) -> None:
        """Restore the items from the trees. A collective."""
        problem: Exception | None = None
        try:
            for name, content in prepared.parts.items():
                self._parts[name].restore(content)
            # These are last, because restoring other items may draw random numbers.
            for name, tree in prepared.own.items():
                self._rank_parts[name].restore(tree)
        except Exception as error:
            problem = error
        exchange(self._collectives, {}, problem, _HALF_RESTORED)
        if self._first:
            self._report(prepared)

    def _end(self, search: StepSearch) -> None:
        """Quarantine damaged steps. A failure is only logged, because the state is restored."""
        try:
            search.end()
        except Exception:
            _log.exception("damaged steps were not quarantined")

    def _report(self, prepared: _Prepared) -> None:
        manifest, ranks = prepared.outline.manifest, len(self._collectives.ranks)
        if prepared.not_restored:
            _log.warning(
                "step %d was restored in part; not restored: %s",
                *(manifest.step, "; ".join(prepared.not_restored)),
            )
        if manifest.world_size != ranks:
            _log.warning(
                "step %d was saved by %d ranks, and this job has %d: %srandom numbers are seeded "
                "anew",
                *(manifest.step, manifest.world_size, ranks),
                "the rest of the epoch is divided over the new ranks, and "
                if "data" in prepared.parts
                else "",
            )
        elif self._sum_order and manifest.sum_order not in ("", self._sum_order):
            _log.warning(
                "step %d was saved by a job that added gradients in another order, so this job may "
                "get sums with other last bits: %s; this job: %s",
                manifest.step,
                describe_sum_order(manifest.sum_order),
                describe_sum_order(self._sum_order),
            )

    def _prepare(self, outline: Outline, own_state: bytes) -> _Prepared:
        same_size = outline.manifest.world_size == len(self._collectives.ranks)
        parts: dict[str, Tree] = {}
        not_restored: list[str] = []
        names = self._names(outline, same_size)
        for name in sorted(names, key=lambda n: isinstance(self._parts[n], DependentItem)):
            try:
                parts[name] = self._prepare_part(name, outline, parts, not_restored)
            except UsageError as error:
                if self._strict:
                    raise
                not_restored.append(f"{name}: {error}")
        wanted = self._wanted
        if not_restored:
            # The part `statistics` has buffers of layers, which may have changed.
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
                not_restored.append(str(error))
        return _Prepared(outline, parts, Broadcast(parts, outline), own, not_restored)

    def _prepare_part(
        self, name: str, outline: Outline, planned: Collection[str], not_restored: list[str]
    ) -> Tree:
        """Plan the restore of a part.

        Args:
            name: the name of the part.
            outline: the outline of the step.
            planned: the names of the parts that have been planned.
            not_restored: descriptions of the state that is not restored. The method appends to
                this list.

        Raises:
            UsageError: the state does not fit.
        """
        part, tree = self._parts[name], outline.tree(name)
        if self._strict or not isinstance(part, PartialItem | DependentItem):
            return part.plan_restore(tree)
        if isinstance(part, DependentItem):
            prepared, lines = part.plan_dependent_restore(tree, self._wanted, planned)
        else:
            prepared, lines = part.plan_partial_restore(tree)
        not_restored += [f"{name}: {line}" for line in lines]
        return prepared

    def _expect_rank_part(self, name: str, saved: Mapping[str, Tree], manifest: Manifest) -> None:
        """Check that this rank's state of a part was saved.

        Raises:
            UsageError: the state was saved by another number of ranks, or was not saved.
        """
        size = len(self._collectives.ranks)
        if manifest.world_size != size:
            plural = "" if manifest.world_size == 1 else "s"
            raise UsageError(
                f"step {manifest.step} was saved by {manifest.world_size} rank{plural}, and this "
                f"job has {size}: {name} has a position for each rank, so only the same number of "
                f"ranks can resume. Resume with {manifest.world_size} rank{plural}, or restore "
                f"with strict=False, which does not restore {name}"
            )
        if name not in saved:
            raise UsageError(
                f"the checkpoint of step {manifest.step} has no per-rank state of {name}. "
                f"Give the checkpointer the items that it was saved with, or restore with "
                f"strict=False"
            )

    def _is_optional(self, name: str) -> bool:
        part = self._parts[name]
        return isinstance(part, OptionalItem) and part.optional

    def _names(self, outline: Outline, same_size: bool) -> list[str]:
        """Return the names of the parts to restore."""
        step, saved = outline.manifest.step, outline.trees.keys()
        lacking = (self._parts.keys() & self._wanted) - saved - self._of_this_size
        required = {name for name in lacking if not self._is_optional(name)}
        if required and self._strict:
            raise UsageError(
                f"the checkpoint of step {step} has no {', '.join(sorted(required))}; it has "
                f"{', '.join(sorted(saved))}. Give the checkpointer the items that it was saved "
                f"with, or restore with strict=False"
            )
        if lacking and self._first:
            _log.warning("step %d has no %s; not restored", step, ", ".join(sorted(lacking)))
        unused = saved - self._parts.keys() - self._of_this_size
        unused |= outline.rank_parts - self._rank_parts.keys()
        if unused and self._first:
            _log.warning(
                "step %d also contains %s, for which this checkpointer has no item: not restored",
                *(step, ", ".join(sorted(unused))),
            )
        return [
            name
            for name in self._parts
            if name in self._wanted
            and name in saved
            and (same_size or name not in self._of_this_size)
        ]
