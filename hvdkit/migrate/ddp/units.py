"""Group scripts that import each other, and check whether a group can be converted together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst

from hvdkit.migrate.ddp.facts import UNSUPPORTED, Facts, model_name, without_module
from hvdkit.migrate.ddp.optimizers import resolve
from hvdkit.migrate.ddp.spawning import can_spawn, is_optional
from hvdkit.migrate.imports import Imports
from hvdkit.migrate.nodes import argument
from hvdkit.migrate.script import Script

#: A file without these words does not use torch.distributed.
_WORDS = re.compile(
    r"torch\.distributed(?!\.elastic)|from\s+torch\s+import\s+(\([^)]*|[^\n]*)\bdistributed\b|"
    r"DistributedDataParallel"
)


def mentions(text: str) -> bool:
    """Return whether a file may use torch.distributed or DDP; fast, with false positives."""
    return _WORDS.search(text) is not None


@dataclass
class Unit:
    """Files that use torch.distributed and import each other."""

    facts: list[Facts]
    #: Why the unit is not converted: (facts of the file, line, reason), each reason once per file.
    obstacles: list[tuple[Facts, int, str]] = field(default_factory=list)
    #: Whether the unit uses something that hvdkit does not have.
    is_unsupported: bool = False

    @property
    def models(self) -> set[str]:
        """The names of the models that DDP wraps, and of the wrapped models."""
        found = {
            name
            for facts in self.facts
            for wrap in facts.wraps
            for name in (wrap.target, model_name(facts.script, wrap.model))
        } - {""}
        while (
            more := {name for facts in self.facts for name in _aliases(facts.script, found)} - found
        ):
            found |= more
        return found

    @property
    def is_conditional(self) -> bool:
        """Whether the scripts can also run as one process, without torch.distributed."""
        return any(facts.is_conditional for facts in self.facts)


def _aliases(script: Script, models: set[str]) -> set[str]:
    """Return other names of the models: `plain = model.module`, or `self.model = model`."""
    found: set[str] = set()
    for node in script.all(cst.Assign):
        targets = {script.dotted(each.target) or "" for each in node.targets}
        value = model_name(script, node.value)
        if value in models:
            found |= targets
        elif targets & models:
            found.add(value)
    return found - {"", "None"}


def divide(scripts: Mapping[Path, Facts], texts: Mapping[Path, str]) -> list[Unit]:
    """Divide the scripts of torch.distributed into units, and examine each.

    Args:
        scripts: the facts of the files that use torch.distributed.
        texts: all given files, because scripts may import each other through other files.
    """
    graph = Imports(texts)
    reached = {path: graph.reachable(path) for path in scripts}
    units: list[tuple[set[Path], set[Path]]] = []
    for path in scripts:
        files, outside = {path}, set()
        for other in reached[path]:
            if other in scripts:
                files.add(other)
            elif other not in texts and mentions(graph.text(other)):
                outside.add(other)
        joined = [each for each in units if each[0] & files]
        for each in joined:
            units.remove(each)
            files |= each[0]
            outside |= each[1]
        units.append((files, outside))
    made = []
    for files, outside in units:
        unit = Unit([scripts[path] for path in sorted(files)])
        _examine(unit, outside)
        made.append(unit)
    return made


def _examine(unit: Unit, outside: Iterable[Path]) -> None:
    """Find what prevents the conversion of a unit."""
    first = unit.facts[0]

    def obstacle(reason: str, facts: Facts = first, node: object = None) -> None:
        line = facts.script.line(node) if node is not None else 1  # type: ignore[arg-type]
        if not any(each[0] is facts and each[2] == reason for each in unit.obstacles):
            unit.obstacles.append((facts, line, reason))

    for path in sorted(outside):
        obstacle(
            f"it imports {path}, which uses torch.distributed too: give both to hvdkit migrate"
        )
    starts_ranks = any(
        not is_optional(facts, call) for facts in unit.facts for call in facts.spawns
    )
    for facts in unit.facts:
        for node, reason in facts.blockers:
            obstacle(reason, facts, node)
            unit.is_unsupported |= reason in UNSUPPORTED.values()
        for call in facts.inits if starts_ranks else ():
            rank = argument(call, "rank")
            if rank is not None and not isinstance(rank.value, cst.Name):
                obstacle(
                    "the script computes its ranks: start them with `hvdkit run`, and use "
                    "hvd.rank() and hvd.local_rank()",
                    facts,
                    call,
                )
        for call in facts.spawns:
            if not is_optional(facts, call) and not can_spawn(facts, call):
                obstacle(
                    "start the ranks with `hvdkit run` instead of torch.multiprocessing.spawn",
                    facts,
                    call,
                )
    if unit.obstacles:
        return
    resolve(unit.facts, unit.models, unit.is_conditional)
    wraps = [(facts, wrap) for facts in unit.facts for wrap in facts.wraps]
    optimizers = [(facts, each) for facts in unit.facts for each in facts.optimizers]
    if not any(facts.inits for facts in unit.facts):
        obstacle("no file calls init_process_group(): give the script that calls it, too")
    if not wraps:
        obstacle("no file wraps a model in DistributedDataParallel")
        return
    models = unit.models
    for facts, optimizer in optimizers:
        if not optimizer.model:
            obstacle("it is not clear whose parameters this optimizer has", facts, optimizer.call)
        elif optimizer.model not in models:
            obstacle(
                f"this optimizer has the parameters of {optimizer.model}, which "
                f"DistributedDataParallel does not wrap",
                facts,
                optimizer.call,
            )
        if unit.is_conditional and not optimizer.target:
            obstacle("assign the optimizer to a name first", facts, optimizer.call)
    for facts, wrap in wraps:
        own = {wrap.target, model_name(facts.script, wrap.model)}
        if len(wraps) == 1:
            own |= models
        if not any(without_module(each.model) in own for _, each in optimizers):
            obstacle(
                "no optimizer of torch.optim is made from the parameters of this model: wrap its "
                "optimizer with hvd.DistributedOptimizer by hand",
                facts,
                wrap.call,
            )
