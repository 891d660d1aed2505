"""The cache of tested wheels and of the sdist.

The entry of a wheel is a folder whose name is the plan's key. An entry is written under another
name and then renamed, so it is complete or missing, even if a build is interrupted.

Nothing is read from or written to a folder that a user other than root and this one may change. A
build uses private copies only.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import platformdirs

from hvdkit.errors import HvdkitError
from hvdkit.system.plain_files import read_json
from hvdkit.system.trusted_paths import untrusted

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


def make(path: Path) -> Path:
    """Create the folder `path` in the cache.

    Raises:
        HvdkitError: it cannot be created, or another user may change it.
    """
    advice = "Set HVDKIT_CACHE_DIR to a folder"
    try:
        reason = ""
        for missing in (*reversed(path.parents), path):
            if not (reason or missing.is_dir()):
                reason = untrusted(missing.parent)
                if not reason:
                    # Not as the umask says, which may let a group write.
                    missing.mkdir(mode=0o755, exist_ok=True)
        reason = reason or untrusted(path)
    except OSError as error:
        raise HvdkitError(
            f"the cache folder {path} cannot be created ({error.strerror}). {advice} that you can "
            "write to."
        ) from error
    if reason:
        raise HvdkitError(
            f"the cache folder {path} is not used, because {reason}. Expected folders of root or "
            f"of you that nobody else can write to. {advice} of your own, or change the owner or "
            "the mode (`chmod go-w`)."
        )
    return path


@contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """Create a temporary folder in `parent` for the duration of a block."""
    path = Path(tempfile.mkdtemp(prefix=".new-", dir=make(parent)))  # noqa: TID251
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def lookup(key: str, into: Path | None = None) -> Path | None:
    """Return the tested wheel stored under `key`, in $HVDKIT_CACHE_DIR or the user's folder.

    Return None if there is none or it is damaged. If another user could have replaced it, log a
    warning and return None.

    Args:
        key: the key.
        into: a folder; if given, copy the wheel into it, and check and return the copy.
    """
    places = [_given(), platformdirs.user_cache_path("hvdkit")]
    for place in dict.fromkeys(filter(None, places[:1] if places[0] == folder() else places)):
        wheel = _lookup(place / "wheels" / key, into)
        if wheel is not None:
            return wheel
    return None


def _lookup(entry: Path, into: Path | None) -> Path | None:
    try:
        description = entry / "entry.json"
        if not _may_use(entry, description):
            return None
        stored = read_json(description)
        wheel = entry / Path(stored["wheel"]).name
        if not _may_use(entry, wheel):
            return None
        if into is not None:
            wheel = Path(shutil.copy(wheel, into))
        return wheel if sha256(wheel) == stored["sha256"] else None
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _may_use(entry: Path, path: Path) -> bool:
    """Return whether nobody else could have replaced a file of an entry. Otherwise warn."""
    reason = untrusted(path)
    if reason:
        log.warning(
            "the engine in %s is not used, because %s. Expected files of root or of you that "
            "nobody else can write to.",
            entry,
            reason,
        )
    return not reason


def store(key: str, wheel: Path, ingredients: Mapping[str, Any]) -> Path:
    """Store a tested wheel under `key` and replace an older one. Return the stored file."""
    wheels = folder() / "wheels"
    entry = wheels / key
    with staging(wheels) as new:
        full = new / "entry"
        full.mkdir()
        # Other users may share the cache, but cannot read folders of mkdtemp.
        full.chmod(0o755)
        shutil.copyfile(wheel, full / wheel.name)
        content = {
            "wheel": wheel.name,
            "sha256": sha256(wheel),
            "ingredients": dict(ingredients),
        }
        (full / "entry.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
        for file in full.iterdir():
            file.chmod(0o644)
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
