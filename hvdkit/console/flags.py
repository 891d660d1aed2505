"""The options on the command line."""

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvdkit.errors import UsageError

#: The name of a value in the help -> its type. Values with other names are texts.
TYPES: Mapping[str, Callable[[str], Any]] = {"N": int, "FILE": Path, "DIR": Path}


def flag(option: str) -> str:
    """Return an option as the user types it, given its name in a namespace of argparse."""
    return f"--{option.replace('_', '-')}"


def check_least(options: argparse.Namespace, least: Mapping[str, float]) -> None:
    """Raise UsageError if an option that was given is below its least value."""
    for option, bound in least.items():
        number = getattr(options, option)
        if number is not None and number < bound:
            raise UsageError(f"{flag(option)} is {number:g}: expected at least {bound:g}")


def add_options(
    parser: argparse.ArgumentParser,
    text: str,
    types: Mapping[str, Callable[[str], Any]] = TYPES,
    **defaults: Any,
) -> None:
    """Add options to a parser, given the text of their help.

        -p --ssh-port PORT        the names, the name of the value, and after two spaces
                                  the help, which may have several lines
        --range MIN MAX           takes two values
        --dry-run                 a flag
        --env-file FILE...        may be given several times
        --launcher {gloo,mpi}     takes only these values
        [a group]                 the title of the options that follow
        | --rdzv HOST:PORT        excludes the other options of its group that begin with a bar

    Args:
        types: as for `TYPES`.
        defaults: the name of an option in the namespace -> its default.
    """
    group: argparse._ActionsContainer = parser
    alone: argparse._ActionsContainer | None = None
    for entry in re.split(r"\n(?=\S)", text.strip()):
        if entry.startswith("["):
            group, alone = parser.add_argument_group(entry.strip("[]")), None
            continue
        spec, _, help = entry.partition("  ")
        words = spec.removeprefix("| ").split()
        names = [word for word in words if word.startswith("-")]
        values = words[len(names) :]
        options: dict[str, Any] = {"help": " ".join(help.split())}
        if not values:
            options["action"] = "store_true"
        elif values[0].startswith("{"):
            options["choices"] = values[0].strip("{}").split(",")
        else:
            several = values[0].endswith("...")
            metavars = tuple(value.removesuffix("...") for value in values)
            options["type"] = types.get(metavars[0])
            options["metavar"] = metavars if len(metavars) > 1 else metavars[0]
            options |= {"nargs": len(metavars)} if len(metavars) > 1 else {}
            options |= {"action": "append", "default": []} if several else {}
        if spec.startswith("|"):
            alone = alone or group.add_mutually_exclusive_group()
        (alone if spec.startswith("|") else group).add_argument(*names, **options)  # type: ignore
    parser.set_defaults(**defaults)
