"""The patches that hvdkit applies to Horovod 0.28.1, in the order of their numbers.

A patch is a file `NN-NAME.patch`: fields in the manner of Debian's DEP-3
(https://dep-team.pages.debian.net/deps/dep3/), a line `---`, and a diff in git's format with the
full hash of each file before and after. `git apply` accepts it, too.

    Description   the defect without the patch, or the feature that it adds
    Origin        the upstream issue or pull request, or how the defect was found
    Test          the test that fails without the patch, or why there is none
    Minimal       yes: no engine builds without it; see `hvdkit build --patches minimal`
    Adds          a new file = its source in `hvdkit/engine/sources/`

The minimal patches are the first ones of the series. Horovod is Apache-2.0.

To add a patch, apply all patches to Horovod's source distribution with `git apply`, and commit the
result. Change the sources, and write `git diff --full-index > NN-NAME.patch` with the next free
number. Put the fields and the line `---` at its top, new files into `hvdkit/engine/sources/`, and
increase `REVISION`. `tests/unit/engine/test_stock.py --long` runs the patch's test without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cache
from importlib import resources
from pathlib import Path

from hvdkit.engine.patches.diff import Diff, DiffError, blob_hash, parse
from hvdkit.errors import HvdkitError

#: The version of Horovod that the patches fit.
HOROVOD_VERSION = "0.28.1"

#: The N in the version of hvdkit's builds, `0.28.1+hvdkit.N`. Increase it when a patch changes.
REVISION = 30

_FILE = re.compile(r"(\d+)-(.+)\.patch")


class PatchFailed(HvdkitError):
    """A patch is malformed, or does not fit the source tree."""


@dataclass(frozen=True)
class Patch:
    """A patch to Horovod. The module's docstring describes the fields.

    Attributes:
        adds: path of a new file in Horovod's tree -> its content.
        diff: the changes to existing files.
    """

    name: str
    description: str
    origin: str
    test: str
    minimal: bool
    adds: Mapping[str, str]
    diff: Diff

    @property
    def hashes(self) -> dict[str, str]:
        """Path -> git's hash of each file that the patch adds or changes, after the patch."""
        added = {path: blob_hash(content) for path, content in self.adds.items()}
        return added | {change.path: change.after for change in self.diff}


@cache
def series() -> tuple[Patch, ...]:
    """Return all patches, in the order in which they are applied."""
    numbered = {}
    for file in resources.files("hvdkit.engine.patches").iterdir():
        if found := _FILE.fullmatch(file.name):
            numbered[int(found[1])] = _read(found[2], file.read_text(encoding="utf-8"))
    return tuple(patch for _, patch in sorted(numbered.items()))


def select(choice: str = "all") -> tuple[Patch, ...]:
    """Return the patches for `--patches all` or `--patches minimal`."""
    return tuple(patch for patch in series() if choice == "all" or patch.minimal)


def apply(patches: Iterable[Patch], tree: Path) -> None:
    """Apply patches to the unpacked Horovod in `tree`. Nothing is written unless all of them fit.

    Raises:
        PatchFailed: a patch does not fit; names the patch and the file.
    """
    changed: dict[str, str] = {}
    for patch in patches:
        changed |= patch.adds
        for change in patch.diff:
            try:
                before = changed.get(change.path)
                if before is None:
                    before = (tree / change.path).read_text(encoding="utf-8")
                changed[change.path] = change.apply(before)
            except (OSError, DiffError) as error:
                raise PatchFailed(
                    f"the patch `{patch.name}` does not fit {change.path}: {error}. Nothing was "
                    f"changed. Expected the unchanged sdist of Horovod {HOROVOD_VERSION} from the "
                    f"package index. If it is unchanged, install hvdkit again."
                ) from error
    for path, content in changed.items():
        (tree / path).write_text(content, encoding="utf-8")


def _read(name: str, text: str) -> Patch:
    header, _, body = text.partition("\n---\n")
    fields = HeaderParser().parsestr(header)
    try:
        diff = parse(body)
    except DiffError as error:
        raise PatchFailed(
            f"the patch `{name}` is malformed: {error}. Install hvdkit again."
        ) from error

    def field(key: str) -> str:
        return " ".join(fields[key].split())

    sources = resources.files("hvdkit.engine").joinpath("sources")
    adds = (line.split(" = ") for line in fields.get_all("Adds", []))
    return Patch(
        name=name,
        description=field("Description"),
        origin=field("Origin"),
        test=field("Test"),
        minimal=fields["Minimal"] == "yes",
        adds={path: sources.joinpath(file).read_text(encoding="utf-8") for path, file in adds},
        diff=diff,
    )
