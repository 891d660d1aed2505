"""Lines in logs, and progress on a terminal."""

import io

from hvdkit.monitor import ConsoleLogger, Slowest, Statistic
from hvdkit.monitor.records import Record


def steps(step, **values):
    metrics = {
        "loss": 0.53214,
        "accuracy": 0.5,
        "lr": 0.1,
        "time/step": 0.05,
        "time/data": 0.01,
        "time/communication": 0.02,
        "time/checkpoint": 0.0,
        "memory/rss": 1e9,
        "throughput/samples_per_sec": 1234.5,
        **values,
    }
    found = {name: Statistic.of({0: value}) for name, value in metrics.items()}
    return Record(step, 10, 1.0, 320, [0, 1], found, Slowest(1, 0.03, 0.02, "time/data"))


def logged(logger, *records):
    logger.open()
    for each in records:
        logger.log(each)
    logger.close()


def test_plain_lines():
    file = io.StringIO()
    logged(ConsoleLogger(file=file), steps(10), steps(20, loss=float("nan")))
    first, second = file.getvalue().splitlines()
    assert first == (
        "step 10: loss 0.5321, accuracy 0.5, lr 0.1, 1,234 samples/s, "
        "50 ms/step (data 20 %, communication 40 %), slowest: rank 1 (+50 %, mostly data)"
    )
    assert second.startswith("step 20: loss nan, ")


def test_progress_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    file = Terminal()
    logged(ConsoleLogger(total_steps=40, file=file), steps(10), steps(20, **{"top[5]": 1.0}))
    text = file.getvalue()
    assert "step 20" in text
    assert "top[5] 1" in text
    assert "\x1b[" in text
