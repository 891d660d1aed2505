"""Find, read and write Python files."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.errors import UsageError
from hvdkit.system import plain_files
from hvdkit.system.plain_files import open_regular
from hvdkit.system.whole_files import beside

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
    #: The state of each file of `texts` when it was read.
    states: dict[Path, os.stat_result] = field(default_factory=dict)


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
            found.states[real] = os.fstat(file.fileno())
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


def write(path: Path, text: str, *, mark: bool, read: os.stat_result) -> None:
    """Replace a file in one step. Its permissions stay; a reader sees the old or the new text.

    Args:
        path: the file.
        text: the new text.
        mark: whether it begins with a byte order mark.
        read: the state of the file when it was read.

    Raises:
        OSError: the file cannot be written, or has changed since it was read; it is as before.
    """
    # The folder may be that of another user, who could exchange it for a link to one of this user.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
        if _identity(found) != _identity(read):
            raise OSError(errno.ESTALE, "it has changed meanwhile: run the command again")
        if not os.access(path.name, os.W_OK, dir_fd=folder):
            raise PermissionError(errno.EACCES, "it is read-only", str(path))
        draft = beside(path).name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(draft, flags, 0o600, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write((_MARK if mark else b"") + text.encode("utf-8"))
                file.flush()
                # Without set-user-ID: the new file may belong to this user, not to the owner.
                os.fchmod(file.fileno(), found.st_mode & 0o777)
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), found.st_uid, found.st_gid)
                os.fsync(file.fileno())
            os.replace(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(draft, dir_fd=folder)
            raise
    finally:
        os.close(folder)


def _identity(state: os.stat_result) -> tuple[int, ...]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def lines_of(text: str) -> list[str]:
    """Return the lines with their ends. Unlike `splitlines`, a form feed does not end a line."""
    return io.StringIO(text, newline="\n").readlines()
