"""Rules about collectives."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from hvdkit.migrate.ddp.conversion import Conversion
from hvdkit.migrate.ddp.example import SETUP
from hvdkit.migrate.ddp.facts import DIST, WRAPPERS
from hvdkit.migrate.ddp.starting import FUNCTIONS
from hvdkit.migrate.nodes import argument, fill
from hvdkit.migrate.rule import Advice, Change, Findings, Note, Rules
from hvdkit.migrate.script import Script

_OPERATIONS = {"SUM": "Sum", "AVG": "Average", "MIN": "Min", "MAX": "Max", "PRODUCT": "Product"}

RULES: Rules[Conversion] = Rules(SETUP)
rule = RULES.add


@rule(
    "hvd.allreduce_ also works in place. Its default operation is the mean.",
    before="dist.all_reduce(total, op=dist.ReduceOp.SUM)",
    after="hvd.allreduce_(total, op=hvd.Sum)",
)
def all_reduce(it: Conversion) -> Findings:
    for call in it.script.calls():
        name = it.script.name_of(call.func)
        if name not in (DIST + "all_reduce", DIST + "reduce"):
            continue
        operation = _operation(it.script, argument(call, "op", 1 if "all_" in name else 2))
        code = f"hvd.allreduce_(tensor, op=hvd.{operation})"
        dropped = ("op",) if "all_" in name else ("dst", "op")
        if operation is None or not _replace(it, call, code, ("tensor",), dropped):
            yield Advice(
                call,
                f"replace {it.script.source(call.func)} by hvd.allreduce_(tensor, op=hvd.Sum) or "
                "hvd.allreduce_async_; for a group, use process_set=",
            )
            continue
        yield Change(call)
        if name.endswith(".reduce"):
            yield Note(call, "every rank gets the result now, not only one")


def _operation(script: Script, given: cst.Arg | None) -> str | None:
    if given is None:
        return "Sum"
    found = re.fullmatch(
        r"torch\.distributed\.(?:ReduceOp|reduce_op)\.(\w+)", script.name_of(given.value) or ""
    )
    return _OPERATIONS.get(found[1]) if found else None


@rule(
    "hvd.broadcast_ also works in place.",
    before="dist.broadcast(weights, src=0)",
    after="hvd.broadcast_(weights, root_rank=0)",
)
def broadcast(it: Conversion) -> Findings:
    for call in it.script.calls():
        if it.script.name_of(call.func) == DIST + "broadcast":
            code = "hvd.broadcast_(tensor, root_rank=src)"
            done = _replace(it, call, code, ("tensor", "src"))
            yield Change(call) if done else _advice(it, call, code)


#: Function -> (its arguments, its replacement).
_GATHERED = {
    "all_gather": (
        ("tensor_list", "tensor"),
        # Unlike PyTorch's function, hvd.allgather passes gradients on.
        "tensor_list[:] = hvd.allgather(tensor.detach()[None]).unbind()",
    ),
    "all_gather_object": (
        ("object_list", "obj"),
        "object_list[:] = hvd.allgather_object(obj)",
    ),
    "broadcast_object_list": (
        ("object_list", "src"),
        "object_list[:] = hvd.broadcast_object(object_list, root_rank=src)",
    ),
}


@rule(
    "The functions of hvdkit return the objects, and do not fill a list.",
    before="dist.all_gather_object(results, result)",
    after="results[:] = hvd.allgather_object(result)",
)
def gather(it: Conversion) -> Findings:
    for call, name in it.script.named_calls():
        short = name.removeprefix(DIST)
        if short not in _GATHERED or name != DIST + short:
            continue
        names, code = _GATHERED[short]
        filled = argument(call, names[0], 0)
        understood = filled is not None and it.script.dotted(filled.value) is not None
        if short == "all_gather" and filled is not None:
            understood &= _is_new_list(it.script, filled.value)
        done = understood and _replace(it, call, code, names)
        yield Change(call) if done else _advice(it, call, code)
        layer = it.script.enclosing(call, cst.ClassDef)
        if layer and any(
            it.script.name_of(base.value) == "torch.autograd.Function" for base in layer.bases
        ):
            yield Note(
                layer,
                f"hvd.gather_for_loss(tensor) can replace {layer.name.value}: it returns the rows "
                "of all ranks in one tensor, and its gradient is the sum over ranks",
            )


#: The module with differentiable functions -> advice for those that the command leaves.
_NN = re.compile(r"torch\.distributed\.nn\.(?:functional\.)?(\w+)")
_NN_ADVICE = {
    "all_gather": "replace it by hvd.gather_for_loss(tensor), which returns the rows of all ranks "
    "in one tensor",
    "all_reduce": "replace it by hvd.allreduce(tensor, op=hvd.Sum)",
    "broadcast": "replace it by hvd.broadcast(tensor, root_rank). The gradient is the mean over "
    "ranks, not the sum: multiply it by hvd.size()",
    "reduce_scatter": "replace it by hvd.reducescatter(tensor, op=hvd.Sum). The gradient is "
    "hvd.size() times as large: divide it",
    "all_to_all": "replace it by hvd.alltoall(tensor, splits)",
    "all_to_all_single": "replace it by hvd.alltoall(tensor, splits)",
}


@rule(
    "The gradient is the sum over ranks, as before. That of hvd.allgather is the mean.",
    before="negatives = torch.cat(torch.distributed.nn.all_gather(model(inputs)))",
    after="negatives = hvd.gather_for_loss(model(inputs))",
    setup=SETUP + "import torch.distributed.nn\n",
)
def gather_for_loss(it: Conversion) -> Findings:
    for call in it.script.calls():
        found = _NN.fullmatch(it.script.name_of(call.func) or "")
        if found is None or len(call.args) != 1 or call.args[0].star:
            continue
        if found[1] == "all_gather":
            joined = _concatenation(it.script, call)
            code = "hvd.gather_for_loss(tensor)" if joined else ""
            yield from _put(
                it, call, joined or call, code or "hvd.gather_for_loss(tensor[None]).unbind()"
            )
        elif found[1] == "all_reduce":
            yield from _put(it, call, call, "hvd.allreduce(tensor, op=hvd.Sum)")


def _concatenation(script: Script, call: cst.Call) -> cst.Call | None:
    """Return `torch.cat(call)`, along the first dimension; None if there is none."""
    given = script.parent(call)
    outer = script.parent(given)
    if not isinstance(given, cst.Arg) or not isinstance(outer, cst.Call):
        return None
    dim = argument(outer, "dim", 1)
    is_first = dim is None or script.source(dim.value) == "0"
    names = ("torch.cat", "torch.concat", "torch.concatenate")
    is_cat = script.name_of(outer.func) in names and outer.args[0] is given
    return outer if is_cat and is_first and len(outer.args) == 1 + (dim is not None) else None


def _put(it: Conversion, call: cst.Call, old: cst.Call, code: str) -> Findings:
    """Replace the expression `old`, which contains `call`; `code` has a name for the argument."""
    it.forget(call.func)
    if old is not call:
        it.forget(old.func)
    it.uses_hvd = True
    it.script.edit(old, _expression, code, it.hvd, old is not call)
    yield Change(call)


def _expression(old: cst.Call, code: str, hvd: str, is_outer: bool) -> cst.BaseExpression:
    call = old.args[0].value if is_outer else old
    assert isinstance(call, cst.Call)
    filled = fill(code, hvd=cst.Name(hvd), tensor=call.args[0].value)
    assert isinstance(filled, cst.Expr)
    return filled.value


def _advice(it: Conversion, call: cst.Call, code: str) -> Advice:
    name = it.script.source(call.func)
    return Advice(call, f"replace {name} by a line such as {code}")


def _is_new_list(script: Script, node: cst.BaseExpression) -> bool:
    """Return whether a list has new tensors, not parts of another tensor that is to be filled."""
    return all(
        isinstance(each, cst.ListComp | cst.BinaryOperation | cst.List)
        for each in script.values_of(node) or [node]
    )


def _replace(
    it: Conversion, call: cst.Call, code: str, names: Sequence[str], dropped: Sequence[str] = ()
) -> bool:
    """Replace a collective that is a statement of its own; return whether it is understood.

    Args:
        code: the new statement, in which the names of the arguments stand for their values.
        names: the arguments that the statement needs, in their order.
        dropped: further arguments of the old call.
    """
    others = {"async_op": "False", "group": "None"}
    for each in call.args:
        key = each.keyword.value if each.keyword else ""
        default = others.get(key)
        if each.star or (default is not None and it.script.source(each.value) != default):
            return False
        if key and default is None and key not in (*names, *dropped):
            return False
    if sum(each.keyword is None for each in call.args) > len(names) + len(dropped):
        return False  # a group, or async_op
    used = [argument(call, name, i) for i, name in enumerate(names)]
    if None in used or not it.script.is_statement(call):
        return False
    it.forget(call.func)
    for each in call.args:
        if each not in used:
            it.forget(each)
    it.uses_hvd = True
    it.script.edit(it.script.parent(call), _filled, code, it.hvd, names)
    return True


def _filled(line: cst.Expr, code: str, hvd: str, names: Sequence[str]) -> cst.BaseSmallStatement:
    assert isinstance(line.value, cst.Call)
    values = {
        name: given.value
        for i, name in enumerate(names)
        if (given := argument(line.value, name, i)) is not None
    }
    return fill(code, hvd=cst.Name(hvd), **values)


#: Other functions of torch.distributed -> advice.
BY_HAND = {
    "gather": "replace it by hvd.allgather(tensor), which returns all ranks' tensors on every rank",
    "scatter": "replace it by hvd.broadcast and take the part of this rank",
    "all_to_all": "replace it by hvd.alltoall(tensor, splits)",
    "all_to_all_single": "replace it by hvd.alltoall(tensor, splits)",
    "reduce_scatter": "replace it by hvd.reducescatter(tensor, op=hvd.Sum)",
    "reduce_scatter_tensor": "replace it by hvd.reducescatter(tensor, op=hvd.Sum)",
    "all_gather_into_tensor": "replace it by hvd.allgather(tensor)",
    "gather_object": "replace it by hvd.allgather_object(obj)",
    "new_group": "replace it by hvd.add_process_set(ranks), and group= by process_set=",
    "send": "hvdkit has no point-to-point messages: use hvd.broadcast or hvd.alltoall",
    "recv": "hvdkit has no point-to-point messages: use hvd.broadcast or hvd.alltoall",
    "isend": "hvdkit has no point-to-point messages: use hvd.broadcast or hvd.alltoall",
    "irecv": "hvdkit has no point-to-point messages: use hvd.broadcast or hvd.alltoall",
    "monitored_barrier": "replace it by hvd.barrier()",
    "get_backend": "remove it: tensors on any device can be reduced",
}


@rule(
    "The right replacement depends on the script.",
    before="dist.send(tensor, 1)",
)
def by_hand(it: Conversion) -> Findings:
    handled = {
        "ReduceOp",
        "reduce_op",
        "all_reduce",
        "reduce",
        "broadcast",
        *_GATHERED,
        *FUNCTIONS,
        "init_process_group",
    }
    for node, name in it.facts.uses:
        short = name.removeprefix(DIST).split(".")[0]
        if not name.startswith(DIST) or node in it.replaced:
            continue
        if short in handled and it.script.call_of(node):
            continue
        if short in ("ReduceOp", "reduce_op") or name in WRAPPERS:
            continue
        advice = BY_HAND.get(short, "replace it, or remove it")
        if found := _NN.fullmatch(name):
            short, advice = f"nn.{found[1]}", _NN_ADVICE.get(found[1], advice)
        yield Advice(node, f"torch.distributed.{short} is left: {advice}")
