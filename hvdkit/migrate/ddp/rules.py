"""Rules about torch.distributed and DistributedDataParallel.

They apply to scripts that can be converted completely.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from hvdkit.migrate.ddp.conversion import Conversion, comment_lines
from hvdkit.migrate.ddp.facts import DIST, SAMPLERS, WRAPPERS, without_module
from hvdkit.migrate.ddp.spawning import spawn_parts
from hvdkit.migrate.rule import Rule, rule
from hvdkit.migrate.script import Script, argument, fill, without_arguments

#: A small DDP script, in which the rules find their lines.
SETUP = """\
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
ddp_model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
_FUNCTIONS = {
    "get_rank": "rank",
    "get_world_size": "size",
    "is_initialized": "is_initialized",
    "barrier": "barrier",
    "destroy_process_group": "shutdown",
}
_VARIABLES = {"RANK": "rank", "LOCAL_RANK": "local_rank", "WORLD_SIZE": "size"}
_OPERATIONS = {"SUM": "Sum", "AVG": "Average", "MIN": "Min", "MAX": "Max", "PRODUCT": "Product"}


@rule(
    "hvd.init() connects the ranks.",
    before='dist.init_process_group(backend="nccl", init_method="env://")',
    after="hvd.init()",
    setup=SETUP.replace('dist.init_process_group("gloo")\n', ""),
)
def start(self: Rule[Conversion], it: Conversion) -> None:
    for call in it.facts.inits:
        it.replace(call, it.call("init"))
        _keep_comments(it.script, call)
        it.script.change(self.name, call, self.reason)


def _keep_comments(script: Script, node: cst.CSTNode) -> None:
    """Put the comments of a replaced expression before its statement."""
    comments = comment_lines(node)
    line = script.statement(node)
    if comments and isinstance(line, cst.SimpleStatementLine):
        script.edit(
            line, lambda each: each.with_changes(leading_lines=[*each.leading_lines, *comments])
        )


@rule(
    "hvdkit wraps the optimizer, not the model. Rank 0's values are sent by a line of their own.",
    before="ddp_model = DDP(model, device_ids=[0], find_unused_parameters=True)",
    after="ddp_model = model\nhvd.broadcast_parameters(ddp_model.state_dict(), root_rank=0)",
    setup=SETUP.replace("ddp_model = DDP(model)\n", ""),
)
def model(self: Rule[Conversion], it: Conversion) -> None:
    _note_differences(self, it)
    for wrap in it.facts.wraps:
        line = it.script.statement(wrap.call)
        inner = it.script.dotted(wrap.model)
        it.forget(wrap.call.func)
        for each in wrap.call.args:
            if each.value is not wrap.model:
                it.forget(each)
        _keep_comments(it.script, wrap.call)
        it.script.change(self.name, wrap.call, self.reason)
        if wrap.target and wrap.target == inner:
            it.script.put(wrap.call, _broadcast(it, inner))
            it.script.edit(it.script.parent(wrap.call), lambda each: cst.Expr(each.value))
            continue
        it.script.edit(wrap.call, _only_model)
        if wrap.target:
            it.script.insert(line, _line(_broadcast(it, wrap.target)))
        elif inner:
            it.script.insert(line, _line(_broadcast(it, inner)), before=True)


def _note_differences(self: Rule[Conversion], it: Conversion) -> None:
    """Point out what DDP does beside reducing gradients."""
    for wrap in it.facts.wraps[:1]:
        name = wrap.target or it.script.dotted(wrap.model) or "model"
        methods = {each.attr.value for each in it.script.attributes()}
        if "eval" in methods:
            it.script.note(
                self.name,
                wrap.call,
                f"each rank keeps its own buffers, such as the statistics of batch norm. To "
                f"evaluate with those of rank 0 on every rank, call "
                f"{it.hvd}.broadcast_parameters({name}.named_buffers(), root_rank=0) before",
            )
        if "load_state_dict" in methods:
            it.script.note(
                self.name,
                wrap.call,
                "keys of a state dict have no prefix `module.` now: remove it from the keys of "
                "checkpoints that contain a wrapped model",
            )


def _only_model(call: cst.Call) -> cst.BaseExpression:
    given = argument(call, "module", 0)
    assert given is not None
    return given.value


def _broadcast(it: Conversion, name: str) -> cst.BaseExpression:
    return it.call("broadcast_parameters", f"{name}.state_dict()", "root_rank=0")


def _line(expression: cst.BaseExpression) -> cst.SimpleStatementLine:
    return cst.SimpleStatementLine([cst.Expr(expression)])


@rule(
    "The wrapped optimizer reduces the gradients.",
    before="optimizer = torch.optim.AdamW(ddp_model.parameters())",
    after="optimizer = torch.optim.AdamW(ddp_model.parameters())\n"
    "optimizer = hvd.DistributedOptimizer(optimizer, ddp_model.named_parameters())",
    setup=SETUP.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n", ""),
)
def optimizer(self: Rule[Conversion], it: Conversion) -> None:
    for each in it.facts.optimizers:
        it.script.change(self.name, each.call, self.reason)
        names = [f"{each.model}.named_parameters()"] if each.is_whole else []
        if not each.target:
            it.script.edit(each.call, _nested, it, names)
            continue
        wrapped = it.call("DistributedOptimizer", each.target, *names)
        assign = cst.parse_statement(f"{each.target} = 0")
        assert isinstance(assign, cst.SimpleStatementLine)
        assign = assign.with_deep_changes(assign.body[0], value=wrapped)
        line: cst.BaseStatement = assign
        if it.unit.is_conditional:
            line = cst.If(it.call("is_initialized"), cst.IndentedBlock([assign]))
        it.script.insert(it.script.statement(each.call), line)


def _nested(call: cst.Call, it: Conversion, names: list[str]) -> cst.BaseExpression:
    new = it.call("DistributedOptimizer", "optimizer", *names)
    assert isinstance(new, cst.Call)
    return new.with_changes(args=[new.args[0].with_changes(value=call), *new.args[1:]])


@rule(
    "The model is not wrapped, so it has no `.module`.",
    before="torch.save(ddp_model.module.state_dict(), path)",
    after="torch.save(ddp_model.state_dict(), path)",
    setup=SETUP,
)
def inner_model(self: Rule[Conversion], it: Conversion) -> None:
    models = it.unit.models
    for node in it.script.attributes():
        if node.attr.value != "module" or it.script.name_of(node) is not None:
            continue
        owner = it.script.dotted(node.value) or ""
        if owner in models:
            it.script.edit(node, lambda each: each.value)
            it.script.change(self.name, node, self.reason)
        elif owner.split(".")[0] not in ("", "self", "cls"):
            it.script.advise(
                self.name,
                node,
                f"if {owner} is the model of DDP, replace {owner}.module by {owner}",
            )


@rule(
    "The functions of Horovod have other names.",
    before="if dist.get_rank() == 0:\n    print(dist.get_world_size())",
    after="if hvd.rank() == 0:\n    print(hvd.size())",
    setup=SETUP,
)
def functions(self: Rule[Conversion], it: Conversion) -> None:
    for call in it.script.calls():
        name = (it.script.name_of(call.func) or "").removeprefix(DIST)
        if name not in _FUNCTIONS or (it.script.name_of(call.func) or "") != DIST + name:
            continue
        group = argument(call, "group", 0)
        if group is not None and it.script.source(group.value) not in ("None", "dist.group.WORLD"):
            it.script.advise(self.name, call, f"replace the group of {name}() by a hvd.ProcessSet")
            continue
        it.replace(call, it.call(_FUNCTIONS[name]))
        it.script.change(self.name, call, self.reason)


@rule(
    "hvdkit's sampler takes rank and size from the job.",
    before="sampler = torch.utils.data.DistributedSampler(data, shuffle=False)",
    after="sampler = hvd.DistributedSampler(data, shuffle=False)",
    setup=SETUP,
)
def sampler(self: Rule[Conversion], it: Conversion) -> None:
    spawned = any(facts.spawns for facts in it.unit.facts)
    for call in it.script.calls():
        if it.script.name_of(call.func) not in SAMPLERS:
            continue
        has_ranks = all(argument(call, name, i) for name, i in (("num_replicas", 1), ("rank", 2)))
        if has_ranks and not spawned:
            continue  # PyTorch's class needs no process group then
        it.replace(call.func, it.name("DistributedSampler"))
        if sum(each.keyword is None for each in call.args) <= 1:
            it.script.edit(call, without_arguments, "num_replicas", "rank")
        it.script.change(self.name, call, self.reason)
    for node in it.script.all(cst.ClassDef):
        assert isinstance(node, cst.ClassDef)
        for base in node.bases:
            if it.script.name_of(base.value) in SAMPLERS:
                it.replace(base.value, it.name("DistributedSampler"))
                it.script.change(self.name, node, self.reason)


@rule(
    "hvd.allreduce_ also works in place; its default is the mean.",
    before="dist.all_reduce(total, op=dist.ReduceOp.SUM)",
    after="hvd.allreduce_(total, op=hvd.Sum)",
    setup=SETUP,
)
def all_reduce(self: Rule[Conversion], it: Conversion) -> None:
    for call in it.script.calls():
        name = it.script.name_of(call.func)
        if name not in (DIST + "all_reduce", DIST + "reduce"):
            continue
        operation = _operation(it.script, argument(call, "op", 1 if "all_" in name else 2))
        code = f"hvd.allreduce_(tensor, op=hvd.{operation})"
        if operation is None or not _replace(self, it, call, code, ("tensor",), ("op", "dst")):
            it.script.advise(
                self.name,
                call,
                "replace it by hvd.allreduce_(tensor, op=hvd.Sum) or "
                "hvd.allreduce_async_; for a group, use process_set=",
            )
        elif name.endswith(".reduce"):
            it.script.note(self.name, call, "every rank gets the result now, not only one")


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
    setup=SETUP,
)
def broadcast(self: Rule[Conversion], it: Conversion) -> None:
    for call in it.script.calls():
        if it.script.name_of(call.func) == DIST + "broadcast":
            code = "hvd.broadcast_(tensor, root_rank=src)"
            if not _replace(self, it, call, code, ("tensor", "src")):
                it.script.advise(self.name, call, f"replace it by a line such as {code}")


#: Function -> (its arguments, its replacement).
_GATHERED = {
    "all_gather": (
        ("tensor_list", "tensor"),
        "tensor_list[:] = hvd.allgather(tensor[None]).unbind()",
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
    "hvdkit returns what it gathers.",
    before="dist.all_gather_object(results, result)",
    after="results[:] = hvd.allgather_object(result)",
    setup=SETUP,
)
def gather(self: Rule[Conversion], it: Conversion) -> None:
    for call in it.script.calls():
        name = it.script.name_of(call.func) or ""
        short = name.removeprefix(DIST)
        if short not in _GATHERED or name != DIST + short:
            continue
        names, code = _GATHERED[short]
        filled = argument(call, names[0], 0)
        understood = filled is not None and it.script.dotted(filled.value) is not None
        if short == "all_gather" and filled is not None:
            understood &= _is_new_list(it.script, filled.value)
        if not understood or not _replace(self, it, call, code, names):
            it.script.advise(self.name, call, f"replace it by a line such as {code}")


def _is_new_list(script: Script, node: cst.BaseExpression) -> bool:
    """Return whether a list has new tensors, not parts of another tensor that is to be filled."""
    return all(
        isinstance(each, cst.ListComp | cst.BinaryOperation | cst.List)
        for each in script.values_of(node) or [node]
    )


def _replace(
    self: Rule[Conversion],
    it: Conversion,
    call: cst.Call,
    code: str,
    names: Sequence[str],
    dropped: Sequence[str] = (),
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
    used = [argument(call, name, i) for i, name in enumerate(names)]
    if None in used or not it.script.is_statement(call):
        return False
    it.forget(call.func)
    for each in call.args:
        if each not in used:
            it.forget(each)
    it.uses_hvd = True
    it.script.edit(it.script.parent(call), _filled, code, it.hvd, names)
    it.script.change(self.name, call, self.reason)
    return True


def _filled(line: cst.Expr, code: str, hvd: str, names: Sequence[str]) -> cst.BaseSmallStatement:
    assert isinstance(line.value, cst.Call)
    values = {
        name: given.value
        for i, name in enumerate(names)
        if (given := argument(line.value, name, i)) is not None
    }
    return fill(code, hvd=cst.Name(hvd), **values)


@rule(
    "hvdkit takes the optimizer, and only backward() has to be in the block.",
    before="with ddp_model.no_sync():\n    loss.backward()",
    after="with hvd.no_sync(optimizer):\n    loss.backward()",
    setup=SETUP,
)
def no_sync(self: Rule[Conversion], it: Conversion) -> None:
    for call in it.script.calls():
        function = call.func
        if not isinstance(function, cst.Attribute) or function.attr.value != "no_sync":
            continue
        owner = it.script.dotted(function.value) or ""
        if it.script.name_of(function) is not None or call.args:
            continue
        found = {each.target for each in it.optimizers_of(without_module(owner))}
        target = found.pop() if len(found) == 1 else ""
        scope = it.script.scope(call)
        if not target or not scope or not scope[target.split(".")[0]]:
            it.script.advise(self.name, call, f"replace it by {it.hvd}.no_sync(optimizer)")
            continue
        it.replace(call, it.call("no_sync", target))
        it.script.change(self.name, call, self.reason)


@rule(
    "PyTorch's layer would normalize on each rank separately, without an error.",
    before="model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    after="model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)",
    setup=SETUP,
)
def sync_batch_norm(self: Rule[Conversion], it: Conversion) -> None:
    for node in it.script.all(cst.Attribute, cst.Name):
        name = it.script.name_of(node) or ""
        if not re.fullmatch(r"torch\.nn\.(modules\.(batchnorm\.)?)?SyncBatchNorm", name):
            continue
        if it.script.enclosing(node, cst.Import, cst.ImportFrom):
            continue
        it.replace(node, it.name("SyncBatchNorm"))
        it.script.change(self.name, node, self.reason)


@rule(
    "After hvd.init(), Horovod knows the rank under every launcher.",
    before='local_rank = int(os.environ["LOCAL_RANK"])',
    after="local_rank = hvd.local_rank()",
    setup=SETUP,
)
def variables(self: Rule[Conversion], it: Conversion) -> None:
    noted = False
    for call in it.script.calls():
        if it.script.source(call.func) != "int" or len(call.args) != 1:
            continue
        variable = _environment_variable(it.script, call.args[0].value)
        if variable not in _VARIABLES:
            continue
        if _is_after_start(it, call):
            it.replace(call, it.call(_VARIABLES[variable]))
            it.script.change(self.name, call, self.reason)
        elif not noted:
            noted = True
            it.script.note(
                self.name,
                call,
                f"{variable} is set by `hvdkit run` and torchrun only. For other launchers, call "
                f"{it.hvd}.init() first and use {it.hvd}.{_VARIABLES[variable]}()",
            )


def _environment_variable(script: Script, node: cst.BaseExpression) -> str:
    """Return "RANK" for `os.environ["RANK"]`, `os.environ.get("RANK", …)` and `os.getenv`."""
    found = re.fullmatch(
        r"""os\.(?:environ\[|environ\.get\(|getenv\()\s*["'](\w+)["'].*""",
        script.source(node),
        re.S,
    )
    return found[1] if found else ""


def _is_after_start(it: Conversion, node: cst.CSTNode) -> bool:
    """Return whether hvd.init() has certainly been called before a line of the same block."""
    inside = set()
    each = node
    while each is not it.script.module:
        each = it.script.parent(each)
        inside.add(each)
        if isinstance(each, cst.FunctionDef):
            break
    for init in it.facts.inits:
        block = it.script.parent(it.script.statement(init))
        if block in inside and it.script.line(init) < it.script.line(node):
            return True
    return False


@rule(
    "torch.distributed.launch gave the option, `hvdkit run` sets LOCAL_RANK.",
    before='parser.add_argument("--local_rank", type=int, default=0)',
    after='parser.add_argument("--local_rank", type=int, '
    'default=int(os.environ.get("LOCAL_RANK", 0)))',
    setup=SETUP + "import argparse\n\nparser = argparse.ArgumentParser()\n",
)
def local_rank_option(self: Rule[Conversion], it: Conversion) -> None:
    for call in it.script.calls():
        function = call.func
        if not isinstance(function, cst.Attribute) or function.attr.value != "add_argument":
            continue
        names = {
            it.script.source(each.value).strip("\"'") for each in call.args if not each.keyword
        }
        if not names & {"--local_rank", "--local-rank"}:
            continue
        given = argument(call, "default")
        default = it.script.source(given.value) if given else "0"
        if "environ" in default or "getenv" in default:
            continue
        new = cst.parse_expression(f'int(os.environ.get("LOCAL_RANK", {default}))')
        it.script.edit(call, _with_default, new)
        it.script.need_import("import os")
        it.script.change(self.name, call, self.reason)


def _with_default(call: cst.Call, default: cst.BaseExpression) -> cst.Call:
    given = argument(call, "default")
    if given is not None:
        return call.with_deep_changes(given, value=default)
    *first, last = call.args
    new = cst.Arg(
        keyword=cst.Name("default"),
        value=default,
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
        comma=last.comma,
        whitespace_after_arg=last.whitespace_after_arg,
    )
    space = cst.SimpleWhitespace(" ")
    last = last.with_changes(
        comma=cst.Comma(whitespace_after=space), whitespace_after_arg=cst.SimpleWhitespace("")
    )
    return call.with_changes(args=[*first, last, new])


@rule(
    "`hvdkit run` starts the ranks, so the script calls the function once.",
    before="torch.multiprocessing.spawn(train, args=(count, 5), nprocs=count, join=True)",
    after="hvd.init()\ntrain(hvd.rank(), hvd.size(), 5)",
    setup=SETUP + "count = torch.cuda.device_count()\n",
)
def spawn(self: Rule[Conversion], it: Conversion) -> None:
    for call in it.facts.spawns:
        parts = spawn_parts(it.script, call)
        assert parts is not None  # otherwise the unit is not converted
        _, given, count = parts
        is_count = [it.script.source(each) == count for each in given]
        for each, replaced in zip(given, is_count, strict=True):
            if replaced:
                it.forget(each)
        it.forget(call.func)
        it.script.edit(call, _without_spawn, it.call("rank"), it.call("size"), is_count)
        line = it.script.statement(call)
        it.script.insert(line, _line(it.call("init")), before=True)
        it.script.change(self.name, call, self.reason)


def _without_spawn(
    call: cst.Call,
    rank: cst.BaseExpression,
    size: cst.BaseExpression,
    is_count: Sequence[bool],
) -> cst.Call:
    function, given = argument(call, "fn", 0), argument(call, "args", 1)
    assert function is not None
    elements = getattr(given.value, "elements", ()) if given else ()
    values = [rank]
    values += [size if own else e.value for e, own in zip(elements, is_count, strict=True)]
    return cst.Call(function.value, [cst.Arg(each) for each in values])


@rule(
    "Only torch.distributed reads the variable; the launcher sets it.",
    before='os.environ["MASTER_PORT"] = "12355"\ndist.barrier()',
    after="hvd.barrier()",
    setup=SETUP,
)
def master_address(self: Rule[Conversion], it: Conversion) -> None:
    for line in it.script.all(cst.SimpleStatementLine):
        assert isinstance(line, cst.SimpleStatementLine)
        statement = line.body[0]
        if len(line.body) != 1 or not isinstance(statement, cst.Assign):
            continue
        target = it.script.source(statement.targets[0].target)
        block = it.script.parent(line)
        if not re.fullmatch(r"""os\.environ\[["']MASTER_(ADDR|PORT)["']\]""", target):
            continue
        if comment_lines(line) or len(getattr(block, "body", ())) < 2 or len(statement.targets) > 1:
            continue
        if all(_sets_master(it.script, each) for each in getattr(block, "body", ())):
            continue
        it.script.remove(line)
        it.script.change(self.name, line, self.reason)


def _sets_master(script: Script, line: cst.CSTNode) -> bool:
    return "MASTER_" in script.source(line) and isinstance(line, cst.SimpleStatementLine)


#: Other functions of torch.distributed -> advice.
_BY_HAND = {
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
    "There is no replacement that is certainly right.",
    before="dist.send(tensor, 1)",
    setup=SETUP,
)
def by_hand(self: Rule[Conversion], it: Conversion) -> None:
    handled = {
        "ReduceOp",
        "reduce_op",
        "all_reduce",
        "reduce",
        "broadcast",
        *_GATHERED,
        *_FUNCTIONS,
        "init_process_group",
    }
    for node, name in it.facts.uses:
        short = name.removeprefix(DIST).split(".")[0]
        if not name.startswith(DIST) or node in it.replaced or short in handled:
            continue
        if name in WRAPPERS:
            continue
        advice = _BY_HAND.get(short, "replace it, or remove it")
        it.script.advise(self.name, node, f"torch.distributed.{short} is left: {advice}")


RULES = (
    start,
    model,
    optimizer,
    inner_model,
    sampler,
    functions,
    all_reduce,
    broadcast,
    gather,
    no_sync,
    sync_batch_norm,
    variables,
    local_rank_option,
    spawn,
    master_address,
    by_hand,
)

#: Full name -> what to use, for scripts that are not converted.
REPLACEMENTS = {
    **{DIST + name: f"hvd.{ours}()" for name, ours in _FUNCTIONS.items()},
    **{DIST + name: text for name, text in _BY_HAND.items()},
    **dict.fromkeys(SAMPLERS, "hvd.DistributedSampler(dataset)"),
    **dict.fromkeys(
        WRAPPERS,
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0), and "
        "hvd.DistributedOptimizer(optimizer, model.named_parameters())",
    ),
    DIST + "init_process_group": "hvd.init()",
    DIST + "all_reduce": "hvd.allreduce_(tensor, op=hvd.Sum)",
    DIST + "reduce": "hvd.allreduce_(tensor, op=hvd.Sum)",
    DIST + "broadcast": "hvd.broadcast_(tensor, root_rank=0)",
    DIST + "all_gather": "hvd.allgather(tensor)",
    DIST + "all_gather_object": "hvd.allgather_object(obj)",
    DIST + "broadcast_object_list": "hvd.broadcast_object(obj, root_rank=0)",
}
