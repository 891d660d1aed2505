"""Scalar operations that work on Python numbers and on scalars of a traced graph.

While a framework traces a graph, a scalar of the graph has no value yet. `if`, `max` and `math`
need a value, so a wire format that depends on a scalar uses these operations instead.
"""

import math
from collections.abc import Sequence
from typing import Any

#: An int, float or bool, or a graph's scalar of one of these. Supports +, -, * and /.
Scalar = Any


class ScalarOps:
    """Operations that Python's own operators cannot do on a graph's scalars.

    Here they are those of Python numbers.
    """

    def where(self, condition: Scalar, a: Scalar, b: Scalar) -> Scalar:
        """Return the integer `a` where the condition is true, otherwise the integer `b`."""
        return a if condition else b

    def logical_and(self, a: Scalar, b: Scalar) -> Scalar:
        """Return whether both conditions are true."""
        return a and b

    def logical_not(self, a: Scalar) -> Scalar:
        """Return whether the condition is false."""
        return not a

    def less(self, a: Scalar, b: Scalar) -> Scalar:
        """Return whether a < b."""
        return a < b

    def minimum(self, a: Scalar, b: Scalar) -> Scalar:
        """Return the smaller of two integers."""
        return min(a, b)

    def largest(self, values: Sequence[Scalar]) -> Scalar:
        """Return the largest of several integers."""
        return max(values)

    def is_finite(self, x: Scalar) -> Scalar:
        """Return whether the float `x` is neither infinite nor NaN."""
        return math.isfinite(x)

    def exponent(self, x: Scalar) -> Scalar:
        """Return the smallest e with x < 2^e. If x is not positive or not finite: any integer."""
        return math.frexp(x)[1]

    def power_of_two(self, exponent: Scalar) -> Scalar:
        """Return 2^exponent as a float, for exponents from -126 to 127."""
        return 2.0**exponent


PYTHON_OPS = ScalarOps()
