"""Migrate files that belong together."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst

from hvdkit.migrate.ddp import facts as ddp_facts
from hvdkit.migrate.ddp import rules as ddp_rules
from hvdkit.migrate.ddp.conversion import Conversion
from hvdkit.migrate.ddp.units import Unit, divide, mentions
from hvdkit.migrate.rules import RULES
from hvdkit.migrate.script import Remark, Script

_HOROVOD = re.compile(r"\b(horovod|hvdkit)\b")


@dataclass
class Outcome:
    """What the rules did with a file, and what they leave to a human."""

    before: str
    after: str
    changes: list[Remark] = field(default_factory=list)
    advice: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)


def concerns(text: str) -> bool:
    """Return whether a file may use Horovod or DDP. Cheap, and true too often."""
    return _HOROVOD.search(text) is not None or mentions(text)


def migrate(texts: Mapping[Path, str]) -> dict[Path, Outcome]:
    """Migrate files, which may import each other.

    Args:
        texts: file -> its text. Each file that is not Python 3 has an outcome with advice.

    Returns:
        The outcomes of the files that use Horovod or DDP.
    """
    outcomes: dict[Path, Outcome] = {}
    scripts: dict[Path, Script] = {}
    for path, text in texts.items():
        if not concerns(text):
            continue
        try:
            scripts[path] = Script(text)
        except cst.ParserSyntaxError as error:
            outcomes[path] = Outcome(text, text, advice=[_not_python(text, error)])
    distributed = {}
    for path, script in scripts.items():
        found = ddp_facts.gather(script)
        if found.is_distributed:
            distributed[path] = found
        if script.imports("horovod", "hvdkit") or "horovod" in script.text:
            for rule in RULES:
                rule(script)
    paths = {id(script): path for path, script in scripts.items()}
    for unit in divide(distributed, texts):
        _convert(unit, {id(each): paths[id(each.script)] for each in unit.facts})
    for path, script in scripts.items():
        outcomes[path] = _outcome(script)
    return {path: each for path, each in outcomes.items() if each.changes or each.advice}


def _convert(unit: Unit, paths: Mapping[int, Path]) -> None:
    """Convert all scripts of a unit, or none."""
    for facts in unit.facts:
        for call in facts.spawns:
            if ddp_rules.spawn_parts(facts.script, call) is None:
                reason = "start the ranks with `hvdkit run` instead of torch.multiprocessing.spawn"
                unit.obstacles.append((facts, facts.script.line(call), reason))
    if not unit.obstacles:
        for facts in unit.facts:
            conversion = Conversion(facts, unit, _free_name(facts.script))
            for rule in ddp_rules.RULES:
                rule(conversion)
            conversion.finish()
            for rule in RULES:
                rule(facts.script)
        return
    for facts, line, reason in unit.obstacles:
        place = "" if len(unit.facts) == 1 else f" with {paths[id(facts)]}, line {line}"
        for each in unit.facts:
            own = each is facts
            text = f"not converted: {reason}" if own else f"not converted{place}: {reason}"
            each.script.advice.append(Remark(line if own else 1, "ddp", text))
    for facts in unit.facts:
        if facts.script.imports("horovod"):
            continue  # a script for both: DDP's part stays
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


def _not_python(text: str, error: cst.ParserSyntaxError) -> Remark:
    lines = text.splitlines()
    line = lines[error.raw_line - 1] if error.raw_line <= len(lines) else ""
    advice = "not Python 3, so the file is left alone: correct the syntax error"
    if re.search(r"\basync\s*=", text):
        advice = "`async` is a keyword since Python 3.7: write non_blocking=True"
    elif re.search(r"^\s*print\s+[^(]", line) or re.search(r"^\s*print\s+[\"']", text, re.M):
        advice = "Python 2: convert the file with lib2to3 (Python 3.11 or older) first"
    return Remark(error.raw_line, "syntax", advice)
