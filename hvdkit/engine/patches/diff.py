"""Parse and apply the diffs of `git diff --full-index`.

`parse` returns a `Change` per file. A change applies only to the exact file that the diff was made
from: git's hashes of the file before and after the change must match.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_FILE = re.compile(r"diff --git a/(\S+) b/(\S+)\n")
_INDEX = re.compile(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: \d+)?\n")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@.*\n")


class DiffError(ValueError):
    """A diff is malformed, or does not fit a file."""


@dataclass(frozen=True)
class Hunk:
    """Consecutive lines of a file and their replacement.

    Attributes:
        start: the index of the first old line.
        old: the lines before, context included.
        new: the lines after, context included.
    """

    start: int
    old: Sequence[str]
    new: Sequence[str]


@dataclass(frozen=True)
class Change:
    """The changes to one file.

    Attributes:
        path: the file.
        before: git's hash of the file before the change: SHA-1 of its blob.
        after: git's hash of the file after the change.
        hunks: in the order of the file.
    """

    path: str
    before: str
    after: str
    hunks: Sequence[Hunk]

    def apply(self, text: str) -> str:
        """Return the changed content of the file.

        Raises:
            DiffError: `text` is not the content that the diff was made from.
        """
        found = blob_hash(text)
        if found != self.before:
            raise DiffError(f"its git hash is {found}; expected {self.before}")
        lines = text.splitlines(keepends=True)
        result: list[str] = []
        end = 0
        for hunk in self.hunks:
            result += lines[end : hunk.start]
            end = hunk.start + len(hunk.old)
            if lines[hunk.start : end] != list(hunk.old):
                raise DiffError(f"line {hunk.start + 1} differs from the diff")
            result += hunk.new
        changed = "".join(result + lines[end:])
        if blob_hash(changed) != self.after:
            raise DiffError(
                f"the result has the git hash {blob_hash(changed)}; expected {self.after}"
            )
        return changed


Diff = tuple[Change, ...]


def parse(text: str) -> Diff:
    """Parse the output of `git diff --full-index`, without renamed, new or deleted files.

    Raises:
        DiffError: it is not such a diff.
    """
    lines = text.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if _FILE.fullmatch(line)]
    if not starts or starts[0] != 0:
        raise DiffError("it does not begin with `diff --git`")
    return tuple(
        _change(lines[start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True)
    )


def blob_hash(text: str) -> str:
    """Return the hash that git gives a file: the SHA-1 of its blob."""
    content = text.encode()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _change(lines: Sequence[str]) -> Change:
    file, index = _FILE.fullmatch(lines[0]), _INDEX.fullmatch("".join(lines[1:2]))
    if file is None or index is None or file[1] != file[2]:
        raise DiffError(f"{lines[0].strip()}: expected one file and an index line with full hashes")
    if lines[2:4] != [f"--- a/{file[1]}\n", f"+++ b/{file[1]}\n"]:
        raise DiffError(f"{file[1]}: expected the lines `---` and `+++` with its name")
    return Change(file[1], index[1], index[2], tuple(_hunks(lines[4:])))


def _hunks(lines: Sequence[str]) -> Iterator[Hunk]:
    starts = [i for i, line in enumerate(lines) if _HUNK.fullmatch(line)]
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        header = _HUNK.fullmatch(lines[start])
        assert header is not None
        body = lines[start + 1 : end]
        old = [line[1:] for line in body if line[0] in " -"]
        if len(old) != int(header[2] or 1) or any(line[0] not in " +-" for line in body):
            raise DiffError(f"malformed hunk: {lines[start].strip()}")
        yield Hunk(int(header[1]) - 1, old, [line[1:] for line in body if line[0] in " +"])
