"""Checks of options, and the script's name, for all kinds of files of `hvdkit generate`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdkit.errors import UsageError
from hvdkit.flags import flag


def check_command(options: argparse.Namespace, example: str) -> None:
    """Raise UsageError, with `example`, if the command is empty."""
    if not options.command:
        raise UsageError(
            f"there is no command for the ranks; expected e.g. `hvdkit generate {example} python "
            f"train.py`"
        )


def check_numbers(options: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Raise UsageError if an option is below its least value."""
    for option, bound in least.items():
        number = getattr(options, option)
        if number is not None and number < bound:
            raise UsageError(f"{flag(option)} is {number}; expected at least {bound}")


def add_restarts(action: argparse.ArgumentParser) -> None:
    """Add the argument for restarts by `hvdkit run`."""
    action.add_argument(
        "--restarts",
        type=int,
        metavar="N",
        help="let `hvdkit run` start the ranks again after a failure, at most N times in a row "
        "without a new checkpoint (default: never)",
    )


def restarts(options: argparse.Namespace) -> list[str]:
    """Return the arguments of `hvdkit run` for restarts."""
    return [] if options.restarts is None else ["--restarts", str(options.restarts)]


def script_name(command: Sequence[str]) -> str:
    """Return the name of the command's script, without its suffix."""
    scripts = [word for word in command if word.endswith((".py", ".sh"))]
    return Path(scripts[0] if scripts else command[0]).stem
