"""Rules about ranks: how they start, and how a script gets their numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from hvdkit.migrate.ddp.conversion import Conversion, comment_lines, keep_comments
from hvdkit.migrate.ddp.example import SETUP
from hvdkit.migrate.ddp.facts import DIST
from hvdkit.migrate.ddp.spawning import is_optional, spawn_parts
from hvdkit.migrate.nodes import argument, line_of, with_argument
from hvdkit.migrate.rule import Advice, Change, Findings, Note, Rules
from hvdkit.migrate.script import Script

FUNCTIONS = {
    "get_rank": "rank",
    "get_world_size": "size",
    "is_initialized": "is_initialized",
    "barrier": "barrier",
    "destroy_process_group": "shutdown",
}


_VARIABLES = {"RANK": "rank", "LOCAL_RANK": "local_rank", "WORLD_SIZE": "size"}

RULES: Rules[Conversion] = Rules(SETUP)
rule = RULES.add


@rule(
    "hvd.init() connects the ranks.",
    before='dist.init_process_group(backend="nccl", init_method="env://")',
    after="hvd.init()",
    setup=SETUP.replace('dist.init_process_group("gloo")\n', ""),
)
def start(it: Conversion) -> Findings:
    for call in it.facts.inits:
        it.replace(call, it.call("init"))
        keep_comments(it.script, call)
        yield Change(call)


@rule(
    "Horovod has other names for these functions.",
    before="if dist.get_rank() == 0:\n    print(dist.get_world_size())",
    after="if hvd.rank() == 0:\n    print(hvd.size())",
)
def functions(it: Conversion) -> Findings:
    for call in it.script.calls():
        name = (it.script.name_of(call.func) or "").removeprefix(DIST)
        if name not in FUNCTIONS or (it.script.name_of(call.func) or "") != DIST + name:
            continue
        group = argument(call, "group", 0)
        if group is not None and it.script.source(group.value) not in ("None", "dist.group.WORLD"):
            yield Advice(call, f"replace the group of {name}() by a hvd.ProcessSet")
            continue
        yield it.replace(call, it.call(FUNCTIONS[name]))


@rule(
    "The function works with every launcher. The variable needs torchrun or `hvdkit run`.",
    before='local_rank = int(os.environ["LOCAL_RANK"])',
    after="local_rank = hvd.local_rank()",
)
def variables(it: Conversion) -> Findings:
    noted = False
    for call in it.script.calls():
        if it.script.source(call.func) != "int" or len(call.args) != 1:
            continue
        variable = _environment_variable(it.script, call.args[0].value)
        if variable not in _VARIABLES:
            continue
        if _is_after_start(it, call):
            yield it.replace(call, it.call(_VARIABLES[variable]))
        elif not noted:
            noted = True
            yield Note(
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
    """Return whether hvd.init() certainly runs before `node`, in its block or in an outer one."""
    inside = set()
    for each in it.script.around(node):
        inside.add(each)
        if isinstance(each, cst.FunctionDef):
            break
    for init in it.facts.inits:
        block = it.script.parent(it.script.statement(init))
        if block in inside and it.script.line(init) < it.script.line(node):
            return True
    return False


@rule(
    "torch.distributed.launch passes the option. `hvdkit run` sets LOCAL_RANK instead.",
    before='parser.add_argument("--local_rank", type=int, default=0)',
    after='parser.add_argument("--local_rank", type=int, '
    'default=int(os.environ.get("LOCAL_RANK", 0)))',
    setup=SETUP + "import argparse\n\nparser = argparse.ArgumentParser()\n",
)
def local_rank_option(it: Conversion) -> Findings:
    for call, _ in it.script.methods("add_argument"):
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
        yield Change(call)


def _with_default(call: cst.Call, default: cst.BaseExpression) -> cst.Call:
    given = argument(call, "default")
    if given is not None:
        return call.with_deep_changes(given, value=default)
    return with_argument(call, "default", default)


@rule(
    "`hvdkit run` starts the ranks, so each rank calls the function itself.",
    before="torch.multiprocessing.spawn(train, args=(count, 5), nprocs=count, join=True)",
    after="hvd.init()\ntrain(hvd.rank(), hvd.size(), 5)",
    setup=SETUP + "count = torch.cuda.device_count()\n",
)
def spawn(it: Conversion) -> Findings:
    for call in it.facts.spawns:
        if is_optional(it.facts, call):
            it.forget(call)
            new = line_of(
                'raise SystemExit("hvdkit run starts the ranks: omit the option for spawn")'
            )
            it.script.put(it.script.parent(call), new.body[0])
            yield Change(call, "`hvdkit run` starts the ranks.")
            continue
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
        it.script.insert(line, line_of(it.call("init")), before=True)
        if "." in count and "(" not in count:  # an option such as args.world_size
            it.script.insert(line, line_of(f"{count} = {it.hvd}.size()"), before=True)
        yield Change(call)


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
    "The launcher sets the variable, so the script does not have to.",
    before='os.environ["MASTER_PORT"] = "12355"\ndist.barrier()',
    after="hvd.barrier()",
)
def master_address(it: Conversion) -> Findings:
    for line in it.script.all(cst.SimpleStatementLine):
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
        yield it.script.remove(line)


def _sets_master(script: Script, line: cst.CSTNode) -> bool:
    return "MASTER_" in script.source(line) and isinstance(line, cst.SimpleStatementLine)
