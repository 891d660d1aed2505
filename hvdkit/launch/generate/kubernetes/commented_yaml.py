"""YAML with a comment above each key that needs one, for files that people edit."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

_WIDTH = 100

#: The path of a key: the keys and list indices that lead to it.
KeyPath = tuple[str | int, ...]
#: The comments of a document, each by the path of the key above which it is written.
Comments = dict[KeyPath, str]


@dataclass(frozen=True)
class Document:
    """One YAML document.

    Attributes:
        content: the document.
        comments: the comments, by the paths of keys in `content`.
    """

    content: Mapping[str, Any]
    comments: Comments = field(default_factory=dict)


def dump(*documents: Document) -> str:
    """Return the documents as YAML, separated by `---`, with their comments."""
    return "---\n".join(_dump(document) for document in documents)


def below(path: KeyPath, comments: Comments) -> Comments:
    """Return the comments with `path` in front of each key, for a document with the object."""
    return {(*path, *key): comment for key, comment in comments.items()}


class _Dumper(yaml.SafeDumper):
    """Write repeated values in full, because a user who edits one must not change another."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _dump(document: Document) -> str:
    dumped = yaml.dump(document.content, Dumper=_Dumper, sort_keys=False, width=_WIDTH)
    lines = dumped.splitlines()
    root = yaml.compose(dumped)
    assert root is not None
    places = dict(_places(root))
    # Insert from the end: the lines above keep their numbers.
    for path in sorted(document.comments, key=lambda path: places[path], reverse=True):
        line, column = places[path]
        mark = " " * column + "# "
        comment = document.comments[path]
        lines[line:line] = textwrap.wrap(
            comment, _WIDTH, initial_indent=mark, subsequent_indent=mark
        )
    return "\n".join([*lines, ""])


def _places(node: yaml.Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, tuple[int, int]]]:
    """Yield the line and column of each key."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), (key.start_mark.line, key.start_mark.column)
            yield from _places(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _places(value, (*path, number))
