"""Names of Keras 2 that the installed Keras 3 does not have, read from its source."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import libcst as cst

from hvdkit.migrate.nodes import imported_names
from hvdkit.migrate.rule import Advice, Findings, Rules
from hvdkit.migrate.script import Script
from hvdkit.migrate.sources import defined_names, statements

#: Name without its package -> what to use.
_HINTS = {
    "experimental.CosineDecay": "keras.optimizers.schedules.CosineDecay",
    "experimental.CosineDecayRestarts": "keras.optimizers.schedules.CosineDecayRestarts",
    "experimental.LinearModel": "a layer Dense(1)",
    "experimental.WideDeepModel": "a model of your own",
    "utils.layer_utils": "the methods of the model, such as summary()",
}

RULES: Rules[Script] = Rules()
rule = RULES.add


@rule(
    "The installed Keras 3 does not have this name.",
    before="rate = tf.keras.experimental.CosineDecay(0.1, 1000)",
    setup="import tensorflow as tf\nimport hvdkit.keras as hvd\n",
)
def missing_names(script: Script) -> Findings:
    known = {each.line for each in [*script.changes, *script.advice, *script.notes]}
    # Names that other rules import from another module.
    changed = {
        (alias.evaluated_alias or alias.evaluated_name).split(".")[0]
        for node in script.all(cst.Import, cst.ImportFrom)
        if script.is_edited(node)
        for _, alias in imported_names(node)
    }
    for node, name in _names(script):
        if script.source(node).split(".")[0] in changed:
            continue
        missing = missing_in(name)
        if missing is None or script.line(node) in known or script.is_edited(node):
            continue
        known.add(script.line(node))
        text = f"Keras 3 has no {missing.removeprefix('tensorflow.')}"
        yield Advice(node, f"{text}: {_hint(name, missing)}")


def _hint(name: str, missing: str) -> str:
    for short, hint in _HINTS.items():
        if f"{name}.".endswith(f"keras.{short}.") or f"keras.{short}." in name:
            return f"use {hint}"
    if not name.startswith("tensorflow.") and missing_in(f"tensorflow.{name}") is None:
        return f"use tensorflow.{missing}"
    return "replace it"


def _names(script: Script) -> Iterator[tuple[cst.CSTNode, str]]:
    for node, name, _ in script.imported_names():
        yield node, name
    for attribute in script.attributes():
        if not isinstance(script.parent(attribute), cst.Attribute) and not script.enclosing(
            attribute, cst.Import, cst.ImportFrom
        ):
            yield attribute, script.name_of(attribute) or ""


def missing_in(name: str) -> str | None:
    """Return the part of a full name that the installed Keras 3 does not have.

    None if Keras 3 has the name, if the name is not one of Keras, or if Keras 3 is not installed.
    """
    root = _root()
    if name.startswith("tensorflow.keras."):
        package, place = "tensorflow.keras", root / "_tf_keras" / "keras" if root else None
    elif name.startswith("keras."):
        package, place = "keras", root
    else:
        return None
    if place is None or ".src." in name:
        return None
    found = package
    for part in name.removeprefix(f"{package}.").split("."):
        names = _names_in(place)
        found = f"{found}.{part}"
        if part not in names:
            return found
        place = place / part
        if not (place / "__init__.py").is_file():
            return None
    return None


@cache
def _root() -> Path | None:
    """Return the folder of Keras 3, without importing Keras."""
    spec = importlib.util.find_spec("keras")
    places = spec.submodule_search_locations if spec else None
    root = Path(next(iter(places))) if places else None
    return root if root and (root / "_tf_keras" / "keras" / "__init__.py").is_file() else None


@cache
def _names_in(place: Path) -> frozenset[str]:
    modules = (each.parent.name for each in place.glob("*/__init__.py"))
    return frozenset([*modules, *defined_names(statements(place / "__init__.py"))])
