"""Find the expressions of a script that are models and optimizers of Keras."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from hvdkit.migrate.nodes import argument
from hvdkit.migrate.rules.keras_names import keras_name
from hvdkit.migrate.script import Script

SETUP = "import keras\nimport hvdkit.keras as hvd\n"


MODEL = SETUP + "model = keras.Sequential()\n"


def is_optimizer_class(name: str | None) -> bool:
    """Return whether a full name is an optimizer of Keras."""
    return bool(re.fullmatch(r"optimizers\.((?!schedules)\w+\.)*[A-Z]\w*", keras_name(name) or ""))


def calls_of(script: Script, *names: str) -> Iterator[cst.Call]:
    """Yield the calls of functions and classes of Keras, which are named as by `keras_name`."""
    for call, name in script.named_calls():
        if keras_name(name) in names:
            yield call


def optimizer_calls(script: Script) -> list[cst.Call]:
    """Return the calls that make optimizers of Keras."""
    return [
        each
        for each in script.calls()
        if is_optimizer_class(script.name_of(each.func)) or _is_chosen_class(script, each.func)
    ]


def _is_chosen_class(script: Script, node: cst.CSTNode) -> bool:
    """Return whether all values of an expression are `getattr(keras.optimizers, …)`."""
    values = script.values_of(node) or [cst.Name("unknown")]
    return all(
        isinstance(each, cst.Call)
        and script.dotted(each.func) == "getattr"
        and len(each.args) == 2
        and keras_name(script.name_of(each.args[0].value)) == "optimizers"
        for each in values
    )


def is_optimizer(script: Script, node: cst.CSTNode) -> bool:
    """Return whether an expression certainly is an optimizer of Keras."""
    made = script.made_by(node)
    if made:
        return all(
            is_optimizer_class(name)
            or re.fullmatch(r"(horovod|hvdkit)\.(tensorflow|.*keras)\.DistributedOptimizer", name)
            for name in made
        )
    return (
        isinstance(node, cst.Attribute)
        and node.attr.value == "optimizer"
        and script.imports("keras", "tensorflow")
        and not script.imports("torch")
    )


def is_model(script: Script, node: cst.CSTNode) -> bool:
    """Return whether an expression certainly is a model of Keras."""
    if isinstance(node, cst.Attribute) and node.attr.value == "model":
        return script.imports("keras", "tensorflow") and not script.imports("torch")
    if not isinstance(node, cst.Name):
        return False
    for name in script.made_by(node) or ():
        short = keras_name(name) or ""
        if re.match(r"(Sequential|Model|models\.\w+|applications\.)", short):
            return True
        if name.endswith("keras.load_model"):
            return True
    return any(
        script.dotted(call.func) == f"{node.value}.compile"
        and (argument(call, "loss") or argument(call, "optimizer"))
        for call in script.calls()
    )


def methods(script: Script, *names: str) -> Iterator[tuple[cst.Call, cst.BaseExpression, str]]:
    """Yield (call, x, name) for the calls `x.name(…)`, where no import defines `x.name`."""
    for call, function in script.methods(*names):
        if script.name_of(function) is None:
            yield call, function.value, function.attr.value
