"""Find the storage for the place of checkpoints: a path or a URL."""

import os
import re
from collections.abc import Mapping
from typing import Any

from hvdkit.checkpoint.posix.storage import PosixStorage
from hvdkit.checkpoint.storage import Storage
from hvdkit.errors import UsageError

_URL = re.compile(r"(.*?)://(.*)", re.DOTALL)


def open_storage(
    place: str | os.PathLike[str], options: Mapping[str, Any] | None = None
) -> Storage:
    """Return the storage for a path or a URL, without accessing it.

    Args:
        place: a path, `file://` and an absolute path, or a URL that fsspec knows.
        options: for fsspec, such as `endpoint_url` or `key`; for URLs only.

    Raises:
        UsageError: fsspec is not installed or does not know the protocol; or there are options for
            a path; or the place is empty.
    """
    text = os.fspath(place)
    if not text:
        raise UsageError(
            "the checkpoint folder is an empty string: expected a path or a URL; '.' is the "
            "current folder"
        )
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/([^/]|$)", text):
        raise UsageError(
            f"the checkpoint folder is {text}, a URL with only one slash. pathlib.Path removes the "
            f"second slash: give the URL as a string."
        )
    url = _URL.fullmatch(text)
    is_file = url is not None and url[1].lower() in ("file", "local")
    if url is not None and is_file and not url[2].startswith("/"):
        raise UsageError(
            f"the checkpoint folder is {text}; expected an absolute path, such as file:///a/b."
        )
    if url is not None and not is_file:
        from hvdkit.checkpoint.objects.storage import ObjectStorage  # fsspec may not be installed

        return ObjectStorage(text, options or {})
    if options:
        raise UsageError(
            f"storage_options {sorted(options)} are for URLs; the checkpoint folder is the local "
            f"path {text}. Remove the options or give a URL."
        )
    return PosixStorage(url[2] if url is not None else os.path.expanduser(text))
