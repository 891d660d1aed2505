"""Stateful items that several frameworks share."""

import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from hvdkit.checkpoint.state import Discarded, StatefulItem, Tensor, TensorSpec, Tree
from hvdkit.errors import UsageError

_SHOWN = 3


class Variables:
    """A `StatefulItem` of ordered, named variables.

    Args:
        variables: returns name -> variable. The saved variables and these must have the same
            order, and the same names except for Keras's numbers of layers (`dense_1`), see `plain`.
            If both have the same names, the numbers must have the same order, too.
        subject: the name of the variables in errors.
        tensor: returns a `Tensor` for a variable.
    """

    def __init__(
        self,
        variables: Callable[[], Mapping[str, Any]],
        subject: str,
        tensor: Callable[[Any], Tensor],
    ) -> None:
        self._variables = variables
        self._subject = subject
        self._tensor = tensor

    def save(self) -> Tree:
        """Return name -> tensor."""
        return {name: self._tensor(variable) for name, variable in self._variables().items()}

    def signature(self) -> list[str]:
        """Return a text for each variable."""
        return [_line(name, tensor.spec) for name, tensor in self.save().items()]

    def plan_restore(self, tree: Tree) -> Tree:
        """Return the variables' own memory as destinations.

        Raises:
            UsageError: the variables differ from those that were saved.
        """
        own = self.save()
        specs = {name: tensor.spec for name, tensor in own.items()}
        saved_lines, own_lines = _lines(tree, specs), _lines(specs, tree)
        if saved_lines != own_lines:
            raise _difference(saved_lines, own_lines, self._subject)
        return dict(zip(tree, own.values(), strict=True))

    def plan_partial_restore(self, tree: Tree) -> tuple[Tree, list[str]]:
        """Return destinations for the variables with the same name, shape and dtype.

        Keras numbers the layers of one class (`dense`, `dense_1`). They are matched in order if the
        checkpoint and the model have equally many of them, with other names. Otherwise they are
        matched by their full names.
        """
        tensors = self.save()
        own = _by_line({name: tensor.spec for name, tensor in tensors.items()})
        saved = _by_line(tree)
        prepared = {name: Discarded(spec) for name, spec in tree.items()}
        left = []
        for line in {**saved, **own}:
            there, here = saved.get(line, []), own.get(line, [])
            pairs = list(zip(there, here, strict=False))
            if len(there) != len(here) or set(there) == set(here):
                # The order does not show which layer was added or removed. If the names are equal,
                # the script may have chosen them.
                pairs = [(name, name) for name in there if name in here]
            prepared |= {a: tensors[b] for a, b in pairs}
            both = {name for pair in pairs for name in pair}
            left += [f"{n} ({line}) is not in the checkpoint" for n in here if n not in both]
            left += [f"{n} ({line}) is only in the checkpoint" for n in there if n not in both]
        return prepared, left

    def restore(self, tree: Tree) -> None:
        """Do nothing: the variables have been written to."""


#: The most bytes of buffers, such as normalization statistics, that each rank saves, because the
#: first rank holds all of them in memory. Of the other buffers, only the first rank's are saved.
LARGEST_STATISTICS = 4_000_000


def smallest(sizes: Mapping[str, int], most: int = LARGEST_STATISTICS) -> set[str]:
    """Return the names of the smallest buffers that have at most `most` bytes together.

    Statistics have a value for each channel. So large tables do not displace them. Buffers of the
    same size are all chosen or none, because a mean belongs to its variance.

    Args:
        sizes: name -> bytes.
        most: bytes.
    """
    by_size: dict[int, list[str]] = {}
    for name, size in sizes.items():
        by_size.setdefault(size, []).append(name)
    found: set[str] = set()
    for size, names in sorted(by_size.items()):
        most -= size * len(names)
        if most < 0:
            break
        found.update(names)
    return found


def plain(name: str) -> str:
    """Return a variable's name without the numbers that Keras adds to layers of one class.

    Keras counts through all models of a process, and names an optimizer's variables after layers.
    """
    return re.sub(r"_\d+(?=[/_]|$)", "", name)


def _by_line(specs: Mapping[str, TensorSpec]) -> dict[str, list[str]]:
    """Return line -> the names of variables that the line describes: layers of one class."""
    found: dict[str, list[str]] = {}
    for name, spec in specs.items():
        found.setdefault(_line(name, spec), []).append(name)
    return found


def _lines(specs: Mapping[str, TensorSpec], others: Mapping[str, TensorSpec]) -> list[str]:
    """Return a text for each variable of `specs`, to compare with those of `others`.

    The text has the full name if all variables of the same line have the same names in both.
    """
    here, there = _by_line(specs), _by_line(others)
    lines = []
    for name, spec in specs.items():
        line = _line(name, spec)
        alike = set(here[line]) == set(there.get(line, ()))
        lines.append(f"{name} {_text(spec)}" if alike else line)
    return lines


def _line(name: str, spec: TensorSpec) -> str:
    return f"{plain(name)} {_text(spec)}"


def _text(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _difference(saved: Sequence[str], own: Sequence[str], subject: str) -> UsageError:
    longest = max(len(saved), len(own))
    padded = [[*lines, *["nothing more"] * (longest - len(lines))] for lines in (saved, own)]
    differ = [f"{a} -> {b}" for a, b in zip(*padded, strict=True) if a != b]
    return does_not_fit(f"{subject} (saved -> here)", differ)


def does_not_fit(subject: str, differences: Sequence[str]) -> UsageError:
    """Return the error for an item that differs from the saved one."""
    more = len(differences) - _SHOWN
    shown = "; ".join(differences[:_SHOWN]) + (f", and {more} more" if more > 0 else "")
    return UsageError(
        f"the checkpoint does not fit {subject}: {shown}. Build it as in the run that saved the "
        f"checkpoint"
    )


def named(variables: Sequence[Any]) -> dict[str, Any]:
    """Return the variables by path or name; a repeated name gets a number."""
    result: dict[str, Any] = {}
    for variable in variables:
        name = getattr(variable, "path", None) or variable.name.removesuffix(":0")
        number, unique = 2, name
        while unique in result:
            unique = f"{name}~{number}"
            number += 1
        result[unique] = variable
    return result


class Plain:
    """A `StatefulItem` without tensors: `get` returns the state, and `take` loads it."""

    def __init__(self, get: Callable[[], Tree], take: Callable[[Tree], None]) -> None:
        self._get = get
        self._take = take

    def save(self) -> Tree:
        """Return the state now."""
        return self._get()

    def plan_restore(self, tree: Tree) -> Tree:
        """Return the tree: there are no tensors to fill."""
        return tree

    def restore(self, tree: Tree) -> None:
        """Load the state."""
        self._take(tree)


def kept_in(values: Any) -> Plain:
    """Return an item that saves a user's dict. A restore keeps the dict's other keys.

    Raises:
        UsageError: `values` is not a dict.
    """
    if not isinstance(values, MutableMapping):
        raise UsageError(f"metadata is a {type(values).__name__}: expected a dict")
    return Plain(lambda: dict(values), values.update)


def several(argument: str, given: Any) -> dict[str, Any]:
    """Return part -> item for an argument of the checkpointer.

    One model gives the part `model`. A dict of models gives a part `model-NAME` for each.

    Args:
        argument: the name of the argument, such as `model`.
        given: its value: an item, a dict of items, or None for no item.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {f"{argument}-{name}": each for name, each in given.items()}
    return {argument: given}


def data_item(data: Any) -> StatefulItem:
    """Return `data`, if its position can be saved.

    Raises:
        UsageError: it is not a stateful item.
    """
    if is_item(data):
        part: StatefulItem = data
        return part
    sampler = getattr(data, "sampler", None)
    if is_item(sampler):
        advice = "its ResumableSampler, data=loader.sampler"
    else:
        advice = "a hvd.ResumableSampler"
    if all(hasattr(data, method) for method in ("state_dict", "load_state_dict")):
        advice += "; only the hvd.Checkpointer of hvdkit.torch keeps a state_dict() of each rank"
    raise UsageError(f"data is a {type(data).__name__}: expected {advice}")


def is_item(value: Any) -> bool:
    """Return whether `value` has the methods of a `StatefulItem`, like a `ResumableSampler`."""
    return all(hasattr(value, method) for method in ("save", "plan_restore", "restore"))
