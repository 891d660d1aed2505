import pytest

from hvdkit.errors import UsageError
from hvdkit.training.schedules import WarmupCosine


def test_rises_linearly_to_the_scaled_peak_and_falls_to_zero():
    schedule = WarmupCosine(base_lr=0.1, total_steps=100, warmup_steps=10, scale=4)
    assert schedule(0) == pytest.approx(0.04)
    assert schedule(4) == pytest.approx(0.2)
    assert schedule(9) == pytest.approx(0.4) == pytest.approx(schedule.peak_lr)
    assert schedule(10) == pytest.approx(0.4)
    assert schedule(55) == pytest.approx(0.2)
    assert 0 < schedule(99) < 0.001
    assert schedule(100) == schedule(1000) == 0


def test_has_one_top():
    rates = [WarmupCosine(0.1, 50, 7)(step) for step in range(50)]
    assert rates[:7] == sorted(rates[:7])
    assert rates[7:] == sorted(rates[7:], reverse=True)


def test_the_warm_up_may_be_missing_or_all_there_is():
    assert WarmupCosine(0.1, 10)(0) == pytest.approx(0.1)
    assert WarmupCosine(0.1, 10, 10)(9) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"base_lr": 0.0, "total_steps": 10}, "base_lr is 0.0"),
        ({"base_lr": float("nan"), "total_steps": 10}, "base_lr is nan"),
        ({"base_lr": 0.1, "total_steps": 0}, "total_steps is 0"),
        ({"base_lr": 0.1, "total_steps": 10, "warmup_steps": 11}, "warmup_steps is 11"),
        ({"base_lr": 0.1, "total_steps": 10, "warmup_steps": -1}, "warmup_steps is -1"),
        ({"base_lr": 0.1, "total_steps": 10, "scale": 0}, "scale is 0"),
    ],
)
def test_bad_values_are_refused(arguments, complaint):
    with pytest.raises(UsageError, match=complaint):
        WarmupCosine(**arguments)


def test_a_negative_step_is_refused():
    with pytest.raises(UsageError, match="step is -1"):
        WarmupCosine(0.1, 10)(-1)
