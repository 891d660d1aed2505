"""Folders of runs, and pages in a form that tests can read."""

import json
import time
from html.parser import HTMLParser

from hvdkit.cli import main
from hvdkit.faults.start_folders import Start
from hvdkit.monitor import JSONLLogger, Run, metrics
from hvdkit.monitor.records import Record, Slowest, Statistic

BEGAN = 1_795_571_141.0
VERSIONS = {"hvdkit": "0.1.0", "Python": "3.11.7", "Horovod": "0.28.1+hvdkit.12"}


def record(step, steps=10, ranks=2, slowest=1, at=None, **values):
    """Return a record. A value is a number or those of the ranks."""
    found = {}
    for name, value in values.items():
        each = value if isinstance(value, list | tuple) else [value] * ranks
        found[name.replace("__", "/")] = Statistic.of(dict(enumerate(each)))
    slow = None if slowest is None else Slowest(slowest, 0.03, 0.02, metrics.DATA)
    when = BEGAN + step if at is None else at
    return Record(step, steps, when, 64, list(range(ranks)), found, slow)


def typical(step, loss=1.0, **values):
    """Return a record with the metrics of a training on two ranks, of which rank 1 is slow."""
    times = {
        "time__step": 0.05,
        "time__data": [0.001, 0.011],
        "time__forward": 0.004,
        "time__backward": 0.01,
        "time__communication": [0.03, 0.02],
        "time__update": 0.005,
    }
    rate = {"throughput__samples_per_sec": 1000.0 + step}
    rest = {"communication__payload_bytes": 2e6, "lr": 0.1, "grad_norm": 2.0, "overflows": 0.0}
    return record(step, **{**times, **rate, **rest, "loss": loss, **values})


def write_metrics(path, records, step=0, wire_formats=("fp16",), ranks=2):
    """Append a part of a run to a file of a `JSONLLogger`."""
    logger = JSONLLogger(path)
    logger.open()
    when = records[0].time if records else BEGAN
    part = Run(step, when, list(range(ranks)), 10, "torch 2.13.0", wire_formats, "vm", "0.1.0")
    logger.begin(part)
    for each in records:
        logger.log(each)
    logger.close()


def write_start(logs, began, *, error=None, **changes):
    """Write the folder of a start, and return it."""
    folder = logs / time.strftime("%Y%m%d-%H%M%S", time.gmtime(began))
    folder.mkdir(parents=True)
    begun = {
        "command": ("python", "train.py"),
        "directory": "/root/job",
        "hosts": {"host0": 2},
        "launcher": "host0 7 1.00",
        "versions": VERSIONS,
        "began": began,
        "ended": began + 100,
        "status": 0,
    }
    (folder / "start.json").write_text(Start(**{**begun, **changes}).to_json())
    if error is not None:
        (folder / "error.json").write_text(json.dumps(error))
    return folder


def report(*arguments):
    """Run `hvdkit report` and return its exit status."""
    return main(["report", *map(str, arguments)])


class Page(HTMLParser):
    """A page.

    Attributes:
        tags: the names of its elements.
        attributes: its attributes: (name, value).
        text: its text, also that of pictures.
        rows: name of a row -> its cells. A number has all its digits.
    """

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.text, self.rows = set(), [], "", {}
        self._row, self._cell = [], None
        self.content = path.read_text(encoding="utf-8")
        self.feed(self.content)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag == "tr":
            self._row = []
        elif tag in ("td", "th"):
            self._cell = ""
        elif tag == "data":
            number = dict(attributes).get("value")
            self._row.append(None if number is None else float(number))
            self._cell = None

    def handle_endtag(self, tag):
        if tag in ("td", "th") and self._cell is not None:
            self._row.append(self._cell)
            self._cell = None
        elif tag == "tr" and self._row:
            self.rows.setdefault(self._row[0], self._row[1:])

    def handle_data(self, data):
        self.text += data
        if self._cell is not None:
            self._cell += data
