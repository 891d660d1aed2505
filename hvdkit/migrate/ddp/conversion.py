"""Edit a script of DDP that is converted completely: `Conversion`, which the rules of DDP use."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from hvdkit.migrate.ddp.facts import Facts, Optimizer
from hvdkit.migrate.ddp.units import Unit
from hvdkit.migrate.nodes import imported_names, line_of, walk
from hvdkit.migrate.script import Change, Script

IMPORT = "import hvdkit.torch as {}"


@dataclass
class Conversion:
    """One script of a unit that is being converted."""

    facts: Facts
    unit: Unit
    #: The name of hvdkit.torch in the script.
    hvd: str
    #: The nodes of names that rules have replaced.
    replaced: set[cst.CSTNode] = field(default_factory=set)
    uses_hvd: bool = False

    @property
    def script(self) -> Script:
        """The script."""
        return self.facts.script

    def call(self, function: str, *arguments: str) -> cst.BaseExpression:
        """Return a call of a function of hvdkit.torch."""
        self.uses_hvd = True
        return cst.parse_expression(f"{self.hvd}.{function}({', '.join(arguments)})")

    def name(self, name: str) -> cst.Attribute | cst.Name:
        """Return a name of hvdkit.torch."""
        self.uses_hvd = True
        node = cst.parse_expression(f"{self.hvd}.{name}")
        assert isinstance(node, cst.Attribute)
        return node

    def with_ranks(self, line: cst.SimpleStatementLine) -> cst.BaseStatement:
        """Return a line; in `if hvd.is_initialized():` if the unit can also run without init."""
        if not self.unit.is_conditional:
            return line
        return cst.If(self.call("is_initialized"), cst.IndentedBlock([line]))

    def replace(self, node: cst.CSTNode, new: cst.BaseExpression) -> Change:
        """Replace an expression by another one."""
        self.forget(node)
        parentheses = {
            key: getattr(node, key)
            for key in ("lpar", "rpar")
            if isinstance(node, cst.BaseExpression)
        }
        return self.script.put(node, new.with_changes(**parentheses))

    def forget(self, node: cst.CSTNode) -> None:
        """Remember that the names in a node are not used any more."""
        self.replaced.update(walk(node))

    def optimizers_of(self, model: str) -> list[Optimizer]:
        """Return the optimizers of a model.

        If none has this model, return all optimizers of the script, provided that they have one
        model: `model` may be another name for it.
        """
        own = [each for each in self.facts.optimizers if each.target]
        exact = [each for each in own if each.model == model]
        return exact or (own if len({each.model for each in own}) == 1 else [])

    def finish(self) -> None:
        """Import hvdkit.torch, and remove imports that are not used any more."""
        lines = [
            (node, statement, unused)
            for node in self.script.module.body
            if isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1
            for statement in node.body
            if isinstance(statement, cst.Import | cst.ImportFrom)
            if (unused := self._unused(statement))
        ]
        # The import of hvdkit.torch replaces an unused import, preferably one of PyTorch.
        lines.sort(key=lambda each: "torch" not in self.script.source(each[0]))
        place = None
        for node, statement, unused in lines:
            assert not isinstance(statement.names, cst.ImportStar)
            if len(unused) < len(statement.names):
                kept = [each for each in statement.names if each not in unused]
                kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
                self.script.set(statement, names=kept)
            elif place is None and self.uses_hvd:
                place = node
                self.script.set(node, body=line_of(IMPORT.format(self.hvd)).body)
            elif not _comments(node):
                self.script.remove(node)
        if place is None and self.uses_hvd:
            self.script.need_import(IMPORT.format(self.hvd))

    def _unused(self, statement: cst.Import | cst.ImportFrom) -> list[cst.ImportAlias]:
        """Return the names of an import whose uses rules have replaced, all of them.

        A variable of the same name counts as a use, too.
        """
        found = []
        for _, alias in imported_names(statement):
            name = alias.evaluated_alias or alias.evaluated_name.split(".")[0]
            uses = set(self.script.variables(name))
            if uses and uses <= self.replaced:
                found.append(alias)
        return found


def _comments(node: cst.CSTNode) -> list[cst.Comment]:
    """Return the comments in a statement and before it."""
    return [each for each in walk(node) if isinstance(each, cst.Comment)]


def comment_lines(node: cst.CSTNode) -> list[cst.EmptyLine]:
    """Return the comments within an expression as lines of their own."""
    return [cst.EmptyLine(comment=each) for each in _comments(node)]


def keep_comments(script: Script, node: cst.CSTNode) -> None:
    """Put the comments of a replaced expression before its statement."""
    comments = comment_lines(node)
    line = script.statement(node)
    if comments and isinstance(line, cst.SimpleStatementLine):
        script.edit(
            line, lambda each: each.with_changes(leading_lines=[*each.leading_lines, *comments])
        )
