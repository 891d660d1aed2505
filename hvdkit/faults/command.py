"""`hvdkit why` and `hvdkit inspect`: explain a job from its records."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.faults import records, stacks
from hvdkit.faults.mismatch import mismatch
from hvdkit.faults.names import CONTINUED, ELSEWHERE, describe_call, name_ranks, shortened
from hvdkit.faults.record_folder import PREFIX, request
from hvdkit.faults.records import Record
from hvdkit.faults.start_folders import START, Start, newest
from hvdkit.faults.start_folders import read as read_start
from hvdkit.faults.timeline import timeline
from hvdkit.faults.verdict import judge
from hvdkit.faults.waits import longest_wait, without_outdated
from hvdkit.runtime.record_files import FOLDER, JOB, RAISED, SILENT, STACKS, STATES
from hvdkit.system.owned_folders import has_owner, opened, temporary
from hvdkit.system.plain_files import Budget, printable, read_json

_ANSWER_SECONDS = 3.0
_POLL_SECONDS = 0.1
# A running job gets a verdict only on collectives that have waited for these seconds. They must be
# more than those in which the ranks answer.
_LEAST_SECONDS = 5.0
# After a failure, the other ranks write records and end within about these seconds.
_RECENT_SECONDS = 5.0
_STACKS = re.compile(STACKS.format(r"(\d+)"))
_UNFINISHED = "The job has not ended, or `hvdkit run` was killed."


def why(
    folder: Path,
    count: int = 20,
    replayed: Callable[[Path], str | None] = lambda _: None,
    budget: Budget | None = None,
) -> str:
    """Return why a job hung or failed.

    Args:
        folder: a folder of `--output-dir`, the folder of one start in it, or a folder of records.
        count: the number of collectives in the timeline.
        replayed: returns the reason for the end of a start, computed from the events in its folder;
            None without events. By default, the description of the start is read.
        budget: the memory for the content of the files. Default: a new budget.

    Raises:
        UsageError: the folder has no records and no failure.
    """
    start, note = newest(folder, FOLDER)
    place = start / FOLDER if (start / FOLDER).is_dir() else start
    budget = budget or Budget()
    found = records.read(place, budget)
    unread = records.files(place).keys() - found.keys()
    end = read_start(start / START)
    reason = _reason(end, replayed(start), has_records=bool(found))
    if not found and reason is None:
        raise UsageError(
            note
            or f"{folder} has neither records nor the failure of a rank: expected a folder of "
            f"`hvdkit run --output-dir`, or of HVDKIT_RECORD_DIR. A job that succeeded or makes "
            f"progress has none; for a running job, use `hvdkit inspect --live`"
        )
    current = without_outdated(found)
    states = dict.fromkeys(found.keys() - current.keys(), CONTINUED) | _texts(place / STATES)
    states |= dict.fromkeys(unread, ELSEWHERE)
    silent = _silent(place / SILENT)
    hosts, network = ([], "") if end is None else (end.host_of_rank, end.network)
    raised = _texts(place / RAISED)

    def verdict(found: Mapping[int, Record], size: int) -> str:
        # A younger call may have ended a moment later.
        seconds = longest_wait(found) / 2
        return judge(found, states, size, seconds, silent, hosts, raised).whole_text

    paragraphs = [
        note and f"{note} The start {start.name}:",
        reason,
        network and f"After the failure, connections between the hosts failed: {network}.",
        _age(end, current),
        *_explain(current, verdict, count),
        budget.note,
    ]
    return printable("\n\n".join(filter(None, paragraphs)))


def inspect_live(count: int = 20, folder: Path | None = None) -> str:
    """Return what the ranks of running jobs on this host do.

    Args:
        count: the number of collectives in the timeline.
        folder: the folder in which the jobs make their folders; default `temporary()`.

    Raises:
        UsageError: no job of `hvdkit run` runs here.
    """
    # The folders of each job. Over MPI and in Slurm, each rank has a folder.
    jobs: dict[str, list[Path]] = {}
    paragraphs = []
    with contextlib.ExitStack() as stack:
        for place in sorted((folder or temporary()).glob(f"{PREFIX}*")):
            with contextlib.suppress(OSError):  # another user's folder
                path = stack.enter_context(opened(place))
                names = [file.name for file in path.glob(JOB.format("*"))]
                jobs.setdefault(names[0] if names else place.name, []).append(path)
        answers, note = _ask(list(jobs.values()))
        for folders, found in zip(jobs.values(), answers, strict=True):
            if found:
                size = next(iter(found.values())).size
                paragraphs.append(f"{len(found)} of {size} ranks answered on this host.")
                verdict = functools.partial(_live_verdict, here=found.keys() | _ranks(folders))
                paragraphs += _explain(found, verdict, count)
            elif ranks := len(_ranks(filter(has_owner, folders))):
                paragraphs.append(
                    f"{ranks} rank{'s' if ranks > 1 else ''} of a job on this host did not answer. "
                    f"The processes may be stopped (SIGSTOP or a debugger), or have ended."
                )
    if not paragraphs:
        raise UsageError(
            "there are no ranks of `hvdkit run` on this host: expected a job of this user that has "
            "called hvd.init()"
        )
    return printable("\n\n".join(filter(None, [*paragraphs, note])))


def _ask(jobs: Sequence[Sequence[Path]]) -> tuple[list[dict[int, Record]], str]:
    """Ask the ranks that write to the folders of jobs for records.

    Returns:
        The answers of each job, empty for a job whose ranks do not answer; and a sentence about
        files that were not read.
    """
    asked = time.monotonic()
    for folder in itertools.chain(*jobs):
        request(folder)
    deadline = time.monotonic() + _ANSWER_SECONDS
    while True:
        budget = Budget()
        answers = [_answers(folders, asked, budget) for folders in jobs]
        complete = all(complete for _, complete in answers) or budget.left_out
        if complete or time.monotonic() > deadline:
            return [found for found, _ in answers], budget.note
        time.sleep(_POLL_SECONDS)


def _answers(
    folders: Sequence[Path], asked: float, budget: Budget
) -> tuple[dict[int, Record], bool]:
    """Return the records that ranks have made since `asked`, and whether all ranks have one."""
    found: dict[int, Record] = {}
    ranks: set[int] = set()
    for folder in folders:
        # An error: another user's folder, or a job that has ended meanwhile.
        with contextlib.suppress(HvdkitError, OSError):
            read = records.read(folder, budget)
            ranks |= _ranks([folder])
            # Not the time of the file: a rank may have made an earlier record before the request,
            # and written it afterwards.
            found |= {rank: r for rank, r in read.items() if r.time - r.offset >= asked}
    return found, found.keys() >= ranks


def _ranks(folders: Iterable[Path]) -> set[int]:
    """Return the ranks that have called `hvd.init()` and write to these folders."""
    files = itertools.chain.from_iterable(folder.glob(STACKS.format("*")) for folder in folders)
    return {int(match[1]) for file in files if (match := _STACKS.fullmatch(file.name))}


def _live_verdict(found: Mapping[int, Record], size: int, here: Collection[int]) -> str:
    """Return the verdict on a job that runs. It may make progress.

    Args:
        here: the ranks on this host. Of the other ranks, nothing is known.
    """
    elsewhere = {rank: ELSEWHERE for rank in range(size) if rank not in here}
    verdict = judge(found, elsewhere, size, _LEAST_SECONDS)
    text = verdict.whole_text
    if verdict.call is None and any(record.open for record in found.values()):
        least = f"{_LEAST_SECONDS:.0f} s"
        text = (
            f"No collective has waited {least} since the last rank on this host called it: the job "
            f"makes progress, or has stopped less than {least} ago."
        )
    if not elsewhere:
        return text
    are, have = ("are", "have") if len(elsewhere) > 1 else ("is", "has")
    return (
        f"{text}\n{name_ranks(list(elsewhere))} {are} on other hosts, or {have} ended. Run `hvdkit "
        f"inspect --live` on the other hosts, too."
    )


def _explain(
    found: Mapping[int, Record], verdict: Callable[[Mapping[int, Record], int], str], count: int
) -> Iterator[str]:
    """Yield paragraphs about a job.

    Args:
        verdict: returns the verdict on the records of a job with a number of ranks.
        count: the number of collectives in the timeline.
    """
    if not found:
        return
    found = records.with_all_groups(found)
    failed = sorted((r for r in found.values() if r.error), key=lambda record: record.time)
    if failed:
        yield "\n".join(filter(None, [mismatch(found), *_failed_lines(failed)]))
    if len(failed) < len(found) or any(_waits_after_error(record) for record in failed):
        yield verdict(found, next(iter(found.values())).size)
    by_stack: dict[tuple[stacks.Frame, ...], list[int]] = {}
    for rank, record in sorted(found.items()):
        if frames := stacks.main_thread(record.stacks):
            by_stack.setdefault(tuple(frames), []).append(rank)
    for stack, ranks in by_stack.items():
        named = [f"{rank} ({found[rank].host}, process {found[rank].pid})" for rank in ranks]
        title = f"Rank{'s' if len(ranks) > 1 else ''} {shortened(named)}, innermost call first:"
        yield "\n".join([title, *(f"  {frame}" for frame in stack)])
    if any(record.done or record.open for record in found.values()):
        yield "\n".join(
            ["The last collectives, and when each rank called them:", *timeline(found, count)]
        )


def _failed_lines(failed: Sequence[Record]) -> list[str]:
    """Return a line for each error, with the ranks that have it."""
    ranks: dict[str, list[Record]] = {}
    for record in failed:
        call = record.failed_call
        name = describe_call(call, record) if call is not None else record.failed
        text = record.error.removeprefix("failed: ").splitlines()
        ranks.setdefault(f"{name} failed: {text[0] if text else ''}", []).append(record)
    return [
        f"Rank {alike[0].rank} on {alike[0].host}: {text}"
        if len(alike) == 1
        else f"{name_ranks(sorted(record.rank for record in alike))}: {text}"
        for text, alike in ranks.items()
    ]


def _waits_after_error(record: Record) -> bool:
    """Return whether the script of a rank has caught an error, and waits for another collective."""
    return record.reason != "error" and any(call.ended is None for call in record.open)


def _reason(start: Start | None, replayed: str | None, has_records: bool) -> str | None:
    """Return a line about the end of a start; None if the records alone say it.

    Args:
        start: the end of the start, if it is known.
        replayed: as for `why`.
        has_records: whether there are records. The text of a verdict is derived from them again.
    """
    if start is None:
        return None
    if start.ended is None and not has_records:
        return f"{_UNFINISHED} No rank has reported a problem."
    if start.status == 0 and has_records:
        return "The job succeeded. The ranks wrote these records earlier:"
    reason = replayed or start.reason
    if not (start.failed and reason) or (start.verdict and has_records):
        return None
    return f"The job failed: {reason}"


def _age(start: Start | None, found: Mapping[int, Record]) -> str:
    """Return a line about records that may not show the last state of the job; may be empty.

    They were made some time before the job failed, or the job has not ended.
    """
    if start is None or not found:
        return ""
    last = max(record.time for record in found.values())
    if start.ended is None:
        return (
            f"{_UNFINISHED} On a host of a running job, `hvdkit inspect --live` shows the "
            f"present state. The ranks wrote these records {max(time.time() - last, 0):,.0f} s "
            f"ago:"
        )
    # A verdict may end a job long after the records, because ranks may save. `_reason` has a line
    # about a success.
    before = start.ended - last
    if start.verdict or start.status == 0 or before < _RECENT_SECONDS:
        return ""
    return f"The ranks wrote these records {before:,.0f} s before the end of the job:"


def _texts(path: Path) -> dict[int, str]:
    """Return rank -> a text, such as the state of its process; empty without a readable file."""
    try:
        return {int(rank): str(text) for rank, text in read_json(path).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _silent(path: Path) -> list[str]:
    """Return the sentences about hosts that did not answer; empty without a readable file."""
    try:
        return [str(sentence) for sentence in read_json(path)]
    except (OSError, ValueError, TypeError):
        return []
