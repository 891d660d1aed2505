"""Options and templates of all kinds of files of `hvdkit generate`."""

from __future__ import annotations

import argparse
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: The option for restarts by `hvdkit run`.
RESTARTS = """\
--restarts N           let `hvdkit run` start the ranks again after a failure, at most N times in a
                       row without a new checkpoint (default: never)"""

_TEMPLATES = Path(__file__).with_name("templates")


def restarts(options: argparse.Namespace) -> list[str]:
    """Return the arguments of `hvdkit run` for restarts."""
    return [] if options.restarts is None else ["--restarts", str(options.restarts)]


def script_name(command: Sequence[str]) -> str:
    """Return the name of the command's script, without its suffix."""
    scripts = [word for word in command if word.endswith((".py", ".sh"))]
    return Path(scripts[0] if scripts else command[0]).stem


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Return a template with its values.

    A line with the name of a value alone becomes the lines of this value, with the same
    indentation. It is left out if there is no value.
    """
    lines = []
    for line in _TEMPLATES.joinpath(template).read_text().splitlines():
        indent, name = re.fullmatch(r"( *)(.*)", line).groups()  # type: ignore[union-attr]
        if name.startswith("$") and name[1:] in values:
            block = (values[name[1:]] or "").removesuffix("\n")
            lines += [indent + each for each in block.split("\n") if block]
        else:
            lines.append(string.Template(line).substitute(values))
    return "".join(f"{line}\n" for line in lines)
