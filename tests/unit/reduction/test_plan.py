import pytest

from hvdkit.errors import UsageError
from hvdkit.reduction.plan import predivide


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf"), "2", None])
def test_a_factor_that_is_no_number_above_zero_is_refused(wrong):
    with pytest.raises(UsageError, match="gradient_predivide_factor is .*above 0"):
        predivide(wrong, average=True)


def test_a_factor_needs_an_average():
    assert (predivide(2, average=True), predivide(1.0, average=False)) == (2.0, None)
    with pytest.raises(UsageError, match=r"pass op=hvd\.Average"):
        predivide(2.0, average=False)
