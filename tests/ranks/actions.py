"""Actions of drawn sequences."""

from collections.abc import Callable
from typing import Any


class Actions(dict[str, Callable[..., None]]):
    """Functions by name. It is the decorator that adds one."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self[function.__name__] = function
        return function
