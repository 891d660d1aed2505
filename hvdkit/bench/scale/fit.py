"""Fit the parameters of the model to measured times, by least squares of the relative errors."""

from collections.abc import Sequence

import numpy as np


def nonnegative(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return coefficients of at least 0 with which a weighted sum of columns fits `seconds`.

    Args:
        columns: for each coefficient, a list of factors with one factor for each time.
        seconds: the measured times.
    """
    # Dividing a row by its time makes its error relative to the time.
    matrix = np.array(columns, dtype=float).T / np.array(seconds)[:, None]
    kept = list(range(matrix.shape[1]))
    found = np.zeros(matrix.shape[1])
    while kept:
        solution = np.linalg.lstsq(matrix[:, kept], np.ones(len(matrix)), rcond=None)[0]
        if (solution >= 0).all():
            found[kept] = solution
            break
        del kept[int(solution.argmin())]
    return [float(value) for value in found]
