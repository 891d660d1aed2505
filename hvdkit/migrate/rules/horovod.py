"""Rules about Horovod's own modules and names."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import libcst as cst

import hvdkit
from hvdkit.migrate.nodes import COMMA, argument, dotted_name, imported_names, named
from hvdkit.migrate.rule import Advice, Change, Findings, Rules
from hvdkit.migrate.rules.keras_objects import optimizer_calls
from hvdkit.migrate.script import Script
from hvdkit.migrate.sources import defined_names, statements

_PACKAGE = Path(hvdkit.__file__).parent
_ADAPTERS = ("torch", "tensorflow", "keras")
#: Parts of Horovod that hvdkit does not replace, and what to use.
_UNSUPPORTED = {
    "horovod.spark": "start the script with `hvdkit run`, and let it read its data itself",
    "horovod.ray": "start the script with `hvdkit run`, which needs no Ray",
    "horovod.mxnet": "MXNet is no longer developed: port the model to PyTorch or Keras",
    "horovod.tensorflow.data": "give each rank its part of the data with `hvd.shard`",
    "horovod.data": "use a DataLoader with workers",
    "horovod._keras": "use the public names of hvdkit.keras",
}
#: Names that TensorFlow 1 needed, and their replacement.
_TENSORFLOW_1 = {
    "broadcast_global_variables": "call hvd.broadcast_variables(model.variables, root_rank=0) and, "
    "after the first step, hvd.broadcast_variables(optimizer.variables, root_rank=0)",
    "BroadcastGlobalVariablesHook": "call hvd.broadcast_variables(model.variables, root_rank=0) "
    "and, after the first step, hvd.broadcast_variables(optimizer.variables, root_rank=0)",
}

RULES: Rules[Script] = Rules()
rule = RULES.add


@rule(
    "hvdkit has Horovod's modules under the same names.",
    before="import horovod.torch as hvd",
    after="import hvdkit.torch as hvd",
)
def imports(script: Script) -> Findings:
    plain = []
    for node, name, alias in script.imported_names(cst.Import):
        target = _module_here(name) if name.split(".")[0] == "horovod" else None
        if target and alias.asname is None:
            plain.append((node, alias, target))
        elif target:
            yield from _rename(script, node, alias, "name", target)
    yield from _plain_imports(script, plain)
    for node in script.all(cst.ImportFrom):
        yield from _from_import(script, node)


def _plain_imports(
    script: Script, found: Sequence[tuple[cst.CSTNode, cst.ImportAlias, str]]
) -> Findings:
    """Rename `import horovod.torch`, and the name `horovod` wherever it is used."""
    roots = list(script.variables("horovod"))
    names = [script.name_of(_whole_name(script, each)) for each in roots]
    if not all(name and _renamed(name) for name in names):
        for node, _, target in found:
            if target != "hvdkit":
                old = target.replace("hvdkit", "horovod", 1)
                text = f"rename {old} to {target} by hand: `horovod` is also used in another way"
                yield Advice(node, text)
        return
    for node, alias, target in found:
        if roots or target != "hvdkit":
            yield from _rename(script, node, alias, "name", target)
    for root in roots if found else ():
        script.set(root, value="hvdkit")


def _whole_name(script: Script, node: cst.CSTNode) -> cst.CSTNode:
    """Return the longest dotted name that begins with a name."""
    while isinstance(script.parent(node), cst.Attribute):
        node = script.parent(node)
    return node


def _from_import(script: Script, node: cst.ImportFrom) -> Findings:
    if node.relative or node.module is None:
        return
    module = script.dotted(node.module) or ""
    if module.split(".")[0] != "horovod":
        return
    names = [name.removeprefix(module + ".") for name, _ in imported_names(node)]
    target = _module_here(module)
    if target is not None and all(_has(target, name) for name in names):
        yield from _rename(script, node, node, "module", target)


def _rename(
    script: Script, statement: cst.CSTNode, node: cst.CSTNode, field: str, target: str
) -> Findings:
    new = dotted_name(target)
    script.set(node, **{field: new})
    yield Change(statement)


def _renamed(name: str) -> bool:
    """Return whether hvdkit has a name of Horovod, such as "horovod.torch.init"."""
    module, attribute = split(name)
    return module is not None and (attribute is None or _has(module, attribute))


@rule(
    "hvdkit has no replacement for this part of Horovod.",
    before="import horovod.spark",
)
def unsupported_modules(script: Script) -> Findings:
    for node, name, _ in script.imported_names():
        for module, advice in _UNSUPPORTED.items():
            if name == module or name.startswith(module + "."):
                yield Advice(node, f"hvdkit does not have {module}: {advice}")


@rule(
    "The name does not exist in hvdkit.",
    before="hvd.DistributedTrainableOptimizer(optimizer)",
    setup="import horovod.torch as hvd",
)
def unknown_names(script: Script) -> Findings:
    seen: set[str] = set()
    names: list[tuple[cst.CSTNode, str]] = [
        (each, name) for each in script.attributes() if (name := script.name_of(each))
    ]
    for statement in script.all(cst.ImportFrom):
        names += [(statement, name) for name, _ in imported_names(statement)]
    for node, name in names:
        module, attribute = split(name)
        if module in (None, "hvdkit") or attribute is None or _has(module, attribute):
            continue
        if f"{module}.{attribute}" not in seen and not name.startswith(tuple(_UNSUPPORTED)):
            seen.add(f"{module}.{attribute}")
            yield Advice(node, f"{module} has no `{attribute}`: remove or replace it")


@rule(
    "The function of hvdkit does not have this argument.",
    before="hvd.DistributedOptimizer(optimizer, compressor=mine)",
    setup="import horovod.torch as hvd",
)
def unknown_arguments(script: Script) -> Findings:
    for call in script.calls():
        module, name = split(script.name_of(call.func) or "")
        signature = _signature(module, name) if module and name else None
        if signature is None or any(each.star for each in call.args):
            continue
        positional, keywords = signature
        given = [each.keyword.value for each in call.args if each.keyword]
        unknown = sorted(set(given) - keywords) if keywords is not None else []
        count = len(call.args) - len(given)
        twice = [each for each in given if each in positional[:count]]
        if unknown:
            text = f"hvd.{name} has no argument {', '.join(unknown)}: remove or replace it"
            yield Advice(call, text)
        elif twice:
            text = (
                f"argument {positional.index(twice[0]) + 1} of hvd.{name} is {twice[0]}, which is "
                f"also given by its name: remove or replace one of them"
            )
            yield Advice(call, text)


@rule(
    "Only TensorFlow 1 has global variables.",
    before="hvd.broadcast_global_variables(0)",
    setup="import horovod.tensorflow as hvd",
)
def global_variables(script: Script) -> Findings:
    for call in script.calls():
        module, name = split(script.name_of(call.func) or "")
        if module == "hvdkit.tensorflow" and name in _TENSORFLOW_1:
            yield Advice(call, f"hvd.{name} is for TensorFlow 1: {_TENSORFLOW_1[name]}")


@rule(
    "Since Horovod 0.21, the callback requires `initial_lr`: the rate after the warm-up.",
    before="opt = keras.optimizers.SGD(0.1 * hvd.size())\n"
    "hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=5)",
    after="opt = keras.optimizers.SGD(0.1 * hvd.size())\n"
    "hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * hvd.size(), warmup_epochs=5)",
    setup="import keras\nimport hvdkit.keras as hvd",
)
def initial_rate(script: Script) -> Findings:
    for call in script.calls():
        name = script.name_of(call.func) or script.dotted(call.func) or ""
        if not re.fullmatch(r".*\.LearningRate(Warmup|Schedule)Callback", name):
            continue
        if any(each.star for each in call.args) or argument(call, "initial_lr", 0):
            continue
        rate = _the_rate(script)
        if rate is None:
            yield Advice(call, "add initial_lr=, the learning rate of the optimizer")
            continue
        yield script.edit(call, _prepend, named(cst.Arg(rate.deep_clone()), "initial_lr"))


def _prepend(call: cst.Call, new: cst.Arg) -> cst.Call:
    if call.args:
        new = new.with_changes(comma=COMMA)
    return call.with_changes(args=[new, *call.args])


def _the_rate(script: Script) -> cst.BaseExpression | None:
    """Return the learning rate of the only Keras optimizer at the top level of the file."""
    made = optimizer_calls(script)
    if len(made) != 1 or script.enclosing(made[0], cst.FunctionDef):
        return None
    given = argument(made[0], "learning_rate", 0) or argument(made[0], "lr")
    value = given.value if given else None
    simple = (cst.Name, cst.Attribute, cst.Float, cst.Integer, cst.BinaryOperation)
    return value if isinstance(value, simple) else None


@rule(
    "The fit before the elastic state trains on all ranks, so it needs a broadcast of the weights. "
    "Without one, hvdkit raises an error.",
    before="model.fit(data, steps_per_epoch=1, callbacks=None)\n"
    "state = hvd.elastic.KerasState(model)",
    after="model.fit(data, steps_per_epoch=1, "
    "callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])\n"
    "state = hvd.elastic.KerasState(model)",
    setup="import hvdkit.keras as hvd",
)
def first_fit(script: Script) -> Findings:
    states = [
        call
        for call in script.calls()
        if re.fullmatch(
            r"(horovod|hvdkit)\..*keras\.elastic\.KerasState", script.name_of(call.func) or ""
        )
    ]
    ending = ".elastic.KerasState"
    sources = {script.source(each.func) for each in states}
    names = {each.removesuffix(ending) for each in sources if each.endswith(ending)}
    models = {script.source(each.args[0].value) for each in states if each.args}
    for call in script.calls() if len(names) == 1 else ():
        function, steps = call.func, argument(call, "steps_per_epoch")
        if not isinstance(function, cst.Attribute) or function.attr.value != "fit":
            continue
        owner = script.source(function.value)
        callbacks = argument(call, "callbacks")
        if not (owner in models or owner.endswith(".model")) or not script.is_statement(call):
            continue
        if steps is None or script.source(steps.value) != "1":
            continue
        if callbacks is None or script.source(callbacks.value) != "None":
            continue
        (name,) = names
        new = cst.parse_expression(f"[{name}.callbacks.BroadcastGlobalVariablesCallback(0)]")
        script.set(callbacks, value=new)
        yield Change(call)


@rule(
    "Lightning has dropped its Horovod strategy.",
    before='Trainer(accelerator="horovod")',
    setup="import hvdkit.torch as hvd\nfrom pytorch_lightning import Trainer",
)
def lightning(script: Script) -> Findings:
    for node in script.all(cst.SimpleString):
        where = script.parent(node)
        if node.evaluated_value != "horovod" or not isinstance(where, cst.Arg):
            continue
        if where.keyword and where.keyword.value in (
            "accelerator",
            "strategy",
            "distributed_backend",
        ):
            yield Advice(
                node,
                "Lightning has no Horovod strategy any more: pass strategy=HvdkitStrategy(), "
                "of hvdkit.lightning, to its Trainer",
            )


# A string with such a name can only be the name of a module.
_MODULE = re.compile(rf"horovod\.({'|'.join(_ADAPTERS)})(\.\w+)*")


@rule(
    "The command does not change an import by a string.",
    before='importlib.import_module("horovod.torch")',
    setup="import importlib",
)
def dynamic_imports(script: Script) -> Findings:
    for node in script.all(cst.SimpleString):
        value = node.evaluated_value
        if not isinstance(value, str) or not re.fullmatch(r"horovod(\.\w+)*", value):
            continue
        call = script.parent(script.parent(node))
        is_imported = isinstance(call, cst.Call) and (script.dotted(call.func) or "").endswith(
            ("import_module", "__import__", "try_import", "find_spec")
        )
        if is_imported or _MODULE.fullmatch(value):
            new = value.replace("horovod", "hvdkit", 1)
            yield Advice(node, f'this import by a string is not changed: use "{new}"')


def split(name: str) -> tuple[str | None, str | None]:
    """Split a full name of Horovod or hvdkit into the module of hvdkit and the name in it.

    The result is (None, None) if the name does not belong to a module that hvdkit has.
    """
    parts = name.split(".")
    if parts[0] not in ("horovod", "hvdkit"):
        return None, None
    for end in range(len(parts), 0, -1):
        module = _module_here(".".join(["horovod", *parts[1:end]]))
        if module is not None:
            return module, parts[end] if end < len(parts) else None
    return None, None


def _module_here(name: str) -> str | None:
    """Return the module of hvdkit that replaces one of Horovod; None if there is none."""
    parts = name.split(".")[1:]
    if not parts:
        return "hvdkit"
    if parts[0] not in _ADAPTERS or name.startswith(tuple(_UNSUPPORTED)):
        return None
    place = _PACKAGE.joinpath(*parts)
    return ".".join(["hvdkit", *parts]) if _source(place) else None


def _source(place: Path) -> Path | None:
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if os.path.isfile(path):  # also for a name that is too long
            return path
    return None


def _signature(module: str, name: str) -> tuple[list[str], set[str] | None] | None:
    """Return the arguments of a function or class of hvdkit, read from its source.

    Returns:
        The positional arguments, and all that may be given by name (None if any may be); None if
        hvdkit does not define the function.
    """
    found = _definition(module, name)
    skipped = 0
    if isinstance(found, ast.ClassDef):
        methods = [each for each in found.body if isinstance(each, ast.FunctionDef)]
        found = next((each for each in methods if each.name == "__init__"), None)
        skipped = 1
    if found is None or found.args.vararg:
        return None
    arguments = found.args
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)][skipped:]
    keywords = {*positional, *(each.arg for each in arguments.kwonlyargs)}
    return positional, None if arguments.kwarg else keywords


@cache
def _definition(module: str, name: str) -> ast.FunctionDef | ast.ClassDef | None:
    """Return the definition of a name, also in the module of hvdkit that it is imported from."""
    path = _source(_PACKAGE.joinpath(*module.split(".")[1:]))
    for node in statements(path) if path else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hvdkit."):
            for each in node.names:
                if (each.asname or each.name) == name:
                    return _definition(node.module or "", each.name)
    return None


def _has(module: str, name: str) -> bool:
    names = names_in(module)
    return "*" in names or name in names


@cache
def names_in(module: str) -> frozenset[str]:
    """Return the names that a module of hvdkit defines, read from its source.

    The names contain "*" if the module imports all names of a module outside hvdkit.
    """
    place = _PACKAGE.joinpath(*module.split(".")[1:])
    path = _source(place)
    if path is None:
        return frozenset()
    if module == "hvdkit":
        return frozenset({"run", *_ADAPTERS})
    names = {each.stem for each in place.glob("*") if _source(each.with_suffix(""))}
    for node in statements(path):
        own = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hvdkit.")
        if own and isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            names |= names_in(node.module or "")
        else:
            names |= set(defined_names([node]))
    return frozenset(names)
