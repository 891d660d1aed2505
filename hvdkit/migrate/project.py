"""Migrate files that belong together."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst

from hvdkit.migrate.ddp import facts as ddp_facts
from hvdkit.migrate.ddp import rules as ddp_rules
from hvdkit.migrate.ddp.conversion import Conversion
from hvdkit.migrate.ddp.facts import Facts
from hvdkit.migrate.ddp.units import Unit, divide, mentions
from hvdkit.migrate.imports import Imports
from hvdkit.migrate.nodes import imported_names
from hvdkit.migrate.rules import RULES, UNIMPORTED
from hvdkit.migrate.script import Remark, Script

#: Attributes that only a model in DDP has.
_ATTRIBUTES = re.compile(r"\.(module|no_sync|require_backward_grad_sync)\b")
_HOROVOD = re.compile(r"\b(horovod|hvdkit)\b")

# The most levels of a syntax tree. A chain of 5,000 operators would take 0.75 GB.
_MOST_LEVELS = 1000


@dataclass
class Outcome:
    """The result for one file: its new text, the changes, and the advice."""

    before: str
    after: str
    changes: list[Remark] = field(default_factory=list)
    advice: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)


def concerns(text: str) -> bool:
    """Return whether a file may use Horovod or DDP. A fast search, with false positives."""
    return _HOROVOD.search(text) is not None or mentions(text)


def migrate(texts: Mapping[Path, str]) -> dict[Path, Outcome]:
    """Migrate files, which may import each other.

    Args:
        texts: file -> its text. Each file that is not Python 3 has an outcome with advice.

    Returns:
        The outcomes of the files that use Horovod or DDP, and of the files that they import.
    """
    outcomes: dict[Path, Outcome] = {}
    scripts = _parse({path: text for path, text in texts.items() if concerns(text)}, outcomes)
    users = [path for path, each in scripts.items() if each.imports("horovod", "hvdkit")]
    graph = Imports(texts)
    imported = {path: graph.reachable(path) for path in users}
    # Imported files run with the same versions of the frameworks, so the rules apply to them, too.
    helpers = {other for others in imported.values() for other in others}
    new = {path: text for path, text in texts.items() if path in helpers - scripts.keys()}
    scripts |= _parse(new, outcomes)
    for user, others in imported.items():
        together = [scripts[path] for path in sorted({user, *others}) if path in scripts]
        for script in together:
            script.related += [
                each for each in together if each is not script and each not in script.related
            ]
    distributed = {}
    for path, script in scripts.items():
        found = ddp_facts.gather(script)
        if found.is_distributed:
            distributed[path] = found
        runs_with_horovod = path in users or (path in helpers and not found.is_distributed)
        for rule in RULES if runs_with_horovod else UNIMPORTED:
            rule(script)
    distributed |= _users_of_models(distributed, texts, scripts, graph, outcomes)
    for path in sorted(helpers - texts.keys()):
        if _needs_changes(graph.text(path)):
            for user in users:
                if path in imported[user]:
                    shown = os.path.relpath(path, user.parent)
                    text = (
                        f"this file imports {shown}, which has to change: give the folder of both "
                        f"files"
                    )
                    scripts[user].advice.append(Remark(1, "imports", text))
    paths = {id(script): path for path, script in scripts.items()}
    for unit in divide(distributed, texts):
        _convert(unit, {id(each): paths[id(each.script)] for each in unit.facts})
    for path, script in scripts.items():
        outcomes[path] = _outcome(script)
    return {path: each for path, each in outcomes.items() if each.changes or each.advice}


def _users_of_models(
    distributed: Mapping[Path, Facts],
    texts: Mapping[Path, str],
    scripts: dict[Path, Script],
    graph: Imports,
    outcomes: dict[Path, Outcome],
) -> dict[Path, Facts]:
    """Return the files that scripts of DDP import, and that use attributes of a wrapped model."""
    reached = {other for path in distributed for other in graph.reachable(path)}
    found = {
        path: texts[path]
        for path in (reached & texts.keys()) - distributed.keys()
        if _ATTRIBUTES.search(texts[path])
    }
    scripts |= _parse({path: found[path] for path in found.keys() - scripts.keys()}, outcomes)
    facts = {path: ddp_facts.gather(scripts[path]) for path in found.keys() & scripts.keys()}
    for each in facts.values():
        # They say nothing about how the ranks start and what is wrapped.
        each.optimizers.clear()
    return facts


def _parse(texts: Mapping[Path, str], outcomes: dict[Path, Outcome]) -> dict[Path, Script]:
    """Parse files. A file that cannot be parsed gets an outcome with advice instead."""
    scripts = {}
    for path, text in texts.items():
        try:
            _expect_few_levels(ast.parse(text))
            scripts[path] = Script(text)
        except cst.ParserSyntaxError as error:
            outcomes[path] = Outcome(text, text, advice=[_not_python(text, error.raw_line)])
        except (SyntaxError, ValueError) as error:  # Python 3.11.2 raises the latter for NUL
            line = getattr(error, "lineno", None) or 1
            outcomes[path] = Outcome(text, text, advice=[_not_python(text, line)])
        except (RecursionError, MemoryError):  # Python's parser raises both
            deep = Remark(
                1, "syntax", "expressions are nested too deeply, so the file is left alone"
            )
            outcomes[path] = Outcome(text, text, advice=[deep])
    return scripts


def _needs_changes(text: str) -> bool:
    """Return whether a file that a script of Horovod imports has to change."""
    outcomes: dict[Path, Outcome] = {}
    for script in _parse({Path(): text}, outcomes).values():
        for rule in RULES:
            rule(script)
        return bool(script.changes or script.advice)
    return bool(outcomes)


def _convert(unit: Unit, paths: Mapping[int, Path]) -> None:
    """Convert all scripts of a unit, or none."""
    if any(facts.script.imports("horovod", "hvdkit") for facts in unit.facts):
        _with_horovod(unit)
    elif unit.obstacles:
        for facts, line, reason in unit.obstacles:
            facts.script.advice.append(Remark(line, "ddp", f"not converted: {reason}"))
        others = sorted(paths[id(facts)] for facts, _, _ in unit.obstacles)
        for facts in unit.facts:
            if facts.is_distributed and not facts.script.advice:
                other = os.path.relpath(others[0], paths[id(facts)].parent)
                text = f"not converted, because {other} is not"
                facts.script.advice.append(Remark(1, "ddp", text))
            if not unit.is_unsupported:
                _advise(facts)
    else:
        for facts in unit.facts:
            conversion = Conversion(facts, unit, _free_name(facts.script))
            for ddp_rule in ddp_rules.RULES:
                ddp_rule(conversion)
            conversion.finish()
            for rule in RULES:
                rule(facts.script)


def _with_horovod(unit: Unit) -> None:
    """Leave the lines for torch.distributed in scripts that also import Horovod or hvdkit.

    A unit that calls init_process_group(), or that imports Horovod only under a condition, supports
    both Horovod and DDP, and gets a note. In another unit, a conversion by hand is incomplete: the
    lines that are left get advice.
    """
    supports_both = any(facts.inits or _imports_on_condition(facts.script) for facts in unit.facts)
    for facts in unit.facts:
        if supports_both:
            node = facts.uses[0][0] if facts.uses else facts.script.module
            facts.script.note("ddp", node, "the lines for torch.distributed are left as they are")
        else:
            _advise(facts)


def _imports_on_condition(script: Script) -> bool:
    """Return whether all imports of Horovod or hvdkit are in a `try`, an `if` or a function."""
    found = [
        node
        for node in script.all(cst.Import, cst.ImportFrom)
        if any(name.split(".")[0] in ("horovod", "hvdkit") for name, _ in imported_names(node))
    ]
    kinds = (cst.Try, cst.TryStar, cst.If, cst.FunctionDef)
    return bool(found) and all(script.enclosing(node, *kinds) for node in found)


def _advise(facts: Facts) -> None:
    for node, name in facts.uses:
        if name in ddp_rules.REPLACEMENTS:
            text = f"{name.rpartition('.')[2]}: use {ddp_rules.REPLACEMENTS[name]}"
            facts.script.advise("ddp", node, text)


def _free_name(script: Script) -> str:
    return next(name for name in ("hvd", "hvdkit_torch", "_hvd") if not script.binds(name))


def _outcome(script: Script) -> Outcome:
    after = script.apply()
    ast.parse(after)  # a rule must not break a script
    return Outcome(
        script.text,
        after,
        sorted(set(script.changes)),
        sorted(set(script.advice)),
        sorted(set(script.notes)),
    )


def _expect_few_levels(tree: ast.AST) -> None:
    """Raise RecursionError for a script whose tree LibCST would need much memory for."""
    level: list[ast.AST] = [tree]
    for _ in range(_MOST_LEVELS):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
    raise RecursionError


def _not_python(text: str, number: int) -> Remark:
    lines = text.splitlines()
    line = lines[number - 1] if number <= len(lines) else ""
    advice = "not Python 3, so the file is left alone: correct the syntax error"
    if re.search(r"\basync\s*=", text):
        advice = "`async` is a keyword since Python 3.7: write non_blocking=True"
    elif re.search(r"^\s*print\s+[^(]", line) or re.search(r"^\s*print\s+[\"']", text, re.M):
        advice = "Python 2: convert the file with lib2to3 (Python 3.11 or older) first"
    return Remark(number, "syntax", advice)
