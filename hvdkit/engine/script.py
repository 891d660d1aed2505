"""The script `horovodrun`, which is a command of hvdkit.

Stock Horovod, and engines of revisions before 28, have a script of this name. When pip installs
such a wheel, it replaces hvdkit's script. When pip removes the wheel, it removes the script.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

NAME = "horovodrun"


def of_hvdkit() -> Path | None:
    """Return the path of hvdkit's script, whatever is there now; None without installed scripts."""
    try:
        files = metadata.files("hvdkit") or []
    except metadata.PackageNotFoundError:
        return None
    # Beside the script `hvdkit`, because older versions of hvdkit had only this one.
    found = (Path(str(file.locate())) for file in files if file.name == "hvdkit")
    return next((path.resolve().with_name(NAME) for path in found if path.is_file()), None)


def is_hvdkits(path: Path) -> bool:
    """Return whether a script runs hvdkit."""
    try:
        return b"hvdkit.cli" in path.read_bytes()
    except OSError:
        return False


def restore() -> None:
    """Write hvdkit's script again, if it is missing or another is in its place."""
    path = of_hvdkit()
    if path is None or is_hvdkits(path):
        return
    text = path.with_name("hvdkit").read_text(encoding="utf-8")
    path.unlink(missing_ok=True)
    path.write_text(re.sub(r"\bmain\b", NAME, text), encoding="utf-8")
    path.chmod(path.with_name("hvdkit").stat().st_mode)
