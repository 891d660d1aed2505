"""`hvdkit generate`: write a commented file for a batch system or a cluster that starts the job."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType

from hvdkit.console.flags import add_options
from hvdkit.errors import UsageError
from hvdkit.launch.generate import kubernetes, slurm_script
from hvdkit.system.whole_files import create_for

HELP = "write a job file for a batch system or a cluster"
EXAMPLE = """\
  hvdkit generate slurm --nodes 2 --tasks-per-node 4 --gpus-per-node 4 -o job.sh python train.py
  hvdkit generate kubernetes --image registry/me/train:1 --workers 2 -o job.yaml python train.py"""

#: Adds one action: (name, help, example) -> its parser.
AddAction = Callable[[str, str, str], argparse.ArgumentParser]


def add_actions(add: AddAction) -> None:
    """Add the actions of `hvdkit generate`, each with its arguments."""
    for name, kind in {"slurm": slurm_script, "kubernetes": kubernetes}.items():
        action = add(name, kind.HELP, kind.EXAMPLE)
        kind.add_arguments(action)
        add_options(action, "-o --output FILE  (default: standard output)")
        action.add_argument("command", nargs=argparse.REMAINDER, help="the command of every rank")
        action.set_defaults(run=partial(_write, kind), when_ended="no file was written.")


def _write(kind: ModuleType, options: argparse.Namespace) -> int:
    if options.command[:1] == ["--"]:
        options.command = options.command[1:]
    if not options.command:
        raise UsageError(
            f"there is no command for the ranks; expected e.g. `hvdkit generate {kind.COMMAND} "
            f"python train.py`"
        )
    try:
        data = kind.text(options).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"an argument is not UTF-8: {error}. Rename the file") from error
    if options.output is None:
        sys.stdout.buffer.write(data)
    else:
        create_for("-o", options.output, data)
    return 0
