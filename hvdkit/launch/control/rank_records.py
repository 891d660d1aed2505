"""The last records that the ranks of a job have sent to the launcher."""

from __future__ import annotations

from collections.abc import Mapping

from hvdkit.faults.mismatch import mismatch
from hvdkit.faults.names import describe_call
from hvdkit.faults.records import Record
from hvdkit.faults.waits import without_outdated


class RankRecords:
    """The last record of each rank, and the last record of an error.

    The events of the job have only their time and their reason, because records are large.

    Attributes:
        last: rank -> its last record.
        errors: rank -> the last record of an error. Later records lack the calls that have failed.
    """

    def __init__(self) -> None:
        self.last: dict[int, Record] = {}
        self.errors: dict[int, Record] = {}
        # The last records that are not outdated; empty if they must be found again.
        self._current: list[Mapping[int, Record]] = []

    def add(self, record: Record) -> None:
        """Add a record, instead of an earlier one of the same rank."""
        self.last[record.rank] = record
        if record.reason == "error":
            self.errors[record.rank] = record
        self._current.clear()

    @property
    def current(self) -> Mapping[int, Record]:
        """The last records that are not outdated."""
        if not self._current:
            self._current.append(without_outdated(self.last))
        return self._current[0]

    @property
    def of_failure(self) -> Mapping[int, Record]:
        """The last records that are not outdated; of a rank with an error, the error's record."""
        errors = {rank: each for rank, each in self.errors.items() if self.last[rank].error}
        return without_outdated(self.last | errors)

    @property
    def mismatch(self) -> str:
        """The ranks that differ in the collective that failed; "" if there are none."""
        return mismatch(self.current) or ""

    def failed_collective(self, rank: int) -> tuple[str, str]:
        """Return the collective that failed last on a rank, and its error.

        Both are empty if there is none, or if a later collective has ended without an error.
        """
        record = self.last.get(rank)
        if record is None or not record.error or rank not in self.current:
            return "", ""
        call = record.failed_call
        name = record.failed if call is None else describe_call(call, record)
        return name, record.error.removeprefix("failed: ")

    def failed_at(self, rank: int) -> float | None:
        """Return when that collective has failed (`time.monotonic` of the rank's host)."""
        record = self.last[rank]
        call = record.failed_call
        return None if call is None or call.ended is None else call.ended - record.offset
