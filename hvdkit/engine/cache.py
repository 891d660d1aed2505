"""Proven wheels and the sdist, kept in the user's cache folder.

A wheel's entry is a folder named by the plan's key. It is written beside and renamed, so an entry
is whole or not there; what an interrupted build leaves behind is no entry.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

from hvdkit.errors import HvdkitError


def folder() -> Path:
    """hvdkit's cache folder: $HVDKIT_CACHE_DIR, else the user's (`~/.cache/hvdkit`)."""
    chosen = os.environ.get("HVDKIT_CACHE_DIR")
    return Path(chosen).absolute() if chosen else platformdirs.user_cache_path("hvdkit")


def make(path: Path) -> Path:
    """Create the folder `path` inside the cache, or say what stands in the way."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HvdkitError(
            f"the cache folder {path} cannot be made ({error.strerror}); set HVDKIT_CACHE_DIR to a "
            "folder that you can write to."
        ) from error
    return path


@contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """A new folder inside `parent` for something that will be renamed into place, then removed."""
    path = Path(tempfile.mkdtemp(prefix=".new-", dir=make(parent)))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sha256(path: Path) -> str:
    """The file's SHA-256 as hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def lookup(key: str) -> Path | None:
    """The proven wheel stored under `key`; None where there is none, or it was damaged since."""
    entry = folder() / "wheels" / key
    try:
        stored = json.loads((entry / "entry.json").read_text(encoding="utf-8"))
        wheel = entry / stored["wheel"]
        return wheel if sha256(wheel) == stored["sha256"] else None
    except (FileNotFoundError, NotADirectoryError, KeyError, ValueError):
        return None


def store(key: str, wheel: Path, ingredients: Mapping[str, Any]) -> Path:
    """Keep a proven `wheel` under `key`, in place of what was there. Returns the kept file."""
    wheels = folder() / "wheels"
    entry = wheels / key
    with staging(wheels) as new:
        shutil.copy2(wheel, new / wheel.name)
        content = {
            "wheel": wheel.name,
            "sha256": sha256(wheel),
            "ingredients": dict(ingredients),
        }
        (new / "entry.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
        full = new.with_name(new.name + ".full")
        new.rename(full)
    # A folder cannot be renamed over one that has files: move the old one out of the way first.
    with staging(wheels) as old:
        if entry.exists():
            entry.rename(old / "entry")
        full.rename(entry)
    return entry / wheel.name
