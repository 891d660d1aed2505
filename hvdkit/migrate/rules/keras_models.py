"""Rules about the models and callbacks of Keras 3."""

from __future__ import annotations

import re

import libcst as cst
from libcst.metadata import Assignment

from hvdkit.migrate.nodes import argument, named, without_arguments
from hvdkit.migrate.rule import Advice, Change, Findings, Note, Rules
from hvdkit.migrate.rules.keras_names import keras_name
from hvdkit.migrate.rules.keras_objects import (
    MODEL,
    SETUP,
    calls_of,
    is_model,
    is_optimizer,
    methods,
)
from hvdkit.migrate.script import Script

RULES: Rules[Script] = Rules(SETUP)
rule = RULES.add


@rule(
    "Keras 3 has no methods such as fit_generator. fit, evaluate and predict take generators.",
    before="model.fit_generator(batches, 100, epochs=5, workers=4)",
    after="model.fit(batches, steps_per_epoch=100, epochs=5)",
    setup=MODEL + "model.compile(loss='mse')\nbatches = []\n",
)
def generators(script: Script) -> Findings:
    for call, owner, method in methods(script, *_GENERATORS):
        if not is_model(script, owner):
            yield Advice(
                call, f"if {script.source(owner)} is a model of Keras: {generators.reason}"
            )
        elif not _is_unclear(call, method):
            yield script.edit(call, _without_generator, method)


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


def _is_unclear(call: cst.Call, old: str) -> bool:
    _, names = _GENERATORS[old]
    return any(each.star for each in call.args) or sum(
        not each.keyword for each in call.args
    ) > len(names)


def _without_generator(call: cst.Call, old: str) -> cst.Call:
    method, names = _GENERATORS[old]
    args = []
    for name, each in zip(names + ("",) * len(call.args), call.args, strict=False):
        if each.keyword is None and name:
            each = named(each, name)
        elif each.keyword is not None and each.keyword.value == "generator":
            each = each.with_changes(keyword=cst.Name("x"))
        args.append(each)
    call = call.with_deep_changes(call.func, attr=cst.Name(method)).with_changes(args=args)
    return without_arguments(call, *_WORKERS)


@rule(
    "In Keras 3, the data set (keras.utils.PyDataset) takes the number of workers, not fit.",
    before="model.fit(batches, epochs=5, workers=4, use_multiprocessing=True)",
    after="model.fit(batches, epochs=5)",
    setup=MODEL + "model.compile(loss='mse')\nbatches = []\n",
)
def workers(script: Script) -> Findings:
    for call, owner, _ in methods(script, "fit", "evaluate", "predict"):
        if any(argument(call, name) for name in _WORKERS) and is_model(script, owner):
            yield script.edit(call, without_arguments, *_WORKERS)


@rule(
    "Keras 3 has no predict_classes and no predict_proba.",
    before="classes = model.predict_classes(x)",
    setup=MODEL + "model.compile(loss='mse')\n",
)
def predict_classes(script: Script) -> Findings:
    for call, owner, method in methods(script, "predict_classes", "predict_proba"):
        if is_model(script, owner):
            new = f"{script.source(owner)}.predict(x)"
            if method == "predict_classes":
                new = f"{new}.argmax(axis=-1) for a softmax, or {new} > 0.5 for a sigmoid"
            yield Advice(call, f"Keras 3 has no {method}: use {new}")


@rule(
    "In Keras 3, the method reset_states has the name reset_state.",
    before="accuracy = keras.metrics.Accuracy()\naccuracy.reset_states()",
    after="accuracy = keras.metrics.Accuracy()\naccuracy.reset_state()",
)
def reset_states(script: Script) -> Findings:
    for call, owner, _ in methods(script, "reset_states"):
        made = script.made_by(owner) or [""]
        if all((keras_name(each) or "").startswith("metrics.") for each in made):
            script.set(call.func, attr=cst.Name("reset_state"))
            yield Change(call)
        elif script.imports("keras", "tensorflow") and not script.imports("torch"):
            code = script.source(owner)
            text = f"if {code} is a metric or a layer of Keras, write {code}.reset_state()"
            yield Advice(call, text)


@rule(
    "The callback of Keras 3 does not have this argument.",
    before='keras.callbacks.TensorBoard("logs", write_grads=True)',
    after='keras.callbacks.TensorBoard("logs")',
)
def tensorboard(script: Script) -> Findings:
    for call in calls_of(script, "callbacks.TensorBoard"):
        if any(argument(call, name) for name in _TENSORBOARD):
            yield script.edit(call, without_arguments, *_TENSORBOARD)


_TENSORBOARD = ("write_grads", "batch_size", "embeddings_layer_names", "embeddings_data")


@rule(
    "Keras 3 does not have this argument. hvdkit ignores it if the optimizer is wrapped.",
    before="model.compile(optimizer='sgd', loss='mse', experimental_run_tf_function=False)",
    after="model.compile(optimizer='sgd', loss='mse')",
    setup=MODEL,
)
def run_tf_function(script: Script) -> Findings:
    for call, _, _ in methods(script, "compile"):
        if argument(call, "experimental_run_tf_function") is None:
            continue
        given = argument(call, "optimizer", 0)
        made = (script.made_by(given.value) or [""]) if given else [""]
        if not any(name.endswith(".DistributedOptimizer") for name in made):
            yield script.edit(call, without_arguments, "experimental_run_tf_function")


@rule(
    "Keras 3 chooses the file format by the suffix of the file name.",
    before='model.save("trained")',
    setup=MODEL + "model.compile(loss='mse')\n",
)
def file_names(script: Script) -> Findings:
    for call in script.calls():
        method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        short = keras_name(script.name_of(call.func)) or ""
        is_checkpoint = short == "callbacks.ModelCheckpoint"
        if is_checkpoint and argument(call, "period"):
            yield Advice(
                call,
                "ModelCheckpoint has no period= in Keras 3: use save_freq=, which "
                'is "epoch" or a number of batches',
            )
        is_function = re.fullmatch(r"(models|saving)\.save_model", short) is not None
        path = argument(call, "filepath", 1 if is_function else 0)
        if not is_checkpoint and not method.startswith("save"):
            path = None
        ending = _ending(path.value) if path else None
        if ending is None:
            if path and is_checkpoint and not _has_ending(script):
                yield Note(call, "the name of the file must end with .keras, .h5 or .weights.h5")
            continue
        only_weights = method == "save_weights"
        if is_checkpoint:
            given = argument(call, "save_weights_only")
            only_weights = given is not None and script.source(given.value) == "True"
        elif is_function:
            pass
        elif method not in ("save", "save_weights") or not is_model(script, call.func.value):  # type: ignore[attr-defined]
            continue
        if only_weights and not ending.endswith(".weights.h5"):
            yield Advice(
                call,
                "the name of a file of weights must end with .weights.h5 in Keras "
                "3, here and where the file is loaded",
            )
        elif not only_weights and not ending.endswith((".keras", ".h5")):
            yield Advice(
                call,
                "the name of a model's file must end with .keras in Keras 3, here "
                "and where the file is loaded",
            )
        elif not only_weights and ending.endswith(".h5"):
            yield Note(
                call,
                "from an .h5 file, Keras 3 does not restore variables of the optimizer such as "
                "the momentum: to continue a training, use a name that ends with .keras, here and "
                "where the file is loaded",
            )


def _has_ending(script: Script) -> bool:
    """Return whether the file contains a string with an ending that Keras 3 knows."""
    texts = script.all(cst.SimpleString, cst.FormattedStringText)
    return any(re.search(r"\.(keras|h5)['\"]*$", script.source(each)) for each in texts)


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
    "Keras 3 crops in training only.",
    before="keras.layers.RandomCrop(160, 160)",
)
def random_crop(script: Script) -> Findings:
    for call in calls_of(script, "layers.RandomCrop"):
        yield Advice(
            call,
            "Keras 3 crops in training only: put a layer CenterCrop of the same size after it, "
            "or the model refuses the larger images in evaluate and predict",
        )


@rule(
    "In Keras 3, an optimizer can train only one model.",
    before="first.compile(loss='mse', optimizer=opt)\nsecond.compile(loss='mse', optimizer=opt)",
    setup=SETUP + "opt = keras.optimizers.SGD(0.1)\n",
)
def shared_optimizers(script: Script) -> Findings:
    first: dict[tuple[cst.CSTNode, str], tuple[str, int]] = {}
    for call, owner, _ in methods(script, "compile"):
        given = argument(call, "optimizer", 0)
        if given is None or not isinstance(given.value, cst.Name):
            continue
        if not is_optimizer(script, given.value):
            continue
        name, model, line = given.value.value, script.source(owner), script.line(call)
        block = script.parent(script.statement(call))
        other, since = first.setdefault((block, name), (model, line))
        scope = script.scope(call)
        made = [
            script.line(each.node)
            for each in (scope[name] if scope else ())
            if isinstance(each, Assignment)
        ]
        if any(since < each < line for each in made):
            first[block, name] = model, line
        elif other != model:
            yield Advice(
                call,
                f"{name} trains {other} already, and in Keras 3 an optimizer can train one model "
                f"only: make another one for {model}",
            )
