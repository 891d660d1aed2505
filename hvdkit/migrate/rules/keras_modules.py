"""Rules about modules and names of Keras that have moved."""

from __future__ import annotations

import libcst as cst

from hvdkit.migrate.rule import Rule, rule
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
from hvdkit.migrate.script import Script, dotted_name, imported_names

_SETUP = "import hvdkit.keras as hvd\n"


def _split(full: str) -> tuple[str, str] | None:
    """Split "tensorflow.keras.layers" into "tensorflow.keras" and "layers".

    The first part of "tensorflow.python.keras.layers" is "tensorflow.keras", too.
    """
    for prefix in PREFIXES:
        if full.startswith(prefix) or full + "." == prefix:
            return prefix[:-1].replace(".python", ""), full[len(prefix) :]
    return None


@rule(
    "tensorflow.python.keras is a private copy of Keras 2, whose models hvdkit cannot train.",
    before="from tensorflow.python.keras.layers import Dense",
    after="from tensorflow.keras.layers import Dense",
    setup=_SETUP,
)
def python_keras(self: Rule[Script], script: Script) -> None:
    for node in script.all(cst.Import, cst.ImportFrom):
        for name, alias in imported_names(node):
            if not name.startswith("tensorflow.python.keras"):
                continue
            module = name if isinstance(node, cst.Import) else name.rpartition(".")[0]
            package, public = _split(module) or ("", "")
            if public in MOVED or f"{public}.{name.rpartition('.')[2]}".lstrip(".") in MOVED:
                continue  # moved_modules changes the line
            if module == "tensorflow.python":  # from tensorflow.python import keras
                script.set(node, module=dotted_name("tensorflow"))
            elif public not in PUBLIC and not public.startswith(("applications.", "datasets.")):
                script.advise(self.name, node, f"{module} is private to Keras 2: replace it")
                continue
            elif isinstance(node, cst.Import):
                if alias.asname is None or len(node.names) > 1:
                    script.advise(self.name, node, f"use {package}.{public}".rstrip("."))
                    continue
                # tensorflow.keras is an attribute that TensorFlow loads on first use.
                start, _, leaf = f"{package}.{public}".rstrip(".").rpartition(".")
                given = alias.evaluated_alias
                name = leaf if leaf == given else f"{leaf} as {given}"
                new = cst.parse_statement(f"from {start} import {name}")
                assert isinstance(new, cst.SimpleStatementLine)
                script.put(node, new.body[0])
            else:
                script.set(node, module=dotted_name(f"{package}.{public}".rstrip(".")))
            script.change(self.name, node, self.reason)


@rule(
    "Keras 3 has moved the names of this module to another module.",
    before="from keras.layers.core import Dense\nfrom keras.utils import np_utils",
    after="from keras.layers import Dense\nfrom keras import utils as np_utils",
    setup=_SETUP,
)
def moved_modules(self: Rule[Script], script: Script) -> None:
    for node in script.all(cst.ImportFrom):
        assert isinstance(node, cst.ImportFrom)
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
                script.advise(self.name, node, f"import from keras.{' and keras.'.join(targets)}")
                continue
            _to_module(self, script, node, f"{package}.{targets.pop()}")
        elif leaves[0] in MOVED and len(names) == 1:
            parent, _, leaf = MOVED[leaves[0]].rpartition(".")
            alias = node.names[0]
            new = alias.with_changes(
                name=cst.Name(leaf),
                asname=alias.asname or _as(names[0] if names[0] != leaf else ""),
            )
            target = dotted_name(".".join(filter(None, [package, parent])))
            script.set(node, module=target, names=[new])
            script.change(self.name, node, self.reason)
        elif any(leaf in MOVED for leaf in leaves):
            script.advise(self.name, node, f"Keras 3 has no {', '.join(set(leaves) & set(MOVED))}")
    for attribute in script.attributes():
        name = keras_name(script.name_of(attribute))
        if name in MOVED and not script.enclosing(attribute, cst.Import, cst.ImportFrom):
            depth = name.count(".") - MOVED[name].count(".")
            if depth > 0 and name.startswith(MOVED[name]):
                script.edit(attribute, _inner, depth)
                script.change(self.name, attribute, self.reason)
            else:
                script.advise(self.name, attribute, f"keras.{name} is now keras.{MOVED[name]}")


def _as(name: str) -> cst.AsName | None:
    return cst.AsName(cst.Name(name)) if name else None


def _inner(node: cst.BaseExpression, depth: int) -> cst.BaseExpression:
    for _ in range(depth):
        assert isinstance(node, cst.Attribute)
        node = node.value
    return node


def _to_module(self: Rule[Script], script: Script, node: cst.CSTNode, module: str) -> None:
    target = dotted_name(module)
    script.set(node, module=target)
    script.change(self.name, node, self.reason)


@rule(
    "Keras 3 does not have this name. tf.keras still has it.",
    before="from keras.preprocessing.image import ImageDataGenerator",
    after="from tensorflow.keras.preprocessing.image import ImageDataGenerator",
    setup=_SETUP,
)
def only_in_tf_keras(self: Rule[Script], script: Script) -> None:
    for node in script.all(cst.ImportFrom):
        assert isinstance(node, cst.ImportFrom)
        module = script.dotted(node.module) if node.module else ""
        if node.relative or isinstance(node.names, cst.ImportStar):
            continue
        names = [name.rpartition(".")[2] for name, _ in imported_names(node)]
        only = ONLY_TF_KERAS.get((module or "").removeprefix("keras."), ())
        if module in _ONLY and (set(names) & set(only) or module == "keras.preprocessing.text"):
            _to_module(self, script, node, f"tensorflow.{module}")
        elif module == "keras.preprocessing" and len(names) == 1:
            only = ONLY_TF_KERAS.get(f"preprocessing.{names[0]}", ())
            if names[0] == "text" or any(
                script.name_of(each) == f"keras.preprocessing.{names[0]}.{each.attr.value}"
                and each.attr.value in only
                for each in script.attributes()
            ):
                _to_module(self, script, node, "tensorflow.keras.preprocessing")
    for attribute in script.attributes():
        name = script.name_of(attribute) or ""
        module, _, last = name.rpartition(".")
        if (
            module in _ONLY
            and last in ONLY_TF_KERAS[module.removeprefix("keras.")]
            and (script.source(attribute).startswith("keras."))
        ):
            script.advise(self.name, attribute, f"use tensorflow.{name}: Keras 3 has no {name}")


_ONLY = tuple(f"keras.{module}" for module in ONLY_TF_KERAS)


@rule(
    "Keras 3 does not have this backend function. tf.keras still has it.",
    before="from keras import backend as K\nK.mean(x)",
    after="from tensorflow.keras import backend as K\nK.mean(x)",
    setup=_SETUP,
)
def backend_functions(self: Rule[Script], script: Script) -> None:
    used = {
        name.rpartition(".")[2]
        for each in script.attributes()
        if (name := script.name_of(each) or "").startswith("keras.backend.")
    } - {"set_session", "get_session", "get_value", "set_value", "tensorflow_backend"}
    if "tf" in used:
        _advise_tf(self, script)
    if not used - BACKEND - {"tf"}:
        return
    for node in script.all(cst.ImportFrom):
        assert isinstance(node, cst.ImportFrom)
        names = [name for name, _ in imported_names(node)]
        if names == ["keras.backend"] and node.module is not None:
            _to_module(self, script, node, "tensorflow.keras")
    for plain in script.all(cst.Import):
        assert isinstance(plain, cst.Import)
        ((name, alias), *others) = imported_names(plain)
        if name == "keras.backend" and alias.asname and not others:
            new = cst.parse_statement(
                f"from tensorflow.keras import backend as {alias.evaluated_alias}"
            )
            assert isinstance(new, cst.SimpleStatementLine)
            script.put(plain, new.body[0])
            script.change(self.name, plain, self.reason)


def _advise_tf(self: Rule[Script], script: Script) -> None:
    """Give advice for the first `K.tf`, which is TensorFlow."""
    for each in script.attributes():
        if script.name_of(each) == "keras.backend.tf":
            code = script.source(each)
            text = (
                f"Keras 3 has no {code}: import tensorflow as tf, and write tf in place of {code}. "
                f"Then run the command again"
            )
            script.advise(self.name, each, text)
            return


@rule(
    "Keras 3 does not have this name.",
    before="from keras.layers import CuDNNLSTM",
    after="from keras.layers import LSTM as CuDNNLSTM",
    setup=_SETUP,
)
def renamed_layers(self: Rule[Script], script: Script) -> None:
    for node in script.all(cst.ImportFrom):
        for name, alias in imported_names(node):
            short = keras_name(name) or ""
            last = short.rpartition(".")[2]
            if not short.startswith(("layers.", "utils.")):
                continue
            if last in REMOVED:
                script.advise(self.name, node, f"Keras 3 has no {last}: use {REMOVED[last]}")
            elif last in RENAMED:
                new = cst.Name(RENAMED[last])
                script.set(alias, name=new, asname=alias.asname or _as(last))
                script.change(self.name, node, self.reason)
    for attribute in script.attributes():
        short = keras_name(script.name_of(attribute)) or ""
        last = short.rpartition(".")[2]
        if not short.startswith(("layers.", "utils.")) or attribute.attr.value != last:
            continue
        if script.enclosing(attribute, cst.Import, cst.ImportFrom):
            continue
        if last in REMOVED:
            script.advise(self.name, attribute, f"Keras 3 has no {last}: use {REMOVED[last]}")
        elif last in RENAMED:
            new = cst.Name(RENAMED[last])
            script.set(attribute, attr=new)
            script.change(self.name, attribute, self.reason)


@rule(
    "In Keras 3, mixed precision is no longer in `experimental`.",
    before='tf.keras.mixed_precision.experimental.set_policy("mixed_float16")',
    after='tf.keras.mixed_precision.set_global_policy("mixed_float16")',
    setup="import tensorflow as tf\n" + _SETUP,
)
def mixed_precision(self: Rule[Script], script: Script) -> None:
    start = "mixed_precision.experimental"
    for attribute in script.attributes():
        name = keras_name(script.name_of(attribute)) or ""
        if name == f"{start}.set_policy":
            new = cst.Name("set_global_policy")
            script.set(attribute, attr=new)
            script.change(self.name, attribute, self.reason)


@rule(
    "Keras 3 has other classes that turn a model into a scikit-learn estimator.",
    before="from keras.wrappers.scikit_learn import KerasClassifier",
    setup=_SETUP,
)
def wrappers(self: Rule[Script], script: Script) -> None:
    for node in script.all(cst.ImportFrom):
        for name, _ in imported_names(node):
            if (keras_name(name) or "").startswith("wrappers.scikit_learn"):
                script.advise(self.name, node, "use keras.wrappers.SKLearnClassifier, or scikeras")


@rule(
    "Keras 3 does not have the private names of Keras 2.",
    before="from keras.backend import _to_tensor",
    setup=_SETUP,
)
def private_names(self: Rule[Script], script: Script) -> None:
    for node in script.all(cst.ImportFrom):
        for name, _ in imported_names(node):
            short = keras_name(name) or ""
            last = short.rpartition(".")[2]
            if last.startswith("_"):
                hint = _PRIVATE.get(last, "replace it")
                script.advise(self.name, node, f"keras.{short} is private to Keras 2: {hint}")


_PRIVATE = {"_to_tensor": "use keras.ops.convert_to_tensor"}


@rule(
    "The package is no longer developed, and needs Keras 2.",
    before="import tensorflow_addons as tfa",
    setup=_SETUP,
)
def old_packages(self: Rule[Script], script: Script) -> None:
    for node in script.all(cst.Import, cst.ImportFrom):
        for package in sorted({name.split(".")[0] for name, _ in imported_names(node)}):
            if package in _OLD_PACKAGES:
                text = f"{package} is no longer developed, and needs Keras 2"
                script.advise(self.name, node, f"{text}: {_OLD_PACKAGES[package]}")


_OLD_PACKAGES = {
    "keras_applications": "use keras.applications",
    "keras_contrib": "use the layers of Keras 3, or write your own",
    "keras_preprocessing": "use tensorflow.keras.preprocessing",
    "tensorflow_addons": "use Keras 3, which has AdamW, Lamb, Lion, GroupNormalization and others",
}


RULES = (
    python_keras,
    moved_modules,
    only_in_tf_keras,
    backend_functions,
    renamed_layers,
    mixed_precision,
    wrappers,
    private_names,
    old_packages,
)
