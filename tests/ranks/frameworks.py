"""Frameworks, imported at their first use on a rank: pytest collects tests without them."""

import importlib
from typing import Any


class LazyModule:
    """A module that is imported when one of its attributes is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


keras = LazyModule("keras")
tf = LazyModule("tensorflow")
