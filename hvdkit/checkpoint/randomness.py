"""Save and restore the states of Python's and NumPy's random number generators.

Each rank has its own states.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvdkit.checkpoint.state import Tree
from hvdkit.errors import UsageError

#: The largest positions in the states of NumPy's generators MT19937 and Philox.
_LAST = {"pos": 624, "buffer_pos": 4}
# Of a Mersenne Twister.
_WORDS = 624


def save() -> Tree:
    """Return the states of the generators of the modules `random` and `numpy.random`."""
    legacy: Any = np.random.get_state(legacy=False)
    inner = legacy["state"]
    return {
        "python": _python_state(random),
        "numpy": {
            "kind": legacy["bit_generator"],
            "key": np.asarray(inner["key"], np.uint32).tobytes(),
            "pos": int(inner["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        }
        if legacy["bit_generator"] == "MT19937"
        else None,
    }


def check(tree: Tree) -> None:
    """Check that NumPy's global generator is of the kind that `save` saved.

    Raises:
        UsageError: it is of another kind, or `save` cannot have returned this state.
    """
    check_twister(tree["python"][1])
    saved, own = tree["numpy"], _numpy_kind()
    if saved is not None and saved["kind"] != own:
        raise UsageError(
            f"NumPy's global generator was of kind {saved['kind']} when it was saved, but is of "
            f"kind {own} here. Call np.random.set_bit_generator in both runs or in none, or "
            f"restore with strict=False"
        )
    _check_numpy(saved)


def restore(tree: Tree) -> None:
    """Restore the states that `save` returned. A generator of another kind is unchanged."""
    _set_python_state(random, tree["python"])
    legacy = tree["numpy"]
    # None: the user had replaced NumPy's generator by one of another kind.
    if legacy is not None and legacy["kind"] == _numpy_kind():
        _check_numpy(legacy)
        key = np.frombuffer(legacy["key"], np.uint32)
        np.random.set_state(
            (legacy["kind"], key, legacy["pos"], legacy["has_gauss"], legacy["gauss"])
        )


def _check_numpy(state: Any) -> None:
    """Check the state of a NumPy generator, which NumPy does not check.

    With a position of a forged file, NumPy reads other memory. With other forged values, all
    numbers are the same, and a draw that discards this number never ends.
    """
    if not isinstance(state, dict):
        return
    for key, value in state.items():
        if key in _LAST and not (isinstance(value, int) and 0 <= value <= _LAST[key]):
            raise _forged(f"{key} {value!r:.40}", f"0 to {_LAST[key]}")
        # The increment of PCG64.
        if key == "inc" and not (isinstance(value, int) and value % 2):
            raise _forged(f"inc {value!r:.40}", "an odd number")
        _check_numpy(value)
    if {"pos", "key"} <= state.keys():
        content = state["key"]
        check_twister(content[1] if isinstance(content, tuple) else content)


def check_twister(content: Any) -> None:
    """Check the words of a state of the Mersenne Twister of Python, NumPy or torch.

    Args:
        content: the bytes of its words of 32 bits.

    Raises:
        UsageError: no bit is set that the generator uses. All its numbers are then 0.
    """
    try:
        words = np.frombuffer(content, np.uint32, count=_WORDS)
    except (TypeError, ValueError):
        raise _forged("no words", f"{_WORDS} words", "a random generator") from None
    # It does not use the lower 31 bits of the first word.
    if not (int(words[0]) >> 31 or words[1:].any()):
        raise _forged("only zeros", "other numbers", "a random generator")


def _forged(found: str, expected: str, of: str = "a NumPy generator") -> UsageError:
    return UsageError(
        f"the checkpoint has {found} in the state of {of}: expected {expected}. Its file was "
        f"changed: restore another step"
    )


def _numpy_kind() -> str:
    state: Any = np.random.get_state(legacy=False)
    return str(state["bit_generator"])


def _python_state(generator: Any) -> Tree:
    """Return the state of a `random.Random`, or of the module: 625 numbers of 32 bits."""
    version, internal, gauss = generator.getstate()
    return [version, np.array(internal, np.uint32).tobytes(), gauss]


def _set_python_state(generator: Any, state: Tree) -> None:
    version, internal, gauss = state
    check_twister(internal)
    generator.setstate((version, tuple(np.frombuffer(internal, np.uint32).tolist()), gauss))


class Generators:
    """The user's generators: Python's, NumPy's and the framework's.

    Args:
        generators: name -> a `random.Random`, a `numpy.random.Generator` or a `kind`.
        kind: the framework's class of generators.
        kind_name: the name of `kind` in errors.
        get: returns the state of a generator of class `kind`, in bytes.
        put: restores a state that `get` returned.
        check: raises UsageError if `get` cannot have returned a state.

    Raises:
        UsageError: one of the generators is of another class.
    """

    def __init__(
        self,
        generators: Mapping[str, Any] | None,
        kind: type,
        kind_name: str,
        get: Callable[[Any], bytes],
        put: Callable[[Any, bytes], None],
        check: Callable[[Tree], Any] = lambda _: None,
    ) -> None:
        if generators is not None and not isinstance(generators, Mapping):
            raise UsageError(f"generators is a {type(generators).__name__}: expected a dict")
        self._generators = dict(generators or {})
        self._kind, self._get, self._put, self._check = kind, get, put, check
        for name, generator in self._generators.items():
            # `SystemRandom` is a subclass of `Random`, but has no state.
            of_python = isinstance(generator, random.Random)
            if isinstance(generator, random.SystemRandom) or not (
                of_python or isinstance(generator, kind | np.random.Generator)
            ):
                raise UsageError(
                    f"generators[{name!r}] is a {type(generator).__name__}: expected a "
                    f"{kind_name}, a numpy.random.Generator or a random.Random"
                )

    def save(self) -> Tree:
        """Return the states by name; bytes for a generator of the framework."""
        return {name: self._state(generator) for name, generator in self._generators.items()}

    def _state(self, generator: Any) -> Tree:
        if isinstance(generator, random.Random):
            return {"kind": "random.Random", "state": _python_state(generator)}
        if isinstance(generator, np.random.Generator):
            state = generator.bit_generator.state
            return {"kind": state["bit_generator"], "state": _without_arrays(state)}
        return self._get(generator)

    def check(self, tree: Tree) -> None:
        """Compare the saved generators with these.

        Raises:
            UsageError: names or kinds differ, or `save` cannot have returned a state.
        """
        if tree.keys() != self._generators.keys():
            saved, own = (", ".join(map(repr, names)) for names in (tree, self._generators))
            raise UsageError(
                f"the checkpoint has the generators {saved or 'none'}, but generators= has "
                f"{own or 'none'}. Give the generators that were saved, or restore with "
                f"strict=False"
            )
        for name, saved_state in tree.items():
            generator = self._generators[name]
            if isinstance(generator, np.random.Generator):
                _check_numpy(saved_state)
            saved, own = map(_kind, (saved_state, self._state(generator)))
            if saved != own:
                raise UsageError(
                    f"generators[{name!r}] was of kind {saved} when it was saved, but is of kind "
                    f"{own} here. Give a generator of the same kind, or restore with strict=False"
                )

    def restore(self, tree: Tree) -> None:
        """Restore the generators that have the same name and kind as when they were saved."""
        for name in self._generators.keys() & tree.keys():
            generator, saved = self._generators[name], tree[name]
            if _kind(saved) != _kind(self._state(generator)):
                continue
            if isinstance(generator, random.Random):
                _set_python_state(generator, saved["state"])
            elif isinstance(generator, np.random.Generator):
                _check_numpy(saved["state"])
                generator.bit_generator.state = _with_arrays(saved["state"])
            else:
                self._put(generator, saved)


def _kind(state: Tree) -> str:
    return state["kind"] if isinstance(state, dict) else "the framework's class"


def _without_arrays(state: Any) -> Tree:
    """Return a bit generator's state, with a tuple of dtype and bytes for each array."""
    if isinstance(state, dict):
        return {key: _without_arrays(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return (state.dtype.str, state.tobytes())
    return state


def _with_arrays(tree: Tree) -> Any:
    if isinstance(tree, dict):
        return {key: _with_arrays(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        dtype, content = tree
        return np.frombuffer(content, dtype).copy()
    return tree
