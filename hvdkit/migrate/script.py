"""A parsed Python file: what its names mean, and the edits that rules request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, TypeVar

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    Assignment,
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    Scope,
    ScopeProvider,
)

from hvdkit.migrate.files import lines_of
from hvdkit.migrate.nodes import imported_names, walk

Edit = Callable[..., "cst.CSTNode | cst.RemovalSentinel"]
Node = TypeVar("Node", bound=cst.CSTNode)


@dataclass(frozen=True, order=True)
class Remark:
    """One line of the file: changed by a rule, or left to a human with advice."""

    line: int
    rule: str
    text: str


@dataclass(frozen=True)
class Finding:
    """A line that a rule has found. `text` is for the user; empty: the reason of the rule."""

    node: cst.CSTNode
    text: str = ""


class Change(Finding):
    """The rule changes the line."""


class Advice(Finding):
    """A human has to change the line."""


class Note(Finding):
    """A difference that needs no change in most scripts."""


@dataclass(eq=False)
class Script:
    """A parsed file.

    Rules read it, and request edits of nodes of the tree as it was parsed. `apply` makes all edits.
    Names are resolved through the imports of the file, so rules see `tensorflow.keras.Model`,
    whatever the script calls it. A name that the file also binds in another way, for
    example as a parameter, is not resolved.
    """

    text: str
    changes: list[Remark] = field(default_factory=list)
    advice: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)
    #: Imports to add at the top, for example "import os".
    new_imports: list[str] = field(default_factory=list)
    #: The other given files that run in the same process: those that import each other.
    related: list[Script] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        # The parser makes no node twice, so the tree needs no copy.
        wrapper = MetadataWrapper(cst.parse_module(self.text), unsafe_skip_copy=True)
        self.module = wrapper.module
        self._positions = wrapper.resolve(PositionProvider)
        self._scopes = wrapper.resolve(ScopeProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._edits: dict[cst.CSTNode, list[Edit]] = {}
        self._before: dict[cst.CSTNode, list[cst.BaseStatement]] = {}
        self._after: dict[cst.CSTNode, list[cst.BaseStatement]] = {}
        self._nodes: dict[type[cst.CSTNode], list[Any]] = {}
        for node in walk(self.module):
            self._nodes.setdefault(type(node), []).append(node)
        self._values_of_attributes = self._assigned_attributes()

    @property
    def script(self) -> Script:
        """This script, as the target of a rule."""
        return self

    # What the file contains.

    def all(self, *kinds: type[Node]) -> Iterator[Node]:
        """Yield the nodes of these classes, in the order of the file."""
        for kind in kinds:
            yield from self._nodes.get(kind, [])

    def calls(self) -> Iterator[cst.Call]:
        """Yield all calls."""
        return self.all(cst.Call)

    def attributes(self) -> Iterator[cst.Attribute]:
        """Yield all attribute accesses, outer ones before those that they contain."""
        return self.all(cst.Attribute)

    def methods(self, *names: str) -> Iterator[tuple[cst.Call, cst.Attribute]]:
        """Yield the calls `x.name(…)`, each with the attribute `x.name`."""
        for call in self.calls():
            if isinstance(call.func, cst.Attribute) and call.func.attr.value in names:
                yield call, call.func

    def call_of(self, function: cst.CSTNode) -> cst.Call | None:
        """Return the call `function(…)`; None if the expression is not called."""
        call = self.parent(function)
        return call if isinstance(call, cst.Call) and call.func is function else None

    def named_calls(self) -> Iterator[tuple[cst.Call, str]]:
        """Yield the calls of names that imports define, each with the full name."""
        for call in self.calls():
            if name := self.name_of(call.func):
                yield call, name

    def uses(self, *kinds: type[cst.CSTNode]) -> Iterator[tuple[Any, str]]:
        """Yield (node, full name) for each use of a name that an import defines.

        Args:
            kinds: the classes of the nodes. Default: attributes.
        """
        for node in self.all(*(kinds or (cst.Attribute,))):
            name = self.name_of(node)
            if name and self.enclosing(node, cst.Import, cst.ImportFrom) is None:
                yield node, name

    def variables(self, name: str) -> Iterator[cst.Name]:
        """Yield the uses of a plain name: not attributes, keywords, and parts of imports."""
        for node in self.all(cst.Name):
            where = self.parent(node)
            is_part = isinstance(where, cst.Attribute) and where.attr is node
            is_keyword = isinstance(where, cst.Arg) and where.keyword is node
            is_imported = self.enclosing(node, cst.Import, cst.ImportFrom) is not None
            if node.value == name and not (is_part or is_keyword or is_imported):
                yield node

    def imported_names(
        self, *kinds: type[cst.Import | cst.ImportFrom]
    ) -> Iterator[tuple[Any, str, cst.ImportAlias]]:
        """Yield (statement, full name, alias) for each name that an import statement has.

        Args:
            kinds: the classes of the statements. Default: both.
        """
        for node in self.all(*(kinds or (cst.Import, cst.ImportFrom))):
            for name, alias in imported_names(node):
                yield node, name, alias

    def line(self, node: cst.CSTNode) -> int:
        """Return the line where the node begins."""
        return int(self._positions[node].start.line)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the node that contains this one; the module contains itself."""
        return self._parents.get(node, self.module)

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the statement line (or the header of a block) that contains the node."""
        kinds = (cst.SimpleStatementLine, cst.BaseCompoundStatement, cst.Module)
        return next(each for each in (node, *self.around(node)) if isinstance(each, kinds))

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes that contain this one, the innermost first and the module last."""
        while node is not self.module:
            node = self.parent(node)
            yield node

    def enclosing(self, node: cst.CSTNode, *kinds: type[Node]) -> Node | None:
        """Return the innermost node of these classes that contains `node`."""
        return next((each for each in self.around(node) if isinstance(each, kinds)), None)

    def is_statement(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is a statement of its own, so that its value is not used."""
        return isinstance(self.parent(node), cst.Expr)

    def source(self, node: cst.CSTNode) -> str:
        """Return the code of a node."""
        return self.module.code_for_node(node)

    def scope(self, node: cst.CSTNode) -> Scope | None:
        """Return the scope in which an expression is evaluated."""
        outward = (node, *self.around(node))
        return next(filter(None, map(self._scopes.get, outward)), None)

    # What names mean.

    def name_of(self, node: cst.CSTNode) -> str | None:
        """Return the full name of a dotted name that an import defines, for example
        "torch.nn.Linear"; None for others."""
        dotted = self.dotted(node)
        if dotted is None:
            return None
        scope = self.scope(node)
        if scope is None:
            return None
        found: set[str] = set()
        for binding in scope[dotted.partition(".")[0]]:
            if isinstance(binding, ImportAssignment):
                found |= {each.name for each in binding.get_qualified_names_for(dotted)}
            elif not self._is_fallback(binding):
                return None
        # A name of horovod counts as that of hvdkit, because the migration renames it.
        later = {re.sub(r"^horovod\b", "hvdkit", each) for each in found}
        return min(found) if len(later) == 1 else None

    @staticmethod
    def dotted(node: cst.CSTNode) -> str | None:
        """Return the text of a plain dotted name, such as "self.model"; None for others."""
        inner = node
        while isinstance(inner, cst.Attribute):
            inner = inner.value
        if not isinstance(inner, cst.Name):
            return None
        return get_full_name_for_node(node)

    def _is_fallback(self, binding: object) -> bool:
        """Return whether a name is bound to None or in an `except`, as after a failed import."""
        if not isinstance(binding, Assignment):
            return False
        value = self._assigned(binding.node)
        is_none = isinstance(value, cst.Name) and value.value == "None"
        return is_none or self.enclosing(binding.node, cst.ExceptHandler) is not None

    def _assigned(self, target: cst.CSTNode) -> cst.BaseExpression | None:
        """Return the value that `target = value` assigns; None for other targets."""
        statement = self.parent(self.parent(target))
        if isinstance(statement, cst.Assign):
            return statement.value
        return None

    def _assigned_attributes(self) -> dict[str, list[cst.BaseExpression | None]]:
        found: dict[str, list[cst.BaseExpression | None]] = {}
        for node in self.all(cst.AssignTarget):
            if isinstance(node.target, cst.Attribute) and (name := self.dotted(node.target)):
                found.setdefault(name, []).append(self._assigned(node.target))
        return found

    def values_of(self, node: cst.CSTNode, depth: int = 4) -> list[cst.BaseExpression] | None:
        """Return the expressions whose values a name may have; None if some are unknown."""
        if isinstance(node, cst.IfExp):
            halves = [self.values_of(each, depth) for each in (node.body, node.orelse)]
            return None if None in halves else [each for half in halves for each in half or ()]
        if not isinstance(node, cst.Attribute | cst.Name) or self.name_of(node) is not None:
            return [node] if isinstance(node, cst.BaseExpression) else None
        values = self.assigned_to(node)
        found: list[cst.BaseExpression] = []
        for value in values:
            more = self.values_of(value, depth - 1) if value is not None and depth else None
            if more is None:
                return None
            found += more
        return found

    def assigned_to(self, node: cst.Attribute | cst.Name) -> Sequence[cst.BaseExpression | None]:
        """Return the expressions that the file assigns to a name; None for those not known."""
        if isinstance(node, cst.Attribute):
            return self._values_of_attributes.get(self.dotted(node) or "", [None])
        scope = self.scope(node)
        bindings = scope[node.value] if scope else set()
        return [
            self._assigned(each.node) if isinstance(each, Assignment) else None for each in bindings
        ] or [None]

    def made_by(self, node: cst.CSTNode) -> list[str] | None:
        """Return the full names of the functions that return the values of a name.

        None if a value is not known to come from a call of an imported function.
        """
        values = self.values_of(node)
        names = [
            self.name_of(each.func) if isinstance(each, cst.Call) else None for each in values or ()
        ]
        return [name for name in names if name] if names and None not in names else None

    def binds(self, name: str) -> bool:
        """Return whether the file uses `name` as a variable anywhere."""
        return any(each.value == name for each in self.all(cst.Name))

    def imports(self, *packages: str) -> bool:
        """Return whether the file imports a module of one of these packages."""
        return any(name.split(".")[0] in packages for name in self.imported)

    @property
    def imported(self) -> list[str]:
        """The full names of all imported modules and names; relative ones begin with a dot."""
        return [name for _, name, _ in self.imported_names()]

    # What rules request. The methods return the change of the line of `node`, for a rule to yield.

    def edit(self, node: cst.CSTNode, edit: Edit, *arguments: Any) -> Change:
        """Replace a node by `edit(node, *arguments)`, after its children and earlier edits."""
        self._edits.setdefault(node, []).append(lambda each: edit(each, *arguments))
        return Change(node)

    def set(self, node: cst.CSTNode, **fields: Any) -> Change:
        """Change fields of a node."""
        return self.edit(node, lambda each: each.with_changes(**fields))

    def put(self, node: cst.CSTNode, new: cst.CSTNode) -> Change:
        """Replace a node by another one."""
        return self.edit(node, lambda _: new)

    def remove(self, node: cst.CSTNode) -> Change:
        """Remove a statement."""
        return self.edit(node, lambda _: cst.RemoveFromParent())

    def insert(
        self, statement: cst.CSTNode, new: cst.BaseStatement, *, before: bool = False
    ) -> None:
        """Insert the statement `new` after `statement`, or before it."""
        (self._before if before else self._after).setdefault(statement, []).append(new)

    def is_edited(self, node: cst.CSTNode) -> bool:
        """Return whether a rule edits or removes the node, or one that contains it."""
        return any(each in self._edits for each in (node, *self.around(node)))

    def change(self, rule: str, node: cst.CSTNode, text: str) -> None:
        """Report that a rule changes the line of `node`."""
        self.changes.append(Remark(self.line(node), rule, text))

    def advise(self, rule: str, node: cst.CSTNode, text: str) -> None:
        """Report a line that a human has to change."""
        self.advice.append(Remark(self.line(node), rule, text))

    def note(self, rule: str, node: cst.CSTNode, text: str) -> None:
        """Report a difference that needs no change in most scripts."""
        self.notes.append(Remark(self.line(node), rule, text))

    def need_import(self, line: str) -> None:
        """Add an import at the top of the file, if it is not there yet."""
        if line not in self.new_imports:
            self.new_imports.append(line)

    def apply(self) -> str:
        """Return the code with all edits."""
        if not (self._edits or self._before or self._after or self.new_imports):
            return self.text
        module = self.module.visit(_Editor(self._edits, self._before, self._after))
        assert isinstance(module, cst.Module)
        after = _with_imports(module, self.new_imports).code
        return _with_layout_of(self.text, self.module.code, after)


class _Editor(cst.CSTTransformer):
    """Makes the edits that rules requested."""

    def __init__(
        self,
        edits: Mapping[cst.CSTNode, Sequence[Edit]],
        before: Mapping[cst.CSTNode, Sequence[cst.BaseStatement]],
        after: Mapping[cst.CSTNode, Sequence[cst.BaseStatement]],
    ) -> None:
        super().__init__()
        self._edits, self._before, self._after = edits, before, after

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> Any:
        result: Any = updated_node
        for edit in self._edits.get(original_node, ()):
            if isinstance(result, cst.CSTNode):
                result = edit(result)
        first = list(self._before.get(original_node, ()))
        last = self._after.get(original_node, ())
        if not first and not last:
            return result
        statements = [result] if isinstance(result, cst.CSTNode) else []
        if first and statements:
            # Comments before the statement stay before the inserted ones.
            first[0] = first[0].with_changes(leading_lines=result.leading_lines)
            statements = [result.with_changes(leading_lines=[])]
        return cst.FlattenSentinel([*first, *statements, *last])


def _with_layout_of(text: str, parsed: str, after: str) -> str:
    """Return `after` with the lines of `text` where nothing has changed.

    LibCST loses some spaces, such as the one in `except KeyError :`. `parsed` is the text as LibCST
    writes it without edits.
    """
    if parsed == text:
        return after
    old, same, new = map(lines_of, (text, parsed, after))
    if len(old) != len(same):
        raise ValueError(
            f"LibCST writes this file with {len(same)} lines instead of {len(old)}, so its layout "
            "cannot be kept. Change the file by hand"
        )
    lines = []
    for kind, start, end, first, last in SequenceMatcher(None, same, new, False).get_opcodes():
        lines += old[start:end] if kind == "equal" else new[first:last]
    return "".join(lines)


def _with_imports(module: cst.Module, lines: Sequence[str]) -> cst.Module:
    """Add imports after the last import of the first block of imports."""
    body = list(module.body)
    present = {module.code_for_node(each).strip() for each in body}
    new = [cst.parse_statement(line) for line in lines if line not in present]
    last = 0
    for i, statement in enumerate(body):
        first = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        if isinstance(first, cst.Import | cst.ImportFrom):
            last = i + 1
        elif last:
            break
    if not last and body and module.get_docstring() is not None:
        last = 1
    body[last:last] = new
    return module.with_changes(body=body)
