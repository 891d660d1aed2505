"""Find, read and write Python files."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit import plain_files
from hvdkit.errors import UsageError
from hvdkit.plain_files import open_regular

#: Folders that hold the code of others.
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "dist-packages", "build", "dist"}
_MARK = b"\xef\xbb\xbf"
#: The longest file that is migrated, in bytes. Parsing it takes about 1.5 GB at most.
LONGEST = 500_000


@dataclass
class Files:
    """The files that were found."""

    #: The real path of a file -> its text, without a byte order mark.
    texts: dict[Path, str] = field(default_factory=dict)
    #: The real path of a file -> the path to show.
    shown: dict[Path, Path] = field(default_factory=dict)
    #: File or folder -> why it cannot be read.
    unreadable: dict[Path, str] = field(default_factory=dict)
    #: Files with a byte order mark, which is kept.
    marked: set[Path] = field(default_factory=set)


def read(paths: Sequence[Path]) -> Files:
    """Read files, and the Python files in folders.

    Raises:
        UsageError: a path does not exist.
    """
    found = Files()
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist: give Python files, or folders of them")
        for each in sorted(_walk(path, found)) if path.is_dir() else [path]:
            real = each.resolve()
            if real not in found.shown:
                found.shown[real] = each
                _read(found, each, real)
    return found


def _walk(folder: Path, found: Files) -> Iterator[Path]:
    """Yield the Python files of a folder, without hidden folders and environments.

    Links are not followed, because they may lead out of the folder. Folders that cannot be read are
    added to `found`.
    """

    def note(error: OSError) -> None:
        found.unreadable[Path(error.filename)] = error.strerror or str(error)

    for root, folders, names in os.walk(folder, onerror=note):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED
            and not os.path.exists(os.path.join(root, name, "pyvenv.cfg"))
        ]
        for name in names:
            path = Path(root, name)
            if name.endswith((".py", ".ipynb")) and path.is_file() and not path.is_symlink():
                yield path


def _read(found: Files, path: Path, real: Path) -> None:
    try:
        with open(open_regular(real), "rb") as file:
            # A notebook may be longer, because of its pictures.
            content = file.read(plain_files.LONGEST)
    except OSError as error:
        found.unreadable[path] = error.strerror or str(error)
        return
    if path.suffix == ".ipynb":
        if b"horovod" in content or b"DistributedDataParallel" in content:
            found.unreadable[path] = (
                "is a notebook: convert it first, with `jupyter nbconvert --to script`"
            )
        return
    if len(content) > LONGEST:
        if b"horovod" in content or b"torch.distributed" in content:
            found.unreadable[path] = (
                f"has more than {LONGEST:,} bytes, so it is left alone: split it first"
            )
        return
    if content.startswith(_MARK):
        found.marked.add(real)
        content = content.removeprefix(_MARK)
    try:
        found.texts[real] = content.decode("utf-8")
    except UnicodeDecodeError:
        if b"horovod" in content or b"torch.distributed" in content:
            found.unreadable[path] = "is not UTF-8, so it is left alone: convert it first"


def write(path: Path, text: str, *, mark: bool) -> None:
    """Replace a file in one step. Its mode stays; a reader sees the old or the new text.

    Raises:
        OSError: the file cannot be written; it is as before.
    """
    state = path.stat()
    if not os.access(path, os.W_OK):
        raise PermissionError(13, "it is read-only", str(path))
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write((_MARK if mark else b"") + text.encode("utf-8"))
            file.flush()
            os.fchmod(file.fileno(), state.st_mode)
            with contextlib.suppress(PermissionError):
                os.fchown(file.fileno(), state.st_uid, state.st_gid)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def lines_of(text: str) -> list[str]:
    """Return the lines with their ends. Unlike `splitlines`, a form feed does not end a line."""
    return io.StringIO(text, newline="\n").readlines()
