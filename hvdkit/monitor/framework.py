"""`Framework`: the parts of a framework's adapter that a monitor needs."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hvdkit.errors import UsageError


class Framework(Protocol):
    """Values, times and counters of a framework on this rank."""

    @property
    def name(self) -> str:
        """Name and version, such as "torch 2.13.0"."""
        ...

    def scalar(self, value: Any) -> Any:
        """Return a value of the user as a number, or as a scalar of the framework.

        Does not wait for a device.

        Raises:
            UsageError: the value is not a number.
        """
        ...

    def numbers(self, values: Sequence[Any]) -> list[float]:
        """Return results of `scalar` as floats. Waits for the device."""
        ...

    def section_seconds(self) -> Mapping[str, float]:
        """Return section of `hvdkit.training.stragglers` -> seconds spent in it so far."""
        ...

    def forward_began(self) -> float | None:
        """Return the seconds of the section `FORWARD` when a step or a backward pass ended last.

        It is -inf if there was none, and None if the framework cannot tell.
        """
        ...

    def pause(self) -> None:
        """Stop counting sections."""
        ...

    def resume(self) -> None:
        """Count sections again."""
        ...

    def totals(self) -> Mapping[str, float]:
        """Return name of a further counter -> its value so far."""
        ...

    def gauges(self) -> Mapping[str, float]:
        """Return metric -> its current value, such as the learning rate."""
        ...

    def gpu(self) -> str | None:
        """Return the UUID of this rank's GPU, such as "GPU-2b34…"; None if it uses none."""
        ...


def as_float(value: Any) -> float:
    """Convert a value that the user has logged, other than a tensor, to a float.

    Raises:
        UsageError: the value is not a number.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"a metric is {value!r}, a {type(value).__name__}: expected a number, or a tensor with "
            f"one element"
        ) from None
