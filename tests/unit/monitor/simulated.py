"""A monitor without a framework, on simulated ranks, and records for loggers."""

import math
import threading

from hvdkit.errors import UsageError
from hvdkit.monitor import Logger, Record, Run, Slowest, Statistic, metrics
from hvdkit.monitor.monitor import BaseMonitor
from hvdkit.training.stragglers import BACKWARD, FORWARD, UPDATE, WAIT

RUN = Run(0, 1000.0, [0, 1], 10, "torch 2.13.0", ("fp16",), "host0", "0.1.0")


class Kept(Logger):
    """Keeps what it gets. The ranks of a test share it."""

    def __init__(self):
        self.runs, self.records = [], []
        self.opened = self.closed = 0

    def open(self):
        self.opened += 1

    def begin(self, run):
        self.runs.append(run)

    def log(self, record):
        self.records.append(record)

    def close(self):
        self.closed += 1

    def values(self, name):
        """Return step -> mean of a metric."""
        return {r.step: r.metrics[name].mean for r in self.records if name in r.metrics}


class Simulated:
    """`hvdkit.monitor.framework.Framework`."""

    name = "simulated 1.0"

    def __init__(self):
        self.seconds = {}
        self.counted = {}
        self.began = float("-inf")

    def scalar(self, value):
        if not isinstance(value, int | float):
            raise UsageError(f"a metric is {value!r}: expected a number")
        return value

    def numbers(self, values):
        return [float(value) for value in values]

    def section_seconds(self):
        return dict(self.seconds)

    def forward_began(self):
        return self.began

    def pause(self):
        pass

    def resume(self):
        pass

    def totals(self):
        return dict(self.counted)

    def gauges(self):
        return {}

    def gpu(self):
        return None

    def spend(self, forward, backward, wait, update):
        """Make a step with these times."""
        spent = {FORWARD: forward, BACKWARD: backward, WAIT: wait, UPDATE: update}
        for section, seconds in spent.items():
            self.seconds[section] = self.seconds.get(section, 0.0) + seconds
        self.began = self.seconds[FORWARD]


def monitor(collectives, logger, every=1):
    return BaseMonitor(collectives, Simulated(), [logger], every)


def record(step=10, steps=10, ranks=(0, 1), **values):
    """Return a record with all metrics of `Monitor`, and with `values`: name -> value by rank."""
    own = {name: {r: 0.25 + r for r in ranks} for name in metrics.METRICS}
    found = {name: Statistic.of(by_rank) for name, by_rank in own.items()}
    found[metrics.SAMPLES] = Statistic(640.0, 640.0, 640.0, {})
    for name, each in values.items():
        found[name] = Statistic.of(dict(zip(ranks, each, strict=True)))
    slowest = Slowest(ranks[-1], 0.5, 0.25, "time/data")
    return Record(step, steps, 1000.0 + step, 64 * steps, list(ranks), found, slowest)


def same(a, b):
    """Return whether two numbers are equal, or both NaN."""
    return a == b or (math.isnan(a) and math.isnan(b))


class Stuck(Logger):
    """Waits in `log` until it is released."""

    def __init__(self):
        self.released = threading.Event()
        self.logged = 0

    def log(self, record):
        self.released.wait(30)
        self.logged += 1
