"""Rules about functional models: inputs, and the symbolic tensors that layers return."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from hvdkit.migrate.nodes import argument, named, walk
from hvdkit.migrate.rule import Advice, Change, Findings, Rules, lower
from hvdkit.migrate.rules.keras_names import keras_name
from hvdkit.migrate.rules.keras_objects import SETUP, calls_of
from hvdkit.migrate.script import Script

_INPUTS = ("Input", "layers.Input")
#: Function of TensorFlow -> function of keras.ops with another name.
_OPS = {
    "clip_by_value": "clip",
    "concat": "concatenate",
    "image.resize": "image.resize",
    "math.divide": "divide",
    "math.l2_normalize": "normalize",
    "nn.l2_normalize": "normalize",
    "reduce_max": "max",
    "reduce_mean": "mean",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_sum": "sum",
}
#: Functions that keras.ops has under the same name.
_SAME_NAME = frozenset(
    [
        *("abs", "add", "argmax", "cast", "cos", "divide", "einsum", "exp", "expand_dims", "log"),
        *("matmul", "maximum", "minimum", "multiply", "ones_like", "pad", "relu", "reshape"),
        *("round", "shape", "sigmoid", "sign", "sin", "softmax", "split", "sqrt", "square"),
        *("squeeze", "stack", "subtract", "tanh", "tile", "transpose", "where", "zeros_like"),
    ]
)

RULES: Rules[Script] = Rules(SETUP)
rule = RULES.add


@rule(
    "The shape of an input is a tuple in Keras 3, not a number.",
    before="x = keras.Input((10))",
    after="x = keras.Input((10,))",
)
def input_shape(script: Script) -> Findings:
    for call in calls_of(script, *_INPUTS):
        given = argument(call, "shape", 0)
        if given is None:
            continue
        values = script.values_of(given.value) or [cst.Name("unknown")]
        if all(isinstance(each, cst.Integer) for each in values):
            script.set(given, value=_tuple_of(given.value))
            yield Change(call)
        elif _is_in_parentheses(given.value):
            code = script.source(_without_parentheses(given.value))
            text = f"if {code} is a number, write ({code},): {lower(input_shape.reason)}"
            yield Advice(call, text)


def _is_in_parentheses(node: cst.BaseExpression) -> bool:
    simple = cst.Name | cst.Attribute | cst.BinaryOperation | cst.Call | cst.Subscript
    return isinstance(node, simple) and bool(node.lpar)


def _without_parentheses(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.with_changes(lpar=[], rpar=[])


def _tuple_of(node: cst.BaseExpression) -> cst.Tuple:
    return cst.Tuple([cst.Element(_without_parentheses(node), comma=cst.Comma())])


@rule(
    "In Keras 3, functions of TensorFlow do not take the tensors of a functional model.",
    before="x = keras.Input((10,))\ny = tf.concat([x, keras.layers.Dense(2)(x)], -1)",
    setup="import tensorflow as tf\n" + SETUP,
)
def symbolic_tensors(script: Script) -> Findings:
    found = _Symbols(script)
    for call in script.calls():
        function = call.func
        name = script.name_of(function) or ""
        if found.is_function_of_tensorflow(call):
            short = name.removeprefix("tensorflow.")
            text = (
                f"tf.{short} does not take a tensor of a functional model in Keras 3: use "
                f"{_replacement(short)}"
            )
            yield Advice(call, text)
        elif (
            isinstance(function, cst.Attribute)
            and function.attr.value == "get_shape"
            and found.contains(function.value)
        ):
            code = script.source(function.value)
            text = f"the tensors of a functional model have no get_shape() in Keras 3: use {code}"
            yield Advice(call, f"{text}.shape")


def _replacement(short: str) -> str:
    last = short.removeprefix("math.").removeprefix("nn.")
    if short in _OPS:
        return f"keras.ops.{_OPS[short]}"
    if last in _SAME_NAME:
        return f"keras.ops.{last}"
    return "a function of keras.ops, or write a layer that calls it"


class _Symbols:
    """The expressions of a script that are symbolic tensors, as far as the file shows it.

    They are inputs, what layers return for them, and what is computed from these. Only names are
    considered that the same function (or the top level of the file) assigns.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        #: (Scope, code of the target).
        self._names: set[tuple[object, str]] = set()
        assignments = list(script.all(cst.Assign))
        while True:
            before = len(self._names)
            for each in assignments:
                if self._is_symbolic(each.value):
                    self._names |= {(script.scope(each), code) for code in self._targets(each)}
            if len(self._names) == before:
                return

    def contains(self, node: cst.CSTNode) -> bool:
        """Return whether a name, or an attribute such as `self.x`, is a symbolic tensor."""
        return (self._script.scope(node), self._script.source(node)) in self._names

    def is_function_of_tensorflow(self, call: cst.Call) -> bool:
        """Return whether a call passes a symbolic tensor to a function of TensorFlow."""
        name = self._script.name_of(call.func) or ""
        return (
            name.startswith("tensorflow.")
            and keras_name(name) is None
            and any(self._is_symbolic(each.value) for each in call.args)
        )

    def _targets(self, assignment: cst.Assign) -> Iterator[str]:
        for each in assignment.targets:
            if isinstance(each.target, cst.Name | cst.Attribute):
                yield self._script.source(each.target)

    def _is_symbolic(self, node: cst.BaseExpression) -> bool:
        if isinstance(node, cst.Name | cst.Attribute):
            return self.contains(node)
        if isinstance(node, cst.List | cst.Tuple):
            return any(self._is_symbolic(each.value) for each in node.elements)
        if isinstance(node, cst.BinaryOperation):
            return self._is_symbolic(node.left) or self._is_symbolic(node.right)
        if isinstance(node, cst.Subscript):
            return self._is_symbolic(node.value)
        if not isinstance(node, cst.Call):
            return False
        if keras_name(self._script.name_of(node.func)) in _INPUTS:
            return True
        # `Dense(3)(x)`, or a function of TensorFlow or Keras.
        made = isinstance(node.func, cst.Call) or self._is_function(node.func)
        return made and any(self._is_symbolic(each.value) for each in node.args)

    def _is_function(self, node: cst.BaseExpression) -> bool:
        name = self._script.name_of(node) or ""
        short = keras_name(name)
        if short is None:
            return name.startswith("tensorflow.") and name.rpartition(".")[2].islower()
        return short.startswith(("activations.", "ops.", "backend.", "layers.")) and (
            short.rpartition(".")[2].islower()
        )


@rule(
    "In Keras 3, an optimizer is built for the variables of its first step.",
    before="opt.apply_gradients(zip(g, first.trainable_variables))\n"
    "opt.apply_gradients(zip(h, second.trainable_variables))",
    setup=SETUP + "opt = keras.optimizers.SGD(0.1)\n",
)
def variable_lists(script: Script) -> Findings:
    if not script.imports("keras", "tensorflow"):
        return
    found: dict[tuple[object, str], dict[str, cst.Call]] = {}
    for call, function in script.methods("apply_gradients"):
        for code in _variables(script, call):
            owner = script.scope(call), script.source(function.value)
            found.setdefault(owner, {}).setdefault(code, call)
    for (_, code), lists in found.items():
        if len(lists) > 1:
            last = list(lists.values())[-1]
            text = (
                f"{code} gets {' and '.join(lists)}: if these are different variables, call "
                f"{code}.build({' + '.join(lists)}) before the first step"
            )
            yield Advice(last, text)


def _variables(script: Script, call: cst.Call) -> list[str]:
    """Return the code of the variables in `apply_gradients(zip(gradients, variables))`."""
    pairs = call.args[0].value if call.args else None
    if not isinstance(pairs, cst.Call) or script.dotted(pairs.func) != "zip":
        return []
    if len(pairs.args) != 2 or any(isinstance(each, cst.Lambda) for each in walk(pairs)):
        return []
    node = pairs.args[1].value
    values = script.assigned_to(node) if isinstance(node, cst.Name) else [node]
    return sorted({script.source(each) for each in values if each is not None})


@rule(
    "The layers and models of Keras 3 do not accept themselves as an argument.",
    before="class Net(keras.Model):\n    def __init__(self):\n        super().__init__(self)",
    after="class Net(keras.Model):\n    def __init__(self):\n        super().__init__()",
)
def init_arguments(script: Script) -> Findings:
    for call, function in script.methods("__init__"):
        if [script.source(each).strip() for each in call.args] != ["self"]:
            continue
        if not script.source(function.value).startswith("super("):
            continue
        if _is_layer(script, script.enclosing(call, cst.ClassDef)):
            yield script.set(call, args=[])


@rule(
    "In Keras 3, only tensors can be positional arguments of a layer.",
    before="class Net(keras.Model):\n    def call(self, x, training):\n"
    "        return self.dropout(x, training)",
    after="class Net(keras.Model):\n    def call(self, x, training):\n"
    "        return self.dropout(x, training=training)",
)
def training_argument(script: Script) -> Findings:
    for call in script.calls():
        if len(call.args) != 2 or any(each.keyword or each.star for each in call.args):
            continue
        function, given = call.func, call.args[1]
        if isinstance(function, cst.Call):
            made = keras_name(script.name_of(function.func)) or ""
            is_call = made.startswith("layers.")
        else:
            owner = script.enclosing(call, cst.ClassDef)
            is_call = (
                isinstance(function, cst.Attribute)
                and script.source(function.value) == "self"
                and _is_layer(script, owner)
                and not _defines(owner, function.attr.value)
            )
        if not is_call:
            continue
        code = script.source(given.value)
        if code == "training":
            script.edit(given, named, "training")
            yield Change(call)
        elif code in ("True", "False"):
            text = f"if {code} is the argument `training` of the layer, write training={code}"
            yield Advice(call, text)


def _defines(owner: cst.ClassDef | None, name: str) -> bool:
    """Return whether a class defines a method."""
    body = owner.body.body if owner else ()
    return any(isinstance(each, cst.FunctionDef) and each.name.value == name for each in body)


def _is_layer(script: Script, found: cst.ClassDef | None) -> bool:
    """Return whether a class is a layer or a model."""
    bases = [keras_name(script.name_of(each.value)) or "" for each in found.bases] if found else []
    return any(re.match(r"(Model|Sequential)$|(layers|models)\.", each) for each in bases)
