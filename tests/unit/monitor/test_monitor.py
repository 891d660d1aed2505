"""Reports of simulated ranks: nothing that happens on one rank may stop the others."""

import math
import time

import pytest

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.monitor import Logger, metrics
from tests.simulated.ranks import SimulatedGroup, on_every_rank
from tests.unit.monitor.simulated import Kept, monitor


def run(size, function, group=None):
    """Call `function(collectives)` on all ranks, and raise the first error."""
    results = on_every_rank(size, function, group)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_a_record_has_mean_minimum_and_maximum_over_ranks_and_steps():
    kept = Kept()

    def rank(collectives):
        with monitor(collectives, kept, every=2) as own:
            for step in range(5):
                own.step({"loss": 10 * collectives.rank + step}, samples=4)

    run(3, rank)
    assert [(r.step, r.steps, r.samples) for r in kept.records] == [
        (2, 2, 24),
        (4, 2, 24),
        (5, 1, 12),
    ]
    loss = kept.records[1].metrics["loss"]
    assert (loss.mean, loss.min, loss.max) == (12.5, 2.5, 22.5)
    assert loss.by_rank == {0: 2.5, 1: 12.5, 2: 22.5}
    rates = [r.metrics[metrics.SAMPLES_OF_RANK].by_rank for r in kept.records]
    assert all(len(each) == 3 for each in rates)
    assert (kept.opened, kept.closed) == (1, 1)


def test_each_report_is_one_collective():
    counts = []

    def rank(collectives):
        own = monitor(collectives, Kept(), every=2)
        own.step({"loss": 1.0})
        before = len(collectives.names)
        for _ in range(10):
            own.step({"loss": 1.0})
        counts.append(len(collectives.names) - before)
        own.close()

    run(2, rank)
    assert counts == [5, 5]


def test_ranks_may_have_different_metrics_at_any_time():
    kept = Kept()

    def rank(collectives):
        me = collectives.rank
        with monitor(collectives, kept) as own:
            own.step({"loss": 1.0, f"only {me}": me})
            own.step({} if me == 1 else {"loss": 2.0})
            own.step({"loss": 3.0, "late": 5.0} if me == 1 else {"loss": 3.0})
            own.step({"loss": 4.0})

    run(3, rank)
    assert kept.values("loss") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    assert kept.records[1].metrics["loss"].by_rank.keys() == {0, 2}
    assert kept.values("only 2") == {1: 2.0}
    assert kept.values("late") == {3: 5.0}
    # The other metrics of the record with a new name are not lost.
    assert metrics.STEP in kept.records[2].metrics


def test_not_a_number_on_one_rank_is_reported_and_stops_nobody():
    kept = Kept()

    def rank(collectives):
        with monitor(collectives, kept) as own:
            own.step({"loss": math.nan if collectives.rank == 1 else 2.0})
            own.step({"loss": math.inf})

    run(3, rank)
    first, second = (record.metrics["loss"] for record in kept.records)
    assert (first.mean, first.min, first.max, first.nonfinite) == (2.0, 2.0, 2.0, [1])
    assert math.isnan(first.shown)
    assert (second.mean, second.nonfinite) == (None, [0, 1, 2])


def test_the_slowest_rank_is_named_with_its_section():
    kept = Kept()

    def rank(collectives):
        with monitor(collectives, kept, every=2) as own:
            slow = collectives.rank == 2
            for _ in range(2):
                own._meter.framework.spend(0.1, 0.5 if slow else 0.2, 0.0 if slow else 0.3, 0.1)
                own.step()

    run(3, rank)
    (record,) = kept.records
    assert record.slowest.rank == 2
    assert record.slowest.section == metrics.BACKWARD
    assert record.slowest.seconds == pytest.approx(0.7)
    assert record.slowest.median == pytest.approx(0.4)
    assert record.metrics[metrics.COMMUNICATION].by_rank == pytest.approx({0: 0.3, 1: 0.3, 2: 0.0})


def test_time_in_batches_and_pauses():
    kept = Kept()

    def rank(collectives):
        def slow():
            for k in range(2):
                time.sleep(0.05)
                yield k

        began = time.perf_counter()
        with monitor(collectives, kept, every=2) as own:
            for _ in own.batches(slow()):
                own._meter.framework.spend(0.06, 0.0, 0.0, 0.0)
                with own.paused():
                    time.sleep(0.2)
                own.step()
            return time.perf_counter() - began

    spans = run(2, rank)
    (record,) = kept.records
    assert record.metrics[metrics.DATA].min >= 0.05
    # A part of the section is the time in `batches`.
    assert record.metrics[metrics.FORWARD].max <= 0.06 - 0.05 + 1e-3
    # Two pauses of 0.2 s do not count.
    assert record.metrics[metrics.STEP].min >= 0.05
    for place, seconds in record.metrics[metrics.STEP].by_rank.items():
        assert seconds * 2 <= spans[place] - 0.4 + 1e-6


def test_a_rank_in_join_is_absent():
    """A rank may join with a report in flight, and with a metric that only it has."""
    kept = Kept()
    group = SimulatedGroup(3)

    def rank(collectives):
        own = monitor(collectives, kept)
        own.step({"loss": 1.0})
        if collectives.rank == 2:
            own.step({"loss": 2.0, "new": 1.0})
            with group.arrived:
                group.joined.add(2)
                group._end_what_is_full()
                group.arrived.notify_all()
            return own
        own.step({"loss": 2.0})
        deadline = time.monotonic() + 30
        while 2 not in group.joined:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        own.step({"loss": 3.0, "new": 4.0})
        own.step({"loss": 4.0, "new": 5.0})
        own.flush()
        own.abandon()
        return None

    run(3, rank, group)
    assert kept.values("loss") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    assert [list(record.ranks) for record in kept.records] == [[0, 1, 2]] * 2 + [[0, 1]] * 2
    assert kept.values("new")[4] == 5.0


def test_a_new_generation_continues_at_the_highest_step():
    kept = Kept()

    def rank(collectives):
        own = monitor(collectives, kept, every=2)
        for _ in range(4 if collectives.rank else 7):
            # Only this rank goes on, as if the others were in `join`.
            if own.steps == 4:
                break
            own.step({"loss": 1.0})
        own._steps += 3 * (collectives.rank == 0)
        collectives.generation += 1
        for _ in range(3):
            own.step({"loss": 2.0})
        own.close()
        return own.steps

    assert run(2, rank) == [10, 10]
    assert [record.step for record in kept.records] == [2, 4, 8, 10]


def test_the_loggers_are_closed_before_another_rank_opens_them():
    """In an elastic job, another rank may become the first. Both may need the same port."""

    class Exclusive(Kept):
        def open(self):
            assert self.opened == self.closed
            super().open()

    kept = Exclusive()

    def rank(collectives):
        own = monitor(collectives, kept)
        own.step({"loss": 1.0 + collectives.rank})
        own.flush()
        collectives.rank = 1 - collectives.rank
        collectives.generation += 1
        own.step({"loss": 3.0 + collectives.rank})
        own.close()

    run(2, rank)
    assert kept.values("loss") == {1: 1.5, 2: 3.5}
    assert (kept.opened, kept.closed) == (2, 2)


def test_steps_continue_after_a_resume_and_a_step_back_begins_a_new_part():
    kept = Kept()

    def rank(collectives):
        with monitor(collectives, kept, every=2) as own:
            own.steps = 100
            for _ in range(4):
                own.step()
            own.flush()
            own.steps = 102
            own.step()
            own.step()

    run(2, rank)
    assert [record.step for record in kept.records] == [102, 104, 104]
    assert [run.step for run in kept.runs] == [100, 102]


def test_logged_values_after_the_last_step_are_a_record_without_steps():
    kept = Kept()

    def rank(collectives):
        with monitor(collectives, kept, every=2) as own:
            own.step()
            own.step()
            own.flush()
            own.log({"val_loss": 1.0 + collectives.rank})
            own.flush()
            own.flush()

    run(2, rank)
    assert [(record.step, record.steps) for record in kept.records] == [(2, 2), (2, 0)]
    assert kept.records[1].metrics["val_loss"].mean == 1.5
    assert metrics.STEP not in kept.records[1].metrics


def test_too_many_names_are_an_error_on_every_rank():
    def rank(collectives):
        own = monitor(collectives, Kept())
        try:
            for step in range(20):
                own.step({f"loss {step} {k}": 1.0 for k in range(60)} if collectives.rank else {})
        finally:
            own.abandon()

    results = on_every_rank(2, rank)
    assert all(isinstance(result, UsageError) for result in results)
    assert all("use the same names in each step" in str(result) for result in results)


def test_different_arguments_are_an_error_on_every_rank():
    results = on_every_rank(2, lambda c: monitor(c, Kept(), every=1 + c.rank))
    assert all(isinstance(result, RankMismatchError) for result in results)
    assert "rank 1: every: 2" in str(results[0])


def test_a_logger_that_cannot_be_opened_is_an_error_on_every_rank():
    class Broken(Kept):
        def open(self):
            raise OSError("no such device")

    results = on_every_rank(3, lambda c: monitor(c, Broken()))
    assert [type(result) for result in results] == [HvdkitError] * 3
    assert {str(result) for result in results} == {"Broken cannot be opened: no such device"}


def test_a_failing_logger_does_not_stop_the_training(caplog):
    class Broken(Logger):
        def log(self, record):
            raise OSError("disk full")

    def rank(collectives):
        with monitor(collectives, Broken()) as own:
            for _ in range(5):
                own.step({"loss": 1.0})

    run(2, rank)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "Broken failed, and the training continues without its records: OSError: disk full",
        "Broken lost 5 records: 5 because of errors, 0 because it was too slow.",
    ]


def test_an_exception_closes_the_loggers_without_a_collective():
    kept = Kept()

    def rank(collectives):
        with monitor(collectives, kept, every=2) as own:
            own.step()
            if collectives.rank == 0:
                raise KeyboardInterrupt
            own.abandon()

    results = on_every_rank(2, rank)
    assert [type(result) for result in results] == [KeyboardInterrupt, type(None)]
    assert kept.closed == 1


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("", 1.0, "expected a string of 1 to 100 characters"),
        ("a\nb", 1.0, "expected a string"),
        (3, 1.0, "expected a string"),
        ("time/step", 1.0, "choose another name"),
        ("loss", "much", "expected a number"),
    ],
)
def test_invalid_metrics(name, value, text):
    def rank(collectives):
        own = monitor(collectives, Kept())
        try:
            own.log({name: value})
        finally:
            own.abandon()

    (result,) = on_every_rank(1, rank)
    assert isinstance(result, UsageError)
    assert text in str(result)


@pytest.mark.parametrize("every", [0, -1, 2.0, True, None])
def test_every_is_a_positive_whole_number(every):
    (result,) = on_every_rank(1, lambda c: monitor(c, Kept(), every))
    assert isinstance(result, UsageError)
    assert "expected a whole number >= 1" in str(result)


def test_a_monitor_after_close_is_an_error():
    def rank(collectives):
        own = monitor(collectives, Kept())
        own.close()
        own.close()
        own.step()

    (result,) = on_every_rank(1, rank)
    assert "step() was called after close()" in str(result)
