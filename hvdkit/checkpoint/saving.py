"""Save the state of all ranks: compare it between the ranks, and collect it on the first rank."""

import json
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import digest
from hvdkit.agreement.replicas import ReplicaCheck
from hvdkit.checkpoint import tree
from hvdkit.checkpoint.coordination import compare, compare_lines, exchange, gather
from hvdkit.checkpoint.sharding import Gather, check_layouts
from hvdkit.checkpoint.snapshot import SnapshotMemory, encoded, in_place
from hvdkit.checkpoint.state import (
    ComparedItem,
    DifferingRankItem,
    RankItem,
    StatefulItem,
    Tree,
    is_divided,
)
from hvdkit.checkpoint.step_files import EncodedPart, rank_to_bytes
from hvdkit.checkpoint.storage import check_number
from hvdkit.errors import UsageError


@dataclass(frozen=True)
class Prepared:
    """The state of a rank that the ranks compare before a save.

    Attributes:
        step: the step to save.
        alike: name of a part without tensors -> its content.
        signatures: name of a part -> a text for each piece of its structure.
        digests: name of a rank part -> digests of values that may be equal on all ranks.
        message: all of it for the other ranks, in JSON.
    """

    step: int
    alike: Mapping[str, Tree]
    signatures: Mapping[str, list[str]]
    digests: Mapping[str, Mapping[str, int]]
    message: dict[str, Any]


class Saving:
    """One call of `Manager.save`: call `prepare`, and then `run`.

    Args:
        collectives: the collectives of the job's ranks.
        parts: name -> an item that is the same on all ranks, or a `DividedItem`.
        rank_parts: name -> an item that has its own state on each rank.
        alike: names of parts without tensors, which are compared by their content.
        replicas: see `Manager`.
        memory: memory for the copy; None to use the tensors in place.
        consequence: added to errors.
        writes: whether this rank writes the state. Default: whether it is the first rank.
    """

    def __init__(
        self,
        collectives: Collectives,
        parts: Mapping[str, StatefulItem],
        rank_parts: Mapping[str, RankItem],
        alike: Collection[str],
        *,
        replicas: Callable[[], Sequence[ReplicaCheck | None]],
        memory: SnapshotMemory | None,
        consequence: str,
        writes: bool | None = None,
    ) -> None:
        self._collectives = collectives
        self._parts = parts
        self._rank_parts = rank_parts
        self._replicas = replicas
        self._memory = memory
        self._consequence = consequence
        self._writes = collectives.is_first if writes is None else writes
        self._names_alike = [name for name in parts if name in alike]

    def prepare(self, step: int) -> Prepared:
        """Prepare the comparison of this rank's state. Not a collective.

        Args:
            step: the step to save.

        Raises:
            UsageError: this rank has a state that cannot be saved.
            MemoryError: there is not enough memory.
        """
        alike = {name: self._parts[name].save() for name in self._names_alike}
        signatures = {
            name: part.signature()
            for name, part in self._parts.items()
            if isinstance(part, ComparedItem) and name not in alike
        }
        digests = {
            name: item.digests()
            for name, item in self._rank_parts.items()
            if isinstance(item, DifferingRankItem)
        }
        message = {
            "step": step,
            "wait": str(self._memory is None),
            "ranks": ", ".join(self._rank_parts),
            "parts": ", ".join(self._parts),
            "alike": {name: _fingerprint(each, name) for name, each in alike.items()},
            "signatures": {name: digest(lines).hex() for name, lines in signatures.items()},
            "digests": {name: list(each.values()) for name, each in digests.items()},
            "replicas": [self._described(check) for check in self._replicas()],
        }
        return Prepared(step, alike, signatures, digests, message)

    def run(
        self, prepared: Prepared | None, problem: Exception | None
    ) -> tuple[dict[str, EncodedPart], list[bytes]]:
        """Compare the state between the ranks, and collect it on the first rank. A collective.

        Args:
            prepared: what `prepare` has returned; None if this rank has an error.
            problem: the error of this rank in `prepare` or before.

        Returns:
            On the first rank, the parts, and the own state of each rank.

        Raises:
            UsageError: on all ranks: a rank has a state that cannot be saved, or the states differ.
            CheckpointError: on all ranks: a rank had another error.
            RankMismatchError: on all ranks: parameters or optimizer state differ.
        """
        content, own, parts, problem = self._collect(prepared, problem)
        message = {} if parts is None else {"shards": parts.layout}
        told = exchange(self._collectives, message, problem, self._consequence)
        assert parts is not None
        layouts = [each["shards"] for each in told]
        check_layouts(self._collectives.ranks, layouts, self._consequence)
        for name, wholes in parts.run(self._collectives, layouts).items():
            content[name] = replace(content[name], tensors={**content[name].tensors, **wholes})
        return content, gather(self._collectives, own, "hvdkit.checkpoint.ranks")

    def run_everywhere(
        self,
        prepared: Prepared | None,
        problem: Exception | None,
        note: Mapping[str, Any],
        others_write: bool,
    ) -> tuple[dict[str, EncodedPart], list[bytes], Mapping[str, Any]]:
        """Compare the state between the ranks, and send each rank's own state to all. A collective.

        All ranks that write get the first rank's content of parts that the ranks do not compare,
        such as metadata.

        Args:
            prepared: see `run`.
            problem: see `run`.
            note: JSON values of the first rank.
            others_write: whether a rank other than the first one writes. Equal on all ranks.

        Returns:
            On the ranks that write, the parts; on all ranks, the own state of each rank, and the
            note of the first rank.

        Raises:
            UsageError, CheckpointError: see `run`.
        """
        content, own, parts, problem = self._collect(prepared, problem)
        if parts is not None and parts.layout:
            problem = problem or UsageError(
                f"{next(iter(parts.layout))} is divided among the ranks, and the memory of a host "
                f"keeps what all ranks have: expected a model of plain tensors. Use every_steps of "
                f"hvd.Checkpointer, without every_steps_in_memory and without an elastic state"
            )
        if others_write:
            differing = [
                name
                for name, part in self._parts.items()
                if name not in self._names_alike and not isinstance(part, ComparedItem)
            ]
            content |= parts_of_first(self._collectives, content, differing, problem) or {}
        message = {"own": own.decode(), "note": dict(note)}
        told = exchange(self._collectives, message, problem, self._consequence)
        return content, [each["own"].encode() for each in told], told[0]["note"]

    def _collect(
        self, prepared: Prepared | None, problem: Exception | None
    ) -> tuple[dict[str, EncodedPart], bytes, Gather | None, Exception | None]:
        """Compare the state between the ranks, and copy the state of this rank. A collective.

        Returns:
            The parts, if this rank writes; its own state; its parts of divided tensors; its error.
        """
        message = prepared.message if prepared else {}
        gathered = exchange(self._collectives, message, problem, self._consequence)
        assert prepared is not None
        self._compare(prepared, gathered)
        self._compare_replicas(prepared.step, [each["replicas"] for each in gathered])
        self._select(prepared, [each["digests"] for each in gathered])
        content: dict[str, EncodedPart] = {}
        own = b""
        parts = None
        try:
            # After the comparison, which may have repaired this rank.
            trees = {
                name: prepared.alike[name] if name in prepared.alike else part.save()
                for name, part in self._parts.items()
                if name in prepared.alike or self._writes or is_divided(part)
            }
            own = rank_to_bytes(
                _encoded_plainly(
                    {name: part.save() for name, part in self._rank_parts.items()}, "rank"
                ),
                len(self._collectives.ranks),
            )
            found = encoded(trees)
            parts = Gather({name: tensors for name, (_, tensors) in found.items()}, self._writes)
            if self._writes:
                content = in_place(found) if self._memory is None else self._memory.copy(found)
        except Exception as error:
            problem = error
        return content, own, parts, problem

    def _compare(self, prepared: Prepared, gathered: Sequence[Mapping[str, Any]]) -> None:
        """Check that the ranks save the same state. A collective.

        Args:
            prepared: of this rank.
            gathered: the messages of all ranks.

        Raises:
            UsageError: on all ranks: the ranks save different states.
        """
        for kind, subject in (
            ("step", "the step to save"),
            ("wait", "whether to wait until it is written"),
            ("ranks", "which items have a state on each rank"),
            ("parts", "the parts"),
        ):
            compare(
                self._collectives, [each[kind] for each in gathered], subject, self._consequence
            )
        for name in prepared.alike:
            positions = [each["alike"][name] for each in gathered]
            compare(self._collectives, positions, f"the position in {name!r}", self._consequence)
        for name, lines in prepared.signatures.items():
            digests = [each["signatures"][name] for each in gathered]
            compare_lines(self._collectives, digests, lines, name, self._consequence)

    def _select(self, prepared: Prepared, gathered: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """Tell items which of their values differ between ranks.

        Args:
            prepared: of this rank.
            gathered: rank -> name of an item -> its digests, in the same order on all ranks,
                because `_compare` has compared the signatures.
        """
        for name, own in prepared.digests.items():
            item = self._rank_parts[name]
            assert isinstance(item, DifferingRankItem)
            of_ranks = zip(*(each[name] for each in gathered), strict=True)
            item.select({n for n, found in zip(own, of_ranks, strict=True) if len({*found}) > 1})

    def _described(self, check: ReplicaCheck | None) -> str:
        """Return the settings of a check; empty if it cannot run on this rank."""
        if check is None or not check.settings.interval:
            return ""
        return str(check.settings) if list(check.ranks) == list(self._collectives.ranks) else ""

    def _compare_replicas(self, step: int, gathered: Sequence[Sequence[str]]) -> None:
        """Compare the replicas of the optimizers whose check can run on all ranks. A collective.

        Args:
            step: the step to save.
            gathered: rank -> optimizer -> the result of `_described`.

        Raises:
            RankMismatchError: on all ranks, see `ReplicaCheck.compare`.
        """
        if len({len(of_rank) for of_rank in gathered}) > 1:
            return
        for check, described in zip(self._replicas(), zip(*gathered, strict=True), strict=True):
            if check is not None and all(described) and len({*described}) == 1:
                check.compare(step, consequence=f"Step {step} was not saved.")


def parts_of_first(
    collectives: Collectives,
    content: Mapping[str, EncodedPart],
    names: Collection[str],
    problem: Exception | None,
) -> dict[str, EncodedPart] | None:
    """Return the first rank's content of some parts. A collective.

    The parts may differ between ranks. Any host may be the only one that keeps them.

    Args:
        collectives: the collectives of the job's ranks.
        content: the content of the parts, on the first rank.
        names: the names of the parts.
        problem: the error of this rank.

    Returns:
        The content; None if the first rank has an error.
    """
    first = collectives.ranks[0]
    sent = b""
    if collectives.rank == first and problem is None:
        sent = pickle.dumps({name: content[name] for name in names})
    received = collectives.broadcast(sent, first, "hvdkit.checkpoint.values")
    return pickle.loads(received) if received else None


def check_arguments(step: Any, epoch: Any, metrics: Any) -> dict[str, float]:
    """Check the arguments of `Manager.save`, and return the metrics as floats.

    Raises:
        UsageError: an argument is invalid.
    """
    check_number("step", step)
    if epoch is not None:
        check_number("epoch", epoch)
    if not isinstance(metrics, Mapping):
        raise UsageError(f"metrics is {metrics!r:.40}: expected a dict of numbers by name")
    values = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise UsageError(f"metrics has the name {name!r}: expected a string")
        try:
            if isinstance(value, str | bytes):
                raise TypeError("a text")
            values[name] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"the metric {name!r} is {value!r:.40}: expected a number") from error
    return values


def _fingerprint(content: Tree, name: str) -> str:
    return digest([json.dumps(_encoded_plainly(content, name), sort_keys=True)]).hex()[:16]


def _encoded_plainly(content: Tree, name: str) -> Any:
    """Return the JSON form of a tree without tensors.

    Raises:
        UsageError: it has tensors, or a value that cannot be saved.
    """
    encoded, tensors = tree.encode(content, name, inline=True)
    if tensors:
        raise UsageError(
            f"{name} has tensors ({', '.join([*tensors][:3])}): expected plain values, such as "
            f"NumPy arrays"
        )
    return encoded
