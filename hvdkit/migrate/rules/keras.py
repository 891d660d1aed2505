"""Rules about Keras 3."""

from __future__ import annotations

import re

import libcst as cst

from hvdkit.migrate.rule import Rule, rule
from hvdkit.migrate.rules.keras_names import OPTIMIZERS, keras_name
from hvdkit.migrate.script import Script, argument, without_arguments

SETUP = "import keras\nimport hvdkit.keras as hvd\n"
MODEL = SETUP + "model = keras.Sequential()\n"
#: Callbacks that set the learning rate in each epoch.
_SCHEDULING = ("LearningRateWarmupCallback", "LearningRateScheduleCallback")
_SCHEDULES = (*_SCHEDULING, "ReduceLROnPlateau", "LearningRateScheduler")


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
    return [each for each in script.calls() if is_optimizer_class(script.name_of(each.func))]


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


def _methods(script: Script, *names: str) -> list[tuple[cst.Call, cst.BaseExpression]]:
    """Return the calls `x.name(…)`, and x."""
    return [
        (call, call.func.value)
        for call in script.calls()
        if isinstance(call.func, cst.Attribute)
        and call.func.attr.value in names
        and script.name_of(call.func) is None
    ]


def _rename_argument(call: cst.Call, old: str, new: str) -> cst.Call:
    return call.with_changes(
        args=[
            each.with_changes(keyword=cst.Name(new))
            if each.keyword and each.keyword.value == old
            else each
            for each in call.args
        ]
    )


@rule(
    "The optimizers of Keras 3 have no `lr`.",
    before="keras.optimizers.SGD(lr=0.1)",
    after="keras.optimizers.SGD(learning_rate=0.1)",
    setup=SETUP,
)
def lr_argument(self: Rule[Script], script: Script) -> None:
    for call in optimizer_calls(script):
        if argument(call, "lr"):
            script.edit(call, _rename_argument, "lr", "learning_rate")
            script.change(self.name, call, self.reason)


@rule(
    "Keras 3 ignores `decay`. The schedule computes the same rates.",
    before="keras.optimizers.SGD(lr=0.1, decay=1e-4)",
    after="keras.optimizers.SGD("
    "learning_rate=keras.optimizers.schedules.InverseTimeDecay(0.1, 1, 1e-4))",
    setup=SETUP,
)
def decay_argument(self: Rule[Script], script: Script) -> None:
    for call in optimizer_calls(script):
        decay = argument(call, "decay")
        if decay is None:
            continue
        if isinstance(decay.value, cst.Float | cst.Integer) and not decay.value.evaluated_value:
            script.edit(call, without_arguments, "decay")
            script.change(self.name, call, "Keras 3 has no `decay`.")
            continue
        keras = _keras_of(script)
        rate = argument(call, "lr") or argument(call, "learning_rate")
        if rate is None or keras is None or any(script.binds(name) for name in _SCHEDULES):
            script.advise(
                self.name,
                call,
                "Keras 3 ignores decay=: remove it, or set the learning rate with "
                "keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay), which does not go "
                "together with callbacks that set the rate",
            )
            continue
        schedule = f"{keras}.optimizers.schedules.InverseTimeDecay"
        script.edit(call, _with_schedule, schedule)
        script.change(self.name, call, self.reason)


def _with_schedule(call: cst.Call, name: str) -> cst.Call:
    decay, rate = argument(call, "decay"), argument(call, "learning_rate")
    assert decay is not None
    assert rate is not None
    schedule = cst.Call(
        func=cst.parse_expression(name),
        args=[
            cst.Arg(rate.value, comma=_COMMA),
            cst.Arg(cst.Integer("1"), comma=_COMMA),
            cst.Arg(decay.value),
        ],
    )
    call = call.with_deep_changes(rate, value=schedule)
    return without_arguments(call, "decay")


_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


def _keras_of(script: Script) -> str | None:
    """Return the script's name for keras, if an import at the top level defines it."""
    for node in script.module.body:
        for each in getattr(node, "body", ()):
            if not isinstance(each, cst.Import | cst.ImportFrom) or isinstance(
                each.names, cst.ImportStar
            ):
                continue
            for alias in each.names:
                name = alias.evaluated_alias or alias.evaluated_name
                found = script.dotted(alias.name)
                if isinstance(each, cst.ImportFrom):
                    module = script.dotted(each.module) if each.module else ""
                    found = f"{module}.{found}"
                if found in ("keras", "tensorflow.keras"):
                    return name
                if found == "tensorflow":
                    return f"{name}.keras"
    return None


@rule(
    "The variables of an optimizer are an attribute.",
    before="opt = keras.optimizers.SGD(0.1)\nhvd.broadcast_variables(opt.variables(), root_rank=0)",
    after="opt = keras.optimizers.SGD(0.1)\nhvd.broadcast_variables(opt.variables, root_rank=0)",
    setup="import keras\nimport hvdkit.tensorflow as hvd\n",
)
def optimizer_variables(self: Rule[Script], script: Script) -> None:
    if not script.imports("keras", "tensorflow"):
        return
    for call, owner in _methods(script, "variables"):
        if call.args:
            continue
        if is_optimizer(script, owner):
            script.edit(call, lambda each: each.func)
            script.change(self.name, call, self.reason)
        else:
            code = script.source(owner)
            script.advise(
                self.name,
                call,
                f"if {code} is an optimizer of Keras, write {code}.variables without parentheses",
            )


@rule(
    "Without an error, Keras 3 sets an attribute that nothing uses.",
    before="model.optimizer.lr = 0.01",
    after="model.optimizer.learning_rate = 0.01",
    setup=MODEL,
)
def lr_attribute(self: Rule[Script], script: Script) -> None:
    if not script.imports("keras", "tensorflow"):
        return
    for node in script.attributes():
        if node.attr.value == "lr" and is_optimizer(script, node.value):
            script.set(node, attr=cst.Name("learning_rate"))
            script.change(self.name, node, self.reason)


@rule(
    "Keras 3 has no K.set_value. The attribute can be set.",
    before="K.set_value(model.optimizer.lr, 0.01)",
    after="model.optimizer.learning_rate = 0.01",
    setup=MODEL + "from keras import backend as K\n",
)
def set_value(self: Rule[Script], script: Script) -> None:
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
            script.change(self.name, call, "Keras 3 has no K.get_value.")
        elif is_rate and len(call.args) == 2 and script.is_statement(call):
            script.edit(script.parent(call), lambda each: _assignment(each.value))
            script.change(self.name, call, self.reason)
        else:
            script.advise(
                self.name,
                call,
                "Keras 3 has no K.get_value and K.set_value: use "
                "keras.ops.convert_to_numpy(variable) and variable.assign(value)",
            )


def _assignment(call: cst.Call) -> cst.Assign:
    target, value = (each.value for each in call.args)
    assert isinstance(target, cst.Attribute)
    return cst.Assign([cst.AssignTarget(target)], value)


@rule(
    "Keras 3 has neither fit_generator nor evaluate_generator: fit and evaluate take generators.",
    before="model.fit_generator(batches, 100, epochs=5, workers=4)",
    after="model.fit(batches, steps_per_epoch=100, epochs=5)",
    setup=MODEL + "model.compile(loss='mse')\nbatches = []\n",
)
def generators(self: Rule[Script], script: Script) -> None:
    for call, owner in _methods(script, *_GENERATORS):
        if not is_model(script, owner):
            script.advise(
                self.name, call, f"if {script.source(owner)} is a model of Keras: {self.reason}"
            )
        elif not _is_unclear(call):
            script.edit(call, _without_generator)
            script.change(self.name, call, self.reason)


#: Old method -> (new method, its arguments in the order of the old one).
_GENERATORS = {
    "fit_generator": (
        "fit",
        ("", "steps_per_epoch", "epochs", "verbose", "callbacks", "validation_data"),
    ),
    "evaluate_generator": ("evaluate", ("", "steps", "callbacks")),
    "predict_generator": ("predict", ("", "steps", "callbacks")),
}
_WORKERS = ("workers", "use_multiprocessing", "max_queue_size", "max_q_size", "pickle_safe")


def _is_unclear(call: cst.Call) -> bool:
    assert isinstance(call.func, cst.Attribute)
    names = _GENERATORS[call.func.attr.value][1]
    return any(each.star for each in call.args) or sum(
        not each.keyword for each in call.args
    ) > len(names)


def _without_generator(call: cst.Call) -> cst.Call:
    assert isinstance(call.func, cst.Attribute)
    method, names = _GENERATORS[call.func.attr.value]
    args = []
    for name, each in zip(names + ("",) * len(call.args), call.args, strict=False):
        if each.keyword is None and name:
            each = each.with_changes(keyword=cst.Name(name), equal=_EQUAL)
        elif each.keyword is not None and each.keyword.value == "generator":
            each = each.with_changes(keyword=cst.Name("x"))
        args.append(each)
    call = call.with_changes(func=call.func.with_changes(attr=cst.Name(method)), args=args)
    return without_arguments(call, *_WORKERS)


_EQUAL = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


@rule(
    "Keras 3 takes the number of workers in the data set (keras.utils.PyDataset).",
    before="model.fit(batches, epochs=5, workers=4, use_multiprocessing=True)",
    after="model.fit(batches, epochs=5)",
    setup=MODEL + "model.compile(loss='mse')\nbatches = []\n",
)
def workers(self: Rule[Script], script: Script) -> None:
    for call, owner in _methods(script, "fit", "evaluate", "predict"):
        if any(argument(call, name) for name in _WORKERS) and is_model(script, owner):
            script.edit(call, without_arguments, *_WORKERS)
            script.change(self.name, call, self.reason)


@rule(
    "Keras 3 has neither predict_classes nor predict_proba.",
    before="classes = model.predict_classes(x)",
    setup=MODEL + "model.compile(loss='mse')\n",
)
def predict_classes(self: Rule[Script], script: Script) -> None:
    for call, owner in _methods(script, "predict_classes", "predict_proba"):
        if is_model(script, owner):
            code = script.source(owner)
            script.advise(
                self.name,
                call,
                f"Keras 3 has only predict: use {code}.predict(x).argmax(axis=-1) with a softmax, "
                f"and {code}.predict(x) > 0.5 with a sigmoid",
            )


@rule(
    "Keras 3 does not find the metric by its short name if the model has the long one.",
    before='keras.callbacks.EarlyStopping(monitor="val_acc")',
    after='keras.callbacks.EarlyStopping(monitor="val_accuracy")',
    setup=MODEL + 'model.compile(loss="mse", metrics=["accuracy"])\n',
)
def accuracy_name(self: Rule[Script], script: Script) -> None:
    strings = [each for each in script.all(cst.SimpleString) if isinstance(each, cst.SimpleString)]
    metrics = {each.evaluated_value for each in strings if _is_metric(script, each)}
    if "accuracy" not in metrics or "acc" in metrics:
        return
    for each in strings:
        where = script.parent(each)
        is_monitor = (
            isinstance(where, cst.Arg) and where.keyword and (where.keyword.value == "monitor")
        )
        key = isinstance(where, cst.Index) and script.enclosing(each, cst.Subscript)
        is_history = isinstance(key, cst.Subscript) and (
            script.source(key.value).endswith(".history")
        )
        if each.evaluated_value in ("acc", "val_acc") and (is_monitor or is_history):
            new = each.value.replace("acc", "accuracy")
            script.set(each, value=new)
            script.change(self.name, each, self.reason)


def _is_metric(script: Script, node: cst.SimpleString) -> bool:
    outer = script.enclosing(node, cst.Arg)
    return (
        isinstance(outer, cst.Arg)
        and outer.keyword is not None
        and (outer.keyword.value == "metrics")
    )


@rule(
    "The method of Keras 3 has no such argument.",
    before="opt.apply_gradients(pairs, experimental_aggregate_gradients=False)",
    after="opt.apply_gradients(pairs)",
    setup=SETUP,
)
def apply_gradients(self: Rule[Script], script: Script) -> None:
    for call, _ in _methods(script, "apply_gradients"):
        given = [name for name in _APPLY if argument(call, name)]
        if given and script.imports("keras", "tensorflow"):
            script.edit(call, without_arguments, *_APPLY)
            script.change(self.name, call, self.reason)


_APPLY = ("experimental_aggregate_gradients", "skip_gradients_aggregation")


@rule(
    "The callback of Keras 3 has no such argument.",
    before='keras.callbacks.TensorBoard("logs", write_grads=True)',
    after='keras.callbacks.TensorBoard("logs")',
    setup=SETUP,
)
def tensorboard(self: Rule[Script], script: Script) -> None:
    for call in script.calls():
        if keras_name(script.name_of(call.func)) == "callbacks.TensorBoard" and any(
            argument(call, name) for name in _TENSORBOARD
        ):
            script.edit(call, without_arguments, *_TENSORBOARD)
            script.change(self.name, call, self.reason)


_TENSORBOARD = ("write_grads", "batch_size", "embeddings_layer_names", "embeddings_data")


@rule(
    "hvdkit ignores the argument only if it knows the optimizer; Keras 3 refuses it.",
    before="model.compile(optimizer='sgd', loss='mse', experimental_run_tf_function=False)",
    after="model.compile(optimizer='sgd', loss='mse')",
    setup=MODEL,
)
def run_tf_function(self: Rule[Script], script: Script) -> None:
    for call, _ in _methods(script, "compile"):
        if argument(call, "experimental_run_tf_function") is None:
            continue
        given = argument(call, "optimizer", 0)
        made = (script.made_by(given.value) or [""]) if given else [""]
        if not any(name.endswith(".DistributedOptimizer") for name in made):
            script.edit(call, without_arguments, "experimental_run_tf_function")
            script.change(self.name, call, self.reason)


@rule(
    "Keras 3 chooses the format by the end of the file's name.",
    before='model.save("trained")',
    setup=MODEL + "model.compile(loss='mse')\n",
)
def file_names(self: Rule[Script], script: Script) -> None:
    for call in script.calls():
        method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        is_checkpoint = keras_name(script.name_of(call.func)) == "callbacks.ModelCheckpoint"
        if is_checkpoint and argument(call, "period"):
            script.advise(
                self.name,
                call,
                "ModelCheckpoint has no period= in Keras 3: use save_freq=, which "
                'is "epoch" or a number of batches',
            )
        path = argument(call, "filepath", 0) if is_checkpoint or method.startswith("save") else None
        ending = _ending(path.value) if path else None
        if ending is None:
            continue
        only_weights = method == "save_weights"
        if is_checkpoint:
            given = argument(call, "save_weights_only")
            only_weights = given is not None and script.source(given.value) == "True"
        elif method not in ("save", "save_weights") or not is_model(script, call.func.value):  # type: ignore[attr-defined]
            continue
        if only_weights and not ending.endswith(".weights.h5"):
            script.advise(
                self.name,
                call,
                "the name of a file of weights must end with .weights.h5 in Keras "
                "3, here and where the file is loaded",
            )
        elif not only_weights and not ending.endswith((".keras", ".h5")):
            script.advise(
                self.name,
                call,
                "the name of a model's file must end with .keras in Keras 3, here "
                "and where the file is loaded",
            )


def _ending(node: cst.BaseExpression) -> str | None:
    """Return a string, or at least its end; None if the source does not say."""
    if isinstance(node, cst.SimpleString):
        return str(node.evaluated_value)
    if isinstance(node, cst.FormattedString) and node.parts:
        last = node.parts[-1]
        return last.value if isinstance(last, cst.FormattedStringText) else None
    if isinstance(node, cst.BinaryOperation):
        right = isinstance(node.operator, cst.Add)
        return _ending(node.right if right else node.left)
    return None


@rule(
    "The optimizers of Keras 3 have no such method.",
    before="opt = keras.optimizers.SGD(0.1)\nopt.minimize(loss, variables)",
    setup=SETUP,
)
def optimizer_methods(self: Rule[Script], script: Script) -> None:
    for call, owner in _methods(script, *_REMOVED_METHODS):
        assert isinstance(call.func, cst.Attribute)
        if is_optimizer(script, owner):
            name = call.func.attr.value
            script.advise(self.name, call, f"Keras 3 has no {name}: {_REMOVED_METHODS[name]}")


_REMOVED_METHODS = {
    "minimize": "compute gradients with hvd.DistributedGradientTape, and call apply_gradients",
    "get_gradients": "compute gradients with tf.GradientTape",
    "get_updates": "call apply_gradients",
    "get_weights": "read optimizer.variables",
    "set_weights": "assign to the elements of optimizer.variables",
    "get_scaled_loss": "use scale_loss(loss)",
    "get_unscaled_gradients": "omit it, because apply_gradients divides by the scale",
}

RULES = (
    lr_argument,
    decay_argument,
    optimizer_variables,
    lr_attribute,
    set_value,
    generators,
    workers,
    predict_classes,
    accuracy_name,
    apply_gradients,
    tensorboard,
    run_tf_function,
    file_names,
    optimizer_methods,
)
