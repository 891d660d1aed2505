"""The folders of a host for what outlives its ranks: commits of elastic states, and steps.

The agent of the host owns them. The launcher imports this module, so it does not import numpy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

#: The folders, separated by `os.pathsep`: one in memory if possible, then one on disk.
VARIABLE = "HVDKIT_HOST_FOLDERS"


def variables(folders: Sequence[Path]) -> dict[str, str]:
    """Return the environment variables from which `folders` reads these folders."""
    return {VARIABLE: os.pathsep.join(map(str, folders))}


def folders(environ: Mapping[str, str] = os.environ) -> Sequence[Path]:
    """Return the folders in the order in which ranks try them; empty if nothing outlives them."""
    return [Path(text) for text in environ.get(VARIABLE, "").split(os.pathsep) if text]
