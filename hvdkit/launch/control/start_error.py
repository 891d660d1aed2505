"""A start that fails because of certain hosts. A restart can leave these hosts out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hvdkit.errors import HvdkitError, UsageError


@dataclass(frozen=True)
class BrokenConnection:
    """A connection that could not be made, or did not transfer data.

    Attributes:
        host: the host that tried to connect.
        target: the other host, or the launcher.
        address: the address of the other host.
    """

    host: str
    target: str
    address: str
    reason: str

    def __str__(self) -> str:
        return f"{self.host} to {self.target} ({self.address}): {self.reason}"


class StartError(HvdkitError):
    """The ranks cannot be started, because of certain hosts.

    Args:
        hosts: the names of the hosts that cannot take part.
        versions: the name of a package that must be the same on all hosts, but differs -> the name
            of each host -> its version.
        broken: the connections between hosts that fail.
    """

    def __init__(
        self,
        message: str,
        hosts: Sequence[str] = (),
        versions: Mapping[str, Mapping[str, str]] | None = None,
        broken: Sequence[BrokenConnection] = (),
    ) -> None:
        super().__init__(message)
        self.hosts = hosts
        self.versions = versions or {}
        self.broken = broken

    def unfit(self, proven: Collection[str]) -> set[str]:
        """Return the names of hosts that cannot take part, or have another version than the job.

        Args:
            proven: the names of the hosts on which ranks of the job have been started.
        """
        found = set(self.hosts)
        for versions in self.versions.values():
            expected = _version_of_job(versions, proven)
            if expected is not None:
                found |= {name for name, version in versions.items() if version != expected}
        return found

    def undecided(self, proven: Collection[str]) -> str:
        """Return a sentence about different versions of which none is known to be right.

        Empty if there are none.
        """
        names = [
            name for name, each in self.versions.items() if _version_of_job(each, proven) is None
        ]
        if not names:
            return ""
        return (
            f"no host is left out because of its version of {', '.join(names)}: no version is that "
            f"of most hosts, or of the hosts where ranks ran before"
        )


class StartUsageError(StartError, UsageError):
    """A `StartError` because the user's arguments do not suit a host."""


def _version_of_job(versions: Mapping[str, str], proven: Collection[str]) -> str | None:
    """Return the version that the job has used, or else that of most hosts; None if unknown."""
    used = {version for name, version in versions.items() if name in proven}
    if len(used) == 1:
        return used.pop()
    ((version, count),) = Counter(versions.values()).most_common(1)
    return version if 2 * count > len(versions) else None
