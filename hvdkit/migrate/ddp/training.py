"""Rules about models, optimizers and data."""

from __future__ import annotations

import re

import libcst as cst

from hvdkit.migrate.ddp.conversion import Conversion, keep_comments
from hvdkit.migrate.ddp.example import SETUP
from hvdkit.migrate.ddp.facts import (
    GRADIENT_SYNC,
    SAMPLERS,
    assignment_of,
    model_name,
    without_module,
)
from hvdkit.migrate.nodes import argument, line_of, without_arguments
from hvdkit.migrate.rule import Advice, Change, Findings, Note, Rules

RULES: Rules[Conversion] = Rules(SETUP)
rule = RULES.add


@rule(
    "hvdkit wraps the optimizer, not the model. A separate line broadcasts the values of rank 0.",
    before="ddp_model = DDP(model, device_ids=[0], find_unused_parameters=True)",
    after="ddp_model = model\nhvd.broadcast_parameters(ddp_model, root_rank=0)",
    setup=SETUP.replace("ddp_model = DDP(model)\n", ""),
)
def model(it: Conversion) -> Findings:
    yield from _note_differences(it)
    for wrap in it.facts.wraps:
        line = it.script.statement(wrap.call)
        inner = it.script.dotted(wrap.model)
        it.forget(wrap.call.func)
        for each in wrap.call.args:
            if each.value is not wrap.model:
                it.forget(each)
        keep_comments(it.script, wrap.call)
        yield Change(wrap.call)
        if wrap.target and wrap.target == inner:
            it.script.put(wrap.call, _broadcast(it, inner))
            it.script.edit(it.script.parent(wrap.call), lambda each: cst.Expr(each.value))
            continue
        it.script.edit(wrap.call, _only_model)
        if wrap.target:
            it.script.insert(line, line_of(_broadcast(it, wrap.target)))
        elif name := model_name(it.script, wrap.model):
            it.script.insert(line, it.with_ranks(line_of(_broadcast(it, name))), before=True)


def _note_differences(it: Conversion) -> Findings:
    """Point out what DDP does beside reducing gradients."""
    for wrap in it.facts.wraps[:1]:
        name = wrap.target or it.script.dotted(wrap.model) or "model"
        methods = {each.attr.value for each in it.script.attributes()}
        if "eval" in methods:
            yield Note(
                wrap.call,
                f"each rank keeps its own buffers, such as the statistics of batch norm. If all "
                f"ranks should evaluate with those of rank 0, first call "
                f"{it.hvd}.broadcast_parameters({name}.named_buffers(), root_rank=0)",
            )
        size = argument(wrap.call, "bucket_cap_mb")
        if size and _bucket_bytes(size) is None:
            yield Note(
                wrap.call,
                f"bucket_cap_mb={it.script.source(size.value)} is omitted: to choose the size of "
                f"the buckets, pass bucket_bytes to {it.hvd}.DistributedOptimizer",
            )
        if "load_state_dict" in methods:
            yield Note(
                wrap.call,
                "keys of a state dict have no prefix `module.` now: remove it from the keys of "
                "checkpoints that contain a wrapped model",
            )


def _only_model(call: cst.Call) -> cst.BaseExpression:
    given = argument(call, "module", 0)
    assert given is not None
    return given.value


def _broadcast(it: Conversion, name: str) -> cst.BaseExpression:
    return it.call("broadcast_parameters", name, "root_rank=0")


@rule(
    "The wrapped optimizer reduces the gradients.",
    before="optimizer = torch.optim.AdamW(ddp_model.parameters())",
    after="optimizer = torch.optim.AdamW(ddp_model.parameters())\n"
    "optimizer = hvd.DistributedOptimizer(optimizer, ddp_model.named_parameters())",
    setup=SETUP.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n", ""),
)
def optimizer(it: Conversion) -> Findings:
    for each in it.facts.optimizers:
        yield Change(each.call)
        names = [f"{each.model}.named_parameters()"] if each.is_whole else []
        names += _options(it, each.model)
        if not each.target:
            it.script.edit(each.call, _nested, it, names)
            continue
        wrapped = it.call("DistributedOptimizer", each.target, *names)
        assign = line_of(f"{each.target} = 0")
        assign = assign.with_deep_changes(assign.body[0], value=wrapped)
        it.script.insert(it.script.statement(each.call), it.with_ranks(assign))


def _options(it: Conversion, model: str) -> list[str]:
    """Return the arguments of DDP that the wrapped optimizer of a model takes."""
    wraps = [(facts.script, wrap) for facts in it.unit.facts for wrap in facts.wraps]
    own = [
        (script, wrap)
        for script, wrap in wraps
        if len(wraps) == 1 or model in (wrap.target, model_name(script, wrap.model))
    ]
    options = []
    given = [(script, argument(wrap.call, "find_unused_parameters")) for script, wrap in own]
    if any(each and script.source(each.value) != "False" for script, each in given):
        options.append("find_unused_parameters=True")
    sizes = [argument(wrap.call, "bucket_cap_mb") for _, wrap in own]
    known = {number for each in sizes if each and (number := _bucket_bytes(each)) is not None}
    if len(known) == 1:
        options.append(f"bucket_bytes={known.pop():_}")
    return options


def _bucket_bytes(size: cst.Arg) -> int | None:
    """Return the bytes of a `bucket_cap_mb`; None if the script calculates it."""
    if not isinstance(size.value, cst.Integer | cst.Float):
        return None
    return max(1, int(size.value.evaluated_value * 2**20))  # 0: a bucket for each parameter


def _nested(call: cst.Call, it: Conversion, names: list[str]) -> cst.BaseExpression:
    new = it.call("DistributedOptimizer", "optimizer", *names)
    assert isinstance(new, cst.Call)
    return new.with_changes(args=[new.args[0].with_changes(value=call), *new.args[1:]])


@rule(
    "The model is not wrapped, so it has no `.module`.",
    before="torch.save(ddp_model.module.state_dict(), path)",
    after="torch.save(ddp_model.state_dict(), path)",
)
def inner_model(it: Conversion) -> Findings:
    models = it.unit.models
    for node in it.script.attributes():
        if node.attr.value != "module" or it.script.name_of(node) is not None:
            continue
        owner = it.script.dotted(node.value) or ""
        if owner in models:
            yield it.script.edit(node, lambda each: each.value)
            if it.script.call_of(node):
                yield Note(
                    node,
                    f"DDP does not reduce the gradients of a backward pass through {owner}.module, "
                    f"and hvdkit reduces those of each pass. If one follows this call, make it in "
                    f"`with {it.hvd}.no_sync(optimizer):`",
                )
        elif not it.facts.is_distributed and not re.search("model|net", owner, re.I):
            continue  # the file does not mention DDP
        elif owner.split(".")[0] not in ("", "self", "cls"):
            yield Advice(node, f"if {owner} is the model of DDP, replace {owner}.module by {owner}")


@rule(
    "hvdkit's sampler takes the rank and the number of ranks from the job.",
    before="sampler = torch.utils.data.DistributedSampler(data, shuffle=False)",
    after="sampler = hvd.DistributedSampler(data, shuffle=False)",
)
def sampler(it: Conversion) -> Findings:
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
        yield Change(call)
    for node in it.script.all(cst.ClassDef):
        for base in node.bases:
            if it.script.name_of(base.value) in SAMPLERS:
                it.replace(base.value, it.name("DistributedSampler"))
                yield Change(node)


@rule(
    "hvd.no_sync takes the optimizer. Only backward() has to be in the block.",
    before="with ddp_model.no_sync():\n    loss.backward()",
    after="with hvd.no_sync(optimizer):\n    loss.backward()",
)
def no_sync(it: Conversion) -> Findings:
    for function in it.script.attributes():
        if function.attr.value != "no_sync" or it.script.name_of(function) is not None:
            continue
        call = it.script.call_of(function)
        if call and call.args:
            continue
        owner = it.script.dotted(function.value) or ""
        found = {each.target for each in it.optimizers_of(without_module(owner))}
        target = found.pop() if len(found) == 1 else ""
        scope = it.script.scope(function)
        if not target or not scope or not scope[target.split(".")[0]]:
            old = it.script.source(call or function)
            new_code = f"{it.hvd}.no_sync(optimizer)"
            yield Advice(function, f"replace {old} by {new_code}")
            continue
        new = it.call("no_sync", target)
        if call:
            it.replace(call, new)
        else:  # context = model.no_sync
            it.forget(function)
            code = f"(lambda: {cst.Module([]).code_for_node(new)})"
            it.script.put(function, cst.parse_expression(code))
        yield Change(function)


@rule(
    "hvdkit reduces the gradients in each pass. The result is the same.",
    before="ddp_model.require_backward_grad_sync = False\nloss.backward()",
    after="loss.backward()",
)
def gradient_sync(it: Conversion) -> Findings:
    for target in it.script.attributes():
        statement = assignment_of(it.script, target)
        if target.attr.value != GRADIENT_SYNC or statement is None:
            continue
        it.forget(statement)
        block = it.script.parent(it.script.parent(statement))
        if isinstance(block, cst.BaseSuite) and len(block.body) == 1:
            it.script.put(statement, cst.Pass())
        else:
            it.script.remove(it.script.parent(statement))
        yield Change(target)
        yield Note(
            target,
            f"to reduce once for several passes, put all but the last backward() into "
            f"`with {it.hvd}.no_sync(optimizer):`",
        )


@rule(
    "PyTorch's layer would normalize on each rank separately, without an error.",
    before="model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    after="model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)",
)
def sync_batch_norm(it: Conversion) -> Findings:
    for node, name in it.script.uses(cst.Attribute, cst.Name):
        if re.fullmatch(r"torch\.nn\.(modules\.(batchnorm\.)?)?SyncBatchNorm", name):
            yield it.replace(node, it.name("SyncBatchNorm"))
