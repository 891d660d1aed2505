"""Nodes of LibCST's trees: find parts of them, and build new ones."""

from collections.abc import Iterator, Mapping

import libcst as cst
from libcst.helpers import get_full_name_for_node

#: Between two arguments.
COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield a node and all nodes in it, in the order of the file."""
    todo = [node]
    while todo:
        each = todo.pop()
        yield each
        todo += reversed(each.children)


def imported_names(node: cst.CSTNode) -> list[tuple[str, cst.ImportAlias]]:
    """Return (full name, alias) for each name of an import statement; none for a star."""
    assert isinstance(node, cst.Import | cst.ImportFrom)
    if isinstance(node.names, cst.ImportStar):
        return []
    start = ""
    if isinstance(node, cst.ImportFrom):
        module = get_full_name_for_node(node.module) if node.module else ""
        start = "." * len(node.relative) + (module or "") + ("." if module else "")
    return [(start + (get_full_name_for_node(each.name) or ""), each) for each in node.names]


def dotted_name(code: str) -> cst.Attribute | cst.Name:
    """Return the tree of a dotted name."""
    node = cst.parse_expression(code)
    assert isinstance(node, cst.Attribute | cst.Name)
    return node


def line_of(content: str | cst.BaseExpression) -> cst.SimpleStatementLine:
    """Return the tree of a line with one statement, of its code or of an expression."""
    if isinstance(content, cst.BaseExpression):
        return cst.SimpleStatementLine([cst.Expr(content)])
    line = cst.parse_statement(content)
    assert isinstance(line, cst.SimpleStatementLine)
    return line


def fill(code: str, **nodes: cst.BaseExpression) -> cst.BaseSmallStatement:
    """Return the tree of a statement, in which expressions take the places of some names."""
    filled = line_of(code).body[0].visit(_Filler(nodes))
    assert isinstance(filled, cst.BaseSmallStatement)
    return filled


class _Filler(cst.CSTTransformer):
    def __init__(self, nodes: Mapping[str, cst.BaseExpression]) -> None:
        super().__init__()
        self._nodes = nodes

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        new = self._nodes.get(original_node.value)
        if new is None:
            return updated_node
        simple = cst.Name | cst.Attribute | cst.Call | cst.Subscript | cst.BaseNumber
        if isinstance(new, simple) or new.lpar:
            return new
        return new.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        old = original_node.value
        new = self._nodes.get(old.value) if isinstance(old, cst.Name) else None
        # An operation needs no parentheses if it is a whole argument.
        plain = isinstance(new, cst.BinaryOperation | cst.UnaryOperation)
        return updated_node.with_changes(value=new) if plain else updated_node


def argument(call: cst.Call, keyword: str, position: int | None = None) -> cst.Arg | None:
    """Return an argument of a call, by its keyword or its position."""
    for i, each in enumerate(call.args):
        if each.keyword is not None and each.keyword.value == keyword:
            return each
        if each.keyword is None and not each.star and i == position:
            return each
    return None


def named(given: cst.Arg, name: str) -> cst.Arg:
    """Return an argument with a keyword."""
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return given.with_changes(keyword=cst.Name(name), equal=equal)


def with_argument(call: cst.Call, name: str, value: cst.BaseExpression) -> cst.Call:
    """Return a call with the keyword argument `name=value` at its end."""
    *first, last = call.args
    new = named(last.with_changes(value=value, star=""), name)
    last = last.with_changes(comma=COMMA, whitespace_after_arg=cst.SimpleWhitespace(""))
    return call.with_changes(args=[*first, last, new])


def without_arguments(call: cst.Call, *keywords: str) -> cst.Call:
    """Return a call without some of its keyword arguments."""
    kept = [each for each in call.args if not (each.keyword and each.keyword.value in keywords)]
    if len(kept) == len(call.args):
        return call
    if kept and call.args[-1] not in kept:
        # The comma of the last argument belongs to the layout of the call.
        kept[-1] = kept[-1].with_changes(
            comma=call.args[-1].comma,
            whitespace_after_arg=call.args[-1].whitespace_after_arg,
        )
    return call.with_changes(args=kept)
