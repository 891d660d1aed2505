"""Rules about the optimizers of Keras 3."""

from __future__ import annotations

import libcst as cst

from hvdkit.migrate.nodes import argument, without_arguments
from hvdkit.migrate.rule import Advice, Change, Findings, Rules
from hvdkit.migrate.rules.keras_names import keras_name
from hvdkit.migrate.rules.keras_objects import (
    MODEL,
    SETUP,
    is_optimizer,
    methods,
    optimizer_calls,
)
from hvdkit.migrate.script import Script

#: Callbacks that set the learning rate in each epoch.
_SCHEDULING = ("LearningRateWarmupCallback", "LearningRateScheduleCallback")


_SCHEDULES = (*_SCHEDULING, "ReduceLROnPlateau", "LearningRateScheduler")


RULES: Rules[Script] = Rules(SETUP)
rule = RULES.add


@rule(
    "The optimizers of Keras 3 have no `lr`.",
    before="keras.optimizers.SGD(lr=0.1)",
    after="keras.optimizers.SGD(learning_rate=0.1)",
)
def lr_argument(script: Script) -> Findings:
    for call in optimizer_calls(script):
        if given := argument(call, "lr"):
            script.set(given, keyword=cst.Name("learning_rate"))
            yield Change(call)


@rule(
    "Keras 3 ignores `decay`. InverseTimeDecay computes the same learning rates.",
    before="keras.optimizers.SGD(lr=0.1, decay=1e-4)",
    after="keras.optimizers.SGD("
    "learning_rate=keras.optimizers.schedules.InverseTimeDecay(0.1, 1, 1e-4))",
)
def decay_argument(script: Script) -> Findings:
    for call in optimizer_calls(script):
        decay = argument(call, "decay")
        if decay is None:
            continue
        if isinstance(decay.value, cst.Float | cst.Integer) and not decay.value.evaluated_value:
            script.edit(call, without_arguments, "decay")
            yield Change(call, "Keras 3 has no `decay`.")
            continue
        keras = _keras_of(script)
        rate = argument(call, "lr") or argument(call, "learning_rate")
        if rate is None or keras is None or any(script.binds(name) for name in _SCHEDULES):
            yield Advice(
                call,
                "Keras 3 ignores decay=: remove it, or set the learning rate with "
                "keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay), which does not go "
                "together with callbacks that set the rate",
            )
            continue
        schedule = f"{keras}.optimizers.schedules.InverseTimeDecay"
        yield script.edit(call, _with_schedule, schedule)


def _with_schedule(call: cst.Call, name: str) -> cst.Call:
    decay, rate = argument(call, "decay"), argument(call, "learning_rate")
    assert decay is not None
    assert rate is not None
    values = (rate.value, cst.Integer("1"), decay.value)
    schedule = cst.Call(cst.parse_expression(name), [cst.Arg(each) for each in values])
    call = call.with_deep_changes(rate, value=schedule)
    return without_arguments(call, "decay")


def _keras_of(script: Script) -> str | None:
    """Return the script's name for keras, if an import at the top level defines it."""
    for node, full, alias in script.imported_names():
        if script.parent(script.statement(node)) is script.module:
            name = alias.evaluated_alias or alias.evaluated_name
            if full in ("keras", "tensorflow.keras"):
                return name
            if full == "tensorflow":
                return f"{name}.keras"
    return None


@rule(
    "In Keras 3, `variables` is an attribute of the optimizer, not a method.",
    before="opt = keras.optimizers.SGD(0.1)\nhvd.broadcast_variables(opt.variables(), root_rank=0)",
    after="opt = keras.optimizers.SGD(0.1)\nhvd.broadcast_variables(opt.variables, root_rank=0)",
    setup="import keras\nimport hvdkit.tensorflow as hvd\n",
)
def optimizer_variables(script: Script) -> Findings:
    if not script.imports("keras", "tensorflow"):
        return
    for call, owner, _ in methods(script, "variables"):
        if call.args:
            continue
        if is_optimizer(script, owner):
            yield script.edit(call, lambda each: each.func)
        else:
            code = script.source(owner)
            yield Advice(
                call,
                f"if {code} is an optimizer of Keras, write {code}.variables without parentheses",
            )


@rule(
    "Keras 3 sets `lr` without an error, but does not use it.",
    before="model.optimizer.lr = 0.01",
    after="model.optimizer.learning_rate = 0.01",
    setup=MODEL,
)
def lr_attribute(script: Script) -> Findings:
    if not script.imports("keras", "tensorflow"):
        return
    for node in script.attributes():
        if node.attr.value == "lr" and is_optimizer(script, node.value):
            yield script.set(node, attr=cst.Name("learning_rate"))


@rule(
    "Keras 3 has no K.set_value. An assignment sets the learning rate.",
    before="K.set_value(model.optimizer.lr, 0.01)",
    after="model.optimizer.learning_rate = 0.01",
    setup=MODEL + "from keras import backend as K\n",
)
def set_value(script: Script) -> Findings:
    for call in script.calls():
        name = keras_name(script.name_of(call.func))
        if name not in ("backend.set_value", "backend.get_value"):
            continue
        rate = call.args[0].value if call.args else None
        is_rate = (
            isinstance(rate, cst.Attribute)
            and rate.attr.value in ("lr", "learning_rate")
            and is_optimizer(script, rate.value)
        )
        if is_rate and name.endswith("get_value") and len(call.args) == 1:
            script.set(call, func=cst.Name("float"))
            yield Change(call, "Keras 3 has no K.get_value.")
        elif is_rate and len(call.args) == 2 and script.is_statement(call):
            script.edit(script.parent(call), lambda each: _assignment(each.value))
            yield Change(call)
        else:
            yield Advice(
                call,
                "Keras 3 has no K.get_value and K.set_value: use "
                "keras.ops.convert_to_numpy(variable) and variable.assign(value)",
            )


def _assignment(call: cst.Call) -> cst.Assign:
    target, value = (each.value for each in call.args)
    assert isinstance(target, cst.Attribute)
    return cst.Assign([cst.AssignTarget(target)], value)


@rule(
    "The method of Keras 3 does not have this argument.",
    before="opt.apply_gradients(pairs, experimental_aggregate_gradients=False)",
    after="opt.apply_gradients(pairs)",
)
def apply_gradients(script: Script) -> Findings:
    for call, _, _ in methods(script, "apply_gradients"):
        given = [name for name in _APPLY if argument(call, name)]
        if given and script.imports("keras", "tensorflow"):
            yield script.edit(call, without_arguments, *_APPLY)


_APPLY = ("experimental_aggregate_gradients", "skip_gradients_aggregation")


@rule(
    "The optimizers of Keras 3 do not have this method.",
    before="opt = keras.optimizers.SGD(0.1)\nopt.minimize(loss, variables)",
)
def optimizer_methods(script: Script) -> Findings:
    for call, owner, name in methods(script, *_REMOVED_METHODS):
        # Only the optimizers of Keras have methods of these two names.
        is_certain = name in ("get_scaled_loss", "get_unscaled_gradients")
        if is_optimizer(script, owner) or (is_certain and script.imports("keras", "tensorflow")):
            yield Advice(call, f"Keras 3 has no {name}: {_REMOVED_METHODS[name]}")


_REMOVED_METHODS = {
    "minimize": "compute gradients with tf.GradientTape, and call apply_gradients. If "
    "hvd.DistributedOptimizer does not wrap this optimizer, reduce the gradients with "
    "hvd.DistributedGradientTape: never use both",
    "get_gradients": "compute gradients with tf.GradientTape",
    "get_updates": "call apply_gradients",
    "get_weights": "read optimizer.variables",
    "set_weights": "assign to the elements of optimizer.variables",
    "get_scaled_loss": "use scale_loss(loss)",
    "get_unscaled_gradients": "omit it, because apply_gradients divides by the scale",
}
