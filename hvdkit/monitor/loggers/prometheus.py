"""Serve the last record to Prometheus.

Names follow https://prometheus.io/docs/practices/naming/: a prefix, base units as a suffix, and
`_total` for counters. The mean over the ranks has no further suffix:
`hvdkit_step_duration_seconds`. Minimum and maximum have `_min` and `_max` before the unit, such as
`hvdkit_step_duration_max_seconds`.
"""

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hvdkit.errors import HvdkitError
from hvdkit.monitor import metrics
from hvdkit.monitor.loggers.logger import Logger, require
from hvdkit.monitor.loggers.metrics_server import MetricsServer
from hvdkit.monitor.records import Record, Run, Statistic
from hvdkit.system import process_limit

_OPEN_METRICS = "application/openmetrics-text"

_UNITS = ("seconds", "bytes", "ratio", "per_second")

#: Metric -> the name of its counter, and its meaning.
COUNTERS = {
    metrics.PAYLOAD: ("hvdkit_payload_bytes", "Encoded gradients that a rank gave to collectives."),
    metrics.OVERFLOWS: ("hvdkit_overflows", "Sums in float16 that were repeated in float32."),
    metrics.SKIPPED: ("hvdkit_skipped_steps", "Steps that an optimizer skipped."),
}


@dataclass(frozen=True)
class _Served:
    """The values of a scrape.

    Attributes:
        run: the last beginning of a part of the run.
        last: the last record, with the metrics of the steps before a validation.
        steps: steps since the start of the process.
        samples: samples of all ranks since then.
        records: records since then.
        counted: metric of `COUNTERS` -> its sum since then.
    """

    run: Run | None = None
    last: Record | None = None
    steps: int = 0
    samples: int = 0
    records: int = 0
    counted: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0.0))


class PrometheusLogger(Logger):
    """Serve metrics at `http://ADDRESS:PORT/metrics`, on the first rank.

    The server is one thread, and keeps at most 8 connections for at most 5 seconds.

    Prometheus should scrape at least as often as records come: only the last record is served.

    Needs `pip install 'hvdkit[monitor-prometheus]'`.

    Args:
        port: the port; 0 for a free one (see `port`).
        address: the address to listen at. There is no authentication: with an address other than
            loopback, everyone in the network can read the metrics.

    Raises:
        UsageError: the package prometheus_client is not installed.
    """

    def __init__(self, port: int = 9464, address: str = "127.0.0.1") -> None:
        self._client = require("prometheus_client", "prometheus_client", "monitor-prometheus")
        self._core = require("prometheus_client.core", "prometheus_client", "monitor-prometheus")
        self._formats = require(
            "prometheus_client.exposition", "prometheus_client", "monitor-prometheus"
        )
        self._port = port
        self._address = address
        self._server: MetricsServer | None = None
        self._registry = self._client.CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(self.families))
        # The last text of each type, and what it shows.
        self._texts: dict[str, tuple[_Served, bytes, str]] = {}
        # The thread of the loggers replaces it, and the server's thread reads it.
        self._served = _Served()

    @property
    def port(self) -> int:
        """The port that the first rank listens on, after `Monitor()`."""
        return self._port

    def open(self) -> None:
        """Listen.

        Raises:
            HvdkitError: the port is in use.
            OSError: this host does not have the address.
        """
        try:
            with process_limit.explained():
                self._server = MetricsServer(self._address, self._port, self._render)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise HvdkitError(
                f"port {self._port} of {self._address} is in use by another program, perhaps by "
                f"another job. Pass port=..., or port=0 for a free one"
            ) from None
        self._port = self._server.port

    def begin(self, run: Run) -> None:
        """Serve the number of ranks from now on."""
        self._served = replace(self._served, run=run)

    def log(self, record: Record) -> None:
        """Serve this record from now on."""
        served, merged = self._served, record
        if not record.steps and served.last is not None:
            # Values of a validation do not replace those of the steps.
            merged = replace(
                record,
                metrics={**served.last.metrics, **record.metrics},
                slowest=served.last.slowest,
            )
        counted = dict(served.counted)
        for name in COUNTERS:
            statistic = record.metrics.get(name)
            per_step = record.steps if name == metrics.PAYLOAD else 1
            if record.steps and statistic is not None and statistic.mean is not None:
                counted[name] += statistic.mean * per_step
        self._served = replace(
            served,
            last=merged,
            steps=served.steps + record.steps,
            samples=served.samples + record.samples,
            records=served.records + 1,
            counted=counted,
        )

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _render(self, accept: str) -> tuple[bytes, str]:
        """Return the text of a scrape and its type. The text is made once for each record."""
        wanted = _OPEN_METRICS if _OPEN_METRICS in accept else ""
        served = self._served
        made, text, kind = self._texts.get(wanted, (None, b"", ""))
        if made is not served:
            encoder, kind = self._formats.choose_encoder(wanted)
            text = encoder(self._registry)
            self._texts[wanted] = (served, text, kind)
        return text, kind

    def families(self) -> Iterator[Any]:
        """Return the metric families of a scrape."""
        served = self._served
        last, run = served.last, served.run
        gauge, counter = self._core.GaugeMetricFamily, self._core.CounterMetricFamily
        yield counter("hvdkit_steps", "Steps since the start of the process.", value=served.steps)
        meaning = "Samples of all ranks since the start of the process."
        yield counter("hvdkit_samples", meaning, value=served.samples)
        meaning = "Records since the start of the process."
        yield counter("hvdkit_records", meaning, value=served.records)
        for name, (family, meaning) in COUNTERS.items():
            yield counter(family, meaning, value=served.counted[name])
        if run is not None:
            yield gauge("hvdkit_ranks", "Ranks of the job.", value=len(run.ranks))
        if last is None:
            return
        yield gauge("hvdkit_step", "Steps since the beginning of the run.", value=last.step)
        meaning = "Time of the last record, since the epoch."
        yield gauge("hvdkit_last_record_timestamp_seconds", meaning, value=last.time)
        if last.slowest is not None:
            yield gauge("hvdkit_slowest_rank", "The slowest rank.", value=last.slowest.rank)
            meaning = "Time per step of the slowest rank, without communication."
            yield gauge("hvdkit_slowest_rank_duration_seconds", meaning, value=last.slowest.seconds)
        families: dict[str, Any] = {}
        for name, statistic in last.metrics.items():
            for family, meaning, labels, value in _samples_of(name, statistic):
                if family not in families:
                    families[family] = gauge(family, meaning, labels=list(labels))
                families[family].add_metric(list(labels.values()), value)
        yield from families.values()


class _Collector:
    """A collector of prometheus_client, which calls `collect` for each scrape."""

    def __init__(self, collect: Callable[[], Iterator[Any]]) -> None:
        self.collect = collect


def _samples_of(
    name: str, statistic: Statistic
) -> Iterator[tuple[str, str, dict[str, str], float]]:
    """Return name, meaning, labels and value of each sample of a metric."""
    known = metrics.METRICS.get(name)
    if known is not None and not known.prometheus:
        return
    labels: dict[str, str] = {}
    if known is None:
        base, meaning, labels = "metric", "Metric of the script", {"name": name}
    elif name in metrics.SECTIONS:
        base, meaning = known.prometheus, "Time per step in a section"
        labels = {"section": os.path.basename(name)}
    else:
        base, meaning = known.prometheus, known.meaning[0].upper() + known.meaning[1:]
    unit = next((u for u in _UNITS if base.endswith(f"_{u}")), "")
    stem = base.removesuffix(f"_{unit}") if unit else base
    suffix = f"_{unit}" if unit else ""
    for kind, value in (
        ("", statistic.shown),
        ("_min", statistic.min),
        ("_max", statistic.max),
    ):
        if value is not None and (not kind or statistic.by_rank):
            which = {"": "mean", "_min": "minimum", "_max": "maximum"}[kind]
            text = f"{meaning}, {which} over the ranks." if statistic.by_rank else f"{meaning}."
            yield f"hvdkit_{stem}{kind}{suffix}", text, labels, value
