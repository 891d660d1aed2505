"""Rules about Horovod's own modules and names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import libcst as cst
from libcst.metadata import ImportAssignment

import hvdkit
from hvdkit.migrate.rule import Rule, rule
from hvdkit.migrate.script import Script, argument, dotted_name, imported_names

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


@rule(
    "hvdkit has Horovod's modules under the same names.",
    before="import horovod.torch as hvd",
    after="import hvdkit.torch as hvd",
)
def imports(self: Rule, script: Script) -> None:
    for node in script.all(cst.Import):
        for name, alias in imported_names(node):
            if name.split(".")[0] != "horovod":
                continue
            if alias.asname is None:
                _plain_import(self, script, node, alias, name)
            elif target := _module_here(name):
                _rename(self, script, node, alias, "name", target)
    for node in script.all(cst.ImportFrom):
        assert isinstance(node, cst.ImportFrom)
        _from_import(self, script, node)


def _plain_import(
    self: Rule, script: Script, node: cst.CSTNode, alias: cst.ImportAlias, module: str
) -> None:
    """Rename `import horovod.torch`, and the name `horovod` wherever it is used."""
    scope = script.scope(node)
    bindings = scope["horovod"] if scope else set()
    uses = [
        script.parent(access.node) if not isinstance(access.node, cst.Attribute) else access.node
        for binding in bindings
        for access in binding.references
    ]
    target = _module_here(module)
    if target is None or not all(isinstance(each, ImportAssignment) for each in bindings):
        return
    names = [script.name_of(each) for each in uses]
    if not all(name and _renamed(name) for name in names):
        if module != "horovod":
            self_text = (
                f"rename {module} to {target} by hand: `horovod` is also used in another way"
            )
            script.advise(self.name, node, self_text)
        return
    if module == "horovod" and not uses:
        return
    _rename(self, script, node, alias, "name", target)
    for root in {
        id(name): name
        for binding in bindings
        for access in binding.references
        for name in [_root(access.node)]
    }.values():
        if len(bindings) == 1 or module != "horovod":
            script.edit(root, lambda each: each.with_changes(value="hvdkit"))


def _root(node: cst.CSTNode) -> cst.CSTNode:
    while isinstance(node, cst.Attribute):
        node = node.value
    return node


def _from_import(self: Rule, script: Script, node: cst.ImportFrom) -> None:
    if node.relative or node.module is None:
        return
    module = script.dotted(node.module) or ""
    if module.split(".")[0] != "horovod":
        return
    names = [name.removeprefix(module + ".") for name, _ in imported_names(node)]
    target = _module_here(module)
    if target is not None and all(_has(target, name) for name in names):
        _rename(self, script, node, node, "module", target)


def _rename(
    self: Rule,
    script: Script,
    statement: cst.CSTNode,
    node: cst.CSTNode,
    field: str,
    target: str,
) -> None:
    new = dotted_name(target)
    script.edit(node, lambda each: each.with_changes(**{field: new}))
    script.change(self.name, statement, self.reason)


def _renamed(name: str) -> bool:
    """Return whether hvdkit has a name of Horovod, such as "horovod.torch.init"."""
    module, attribute = split(name)
    return module is not None and (attribute is None or _has(module, attribute))


@rule(
    "hvdkit has no replacement for this part of Horovod.",
    before="import horovod.spark",
)
def unsupported_modules(self: Rule, script: Script) -> None:
    for node in script.all(cst.Import, cst.ImportFrom):
        for name, _ in imported_names(node):
            for module, advice in _UNSUPPORTED.items():
                if name == module or name.startswith(module + "."):
                    script.advise(self.name, node, f"hvdkit does not have {module}: {advice}")


@rule(
    "The name does not exist in hvdkit.",
    before="hvd.DistributedTrainableOptimizer(optimizer)",
    setup="import horovod.torch as hvd",
)
def unknown_names(self: Rule, script: Script) -> None:
    seen: set[str] = set()
    for node in script.attributes():
        name = script.name_of(node)
        if name is None or name.split(".")[0] not in ("horovod", "hvdkit"):
            continue
        module, attribute = split(name)
        if module in (None, "hvdkit") or attribute is None or _has(module, attribute):
            continue
        if f"{module}.{attribute}" not in seen and not name.startswith(tuple(_UNSUPPORTED)):
            seen.add(f"{module}.{attribute}")
            script.advise(self.name, node, f"{module} has no `{attribute}`: remove or replace it")
    for node in script.all(cst.ImportFrom):
        for name, _ in imported_names(node):
            module, attribute = split(name)
            if module in (None, "hvdkit") or attribute is None or _has(module, attribute):
                continue
            if name.split(".")[0] == "horovod" and not name.startswith(tuple(_UNSUPPORTED)):
                script.advise(self.name, node, f"{module} has no `{attribute}`: replace it")


@rule(
    "The function is for TensorFlow 1, whose variables are global.",
    before="hvd.broadcast_global_variables(0)",
    setup="import horovod.tensorflow as hvd",
)
def global_variables(self: Rule, script: Script) -> None:
    for call in script.calls():
        module, name = split(script.name_of(call.func) or "")
        if module == "hvdkit.tensorflow" and name in _TENSORFLOW_1:
            script.advise(self.name, call, f"hvd.{name} is for TensorFlow 1: {_TENSORFLOW_1[name]}")


@rule(
    "The callback needs the rate at the end of the warm-up, since Horovod 0.21.",
    before="opt = keras.optimizers.SGD(0.1 * hvd.size())\n"
    "hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=5)",
    after="opt = keras.optimizers.SGD(0.1 * hvd.size())\n"
    "hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * hvd.size(), warmup_epochs=5)",
    setup="import keras\nimport hvdkit.keras as hvd",
)
def initial_rate(self: Rule, script: Script) -> None:
    for call in script.calls():
        name = script.name_of(call.func) or ""
        if not re.fullmatch(
            r"(horovod|hvdkit)\..*keras\.callbacks\.LearningRate(Warmup|Schedule)Callback", name
        ):
            continue
        if any(each.star for each in call.args) or argument(call, "initial_lr", 0):
            continue
        rate = _the_rate(script)
        if rate is None:
            script.advise(self.name, call, "add initial_lr=, the learning rate of the optimizer")
            continue
        new = cst.Arg(
            keyword=cst.Name("initial_lr"),
            value=rate.deep_clone(),
            equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
        )
        script.edit(call, lambda each, new=new: each.with_changes(args=_prepended(new, each)))
        script.change(self.name, call, self.reason)


def _prepended(new: cst.Arg, call: cst.Call) -> list[cst.Arg]:
    if call.args:
        new = new.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    return [new, *call.args]


def _the_rate(script: Script) -> cst.BaseExpression | None:
    """Return the learning rate of the only Keras optimizer at the top level of the file."""
    from hvdkit.migrate.rules.keras import optimizer_calls

    made = optimizer_calls(script)
    if len(made) != 1 or script.enclosing(made[0], cst.FunctionDef):
        return None
    given = argument(made[0], "learning_rate", 0) or argument(made[0], "lr")
    value = given.value if given else None
    simple = (cst.Name, cst.Attribute, cst.Float, cst.Integer, cst.BinaryOperation)
    return value if isinstance(value, simple) else None


@rule(
    "Lightning has dropped its Horovod strategy.",
    before='Trainer(accelerator="horovod")',
    setup="import hvdkit.torch as hvd\nfrom pytorch_lightning import Trainer",
)
def lightning(self: Rule, script: Script) -> None:
    for node in script.all(cst.SimpleString):
        assert isinstance(node, cst.SimpleString)
        where = script.parent(node)
        if node.evaluated_value != "horovod" or not isinstance(where, cst.Arg):
            continue
        if where.keyword and where.keyword.value in (
            "accelerator",
            "strategy",
            "distributed_backend",
        ):
            script.advise(
                self.name,
                node,
                "PyTorch Lightning has no Horovod strategy any more: write the training loop "
                "with hvd.DistributedOptimizer, or use a strategy of Lightning",
            )


@rule(
    "An import by a string is not changed.",
    before='importlib.import_module("horovod.torch")',
    setup="import importlib",
)
def dynamic_imports(self: Rule, script: Script) -> None:
    for node in script.all(cst.SimpleString):
        assert isinstance(node, cst.SimpleString)
        value = node.evaluated_value
        if not isinstance(value, str) or not re.fullmatch(r"horovod(\.\w+)*", value):
            continue
        call = script.parent(script.parent(node))
        if isinstance(call, cst.Call) and (script.dotted(call.func) or "").endswith(
            ("import_module", "__import__", "try_import", "find_spec")
        ):
            new = value.replace("horovod", "hvdkit", 1)
            script.advise(self.name, node, f'this import by a string is not changed: use "{new}"')


def split(name: str) -> tuple[str | None, str | None]:
    """Split a full name of Horovod or hvdkit into the module of hvdkit and the name in it.

    (None, None) if the name does not belong to a module that hvdkit has.
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
        if path.is_file():
            return path
    return None


def _has(module: str, name: str) -> bool:
    names = names_in(module)
    return "*" in names or name in names


@cache
def names_in(module: str) -> frozenset[str]:
    """Return the names that a module of hvdkit defines, read from its source.

    They contain "*" if the source cannot say.
    """
    place = _PACKAGE.joinpath(*module.split(".")[1:])
    path = _source(place)
    if path is None:
        return frozenset()
    names = {each.stem for each in place.glob("*.py")} if place.is_dir() else set()
    if module == "hvdkit":
        return frozenset({"run"})
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            own = (node.module or "").startswith("hvdkit.")
            names |= names_in(node.module or "") if own else {"*"}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(each.asname or each.name).split(".")[0] for each in node.names}
        elif isinstance(node, ast.Assign):
            names |= {each.id for each in node.targets if isinstance(each, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return frozenset(names)


RULES = (
    imports,
    unsupported_modules,
    unknown_names,
    global_variables,
    initial_rate,
    lightning,
    dynamic_imports,
)
