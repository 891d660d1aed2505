"""Loggers run in threads, and lose records instead of slowing the training."""

import time

from hvdkit.monitor import Logger, delivery
from hvdkit.monitor.delivery import Delivery
from tests.unit.monitor.simulated import RUN, Kept, Stuck, record


def test_records_arrive_in_order():
    kept = Kept()
    sent = Delivery([kept])
    sent.begin(RUN)
    for step in range(1, 6):
        sent.log(record(step))
    sent.close()
    assert [each.step for each in kept.records] == [1, 2, 3, 4, 5]
    assert (kept.runs, kept.closed) == ([RUN], 1)


def test_a_slow_logger_drops_records_and_another_gets_all(caplog, monkeypatch):
    monkeypatch.setattr(delivery, "CAPACITY", 5)
    slow, kept = Stuck(), Kept()
    sent = Delivery([slow, kept])
    deadline = time.monotonic() + 30
    for step in range(1, 31):
        sent.log(record(step))
        while len(kept.records) < step:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    assert len(kept.records) == 30
    slow.released.set()
    sent.close()
    # One is in `log`, and five wait.
    assert slow.logged in (5, 6)
    first, last = (each.getMessage() for each in caplog.records)
    assert first.startswith("Stuck is slower than the training: 5 records wait")
    assert last.startswith(f"Stuck lost {30 - slow.logged} records: 0 because of errors")


def test_a_logger_that_hangs_does_not_hang_the_end(caplog, monkeypatch):
    monkeypatch.setattr(delivery, "CLOSE_SECONDS", 0.2)
    stuck = Stuck()
    sent = Delivery([stuck])
    sent.log(record(1))
    sent.log(record(2))
    sent.close()
    sent.close()
    stuck.released.set()
    messages = [each.getMessage() for each in caplog.records]
    assert messages[0] == "Stuck did not end within 0 s."
    assert len(messages) == 2


def test_an_error_is_said_once_and_later_records_are_tried(caplog):
    class Recovers(Kept):
        def log(self, record):
            if record.step < 4:
                raise ConnectionError("the server is gone")
            super().log(record)

    recovers = Recovers()
    sent = Delivery([recovers])
    for step in range(1, 7):
        sent.log(record(step))
    sent.close()
    assert [each.step for each in recovers.records] == [4, 5, 6]
    assert len([r for r in caplog.records if "the server is gone" in r.getMessage()]) == 1
    assert "Recovers lost 3 records" in caplog.records[-1].getMessage()


def test_an_error_in_close_is_said(caplog):
    class Broken(Logger):
        def log(self, record):
            pass

        def close(self):
            raise OSError("cannot close")

    Delivery([Broken()]).close()
    assert "cannot close" in caplog.text
