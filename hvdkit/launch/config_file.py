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
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.whole_files import create

_COMMAND = "command"
# Options for the file itself, or for one start only.
_NOT_IN_FILE = frozenset({"help", "config", "write-config", "dry-run"})


def parse_with(
    path: Path, verb: argparse.ArgumentParser, words: Sequence[str]
) -> argparse.Namespace:
    """Parse a file and a command line. The command line takes precedence.

    Args:
        path: the file.
        verb: the parser of `hvdkit run`.
        words: the command line after `run`.

    Raises:
        UsageError: the file does not exist or is not TOML, or a key or a value is not valid.
    """
    found = _read(path, verb)
    given = verb.parse_args(words)
    # An option of the command line replaces those of the file that it excludes.
    for group in verb._mutually_exclusive_groups:
        actions_of_group = group._group_actions
        if any(getattr(given, action.dest) != action.default for action in actions_of_group):
            for action in actions_of_group:
                for key in _keys(action.option_strings):
                    found.pop(key, None)
    actions = _actions(verb)
    from_file = [
        word for key in found if key != _COMMAND for word in _words(actions[key], found[key])
    ]
    options = verb.parse_args([*from_file, *words])
    options.command = options.command or list(found.get(_COMMAND, ()))
    return options


def _read(path: Path, verb: argparse.ArgumentParser) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: it is not TOML: {error}") from error
    actions = _actions(verb)
    for key, value in found.items():
        if key != _COMMAND and key not in actions:
            close = difflib.get_close_matches(key, [*actions, _COMMAND], 1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise UsageError(
                f"--config {path}: {key} is not an option of `hvdkit run`. Expected long "
                f"options without the leading --, such as num-proc, or `command`.{hint}"
            )
        expected = _expected(actions.get(key))
        if not _fits(value, expected):
            raise UsageError(f"--config {path}: {key} is {value!r}; expected {expected}")
    return found


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
    try:
        # Mode 600, because -x NAME=VALUE may be a secret.
        create(path, data, 0o600)
    except FileExistsError:
        raise HvdkitError(
            f"--write-config {path} exists; remove it, or choose another name"
        ) from None
    except OSError as error:
        raise HvdkitError(f"--write-config {path}: {error.strerror}") from error


def _actions(verb: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the options of `verb` by their keys."""
    return {
        key: action
        for action in verb._actions
        for key in _keys(action.option_strings)
        if key not in _NOT_IN_FILE
    }


def _keys(strings: Sequence[str]) -> Iterator[str]:
    """Yield the long name of an option, or its short name if it has no long name."""
    if strings:
        yield max(strings, key=len).lstrip("-")


def _expected(action: argparse.Action | None) -> str:
    """Return the type of an option's value as a text. `action` is None for the command."""
    if action is None or isinstance(action, argparse._AppendAction):
        return "a list of strings"
    if action.nargs == 2:
        return "a list of 2 numbers"
    return "true or false" if action.nargs == 0 else "a string or a number"


def _fits(value: Any, expected: str) -> bool:
    if expected == "true or false":
        return isinstance(value, bool)
    if expected == "a string or a number":
        return isinstance(value, str | int | float) and not isinstance(value, bool)
    if expected == "a list of 2 numbers":
        pair = isinstance(value, list) and len(value) == 2
        return pair and all(isinstance(each, int | float) for each in value)
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _words(action: argparse.Action, value: Any) -> list[str]:
    """Return an option and its value as words of a command line."""
    name = max(action.option_strings, key=len)
    if isinstance(value, bool):
        return [name] if value else []
    if action.nargs == 2:
        return [name, *map(str, value)]
    values = value if isinstance(value, list) else [value]
    # With =, because a value may begin with a dash.
    return [f"{name}={each}" for each in values]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, int | float):
        return str(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
