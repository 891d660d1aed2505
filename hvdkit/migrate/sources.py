"""The names that the source of a module defines, read without importing it."""

import ast
from collections.abc import Iterator
from pathlib import Path


def statements(path: Path) -> list[ast.stmt]:
    """Return the statements at the top level of a file."""
    return ast.parse(path.read_text(encoding="utf-8")).body


def defined_names(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements define, "*" for each import of all names."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((each.asname or each.name).split(".")[0] for each in node.names)
        elif isinstance(node, ast.Assign):
            yield from (each.id for each in node.targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
