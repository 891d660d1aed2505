"""The cache of tested wheels and of the sdist.

The entry of a wheel is a folder whose name is the plan's key. An entry is written under another
name and then renamed, so it is complete or missing, even if a build is interrupted.
"""

from __future__ import annotations

import errno
import grp
import hashlib
import json
import logging
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import platformdirs

from hvdkit.errors import HvdkitError
from hvdkit.plain_files import read_json

log = logging.getLogger("hvdkit.engine")

# How often `store` tries to rename an entry while other processes store the same key.
_ATTEMPTS = 10


def folder() -> Path:
    """Return the folder for new entries.

    $HVDKIT_CACHE_DIR if it is set and this user can write to it; otherwise `~/.cache/hvdkit`.
    """
    given = _given()
    if given is None or (given.is_dir() and not os.access(given, os.W_OK | os.X_OK)):
        return platformdirs.user_cache_path("hvdkit")
    return given


def _given() -> Path | None:
    chosen = os.environ.get("HVDKIT_CACHE_DIR")
    return Path(chosen).absolute() if chosen else None


def _untrusted(path: Path) -> str:
    """Return how another user could have replaced a file; "" if none could.

    Checks the owner and the mode of the file and of every folder above it, because an installed
    engine runs with the rights of this user.
    """
    path = path.resolve()
    for part in (path, *path.parents):
        found = part.stat()
        if found.st_uid not in (0, os.geteuid()):
            return f"{part} belongs to user {_user_name(found.st_uid)}"
        if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
            continue  # Others may add files, but not replace them.
        if found.st_mode & stat.S_IWOTH:
            return f"all users may write to {part}"
        if found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid):
            return f"its group may write to {part}"
    return ""


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _is_private(group: int) -> bool:
    """Return whether this user is the only member of a group."""
    try:
        found = grp.getgrgid(group)
        own = pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    primary = [user.pw_name for user in pwd.getpwall() if user.pw_gid == group]
    return {*found.gr_mem, *primary} <= {own.pw_name}


def make(path: Path) -> Path:
    """Create the folder `path` in the cache."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HvdkitError(
            f"the cache folder {path} cannot be created ({error.strerror}). Set HVDKIT_CACHE_DIR "
            "to a folder that you can write to."
        ) from error
    return path


@contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """Create a temporary folder in `parent` for the duration of a block."""
    path = Path(tempfile.mkdtemp(prefix=".new-", dir=make(parent)))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def lookup(key: str) -> Path | None:
    """Return the tested wheel stored under `key`, in $HVDKIT_CACHE_DIR or the user's folder.

    Return None if there is none or it is damaged. If another user could have replaced it, log a
    warning and return None.
    """
    places = [_given(), platformdirs.user_cache_path("hvdkit")]
    for place in dict.fromkeys(filter(None, places[:1] if places[0] == folder() else places)):
        wheel = _lookup(place / "wheels" / key)
        if wheel is not None:
            return wheel
    return None


def _lookup(entry: Path) -> Path | None:
    try:
        stored = read_json(entry / "entry.json")
        wheel = entry / Path(stored["wheel"]).name
        for path in (entry / "entry.json", wheel):
            if reason := _untrusted(path):
                log.warning(
                    "the engine in %s is not used, because %s. Expected files of root or of you "
                    "that nobody else can write to. hvdkit builds a new engine.",
                    entry,
                    reason,
                )
                return None
        return wheel if sha256(wheel) == stored["sha256"] else None
    except (OSError, KeyError, TypeError, ValueError):
        return None


def store(key: str, wheel: Path, ingredients: Mapping[str, Any]) -> Path:
    """Store a tested wheel under `key` and replace an older one. Return the stored file."""
    wheels = folder() / "wheels"
    entry = wheels / key
    with staging(wheels) as new:
        full = new / "entry"
        full.mkdir()
        # Other users may share the cache, but cannot read folders of mkdtemp.
        full.chmod(0o755)
        shutil.copy2(wheel, full / wheel.name)
        content = {
            "wheel": wheel.name,
            "sha256": sha256(wheel),
            "ingredients": dict(ingredients),
        }
        (full / "entry.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
        _rename(full, entry, new)
    return entry / wheel.name


def _rename(new: Path, entry: Path, staged: Path) -> None:
    """Rename the folder `new` to `entry`, and move an older entry to the folder `staged`."""
    for attempt in range(_ATTEMPTS):
        # A rename cannot replace a folder that has files: move the old one first.
        with suppress(FileNotFoundError):
            entry.rename(staged / f"old-{attempt}")
        try:
            new.rename(entry)
            return
        except OSError as error:
            # Another process has stored the same key in the meantime.
            if attempt == _ATTEMPTS - 1 or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
