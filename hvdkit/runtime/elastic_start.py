"""The environment variables in which `hvdkit run --elastic` describes a start of the ranks.

The launcher imports this module, so it does not import numpy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.runtime import host_folders

#: The number of starts of the ranks before this one.
START_VARIABLE = "HVDKIT_ELASTIC_START"
#: The version of the list of hosts from which this start was planned.
HOSTS_VARIABLE = "HVDKIT_ELASTIC_HOSTS"
#: 1 if a commit was stored before this start.
COMMITTED_VARIABLE = "HVDKIT_ELASTIC_COMMITTED"
#: The file in the first folder with the current version of the list of hosts.
HOSTS_FILE = "hosts"


@dataclass(frozen=True)
class ElasticStart:
    """One start of the ranks of an elastic job.

    Attributes:
        folders: the folders for commits on this host.
        number: the number of starts before this one.
        hosts: the version of the list of hosts from which this start was planned.
        committed: whether a commit was stored before this start.
    """

    folders: Sequence[Path]
    number: int
    hosts: int
    committed: bool

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> ElasticStart | None:
        """Return the start that the launcher has described; None in a job that is not elastic."""
        if not environ.get(START_VARIABLE):
            return None
        return cls(
            host_folders.folders(environ),
            int(environ[START_VARIABLE]),
            int(environ[HOSTS_VARIABLE]),
            environ[COMMITTED_VARIABLE] == "1",
        )

    def variables(self) -> dict[str, str]:
        """Return the environment variables from which `read` reads this start."""
        return {
            **host_folders.variables(self.folders),
            START_VARIABLE: str(self.number),
            HOSTS_VARIABLE: str(self.hosts),
            COMMITTED_VARIABLE: "1" if self.committed else "0",
        }

    def current_hosts(self) -> int:
        """Return the version of the list of hosts that this host has received last."""
        try:
            return int((self.folders[0] / HOSTS_FILE).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return self.hosts
