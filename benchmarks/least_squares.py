"""Fit positive parameters to measured times, by least squares."""

from collections.abc import Callable, Sequence

import numpy as np

_STEPS = 100
_DIFFERENCE = 1e-4
# The search ends if a step reduces the sum of squares by less than this share of the sum, or if no
# step with up to this damping reduces the sum.
_SMALL = 1e-5
_LARGEST_DAMPING = 1e8


def positive(residuals: Callable[[np.ndarray], np.ndarray], start: Sequence[float]) -> np.ndarray:
    """Return the positive parameters for which the sum of squared residuals is least.

    The method is that of Levenberg and Marquardt, on the logarithms of the parameters.

    Args:
        residuals: returns the errors of the model with the given parameters.
        start: the parameters at which the search begins.
    """
    point = np.log(np.array(start, dtype=float))
    errors = residuals(np.exp(point))
    damping = 1e-2
    for _ in range(_STEPS):
        slopes = np.empty((len(errors), len(point)))
        for i in range(len(point)):
            shifted = point.copy()
            shifted[i] += _DIFFERENCE
            slopes[:, i] = (residuals(np.exp(shifted)) - errors) / _DIFFERENCE
        # The damping also bounds a parameter on which no error depends.
        system = slopes.T @ slopes + damping * np.eye(len(point))
        change = np.clip(np.linalg.solve(system, -slopes.T @ errors), -1.0, 1.0)
        trial = residuals(np.exp(point + change))
        before, after = errors @ errors, trial @ trial
        if after < before:
            point, errors, damping = point + change, trial, damping / 3
            if after > before * (1 - _SMALL):
                break
        else:
            damping *= 4
            if damping > _LARGEST_DAMPING:
                break
    return np.exp(point)
