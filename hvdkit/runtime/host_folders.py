"""The folders of a host for what outlives its ranks: commits of elastic states, and steps.

The agent of the host owns them. The launcher imports this module, so it does not import numpy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdkit.system.owned_folders import is_own

#: The folders, separated by `os.pathsep`: one in memory if possible, then one on disk.
VARIABLE = "HVDKIT_HOST_FOLDERS"


def variables(folders: Sequence[Path]) -> dict[str, str]:
    """Return the environment variables from which `folders` reads these folders."""
    return {VARIABLE: os.pathsep.join(map(str, folders))}


def folders(environ: Mapping[str, str] = os.environ) -> Sequence[Path]:
    """Return the folders in the order in which ranks try them; empty if nothing outlives them.

    A program that cleans /tmp may have deleted a folder, and another user may then have made it. It
    is left out: a commit contains code.
    """
    named = [Path(text) for text in environ.get(VARIABLE, "").split(os.pathsep) if text]
    return [folder for folder in named if is_own(folder)]
