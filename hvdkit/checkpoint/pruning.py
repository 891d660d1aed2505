"""Choose the steps that `hvdkit checkpoint prune` deletes."""

from __future__ import annotations

from collections.abc import Callable

from hvdkit.checkpoint.retention import Retention
from hvdkit.checkpoint.storage import Entry, newest_run
from hvdkit.checkpoint.store import Store


def prunable(
    store: Store,
    retention: Retention,
    older_runs: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[Entry]:
    """List the complete steps of the newest run that `retention` deletes, oldest first.

    The steps to keep are read and verified. A damaged step is not deleted, but `retention` does
    not count it. So at least one good step stays, if there is one.

    Args:
        store: the steps.
        retention: which steps are kept.
        older_runs: delete all steps of older runs as well, if the newest has a good step.
        progress: called with the number of bytes read since the previous call.

    Raises:
        CheckpointError: the folder or a step cannot be read.
    """
    entries = store.entries()
    run = newest_run(entries)
    listed = [e for e in entries if e.run == run and e.error is None]
    good: list[Entry] = []
    while True:
        stay = [
            listed[place] for place in retention.kept([e.manifest for e in listed if e.manifest])
        ]
        unread = [entry for entry in stay if entry not in good]
        if not unread:
            break
        opened, problems = store.examine(unread[0], progress)
        if opened is not None:
            opened.close()
            good.append(unread[0])
        else:
            listed.remove(unread[0])
            store.say_damaged(
                unread[0].step, problems, "it is not deleted, and not counted as kept."
            )
    older = [entry for entry in entries if entry.run != run and older_runs and good]
    return [entry for entry in [*older, *listed] if entry not in good]


def of_older_runs(store: Store) -> list[Entry]:
    """List the steps of all runs except the newest, oldest first.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    entries = store.entries()
    newest = newest_run(entries)
    return [entry for entry in entries if entry.run != newest]
