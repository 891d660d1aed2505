"""Calls of `torch.multiprocessing.spawn` that start the ranks."""

from __future__ import annotations

import re

import libcst as cst

from hvdkit.migrate.ddp.facts import Facts
from hvdkit.migrate.nodes import argument
from hvdkit.migrate.script import Script

_KNOWN = {"fn", "args", "nprocs", "join", "daemon", "start_method"}


def spawn_parts(script: Script, call: cst.Call) -> tuple[str, list[cst.BaseExpression], str] | None:
    """Return the function, its arguments and the number of processes of a call of `spawn`.

    None if a plain call of the function cannot replace it.
    """
    function, count = argument(call, "fn", 0), argument(call, "nprocs", 2)
    given = argument(call, "args", 1)
    if function is None or count is None or not script.is_statement(call):
        return None
    if {each.keyword.value for each in call.args if each.keyword} - _KNOWN:
        return None
    code, name = script.source(count.value), script.dotted(function.value)
    is_count = isinstance(count.value, cst.Name | cst.Integer) or script.dotted(count.value)
    if name is None or not (is_count or re.search(r"\bdevice_count\(\)$|^len\(", code)):
        return None
    values: list[cst.BaseExpression] = []
    if given is not None:
        if not isinstance(given.value, cst.Tuple | cst.List):
            return None
        if any(isinstance(each, cst.StarredElement) for each in given.value.elements):
            return None
        values = [each.value for each in given.value.elements]
    return name, values, code


def can_spawn(facts: Facts, call: cst.Call) -> bool:
    """Return whether a call of `spawn` starts the ranks, and can be replaced."""
    parts = spawn_parts(facts.script, call)
    if parts is None:
        return False
    functions = {each.name.value: each for each in facts.script.all(cst.FunctionDef)}
    if parts[0] not in functions:
        # A parameter of the function around it.
        return len(facts.spawns) == 1 and "." not in parts[0]
    todo, seen = [parts[0]], set()
    while todo:
        name = todo.pop()
        seen.add(name)
        inside = [each for each in facts.script.calls() if _within(facts, each, functions[name])]
        if any(init in inside for init in facts.inits):
            return True
        names = {facts.script.dotted(each.func) or "" for each in inside}
        todo += [each for each in names & functions.keys() if each not in seen]
    return False


def is_optional(facts: Facts, call: cst.Call) -> bool:
    """Return whether `spawn` is in an `if` whose `else` calls the function in this process."""
    function = argument(call, "fn", 0)
    name = facts.script.dotted(function.value) if function else None
    branch = facts.script.enclosing(call, cst.If)
    if name is None or branch is None or not isinstance(branch.orelse, cst.Else):
        return False
    return facts.script.is_statement(call) and any(
        facts.script.dotted(each.func) == name and _within(facts, each, branch.orelse)
        for each in facts.script.calls()
    )


def _within(facts: Facts, node: cst.CSTNode, outer: cst.CSTNode) -> bool:
    return any(each is outer for each in facts.script.around(node))
