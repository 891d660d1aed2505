"""Read and write the arguments of `hvdkit run` in a TOML file (`--config`, `--write-config`).

The keys are the long options without the leading `--`, and `command`:

    num-proc = 8
    hosts = "node0:4,node1:4"
    x = ["WANDB_API_KEY"]
    all-output = true
    command = ["python", "train.py"]
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdkit.errors import UsageError
from hvdkit.system.plain_files import read_text
from hvdkit.system.whole_files import create_for

_COMMAND = "command"
# The longest file, in bytes.
_LONGEST = 20_000
# A dotted key (a.a.a...) of many parts. Python's memory for it grows with the square of their
# number, to 0.4 GB in a file of this length.
_PART = r"""(?:[\w-]{1,500}+|"(?:\\.|[^"\\\n]){0,500}+"|'[^'\n]{0,500}+')"""
_DEEP_KEY = re.compile(rf"(?:{_PART}[ \t]*+\.[ \t]*+){{64}}", re.ASCII)
# Options for the file itself, or for one start only.
_NOT_IN_FILE = frozenset({"help", "config", "write-config", "dry-run"})


def parse_with(
    path: Path, verb: argparse.ArgumentParser, words: Sequence[str]
) -> argparse.Namespace:
    """Parse a file and a command line. The command line takes precedence.

    Args:
        verb: the parser of `hvdkit run`.
        words: the command line after `run`.

    Raises:
        UsageError: the file does not exist or is not TOML, or a key or a value is not valid.
    """
    try:
        text = read_text(path.resolve(), _LONGEST).removeprefix("\ufeff")
        if _DEEP_KEY.search(text):
            raise ValueError("a key has more than 64 parts")
        found = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    # Numbers and levels that are too large for Python are other errors than those of TOML.
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config {path}: it is not TOML: {error}") from error
    given = verb.parse_args(words)
    actions = _actions(verb)
    # An option of the command line replaces those of the file that it excludes.
    replaced = {
        action
        for group in verb._mutually_exclusive_groups
        if any(getattr(given, each.dest) != each.default for each in group._group_actions)
        for action in group._group_actions
    }
    from_file = []
    for key, value in found.items():
        if key != _COMMAND and key not in actions:
            close = difflib.get_close_matches(key, [*actions, _COMMAND], 1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise UsageError(
                f"--config {path}: {key} is not an option of `hvdkit run`. Expected long "
                f"options without the leading --, such as num-proc, or `command`.{hint}"
            )
        expected, of_file = _words(actions.get(key), value)
        if of_file is None:
            raise UsageError(f"--config {path}: {key} is {value!r}; expected {expected}")
        if key != _COMMAND and actions[key] not in replaced:
            from_file += of_file
    options = verb.parse_args([*from_file, *words])
    options.command = options.command or list(found.get(_COMMAND, ()))
    return options


def write(path: Path, options: argparse.Namespace, verb: argparse.ArgumentParser) -> None:
    """Write the command, and the options that differ from their defaults.

    Raises:
        HvdkitError: the file exists, or cannot be written.
    """
    lines = []
    for key, action in _actions(verb).items():
        value = getattr(options, action.dest)
        if value != action.default:
            lines.append(f"{key} = {_toml(value)}")
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if words:
        lines.append(f"{_COMMAND} = {_toml(words)}")
    try:
        data = "".join(f"{line}\n" for line in lines).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"--write-config {path}: an argument is not UTF-8: {error}") from error
    if len(data) > _LONGEST:
        raise UsageError(
            f"--write-config {path}: the arguments take {len(data):,} bytes; expected at most "
            f"{_LONGEST:,}. Give the hosts with --hostfile"
        )
    # Mode 600, because -x NAME=VALUE may be a secret.
    create_for("--write-config", path, data, 0o600)


def _actions(verb: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the options of `verb` by their long names, or short names if there are no others."""
    named = {
        max(action.option_strings, key=len).lstrip("-"): action
        for action in verb._actions
        if action.option_strings
    }
    return {key: named[key] for key in named if key not in _NOT_IN_FILE}


def _words(action: argparse.Action | None, value: Any) -> tuple[str, list[str] | None]:
    """Return the type that an option expects, and the option as words of a command line.

    Args:
        action: the option; None for the command, which gives no words.
        value: its value in the file. Without the expected type, it gives None instead of words.
    """
    name = "" if action is None else max(action.option_strings, key=len)
    is_list = isinstance(value, list)
    values = value if is_list else [value]
    kinds = {type(each) for each in values}
    if action is None or isinstance(action, argparse._AppendAction):
        fits = is_list and kinds <= {str}
        # With =, because a value may begin with a dash.
        return "a list of strings", [f"{name}={each}" for each in values] if fits else None
    if action.nargs == 0:
        return "true or false", [name] * value if isinstance(value, bool) else None
    if action.nargs == 2:
        fits = is_list and len(values) == 2 and kinds <= {int, float}
        return "a list of 2 numbers", [name, *map(str, values)] if fits else None
    fits = not is_list and kinds <= {str, int, float}
    return "a string or a number", [f"{name}={value}"] if fits else None


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, int | float):
        return str(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
