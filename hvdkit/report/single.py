"""The report of one run."""

from __future__ import annotations

import shlex

from hvdkit.report import sections
from hvdkit.report.document import Cell, Document, Table
from hvdkit.report.numbers import count, duration, moment, times
from hvdkit.report.ranks import ranks
from hvdkit.report.reliability import checkpoints, starts, state
from hvdkit.report.training_run import TrainingRun

_LONGEST_TITLE = 80
_SHOWN_HOSTS = 8


def document(run: TrainingRun) -> Document:
    """Return the report of one run."""
    makers = [
        *sections.METRIC_SECTIONS[:-1],
        ranks,
        sections.METRIC_SECTIONS[-1],
        checkpoints,
        starts,
        sections.own_values,
        sections.memory,
        sections.all_metrics,
    ]
    made = [section for make in makers if (section := make(run)) is not None]
    return Document(f"Training run: {title(run)}", _summary(run), facts([run]), made, run.notes)


def title(run: TrainingRun) -> str:
    """Return a name of a run for its page: its command if known, otherwise its folder."""
    start = run.last_start
    if start is None:
        return run.name
    command = shlex.join(start.command)
    if len(command) > _LONGEST_TITLE:
        command = f"{command[:_LONGEST_TITLE]}…"
    return command


def _summary(run: TrainingRun) -> list[str]:
    sentences = [state(run)]
    if run.records:
        reports = count(len(run.records), "report")
        text = f"{count(run.steps or 0, 'step')} are reported, in {reports}"
        if run.restarts:
            text += f"; the training has resumed {times(len(run.restarts))}"
        sentences.append(f"{text}.")
    return sentences


def facts(runs: list[TrainingRun]) -> Table:
    """Return a table of what ran where: a row for each fact, a column for each run."""
    rows = {
        "command": [_command(run) for run in runs],
        "folder": [str(run.place) for run in runs],
        "ranks": [_ranks(run) for run in runs],
        "hosts": [_hosts(run) for run in runs],
        "versions": [_versions(run) for run in runs],
        "wire format": [", ".join(run.wire_formats) for run in runs],
        "began": [moment(run.began) if run.began is not None else "" for run in runs],
        "last event": [moment(run.ended) if run.ended is not None else "" for run in runs],
        "time between": [_duration(run) for run in runs],
        "checkpoints": [run.checkpoint_folder for run in runs],
    }
    head = ["", *(run.name for run in runs)] if len(runs) > 1 else ["", ""]
    known: list[list[Cell]] = [
        [name, *(value or "unknown" for value in values)]
        for name, values in rows.items()
        if any(values)
    ]
    return Table(head, known)


def _command(run: TrainingRun) -> str:
    start = run.last_start
    if start is None:
        return ""
    return f"{shlex.join(start.command)} (in {start.directory})"


def _ranks(run: TrainingRun) -> str:
    numbers = [len(part.ranks) for part in run.parts] or [each.ranks for each in run.starts]
    distinct = list(dict.fromkeys(numbers))
    return ", then ".join(map(str, distinct))


def _hosts(run: TrainingRun) -> str:
    start = run.last_start
    if start is None:
        names = list(dict.fromkeys(part.host for part in run.parts if part.host))
        return f"{', '.join(names[:_SHOWN_HOSTS])} (of the first rank)" if names else ""
    hosts = [f"{name} ({count(ranks, 'rank')})" for name, ranks in start.hosts.items()]
    more = f" and {len(hosts) - _SHOWN_HOSTS} more" if len(hosts) > _SHOWN_HOSTS else ""
    return ", ".join(hosts[:_SHOWN_HOSTS]) + more


def _versions(run: TrainingRun) -> str:
    found: dict[str, None] = {}
    for each in run.starts:
        if each.start is not None:
            found |= {f"{name} {version}": None for name, version in each.start.versions.items()}
    for part in run.parts:
        found |= {part.framework: None}
        if part.hvdkit and not run.starts:
            found |= {f"hvdkit {part.hvdkit}": None}
    return ", ".join(found)


def _duration(run: TrainingRun) -> str:
    if run.began is None or run.ended is None:
        return ""
    return duration(max(run.ended - run.began, 0.0))
