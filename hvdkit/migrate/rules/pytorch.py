"""Rules about old versions of PyTorch, NumPy and Python."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst
from libcst.metadata import ImportAssignment

from hvdkit.migrate.nodes import argument, named, with_argument, without_arguments
from hvdkit.migrate.rule import Advice, Change, Findings, Rules
from hvdkit.migrate.script import Script

_SETUP = "import torch\nimport torch.nn.functional as F\nimport hvdkit.torch as hvd\n"
_LOSS = re.compile(
    r"torch\.nn\.functional\.(\w*cross_entropy\w*|\w*nll_loss|\w+_loss|kl_div)"
    r"|torch\.nn\.(modules\.loss\.)?\w+Loss"
)

RULES: Rules[Script] = Rules(_SETUP)
rule = RULES.add


@rule(
    "A loss has no dimensions, and so no element 0.",
    before="loss = F.cross_entropy(output, target)\nprint(loss.data[0])",
    after="loss = F.cross_entropy(output, target)\nprint(loss.item())",
)
def loss_value(script: Script) -> Findings:
    for node in script.all(cst.Subscript):
        data = node.value
        if script.source(node)[-3:] != "[0]" or not isinstance(data, cst.Attribute):
            continue
        if data.attr.value != "data" or not script.imports("torch"):
            continue
        if _is_loss(script, data.value):
            if isinstance(script.parent(node), cst.Attribute):
                continue
            yield script.edit(node, _item)
        elif re.search(r"loss", script.source(data.value), re.I):
            code = script.source(data.value)
            yield Advice(node, f"if {code} is one number, write {code}.item()")


def _item(node: cst.Subscript) -> cst.Call:
    assert isinstance(node.value, cst.Attribute)
    return cst.Call(node.value.with_changes(attr=cst.Name("item")))


def _is_loss(script: Script, node: cst.CSTNode) -> bool:
    """Return whether all values of a name come from loss functions that return one number."""
    for value in script.values_of(node) or (node,):
        calls: Sequence[cst.CSTNode] = [value]
        if isinstance(value, cst.Call) and script.name_of(value.func) is None:
            # `criterion(output, target)`, where criterion = nn.CrossEntropyLoss()
            calls = script.values_of(value.func) or [cst.Name("unknown")]
            if _has_reduction(value):
                return False
        for call in calls:
            if not isinstance(call, cst.Call) or _has_reduction(call):
                return False
            if not _LOSS.fullmatch(script.name_of(call.func) or ""):
                return False
    return True


def _has_reduction(call: cst.Call) -> bool:
    return any(argument(call, name) for name in ("reduce", "reduction"))


@rule(
    "PyTorch ignores `volatile`, so it records the graph, which needs memory.",
    before="inputs = Variable(inputs, volatile=True)",
    setup=_SETUP + "from torch.autograd import Variable\n",
)
def volatile(script: Script) -> Findings:
    for call, name in script.named_calls():
        if name.startswith("torch.autograd") and argument(call, "volatile"):
            yield Advice(call, "remove volatile=, and evaluate in a block of torch.no_grad()")


@rule(
    "view() raises an error, because the rows of a transposed tensor are not contiguous.",
    before="correct_k = correct[:k].view(-1).float().sum(0)",
    after="correct_k = correct[:k].reshape(-1).float().sum(0)",
)
def flat_view(script: Script) -> Findings:
    for call, _ in script.methods("view"):
        if not re.fullmatch(r"\w*correct\w*\[\s*:\s*\w+\]\.view\(-1\)", script.source(call)):
            continue
        script.edit(
            call,
            lambda each: each.with_deep_changes(each.func, attr=cst.Name("reshape")),
        )
        yield Change(call)


@rule(
    "In Python 3, iterators have no method next().",
    before="batches = iter(loader)\nx = batches.next()",
    after="batches = iter(loader)\nx = next(batches)",
)
def next_method(script: Script) -> Findings:
    for call in script.calls():
        function = call.func
        if not isinstance(function, cst.Attribute) or function.attr.value != "next" or call.args:
            continue
        values = script.values_of(function.value) or [cst.Name("unknown")]
        if all(
            isinstance(each, cst.Call) and script.dotted(each.func) == "iter" for each in values
        ):
            yield script.edit(
                call, lambda each: cst.Call(cst.Name("next"), [cst.Arg(each.func.value)])
            )
        elif any(name.endswith(".ImageDataGenerator") for name in script.imported):
            code = script.source(function.value)
            yield Advice(call, f"if {code} is an iterator, write next({code})")


@rule(
    "The schedulers of PyTorch no longer have the argument `verbose`.",
    before="torch.optim.lr_scheduler.StepLR(optimizer, 30, verbose=True)",
    after="torch.optim.lr_scheduler.StepLR(optimizer, 30)",
)
def scheduler_verbose(script: Script) -> Findings:
    for call, name in script.named_calls():
        if name.startswith("torch.optim.lr_scheduler.") and argument(call, "verbose"):
            yield script.edit(call, without_arguments, "verbose")


@rule(
    "PyTorch has removed torch.symeig. torch.linalg.eigh returns the same.",
    before="values, vectors = torch.symeig(x, eigenvectors=True)",
    after='values, vectors = torch.linalg.eigh(x, UPLO="U")',
)
def linear_algebra(script: Script) -> Findings:
    for call, name in script.named_calls():
        if name not in _REMOVED or not isinstance(call.func, cst.Attribute):
            continue
        vectors = argument(call, "eigenvectors")
        if (
            name == "torch.symeig"
            and len(call.args) == 2
            and vectors is not None
            and script.source(vectors.value) == "True"
        ):
            new = cst.parse_expression(f"{script.source(call.func.value)}.linalg.eigh")
            upper = named(cst.Arg(cst.SimpleString('"U"')), "UPLO")
            yield script.set(call, func=new, args=[call.args[0], upper])
        else:
            yield Advice(call, f"PyTorch has removed {name}: use {_REMOVED[name]}")


#: Functions that PyTorch has removed -> what to use.
_REMOVED = {
    "torch.eig": "torch.linalg.eig, whose result is complex",
    "torch.lstsq": "torch.linalg.lstsq, whose first argument is the matrix",
    "torch.matrix_rank": "torch.linalg.matrix_rank",
    "torch.solve": "torch.linalg.solve, whose first argument is the matrix",
    "torch.symeig": 'torch.linalg.eigh(…, UPLO="U"), or torch.linalg.eigvalsh',
}


_TRANSFORMS = {"Scale": "Resize", "RandomSizedCrop": "RandomResizedCrop"}


@rule(
    "The transform has another name.",
    before="transforms.Scale(256)",
    after="transforms.Resize(256)",
    setup=_SETUP + "from torchvision import transforms\n",
)
def transforms(script: Script) -> Findings:
    for attribute, name in script.uses():
        old = name.removeprefix("torchvision.transforms.")
        if name != old and old in _TRANSFORMS and attribute.attr.value == old:
            new = cst.Name(_TRANSFORMS[old])
            yield script.set(attribute, attr=new)
    for node in script.all(cst.ImportFrom):
        if node.module is None or script.dotted(node.module) != "torchvision.transforms":
            continue
        for alias in node.names if not isinstance(node.names, cst.ImportStar) else ():
            old = alias.evaluated_name
            if old in _TRANSFORMS:
                new = cst.Name(_TRANSFORMS[old])
                script.set(alias, name=new, asname=alias.asname or cst.AsName(cst.Name(old)))
                yield Change(node)


#: Names that NumPy has removed -> what they were.
_NUMPY = {
    "bool8": "np.bool_",
    "complex": "complex",
    "float": "float",
    "int": "int",
    "object": "object",
    "str": "str",
    "Inf": "np.inf",
    "NaN": "np.nan",
    "float_": "np.float64",
    "product": "np.prod",
}


@rule(
    "NumPy has removed the name.",
    before="x = np.zeros(3, np.float)",
    after="x = np.zeros(3, float)",
    setup=_SETUP + "import numpy as np\n",
)
def numpy_names(script: Script) -> Findings:
    for attribute, name in script.uses():
        old = name.removeprefix("numpy.")
        if name == old or old not in _NUMPY or script.dotted(attribute) is None:
            continue
        new = _NUMPY[old].replace("np.", script.source(attribute.value) + ".")
        if "." not in new and _is_bound(script, new):
            continue
        yield script.put(attribute, cst.parse_expression(new))


def _is_bound(script: Script, name: str) -> bool:
    """Return whether a script gives the name of a builtin another meaning."""
    scope = script.scope(script.module.body[0]) if script.module.body else None
    return scope is None or any(
        not type(each).__name__.startswith("Builtin") for each in scope[name]
    )


@rule(
    "Python 3.12 has no distutils.",
    before="from distutils.version import LooseVersion",
    after="from packaging.version import parse as LooseVersion",
)
def loose_version(script: Script) -> Findings:
    for node in script.all(cst.ImportFrom):
        if node.module is None or script.dotted(node.module) != "distutils.version":
            continue
        if isinstance(node.names, cst.ImportStar) or len(node.names) != 1:
            continue
        alias = node.names[0]
        name = alias.evaluated_alias or alias.evaluated_name
        if alias.evaluated_name not in ("LooseVersion", "StrictVersion"):
            continue
        scope = script.scope(node)
        uses = [
            access.node
            for binding in (scope[name] if scope else ())
            if isinstance(binding, ImportAssignment)
            for access in binding.references
        ]
        if not all(isinstance(script.parent(each), cst.Call) for each in uses):
            yield Advice(node, "Python 3.12 has no distutils: use packaging.version")
            continue
        new = alias.with_changes(name=cst.Name("parse"), asname=cst.AsName(cst.Name(name)))
        target = cst.parse_expression("packaging.version")
        yield script.set(node, module=target, names=[new])


@rule(
    "Python 3.12 has no distutils.",
    before="import distutils.util",
)
def distutils(script: Script) -> Findings:
    for node, name, _ in script.imported_names():
        if re.match(r"distutils\b(?!\.version)", name):
            yield Advice(node, f"Python 3.12 has no {name}: replace it")


@rule(
    "transformers 5 has no AdamW. PyTorch's AdamW has other defaults.",
    before="from transformers import AdamW, BertConfig\nAdamW(model.parameters(), lr=1e-4)",
    after="from transformers import BertConfig\nfrom torch.optim import AdamW\n"
    "AdamW(model.parameters(), lr=1e-4, eps=1e-6, weight_decay=0.0)",
)
def adamw(script: Script) -> Findings:
    calls = [call for call, name in script.named_calls() if name == _ADAMW]
    uses = [node for node, name in script.uses(cst.Name, cst.Attribute) if name == _ADAMW]
    imports = [
        (node, alias)
        for node, name, alias in script.imported_names(cst.ImportFrom)
        if name == _ADAMW
    ]
    plain = all(isinstance(each.func, cst.Name) and _is_clear(each) for each in calls)
    if len(imports) != 1 or len(uses) != len(calls) or not plain:
        for each in uses or [node for node, _ in imports]:
            text = "transformers 5 has no AdamW: use torch.optim.AdamW(…, eps=1e-6, weight_decay=0)"
            yield Advice(each, text)
        return
    ((node, alias),) = imports
    if len(node.names) == 1:
        script.set(node, module=cst.parse_expression("torch.optim"))
    else:
        kept = [each for each in node.names if each is not alias]
        kept[-1] = kept[-1].with_changes(comma=node.names[-1].comma)
        script.set(node, names=kept)
        script.need_import(f"from torch.optim import {script.source(alias).rstrip(', ')}")
    yield Change(node)
    for call in calls:
        script.edit(call, _with_defaults)


_ADAMW = "transformers.AdamW"


def _is_clear(call: cst.Call) -> bool:
    """Return whether torch's AdamW takes the arguments of a call of transformers' AdamW."""
    known = ("params", "lr", "betas", "eps", "weight_decay")
    return (
        bool(call.args)
        and not any(each.star for each in call.args)
        and all(each.keyword is None or each.keyword.value in known for each in call.args)
        and sum(each.keyword is None for each in call.args) <= 3
    )


def _with_defaults(call: cst.Call) -> cst.Call:
    for name, value in (("eps", "1e-6"), ("weight_decay", "0.0")):
        if argument(call, name) is None:
            call = with_argument(call, name, cst.Float(value))
    return call
