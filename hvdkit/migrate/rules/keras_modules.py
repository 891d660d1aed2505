"""Rules about modules and names of Keras that have moved."""

from __future__ import annotations

import libcst as cst

from hvdkit.migrate.nodes import dotted_name, imported_names, line_of
from hvdkit.migrate.rule import Advice, Change, Findings, Rules
from hvdkit.migrate.rules.keras_names import (
    BACKEND,
    MOVED,
    MOVED_NAMES,
    ONLY_TF_KERAS,
    PREFIXES,
    PUBLIC,
    REMOVED,
    RENAMED,
    keras_name,
)
from hvdkit.migrate.script import Script

_SETUP = "import hvdkit.keras as hvd\n"


def _split(full: str) -> tuple[str, str] | None:
    """Split "tensorflow.keras.layers" into "tensorflow.keras" and "layers".

    The first part of "tensorflow.python.keras.layers" is "tensorflow.keras", too.
    """
    for prefix in PREFIXES:
        if full.startswith(prefix) or full + "." == prefix:
            return prefix[:-1].replace(".python", ""), full[len(prefix) :]
    return None


RULES: Rules[Script] = Rules(_SETUP)
rule = RULES.add


@rule(
    "tensorflow.python.keras is a private copy of Keras 2, whose models hvdkit cannot train.",
    before="from tensorflow.python.keras.layers import Dense",
    after="from tensorflow.keras.layers import Dense",
)
def python_keras(script: Script) -> Findings:
    for node, name, alias in script.imported_names():
        if not name.startswith("tensorflow.python.keras"):
            continue
        module = name if isinstance(node, cst.Import) else name.rpartition(".")[0]
        package, public = _split(module) or ("", "")
        if public in MOVED or f"{public}.{name.rpartition('.')[2]}".lstrip(".") in MOVED:
            continue  # moved_modules changes the line
        if module == "tensorflow.python":  # from tensorflow.python import keras
            script.set(node, module=dotted_name("tensorflow"))
        elif public not in PUBLIC and not public.startswith(("applications.", "datasets.")):
            yield Advice(node, f"{module} is private to Keras 2: replace it")
            continue
        elif isinstance(node, cst.Import):
            if alias.asname is None or len(node.names) > 1:
                yield Advice(node, f"use {package}.{public}".rstrip("."))
                continue
            # tensorflow.keras is an attribute that TensorFlow loads on first use.
            start, _, leaf = f"{package}.{public}".rstrip(".").rpartition(".")
            given = alias.evaluated_alias
            name = leaf if leaf == given else f"{leaf} as {given}"
            script.put(node, line_of(f"from {start} import {name}").body[0])
        else:
            script.set(node, module=dotted_name(f"{package}.{public}".rstrip(".")))
        yield Change(node)


@rule(
    "Keras 3 has moved the names of this module to another module.",
    before="from keras.layers.core import Dense\nfrom keras.utils import np_utils",
    after="from keras.layers import Dense\nfrom keras import utils as np_utils",
)
def moved_modules(script: Script) -> Findings:
    for node in script.all(cst.ImportFrom):
        if node.module is None or node.relative or isinstance(node.names, cst.ImportStar):
            continue
        found = _split(script.dotted(node.module) or "")
        if found is None:
            continue
        package, module = found
        names = [name.rpartition(".")[2] for name, _ in imported_names(node)]
        leaves = [f"{module}.{name}".lstrip(".") for name in names]
        if module in MOVED:
            targets = {MOVED_NAMES.get(name, MOVED[module]) for name in names}
            if len(targets) > 1:
                yield Advice(node, f"import from keras.{' and keras.'.join(targets)}")
                continue
            yield from _to_module(script, node, f"{package}.{targets.pop()}")
        elif leaves[0] in MOVED and len(names) == 1:
            parent, _, leaf = MOVED[leaves[0]].rpartition(".")
            alias = node.names[0]
            new = alias.with_changes(
                name=cst.Name(leaf),
                asname=alias.asname or _as(names[0] if names[0] != leaf else ""),
            )
            target = dotted_name(".".join(filter(None, [package, parent])))
            yield script.set(node, module=target, names=[new])
        elif any(leaf in MOVED for leaf in leaves):
            yield Advice(node, f"Keras 3 has no {', '.join(set(leaves) & set(MOVED))}")
    for attribute, full in script.uses():
        if (name := keras_name(full)) in MOVED:
            depth = name.count(".") - MOVED[name].count(".")
            if depth > 0 and name.startswith(MOVED[name]):
                yield script.edit(attribute, _inner, depth)
            else:
                yield Advice(attribute, f"keras.{name} is now keras.{MOVED[name]}")


def _as(name: str) -> cst.AsName | None:
    return cst.AsName(cst.Name(name)) if name else None


def _inner(node: cst.BaseExpression, depth: int) -> cst.BaseExpression:
    for _ in range(depth):
        assert isinstance(node, cst.Attribute)
        node = node.value
    return node


def _to_module(script: Script, node: cst.CSTNode, module: str) -> Findings:
    yield script.set(node, module=dotted_name(module))


@rule(
    "Keras 3 does not have this name. tf.keras still has it.",
    before="from keras.preprocessing.image import ImageDataGenerator",
    after="from tensorflow.keras.preprocessing.image import ImageDataGenerator",
)
def only_in_tf_keras(script: Script) -> Findings:
    for node in script.all(cst.ImportFrom):
        module = script.dotted(node.module) if node.module else ""
        if node.relative or isinstance(node.names, cst.ImportStar):
            continue
        names = [name.rpartition(".")[2] for name, _ in imported_names(node)]
        only = ONLY_TF_KERAS.get((module or "").removeprefix("keras."), ())
        if module in _ONLY and (set(names) & set(only) or module == "keras.preprocessing.text"):
            yield from _to_module(script, node, f"tensorflow.{module}")
        elif module == "keras.preprocessing" and len(names) == 1:
            only = ONLY_TF_KERAS.get(f"preprocessing.{names[0]}", ())
            if names[0] == "text" or any(
                script.name_of(each) == f"keras.preprocessing.{names[0]}.{each.attr.value}"
                and each.attr.value in only
                for each in script.attributes()
            ):
                yield from _to_module(script, node, "tensorflow.keras.preprocessing")
    for attribute, name in script.uses():
        module, _, last = name.rpartition(".")
        if (
            module in _ONLY
            and last in ONLY_TF_KERAS[module.removeprefix("keras.")]
            and (script.source(attribute).startswith("keras."))
        ):
            yield Advice(attribute, f"use tensorflow.{name}: Keras 3 has no {name}")


_ONLY = tuple(f"keras.{module}" for module in ONLY_TF_KERAS)


@rule(
    "Keras 3 does not have this backend function. tf.keras still has it.",
    before="from keras import backend as K\nK.mean(x)",
    after="from tensorflow.keras import backend as K\nK.mean(x)",
)
def backend_functions(script: Script) -> Findings:
    used = {
        name.rpartition(".")[2] for _, name in script.uses() if name.startswith("keras.backend.")
    } - {"set_session", "get_session", "get_value", "set_value", "tensorflow_backend"}
    if "tf" in used:
        yield from _advise_tf(script)
    if not used - BACKEND - {"tf"}:
        return
    for node in script.all(cst.ImportFrom):
        names = [name for name, _ in imported_names(node)]
        if names == ["keras.backend"] and node.module is not None:
            yield from _to_module(script, node, "tensorflow.keras")
    for plain in script.all(cst.Import):
        ((name, alias), *others) = imported_names(plain)
        if name == "keras.backend" and alias.asname and not others:
            new = line_of(f"from tensorflow.keras import backend as {alias.evaluated_alias}")
            yield script.put(plain, new.body[0])


def _advise_tf(script: Script) -> Findings:
    """Give advice for the first `K.tf`, which is TensorFlow."""
    for each, name in script.uses():
        if name == "keras.backend.tf":
            code = script.source(each)
            text = (
                f"Keras 3 has no {code}: import tensorflow as tf, and write tf in place of {code}. "
                f"Then run the command again"
            )
            yield Advice(each, text)
            return


@rule(
    "Keras 3 does not have this name.",
    before="from keras.layers import CuDNNLSTM",
    after="from keras.layers import LSTM as CuDNNLSTM",
)
def renamed_layers(script: Script) -> Findings:
    for node, name, alias in script.imported_names(cst.ImportFrom):
        short = keras_name(name) or ""
        last = short.rpartition(".")[2]
        if not short.startswith(("layers.", "utils.")):
            continue
        if last in REMOVED:
            yield Advice(node, f"Keras 3 has no {last}: use {REMOVED[last]}")
        elif last in RENAMED:
            new = cst.Name(RENAMED[last])
            script.set(alias, name=new, asname=alias.asname or _as(last))
            yield Change(node)
    for attribute, name in script.uses():
        short = keras_name(name) or ""
        last = short.rpartition(".")[2]
        if not short.startswith(("layers.", "utils.")) or attribute.attr.value != last:
            continue
        if last in REMOVED:
            yield Advice(attribute, f"Keras 3 has no {last}: use {REMOVED[last]}")
        elif last in RENAMED:
            yield script.set(attribute, attr=cst.Name(RENAMED[last]))


@rule(
    "In Keras 3, mixed precision is no longer in `experimental`.",
    before='tf.keras.mixed_precision.experimental.set_policy("mixed_float16")',
    after='tf.keras.mixed_precision.set_global_policy("mixed_float16")',
    setup="import tensorflow as tf\n" + _SETUP,
)
def mixed_precision(script: Script) -> Findings:
    for attribute, name in script.uses():
        if keras_name(name) == "mixed_precision.experimental.set_policy":
            yield script.set(attribute, attr=cst.Name("set_global_policy"))


@rule(
    "Keras 3 has other classes that turn a model into a scikit-learn estimator.",
    before="from keras.wrappers.scikit_learn import KerasClassifier",
)
def wrappers(script: Script) -> Findings:
    for node, name, _ in script.imported_names(cst.ImportFrom):
        if (keras_name(name) or "").startswith("wrappers.scikit_learn"):
            yield Advice(node, "use keras.wrappers.SKLearnClassifier, or scikeras")


@rule(
    "Keras 3 does not have the private names of Keras 2.",
    before="from keras.backend import _to_tensor",
)
def private_names(script: Script) -> Findings:
    for node, name, _ in script.imported_names(cst.ImportFrom):
        short = keras_name(name) or ""
        last = short.rpartition(".")[2]
        if last.startswith("_"):
            hint = _PRIVATE.get(last, "replace it")
            yield Advice(node, f"keras.{short} is private to Keras 2: {hint}")


_PRIVATE = {"_to_tensor": "use keras.ops.convert_to_tensor"}


@rule(
    "The package is no longer developed, and needs Keras 2.",
    before="import tensorflow_addons as tfa",
)
def old_packages(script: Script) -> Findings:
    for node, name, _ in script.imported_names():
        if (package := name.split(".")[0]) in _OLD_PACKAGES:
            text = f"{package} is no longer developed, and needs Keras 2"
            yield Advice(node, f"{text}: {_OLD_PACKAGES[package]}")


_OLD_PACKAGES = {
    "keras_applications": "use keras.applications",
    "keras_contrib": "use the layers of Keras 3, or write your own",
    "keras_preprocessing": "use tensorflow.keras.preprocessing",
    "tensorflow_addons": "use Keras 3, which has AdamW, Lamb, Lion, GroupNormalization and others",
}
