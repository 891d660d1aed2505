"""Ranks that are started as those of `hvdkit run --elastic`, in a job whose ranks stay."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvdkit.core.elastic import run
from hvdkit.core.elastic.committer import Committer
from hvdkit.core.elastic.start import ElasticStart


@contextmanager
def host_of_its_own() -> Iterator[Path]:
    """Return a context in which this rank is the only one of its host.

    The value is the host's folder for commits.
    """

    def committer(*arguments: object) -> Committer:
        return Committer(*arguments[:3], writes=True)

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        for variable, value in ElasticStart([folder], 0, 0, False).variables().items():
            patch.setenv(variable, value)
        patch.setattr(run, "Committer", committer)
        yield folder


def commit_in(folder: Path) -> Path:
    """Return the only commit in the folder of a host."""
    (commit,) = folder.glob("*.commit")
    return commit
