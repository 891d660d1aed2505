"""Choose the step that all checkpointers of a script resume from.

If a process is killed between the saves of two checkpointers, one folder has a newer step than the
other. Two networks that are trained together must not continue from different steps. Each step
names the folders that the script saves with the same steps (`Manifest.beside`), so other folders,
such as that of an earlier phase of the training, do not count.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdkit.checkpoint.checkpointers import relative
from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.store import Store

_log = logging.getLogger("hvdkit.checkpoint")


@dataclass(frozen=True)
class CommonStep:
    """The step to restore.

    Attributes:
        step: its number; None: any.
        commit: its commit in the own folder; None: the newest.
        partner: the folder from which another checkpointer has restored this step; "" for none.
    """

    step: int | None = None
    commit: int | None = None
    partner: str = ""

    def check(self, restored: int, location: str) -> None:
        """Check the step that was restored, which is older if newer ones were damaged.

        Raises:
            CheckpointError: another checkpointer has restored another step.
        """
        if self.partner and restored != self.step:
            raise CheckpointError(
                f"step {self.step} in {location} is damaged, so step {restored} was restored; but "
                f"step {self.step} was restored from {self.partner}, which belongs to it. Start "
                f"the job again: it restores step {restored} from both, if both have it"
            )


@dataclass(frozen=True)
class _Partner:
    """A folder that belongs to another one.

    Attributes:
        location: its path or URL.
        steps: its steps.
        restored: the step that its checkpointer has restored; None if it has not restored one.
    """

    location: str
    steps: Mapping[int, Manifest]
    restored: int | None


def newest_common(own: Store, others: Sequence[tuple[Store, int | None]]) -> CommonStep:
    """Return the newest step that a folder and those that belong to it have.

    Args:
        own: the folder.
        others: the folders of the other checkpointers, and the step that each has restored; None if
            it has not restored one.

    Raises:
        CheckpointError: there is no such step; or a folder cannot be read.
    """
    if not others:
        return CommonStep()
    mine = _steps(own)
    partners = _partners(own, mine, others)
    if not partners:
        _warn_of_empty(own, mine, others)
        return CommonStep()
    common = _common(mine, partners)
    if not common:
        raise CheckpointError(_describe_none(own, mine, partners))
    step, newest = common[-1], [*mine][-1]
    if step != newest:
        _log.warning(
            "step %d in %s is not restored, but step %d, the newest that %s has, too",
            *(newest, own.location, step),
            " and ".join(partner.location for partner in partners),
        )
    done = [partner.location for partner in partners if partner.restored is not None]
    return CommonStep(step, mine[step].commit, done[0] if done else "")


def can_restore(stores: Sequence[Store]) -> bool:
    """Return whether `newest_common` finds a step for each of these folders.

    Raises:
        CheckpointError: a folder cannot be read.
    """
    for own in stores if len(stores) > 1 else ():
        mine = _steps(own)
        partners = _partners(own, mine, [(store, None) for store in stores if store is not own])
        if partners and not _common(mine, partners):
            return False
    return True


def _partners(
    own: Store, mine: Mapping[int, Manifest], others: Sequence[tuple[Store, int | None]]
) -> list[_Partner]:
    """Return the folders that belong to `own`, also through others.

    Of two folders that belong together, the newest step of one names the other. Only the folder
    with the higher step counts: a script may stop using a checkpointer. A folder without a step
    belongs to one whose newest step says that its state would be lost.
    """
    left = [(store, _steps(store), restored) for store, restored in others]
    found: list[_Partner] = []
    members = [(own, mine)]
    while members:
        store, steps = members.pop()
        for each in list(left):
            other, theirs, restored = each
            if _names(steps, theirs, relative(other, store)) or _names(
                theirs, steps, relative(store, other)
            ):
                left.remove(each)
                members.append((other, theirs))
                found.append(_Partner(other.location, theirs, restored))
    return found


def _names(steps: Mapping[int, Manifest], others: Mapping[int, Manifest], folder: str) -> bool:
    """Return whether the newest of some steps names the folder of others."""
    if not steps:
        return False
    newest = [*steps.values()][-1]
    if not others:
        return folder in newest.beside + newest.unsaved
    return folder in newest.beside and newest.step >= [*others.values()][-1].step


def _common(mine: Mapping[int, Manifest], partners: Sequence[_Partner]) -> list[int]:
    return [
        step
        for step in mine
        if all(
            step in partner.steps if partner.restored is None else step == partner.restored
            for partner in partners
        )
    ]


def _warn_of_empty(
    own: Store, mine: Mapping[int, Manifest], others: Sequence[tuple[Store, int | None]]
) -> None:
    empty = [store.location for store, _ in others if not _steps(store)]
    if mine and empty:
        _log.warning(
            "%s has step %d, and %s no step: its state begins anew",
            *(own.location, [*mine][-1], " and ".join(empty)),
        )


def _steps(store: Store) -> dict[int, Manifest]:
    """Return the complete steps of the newest run, oldest first."""
    return {info.step: info.manifest for info in store.steps_of_newest_run()}


def _describe_none(own: Store, mine: Mapping[int, Manifest], partners: Sequence[_Partner]) -> str:
    def has(steps: Mapping[int, Manifest]) -> str:
        return f"has {', '.join(map(str, steps)) or 'no step'}"

    told = [f"{own.location} {has(mine)}"]
    for partner in partners:
        done = "" if partner.restored is None else f"; step {partner.restored} was restored"
        told.append(f"{partner.location} {has(partner.steps)}{done}")
    return (
        f"the checkpointers of these folders belong together, and no step is in all: "
        f"{'; '.join(told)}. Make all checkpointers before the first restore(). To continue from "
        f"different steps, call restore(step) of each; to train from the beginning, move the steps "
        f"out of the folders"
    )
