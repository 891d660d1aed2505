import math

import pytest

from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.retention import KeepBest, Retention
from hvdkit.errors import UsageError


def manifests(*steps_and_losses):
    return [
        Manifest(
            step=step,
            epoch=None,
            world_size=1,
            commit=commit,
            time=0.0,
            metrics={} if loss is None else {"loss": loss},
            versions={},
            files={},
        )
        for commit, (step, loss) in enumerate(steps_and_losses)
    ]


STEPS = manifests((10, 3.0), (20, 1.0), (30, math.nan), (40, 2.0), (50, None), (60, 5.0))


@pytest.mark.parametrize(
    ("retention", "steps"),
    [
        (Retention(keep_last=1), {60}),
        (Retention(keep_last=3), {40, 50, 60}),
        (Retention(keep_last=100), {10, 20, 30, 40, 50, 60}),
        (Retention(keep_last=None), {10, 20, 30, 40, 50, 60}),
        (Retention(1, [KeepBest("loss")]), {20, 60}),
        (Retention(1, [KeepBest("loss", count=2)]), {20, 40, 60}),
        (Retention(1, [KeepBest("loss", "max", 2)]), {60, 10}),
        (Retention(1, [KeepBest("loss"), KeepBest("loss", "max", 2)]), {20, 60, 10}),
        (Retention(1, [KeepBest("accuracy")]), {60}),
    ],
)
def test_steps_to_keep(retention, steps):
    assert {STEPS[place].step for place in retention.kept(STEPS)} == steps


def test_without_steps_none_is_kept():
    assert Retention().kept([]) == set()


def test_of_equal_values_the_newer_stays():
    equal = manifests((1, 2.0), (2, 2.0), (3, 9.0))
    assert Retention(1, [KeepBest("loss")]).kept(equal) == {1, 2}
    low_at_last = manifests((1, 2.0), (2, 2.0), (3, 1.0))
    assert Retention(1, [KeepBest("loss", "max")]).kept(low_at_last) == {1, 2}


def test_a_step_that_was_saved_again_counts_once():
    again = manifests((10, 1.0), (20, 2.0), (10, 3.0))
    assert Retention(keep_last=2).kept(again) == {1, 2}
    assert Retention(keep_last=None).kept(again) == {1, 2}
    # The value of the older save does not count, because the newer one has replaced it.
    assert Retention(1, [KeepBest("loss")]).kept(again) == {1, 2}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Retention(keep_last=0), "keep_last is 0; expected a whole number >= 1"),
        (lambda: KeepBest("loss", "low"), "loss's mode is 'low'; expected 'min' or 'max'"),
        (lambda: KeepBest("loss", count=0), "expected 1 or more"),
        (lambda: KeepBest("score"), r"does not tell; expected KeepBest\('score', 'min'\)"),
        (lambda: KeepBest("accuracy_loss"), "the name of the metric does not tell"),
        (lambda: KeepBest("neg_log_loss"), "the name of the metric does not tell"),
        (lambda: KeepBest("1 - accuracy"), "the name of the metric does not tell"),
        (lambda: KeepBest.parse("loss"), "expected METRIC:min or METRIC:max, such as loss:min"),
        (lambda: KeepBest.parse(":min"), "expected METRIC"),
        (lambda: KeepBest.parse("loss:low"), "expected METRIC"),
    ],
)
def test_invalid_rules(make, said):
    with pytest.raises(UsageError, match=said):
        make()


@pytest.mark.parametrize(
    ("metric", "mode"),
    [("val_loss", "min"), ("val_accuracy", "max"), ("top-1/acc", "max"), ("MSE", "min")],
)
def test_usual_names_imply_which_value_is_best(metric, mode):
    assert KeepBest(metric) == KeepBest(metric, mode)
    opposite = "max" if mode == "min" else "min"
    assert KeepBest(metric, opposite).mode == opposite


def test_a_metric_may_have_a_colon():
    assert KeepBest.parse("val:loss:max") == KeepBest("val:loss", "max")
