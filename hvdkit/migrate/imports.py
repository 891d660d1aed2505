"""Find the local files that a Python file imports."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from hvdkit.migrate import files
from hvdkit.system.plain_files import read_text


class Imports:
    """The imports of local modules.

    An absolute import is looked up in three folders: that of the file that is started, the one
    that contains the package of the importing file, and the one that contains all given files.
    """

    def __init__(self, texts: Mapping[Path, str]) -> None:
        self._texts = dict(texts)
        folders = {path.parent for path in texts}
        self._top = [Path(os.path.commonpath(folders))] if folders else []
        self._found: dict[tuple[Path, Path], list[Path]] = {}

    def text(self, path: Path) -> str:
        """Return the text of a file; empty if it cannot be read."""
        if path not in self._texts:
            try:
                self._texts[path] = read_text(path, files.LONGEST)
            except OSError:
                self._texts[path] = ""
        return self._texts[path]

    def reachable(self, path: Path) -> set[Path]:
        """Return all local files that a file imports, directly or through others."""
        found: set[Path] = set()
        todo = [path]
        while todo:
            key = (todo.pop(), path.parent)
            if key not in self._found:
                self._found[key] = list(self._imported(*key))
            for other in self._found[key]:
                if other not in found and other != path:
                    found.add(other)
                    todo.append(other)
        return found

    def _imported(self, path: Path, start: Path) -> Iterable[Path]:
        try:
            tree = ast.parse(self.text(path))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return
        places = {start, _root(path), *self._top}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    for place in places:
                        yield from _files(place, alias.name)
            elif isinstance(node, ast.ImportFrom):
                names = [
                    node.module or "",
                    *(f"{node.module or ''}.{a.name}".lstrip(".") for a in node.names),
                ]
                own = 0 < node.level <= len(path.parents)
                for place in [path.parents[node.level - 1]] if own else places:
                    for name in filter(None, names):
                        yield from _files(place, name)


def _root(path: Path) -> Path:
    """Return the folder of the outermost package that contains a file."""
    folder = path.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _files(start: Path, module: str) -> Iterable[Path]:
    place = start.joinpath(*module.split("."))
    for path in (place.with_name(place.name + ".py"), place / "__init__.py"):
        if os.path.isfile(path):  # also for a name that is too long
            yield path.resolve()
