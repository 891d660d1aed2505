"""The predictions of published measurements. Pure arithmetic."""

import numpy as np
import pytest

from benchmarks import published
from benchmarks.least_squares import positive
from benchmarks.published import BELOW, GPUS, METHODS, THROUGHPUTS
from hvdkit.bench.scale import fit


def test_least_squares_find_the_parameters_of_exact_times():
    sizes = [1e3, 1e5, 1e7]
    times = [2e-3 + size * 1e-9 for size in sizes]
    found = fit.nonnegative([[1.0] * 3, sizes], times)
    assert found == pytest.approx([2e-3, 1e-9])
    # A negative coefficient would be better, and is not possible.
    falling = fit.nonnegative([[1.0] * 3, [1.0, 2.0, 3.0]], [3.0, 2.0, 1.0])
    assert falling[1] == 0
    assert falling[0] > 0


def test_levenberg_marquardt_finds_the_parameters_of_exact_values():
    expected = [3e-5, 2e9]

    def residuals(values):
        sizes = np.array([1e3, 1e5, 1e6, 1e8])
        exact = expected[0] + sizes / expected[1]
        return (values[0] + sizes / values[1]) / exact - 1

    assert positive(residuals, [1e-6, 1e10]) == pytest.approx(expected, rel=1e-3)


def test_held_out_models_are_predicted_within_15_per_cent():
    """The networks are fitted to ResNet-50, and both BERTs are predicted."""
    fitted = published.fit_each(list(METHODS))
    for method in METHODS:
        points = published.predict_berts(fitted, method)
        assert len(points) == 2 * 3 * len(GPUS)
        assert {point.model for point in points} == {"bert-base", "bert-large"}
        assert all(point.measured < BELOW for point in points)
        assert published.median_error(points) <= 0.15


def test_horovods_published_efficiencies():
    """Nothing is fitted. The order of the models is right, and the error is at most 16 %."""
    points = {point.model: point for point in published.predict_horovod()}
    assert points["vgg16"].predicted < min(
        points[model].predicted for model in ("inception3", "resnet101")
    )
    assert all(point.error <= 0.16 for point in points.values())
    # Ranks that differ make it worse.
    for slower in published.predict_horovod(jitter=0.02):
        assert slower.predicted < points[slower.model].predicted


def test_the_table_is_complete():
    assert len(THROUGHPUTS) == 3 * 2 * 3
    assert all(len(row) == len(GPUS) for row in THROUGHPUTS.values())
