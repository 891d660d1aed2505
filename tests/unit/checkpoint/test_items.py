"""The choice of the buffers that each rank saves."""

import pytest

from hvdkit.checkpoint.items import smallest


@pytest.mark.parametrize(
    ("sizes", "most", "chosen"),
    [
        ({"mean": 4, "variance": 4}, 8, {"mean", "variance"}),
        # A large table does not displace the statistics.
        ({"table": 100, "mean": 4, "variance": 4}, 50, {"mean", "variance"}),
        # Not the mean without its variance.
        ({"count": 1, "mean": 4, "variance": 4}, 5, {"count"}),
        ({"table": 100, "empty": 0}, 50, {"empty"}),
    ],
)
def test_the_smallest_buffers_are_chosen(sizes, most, chosen):
    assert smallest(sizes, most) == chosen
