"""Folders of libraries in /tmp, from which ranks run code or read settings."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hvdkit.system.trusted_paths import untrusted


def variables(environment: Mapping[str, str], own: Path) -> dict[str, str]:
    """Return variables that replace folders which another user may have made.

    PyTorch runs the code in the folder torchinductor_USER of TMPDIR, whoever has made it. This
    function makes it before another user can. Keras reads the settings in /tmp/.keras if it cannot
    write to the home folder.

    Args:
        environment: the environment of a rank. Its own settings take precedence.
        own: a folder of this user.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the system does not know this user
        user = f"uid_{os.getuid()}"
    user = re.sub(r'[\\/:*?"<>|]', "_", user)
    parent = Path(environment.get("TMPDIR") or tempfile.gettempdir())
    found = {}
    if not _make(parent / f"torchinductor_{user}"):
        found["TORCHINDUCTOR_CACHE_DIR"] = str(own / "compiled")
    if not os.access(Path("~").expanduser(), os.W_OK):
        settings = parent / f"keras_{user}"
        found["KERAS_HOME"] = str(settings if _make(settings) else own / "keras")
    return found


def _make(folder: Path) -> bool:
    """Make a folder if it does not exist. Return whether no other user can change it."""
    with suppress(OSError):
        folder.mkdir(mode=0o700)
    try:
        return not untrusted(folder)
    except OSError:
        return False
