"""The rule about the name of the accuracy: `acc` in Keras 2, `accuracy` in Keras 3."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from hvdkit.migrate.nodes import argument, walk
from hvdkit.migrate.rule import Findings, Rules
from hvdkit.migrate.rules.keras_names import keras_name
from hvdkit.migrate.rules.keras_objects import MODEL, calls_of, methods
from hvdkit.migrate.script import Script

_OLD = ("acc", "val_acc")
#: Expressions that are dictionaries of metrics: `history.history`, and the `logs` of a callback.
_METRICS = re.compile(r"(.*\.)?(history|logs)(\.keys\(\))?")
#: Callback -> the position of its argument `monitor`.
_MONITORS = {"EarlyStopping": 0, "ReduceLROnPlateau": 0, "ModelCheckpoint": 1}
#: A field of a file name, such as `{val_acc:.2f}`.
_FIELD = re.compile(r"\{((?:val_)?)acc(?=[:}])")

RULES: Rules[Script] = Rules()
rule = RULES.add


@rule(
    "Keras 3 names the metric as compile does: accuracy, not acc.",
    before='keras.callbacks.EarlyStopping(monitor="val_acc")',
    after='keras.callbacks.EarlyStopping(monitor="val_accuracy")',
    setup=MODEL + 'model.compile(loss="mse", metrics=["accuracy"])\n',
)
def accuracy_name(script: Script) -> Findings:
    metrics = {name for each in (script, *script.related) for name in _metrics(each)}
    if "accuracy" not in metrics or "acc" in metrics:
        return
    keys = list(_keys(script))
    tested = {key.evaluated_value for key in keys if isinstance(script.parent(key), cst.Comparison)}
    if {"accuracy", "val_accuracy"} & tested:
        keys = []  # The script understands both names.
    for each in [*keys, *_monitors(script)]:
        if each.evaluated_value in _OLD:
            yield script.set(each, value=each.value.replace("acc", "accuracy"))
    for each in _file_names(script):
        if isinstance(each.evaluated_value, str) and _FIELD.search(each.evaluated_value):
            yield script.set(each, value=_FIELD.sub(r"{\1accuracy", each.value))


def _metrics(script: Script) -> Iterator[str]:
    """Yield the names of the metrics with which models are compiled."""
    given = [
        each.value
        for each in script.all(cst.Arg)
        if each.keyword and each.keyword.value == "metrics"
    ]
    for call, _, _ in methods(script, "compile"):
        third = argument(call, "metrics", 2)
        given += [third.value] if third else []
    for value in given:
        for expression in script.values_of(value) or [value]:
            for node in _strings_in(expression):
                yield str(node.evaluated_value)


def _strings_in(node: cst.CSTNode) -> Iterator[cst.SimpleString]:
    """Yield the strings in an expression."""
    for each in walk(node):
        if isinstance(each, cst.SimpleString):
            yield each


def _keys(script: Script) -> Iterator[cst.SimpleString]:
    """Yield the strings that are keys of a dictionary of metrics."""
    for node in script.all(cst.SimpleString):
        where = script.parent(node)
        owner: cst.CSTNode | None = None
        if isinstance(where, cst.Index):  # history.history["acc"]
            subscript = script.enclosing(node, cst.Subscript)
            owner = subscript.value if subscript else None
        elif isinstance(where, cst.Comparison):  # "acc" in history.history
            (target, *others) = where.comparisons
            is_in = isinstance(target.operator, cst.In | cst.NotIn)
            owner = target.comparator if where.left is node and is_in and not others else None
        elif isinstance(where, cst.Arg):  # logs.get("acc")
            call = script.parent(where)
            function = call.func if isinstance(call, cst.Call) else None
            if isinstance(function, cst.Attribute) and function.attr.value in ("get", "pop"):
                owner = function.value
        if owner is not None and _METRICS.fullmatch(script.source(owner)):
            yield node


def _monitors(script: Script) -> Iterator[cst.SimpleString]:
    """Yield the strings that name the metric of a callback."""
    for call in script.calls():
        callback = (keras_name(script.name_of(call.func)) or "").removeprefix("callbacks.")
        given = argument(call, "monitor", _MONITORS.get(callback))
        if given is not None and isinstance(given.value, cst.SimpleString):
            yield given.value


def _file_names(script: Script) -> Iterator[cst.SimpleString]:
    """Yield the strings of the file names of ModelCheckpoint."""
    for call in calls_of(script, "callbacks.ModelCheckpoint"):
        path = argument(call, "filepath", 0)
        for value in (script.values_of(path.value) or [path.value]) if path else ():
            yield from _strings_in(value)
