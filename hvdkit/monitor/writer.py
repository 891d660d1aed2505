"""`Writer`: make records of reports, and pass them to the loggers of the first rank."""

import socket
import time
import weakref
from collections.abc import Sequence

import hvdkit
from hvdkit.agreement.collectives import Collectives
from hvdkit.monitor import metrics
from hvdkit.monitor.delivery import Delivery
from hvdkit.monitor.exchange import Decoded
from hvdkit.monitor.loggers.logger import Logger
from hvdkit.monitor.records import Record, Run, Slowest, Statistic
from hvdkit.runtime.counters import counters


class Writer:
    """Write records to loggers that are open.

    Args:
        loggers: the loggers.
        collectives: the collectives of the ranks.
        every: steps per record.
        framework: name and version of the framework.
    """

    def __init__(
        self, loggers: Sequence[Logger], collectives: Collectives, every: int, framework: str
    ) -> None:
        self._collectives = collectives
        self._every = every
        self._framework = framework
        self._delivery = Delivery(loggers)
        self._written: int | None = None
        self.close = self._delivery.close
        # A script may end without close().
        weakref.finalize(self, self.close)

    def write(self, decoded: Decoded) -> None:
        """Write the record of a report, if it has anything of this rank."""
        if self._collectives.rank not in decoded.present:
            return
        # Another rank that was in `join` may have steps that it has not reported.
        step, steps, _ = decoded.present[self._collectives.rank]
        if not steps and not decoded.values.keys() - metrics.METRICS.keys():
            return
        record = _record_of(decoded, step, steps)
        if self._written is None or step - steps < self._written:
            self._delivery.begin(
                Run(
                    step - steps,
                    record.time,
                    list(self._collectives.ranks),
                    self._every,
                    self._framework,
                    tuple(sorted(counters.wire_formats)),
                    socket.gethostname(),
                    hvdkit.__version__,
                )
            )
        self._written = step
        self._delivery.log(record)


def _record_of(decoded: Decoded, step: int, steps: int) -> Record:
    """Return the record of a report.

    Args:
        decoded: the contributions of the ranks.
        step: the number of steps of the run.
        steps: the number of steps that the record covers.
    """
    samples = sum(count for _, _, count in decoded.present.values())
    statistics = {name: Statistic.of(values) for name, values in decoded.values.items()}
    durations = decoded.values.get(metrics.STEP, {})
    seconds = max((durations[r] * decoded.present[r][1] for r in durations), default=0.0)
    if samples and seconds > 0:
        rate = samples / seconds
        statistics[metrics.SAMPLES] = Statistic(rate, rate, rate, {})
    return Record(
        step,
        steps,
        time.time(),
        samples,
        list(decoded.present),
        statistics,
        Slowest.of(decoded.values),
    )
