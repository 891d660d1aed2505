"""Choose the hosts of a start of an elastic job, so that the newest commit is not lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdkit.launch.control.plan import Plan, shares
from hvdkit.launch.elastic.member import Member
from hvdkit.launch.hosts.hosts import Host, total_slots

#: (name of a host, its number of ranks) for each host of a start, in the order of ranks.
Assignment = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Choice:
    """The hosts from which those of a start are chosen.

    Attributes:
        members: name -> the host.
        listed: the names on the list, the oldest first. Other hosts have left it.
        max_size: the largest number of ranks; None for all slots.
    """

    members: Mapping[str, Member]
    listed: Sequence[str]
    max_size: int | None

    def assign(self, hosts: Sequence[Host]) -> Assignment:
        """Return the numbers of ranks on hosts, each with all its slots if possible."""
        size = total_slots(hosts) if self.max_size is None else self.max_size
        return [(host.name, count) for host, count in shares(hosts, size)]

    def missing_holders(self, usable: Sequence[Host], holders: Collection[str]) -> Sequence[Member]:
        """Return the hosts of which a start needs one, because only they have the newest commit.

        Empty if a start on `usable` has a rank on a host with this commit. The first host is the
        best: hosts of `usable` come first, then other hosts on the list, then hosts that have left
        the list.

        Args:
            usable: the hosts that can take part.
            holders: the names of the hosts that have the newest commit.
        """
        if any(name in holders for name, _ in self.assign(usable)):
            return []
        # A host that has left the list only copies its commit, which needs a second rank.
        removed = [] if self.max_size == 1 else sorted(set(holders) - set(self.listed))
        order = dict.fromkeys([*(host.name for host in usable), *self.listed, *removed])
        return [self.members[n] for n in order if n in holders and n in self.members]

    def with_holder(
        self, usable: Sequence[Host], holders: Collection[str], also_starting: bool = False
    ) -> Sequence[Host]:
        """Return the hosts for a start. At least one has the newest commit, if this is possible.

        All paths by which a host leaves the job end here: hosts that are excluded, that have left
        the list, or that do not answer are not in `usable`. If only such hosts have the newest
        commit, one that answers comes first with one rank. At the next commit, other hosts have
        the commit too, and the ranks start again without it.

        Args:
            usable: the hosts that can take part.
            holders: the names of the hosts that have the newest commit.
            also_starting: whether an agent that starts counts as an answer, too.
        """
        missing = self.missing_holders(usable, holders)
        answers = (m.host for m in missing if m.is_ready or (also_starting and m.is_starting))
        holder = next(answers, None)
        if holder is None:
            return usable
        if holder in usable:
            return [holder, *(host for host in usable if host != holder)]
        return [replace(holder, slots=1), *usable]


def assignment_of(plan: Plan) -> Assignment:
    """Return the hosts of a plan, and their numbers of ranks."""
    return [(host.name, len(plan.on(host))) for host in plan.hosts]
