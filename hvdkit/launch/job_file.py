"""Checks of options and the job's name, for all kinds of files of `hvdkit generate`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdkit.errors import UsageError


def flag(option: str) -> str:
    """An option as the user types it."""
    return f"--{option.replace('_', '-')}"


def check_command(options: argparse.Namespace, example: str) -> None:
    """Raises UsageError, with `example`, where there is nothing for the ranks to run."""
    if not options.command:
        raise UsageError(
            f"what do the ranks run? Expected e.g. `hvdkit generate {example} python train.py`"
        )


def check_numbers(options: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Raises UsageError where an option that is given is below its least value."""
    for option, bound in least.items():
        number = getattr(options, option)
        if number is not None and number < bound:
            raise UsageError(f"{flag(option)} is {number}; expected at least {bound}")


def script_name(command: Sequence[str]) -> str:
    """Return the name of the script that the command runs, without its ending."""
    scripts = [word for word in command if word.endswith((".py", ".sh"))]
    return Path(scripts[0] if scripts else command[0]).stem
