"""Find the expressions of a script that are models and optimizers of Keras."""

from __future__ import annotations

import re

import libcst as cst

from hvdkit.migrate.rules.keras_names import OPTIMIZERS, keras_name
from hvdkit.migrate.script import Script, argument

SETUP = "import keras\nimport hvdkit.keras as hvd\n"


MODEL = SETUP + "model = keras.Sequential()\n"


def is_optimizer_class(name: str | None) -> bool:
    """Return whether a full name is an optimizer of Keras."""
    short = keras_name(name)
    return (
        short is not None
        and short.startswith("optimizers.")
        and (short.rpartition(".")[2] in OPTIMIZERS)
    )


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


def methods(script: Script, *names: str) -> list[tuple[cst.Call, cst.BaseExpression]]:
    """Return the calls `x.name(…)`, and x."""
    return [
        (call, call.func.value)
        for call in script.calls()
        if isinstance(call.func, cst.Attribute)
        and call.func.attr.value in names
        and script.name_of(call.func) is None
    ]
