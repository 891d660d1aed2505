"""Ranks that are started as those of `hvdkit run --elastic`, in a job whose ranks stay."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvdkit.checkpoint.host_steps import HostSteps
from hvdkit.elastic import run
from hvdkit.elastic.commits import Commits
from hvdkit.elastic.parts import Parts, read
from hvdkit.runtime.elastic_start import ElasticStart


@contextmanager
def host_of_its_own() -> Iterator[Path]:
    """Return a context in which this rank is the only one of its host.

    The value is the host's folder for commits.
    """

    def commits(*arguments: object) -> Commits:
        return Commits(*arguments[:3], writes=True)

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        for variable, value in ElasticStart([folder], 0, 0, False).variables().items():
            patch.setenv(variable, value)
        patch.setattr(run, "Commits", commits)
        yield folder


def commit_in(folder: Path) -> Parts:
    """Return the newest commit in the folder of a host."""
    (commits,) = folder.glob("commits-*[0-9]")
    with HostSteps([commits]).newest() as opened:
        return read(opened)
