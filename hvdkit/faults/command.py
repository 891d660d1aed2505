"""`hvdkit why` and `hvdkit inspect`: explain a job from its records."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.exit_statuses import status_text
from hvdkit.faults import records, stacks
from hvdkit.faults.alignment import aligned
from hvdkit.faults.call_names import describe_call
from hvdkit.faults.mismatch import mismatch
from hvdkit.faults.outdated import without_outdated
from hvdkit.faults.process_states import CONTINUED, ELSEWHERE
from hvdkit.faults.rank_names import name_ranks
from hvdkit.faults.record_folder import PREFIX, request
from hvdkit.faults.records import Record
from hvdkit.faults.start_folders import ERROR, START, newest
from hvdkit.faults.timeline import timeline
from hvdkit.faults.verdict import judge
from hvdkit.faults.waits import late_calls, long_waits
from hvdkit.owned_folders import has_owner, is_own
from hvdkit.plain_files import printable, rank_number, read_json, seconds
from hvdkit.record_files import JOB, STACKS

#: In the output folder of a start: the folder for records, the states of the ranks' processes,
#: sentences about hosts that did not answer the launcher, and the exceptions of running ranks.
FOLDER, STATES, SILENT, RAISED = "records", "states.json", "silent.json", "raised.json"
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
    folder: Path, count: int = 20, replayed: Callable[[Path], dict[str, Any] | None] | None = None
) -> str:
    """Return why a job hung or failed.

    Args:
        folder: a folder of `--output-dir`, the folder of one start in it, or a folder of records.
        count: the number of collectives in the timeline.
        replayed: returns the failure in the form of `error.json`, computed from the events in the
            folder of a start; None without events. By default, `error.json` is read.

    Raises:
        UsageError: the folder has no records and no failure.
    """
    start, note = newest(folder, FOLDER)
    place = start / FOLDER if (start / FOLDER).is_dir() else start
    found = records.read(place)
    description = _description(start / START)
    content = None if replayed is None else replayed(start)
    failure = _failure(start / ERROR, content) or _reason(description, has_records=bool(found))
    if not found and failure is None:
        raise UsageError(
            note
            or f"{folder} has neither records nor the failure of a rank: expected a folder of "
            f"`hvdkit run --output-dir`, or of HVDKIT_RECORD_DIR. A job that succeeded or makes "
            f"progress has none; for a running job, use `hvdkit inspect --live`"
        )
    current = without_outdated(found)
    states = dict.fromkeys(found.keys() - current.keys(), CONTINUED) | _texts(place / STATES)
    silent = _silent(place / SILENT)
    hosts, raised = _hosts(description), _texts(place / RAISED)

    def verdict(found: Mapping[int, Record], size: int) -> str:
        late = late_calls(found.values())
        return judge(found, states, size, silent, late, hosts, raised).whole_text

    paragraphs = [
        note and f"{note} The start {start.name}:",
        failure,
        _network(description),
        _age(description, current),
        *_explain(current, verdict, count),
    ]
    return printable("\n\n".join(filter(None, paragraphs)))


def inspect_live(count: int = 20, folder: Path | None = None) -> str:
    """Return what the ranks of running jobs on this host do.

    Args:
        count: the number of collectives in the timeline.
        folder: the folder in which the jobs make their folders; default `tempfile.gettempdir()`.

    Raises:
        UsageError: no job of `hvdkit run` runs here.
    """
    # The folders of each job. Over MPI and in Slurm, each rank has a folder.
    jobs: dict[str, list[Path]] = {}
    places = (folder or Path(tempfile.gettempdir())).glob(f"{PREFIX}*")
    for path in filter(is_own, sorted(places)):
        names = [file.name for file in path.glob(JOB.format("*"))]
        jobs.setdefault(names[0] if names else path.name, []).append(path)
    paragraphs = []
    for folders, found in zip(jobs.values(), _ask(list(jobs.values())), strict=True):
        if found:
            size = next(iter(found.values())).size
            paragraphs.append(f"{len(found)} of {size} ranks answered on this host.")
            verdict = functools.partial(_live_verdict, here=found.keys() | _ranks(folders))
            paragraphs += _explain(found, verdict, count)
        elif ranks := len(_ranks(filter(has_owner, folders))):
            paragraphs.append(
                f"{ranks} rank{'s' if ranks > 1 else ''} of a job on this host did not answer. The "
                f"processes may be stopped (SIGSTOP or a debugger), or have ended."
            )
    if not paragraphs:
        raise UsageError(
            "there are no ranks of `hvdkit run` on this host: expected a job of this user that has "
            "called hvd.init()"
        )
    return printable("\n\n".join(paragraphs))


def _ask(jobs: Sequence[Sequence[Path]]) -> list[dict[int, Record]]:
    """Ask the ranks that write to the folders of jobs for records, and return each job's answers.

    They are empty for a job whose ranks do not answer.
    """
    asked = _Asked(time.monotonic(), time.time())
    for folder in itertools.chain(*jobs):
        request(folder)
    deadline = time.monotonic() + _ANSWER_SECONDS
    while True:
        answers = [_answers(folders, asked) for folders in jobs]
        if all(complete for _, complete in answers) or time.monotonic() > deadline:
            return [found for found, _ in answers]
        time.sleep(_POLL_SECONDS)


@dataclass(frozen=True)
class _Asked:
    """When ranks were asked for records, in seconds.

    Attributes:
        monotonic: by the monotonic clock.
        day: since 1970.
    """

    monotonic: float
    day: float

    def answered_by(self, record: Record) -> bool:
        """Return whether a record of this host was made since then."""
        if record.offset is None:
            return record.time >= self.day
        return record.time - record.offset >= self.monotonic


def _answers(folders: Sequence[Path], asked: _Asked) -> tuple[dict[int, Record], bool]:
    """Return the records that ranks have made since `asked`, and whether all ranks have one."""
    found: dict[int, Record] = {}
    ranks: set[int] = set()
    for folder in folders:
        # An error: another user's folder, or a job that has ended meanwhile.
        with contextlib.suppress(HvdkitError, OSError):
            read = records.read(folder)
            ranks |= _ranks([folder])
            # Not the time of the file: a rank may have made an earlier record before the request,
            # and written it afterwards.
            found |= {rank: record for rank, record in read.items() if asked.answered_by(record)}
    return found, found.keys() >= ranks


def _ranks(folders: Iterable[Path]) -> set[int]:
    """Return the ranks that have called `hvd.init()` and write to these folders."""
    files = itertools.chain.from_iterable(folder.glob(STACKS.format("*")) for folder in folders)
    return {int(match[1]) for file in files if (match := _STACKS.fullmatch(file.name))}


def _live_verdict(found: Mapping[int, Record], size: int, here: Collection[int]) -> str:
    """Return the verdict on a job that runs. It may make progress.

    Args:
        found: the records, by rank.
        size: the number of ranks of the job.
        here: the ranks on this host. Of the other ranks, nothing is known.
    """
    elsewhere = {rank: ELSEWHERE for rank in range(size) if rank not in here}
    late = long_waits(found, size, _LEAST_SECONDS, elsewhere)
    if late or not any(record.open for record in found.values()):
        text = judge(found, elsewhere, size, late=late).whole_text
    else:
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
        found: the records, by rank.
        verdict: returns the verdict on the records of a job with a number of ranks.
        count: the number of collectives in the timeline.
    """
    if not found:
        return
    found = records.with_all_groups(aligned(found))
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
        shown = [f"{rank} ({found[rank].host}, process {found[rank].pid})" for rank in ranks[:4]]
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        title = (
            f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}{more}, innermost call first:"
        )
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


def _failure(path: Path, replayed: dict[str, Any] | None) -> str | None:
    """Return a line about the rank whose failure ended the job; None if there was none."""
    try:
        content: dict[str, Any] = replayed or read_json(path)
        if content["rank"] is None:
            return None  # a deadlock or a lost host, for example
        ending = content["signal"] or status_text(content["status"])
        # Earlier versions did not write this field.
        if hint := content.get("hint"):
            ending += f", {hint}"
        # A lost peer is only a consequence of the failure.
        causes = content.get("possible_causes")
        error = causes or content["exception"] or ""
        if error and not causes and content["signal"]:
            error = f"Earlier, the rank had written a traceback: {error}"
        if not error and content["last_lines"]:
            error = f"Its last line of output: {content['last_lines'][-1]}"
        who = f"Rank {content['rank']} on {content['host']} failed"
        # Earlier versions did not write this field.
        alike = sorted(content.get("suspects", ()))
        if len(alike) > 1 and not content["signal"]:
            who = f"{name_ranks(alike)} failed with the same error"
        elif not causes:
            who += " first"
        return f"{who}: {ending}. {error}".rstrip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HvdkitError(
            f"cannot read {path}: {error!r}. Expected the file that `hvdkit run --output-dir` "
            "writes. Delete it to read the records alone"
        ) from error


def _description(path: Path) -> Any:
    """Return the content of the description of a start; None without a readable file."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def _reason(content: Any, has_records: bool) -> str | None:
    """Return a line about the end of a job in which no rank failed first, such as a lost host.

    Args:
        content: the description of the start.
        has_records: whether there are records. Then the line contains no verdict on a stall, which
            is derived from the records again. If the job succeeded, the line says so. If there are
            no records and the job has no end, the line says this.
    """
    try:
        reason = str(content["reason"]) if content["failed"] else ""
        # Earlier versions did not write all of these fields.
        succeeded = content.get("status") == 0
        unfinished = content.get("ended", 0.0) is None
        is_verdict = bool(content.get("verdict", False))
    except (KeyError, TypeError, AttributeError):
        return None
    if unfinished and not has_records:
        return f"{_UNFINISHED} No rank has reported a problem."
    if succeeded and has_records:
        return "The job succeeded. The ranks wrote these records earlier:"
    return None if not reason or (is_verdict and has_records) else f"The job failed: {reason}"


def _age(content: Any, found: Mapping[int, Record]) -> str:
    """Return a line about records that may not show the last state of the job; may be empty.

    They were made some time before the job failed, or the job has not ended.

    Args:
        content: as for `_reason`.
        found: the records, by rank.
    """
    try:
        last = max(record.time for record in found.values())
        if content["ended"] is None:
            return (
                f"{_UNFINISHED} On a host of a running job, `hvdkit inspect --live` shows the "
                f"present state. The ranks wrote these records {max(time.time() - last, 0):,.0f} s "
                f"ago:"
            )
        before = seconds(content["ended"]) - last
        # A verdict may end a job long after the records, because ranks may save. `_reason` has a
        # line about a success.
        other = content["verdict"] or content["status"] == 0
    except (KeyError, TypeError, ValueError):
        return ""
    if other or before < _RECENT_SECONDS:
        return ""
    return f"The ranks wrote these records {before:,.0f} s before the end of the job:"


def _network(content: Any) -> str:
    """Return a line about connections that failed after the end of the ranks; may be empty.

    Args:
        content: as for `_reason`.
    """
    found = content.get("network") if isinstance(content, dict) else None
    return f"After the failure, connections between the hosts failed: {found}." if found else ""


def _hosts(content: Any) -> list[str]:
    """Return the host of each rank, from the description of the start; empty if not known."""
    try:
        hosts = {name: rank_number(count) for name, count in content["hosts"].items()}
        rank_number(sum(hosts.values()))
        return [name for name, count in hosts.items() for _ in range(count)]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []


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
