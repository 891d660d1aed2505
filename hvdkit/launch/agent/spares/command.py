"""Recognise the commands for which a spare interpreter can be started."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
# The options of Python that a spare may have: without an argument, and with one. -E, -I and -S are
# missing, because with them Python ignores `agent/hook/sitecustomize.py`, where the spare waits.
_FLAGS = re.compile(r"-[bBdOPqsu]+")
_WITH_ARGUMENT = re.compile(r"-[WX]")
# With this variable, Python does not add the folder of the script to the module path.
_SAFE_PATH = "PYTHONSAFEPATH"


@dataclass(frozen=True)
class PythonCommand:
    """A command that runs a script or a module with Python.

    Attributes:
        path: the folders that Python puts before its module path for this command.
        file: the absolute path of the script; empty for a module.
    """

    path: Sequence[str]
    file: str


def recognise(
    command: Sequence[str], directory: str, environment: Mapping[str, str]
) -> PythonCommand | None:
    """Return the script or module that `command` runs; None if it may be another kind of command.

    Args:
        command: `python [OPTION...] SCRIPT ...` or `python [OPTION...] -m MODULE ...`.
    """
    words = list(command)
    if not words or not _is_python(words[0], environment):
        return None
    safe = bool(environment.get(_SAFE_PATH))
    position = 1
    while position < len(words):
        word = words[position]
        if word == "-m":
            if position + 1 == len(words):
                return None
            return PythonCommand([] if safe else [os.path.realpath(directory)], "")
        if not word.startswith("-"):
            file = os.path.join(directory, word)
            if not os.path.isfile(file):
                return None  # Python can also run a folder
            return PythonCommand([] if safe else [os.path.dirname(os.path.realpath(file))], file)
        if _FLAGS.fullmatch(word):
            safe = safe or "P" in word
        elif _WITH_ARGUMENT.fullmatch(word):
            position += 1
        elif not _WITH_ARGUMENT.match(word):
            return None
        position += 1
    return None


def _is_python(program: str, environment: Mapping[str, str]) -> bool:
    """Return whether a program is Python itself. A shell script may be named python, too."""
    if not _PYTHON.fullmatch(Path(program).name):
        return False
    path = shutil.which(program, path=environment.get("PATH"))
    if path is None:
        return False
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False
