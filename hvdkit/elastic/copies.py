"""Find objects of an elastic state that must not be copied.

`restore` and `sync` replace each object of a state by a copy. This is an error for an object to
which the script or other objects refer, because they would still use the original.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hvdkit.errors import UsageError

#: Types of values that cannot contain others. Long lists of numbers are common.
_PLAIN = {bool, int, float, complex, str, bytes, type(None)}


def check_values(name: str, value: Any, advice: Callable[[Any], str]) -> None:
    """Check that an object of the state, and each value in it, may be replaced by a copy.

    Args:
        name: the name of the object in the state.
        value: the object.
        advice: returns what to do with a value that must not be copied; "" if it may be copied.

    Raises:
        UsageError: others refer to the object, or to a value in it.
    """
    for (first, *keys), each in _nested(name, value):
        if text := advice(each):
            path = first + "".join(f"[{key!r:.40}]" for key in keys)
            raise UsageError(
                f"{path} is a {type(each).__name__}. The state would replace it by a copy, and "
                f"the script or other objects would still use the original: {text}"
            )


def check_references(name: str, value: Any, originals: Iterable[Any]) -> None:
    """Check that an object does not refer to a part of the state that is not copied.

    Args:
        name: the name of the object in the state.
        value: the object.
        originals: the parts of the state that are not copied, such as models.

    Raises:
        UsageError: it does.
    """
    # It gets the `id` of each object that is copied.
    copied: dict[int, Any] = {}
    with contextlib.suppress(Exception):
        copy.deepcopy(value, copied)
    for each in originals:
        if id(each) in copied:
            raise UsageError(
                f"{name} (of type {type(value).__name__}) refers to a {type(each).__name__} "
                f"that the state keeps. The state would replace {name} by a copy, which would "
                f"use a copy of the {type(each).__name__}: omit {name} from the state, and "
                f"pass only its numbers and arrays"
            )


def is_of_keras(value: Any) -> bool:
    """Return whether `value` is a variable, an optimizer, or a layer with variables of Keras."""
    # By names, because this module does not import Keras.
    classes = type(value).__mro__
    names = {c.__name__ for c in classes if c.__module__.split(".")[0] in ("keras", "tf_keras")}
    # In Keras 2, a metric is a layer. The state alone may have a metric.
    if "Layer" in names and "Metric" not in names:
        return bool(value.weights)
    return not names.isdisjoint({"Variable", "Optimizer", "BaseOptimizer"})


def _nested(name: str, value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield a value and all values in its lists, tuples, sets and dicts.

    Each comes with its path: the name, and then keys and indices.
    """
    found: list[tuple[tuple[Any, ...], Any]] = [((name,), value)]
    seen = set()
    while found:
        path, each = found.pop()
        yield path, each
        if not isinstance(each, dict | list | tuple | set | frozenset | deque) or id(each) in seen:
            continue
        seen.add(id(each))
        values = each.values() if isinstance(each, dict) else each
        if set(map(type, values)) <= _PLAIN:
            continue
        pairs = each.items() if isinstance(each, dict) else enumerate(each)
        found += [((*path, key), inner) for key, inner in pairs]
