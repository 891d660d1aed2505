"""Arithmetic on numbers of which only a running step knows the value.

In Python these are plain numbers. While a graph is traced they are symbols, with which `if`, `math`
and `max` cannot work; what is here works with both. Truth is 1, and its opposite 0.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

#: An int or a float, or what a framework has for one in a graph. Has +, -, *, / with others.
Number = Any


def select(condition: Number, first: Number, second: Number) -> Number:
    """The whole number `first` where the condition is 1, `second` where it is 0."""
    return second + condition * (first - second)


class Numbers(Protocol):
    """What operators do not offer."""

    def less(self, a: Number, b: Number) -> Number:
        """1 where a < b."""
        ...

    def least(self, a: Number, b: Number) -> Number:
        """The smaller one."""
        ...

    def largest(self, values: Sequence[Number]) -> Number:
        """The largest one."""
        ...

    def is_finite(self, x: Number) -> Number:
        """1 where the float `x` is neither infinite nor NaN."""
        ...

    def exponent(self, x: Number) -> Number:
        """The smallest e with `x` < 2^e, of a positive float; of others, any whole number."""
        ...

    def power_of_two(self, exponent: Number) -> Number:
        """2^exponent, as a float; from 2^-126 to 2^127."""
        ...


class _Python:
    def less(self, a: Number, b: Number) -> Number:
        return int(a < b)

    def least(self, a: Number, b: Number) -> Number:
        return min(a, b)

    def largest(self, values: Sequence[Number]) -> Number:
        return max(values)

    def is_finite(self, x: Number) -> Number:
        return int(math.isfinite(x))

    def exponent(self, x: Number) -> Number:
        return math.frexp(x)[1]

    def power_of_two(self, exponent: Number) -> Number:
        return 2.0**exponent


#: For numbers that are there.
PYTHON: Numbers = _Python()
