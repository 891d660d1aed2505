"""The arguments and actions of `hvdkit checkpoint`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from hvdkit.checkpoint import report
from hvdkit.checkpoint.reading import OpenCheckpoint
from hvdkit.checkpoint.retention import KeepBest, Retention
from hvdkit.checkpoint.store import Store
from hvdkit.console.flags import add_options
from hvdkit.console.tables import Console
from hvdkit.errors import UsageError

HELP = "list, verify, prune and export the checkpoints in a folder"
EXAMPLE = """\
  hvdkit checkpoint ls runs/digits
  hvdkit checkpoint verify runs/digits
  hvdkit checkpoint export runs/digits weights.pt"""

_PRUNE = """
-n --keep-last N          number of newest steps to keep (default: 3)
--keep-best METRIC:min|max...  also keep the step with the best value; may be given several times
--keep-every N            also keep steps whose number is a multiple of N
--damaged                 also delete quarantined steps
--older-runs              also delete all steps of older runs
--dry-run                 only print what would be deleted
"""
_EXPORT = """
--format {torch,safetensors,huggingface}  the format (default: determined by the name of TARGET):
                          PyTorch's state_dict, one safetensors file, or a folder with
                          model.safetensors as transformers reads it (add your model's config.json)
--step N                  the step (default: the newest good one)
"""

#: Adds one action: (name, help, example) -> its parser.
AddAction = Callable[[str, str, str], argparse.ArgumentParser]
#: Writes the model of a checkpoint to a file or folder, in the given format or that of the name.
Export = Callable[[OpenCheckpoint, Path, str | None], None]


def add_actions(add: AddAction, export: Export) -> None:
    """Add the actions of `hvdkit checkpoint` with their arguments."""

    def action(
        name: str, help: str, example: str, run: Callable[[argparse.Namespace], int]
    ) -> argparse.ArgumentParser:
        parser = add(name, help, f"  hvdkit checkpoint {example}")
        parser.add_argument("folder", metavar="DIR", help="the folder of checkpoints, or a URL")
        ended = "the steps that `hvdkit checkpoint ls` lists are complete."
        parser.set_defaults(run=run, when_ended=ended)
        return parser

    action("ls", "list the steps", "ls runs/digits", _list)
    show = action("show", "print what one step contains", "show runs/digits 1200", _show)
    _add_step(show, "the newest good one")
    _add_run(show)
    verify = action(
        "verify", "read all files again and compare their hashes", "verify runs/digits", _verify
    )
    _add_step(verify, "all")
    prune = action(
        "prune",
        "delete old steps of the newest run; at least one good step is kept",
        "prune runs/digits -n 2",
        _prune,
    )
    add_options(prune, _PRUNE, keep_last=3)
    exporting = action(
        "export",
        "write the model for PyTorch, Keras, safetensors or Hugging Face",
        "export runs/digits model.weights.h5",
        lambda options: _export(options, export),
    )
    exporting.add_argument(
        "target",
        type=Path,
        metavar="TARGET",
        help="*.pt, *.pth, *.safetensors, *.weights.h5, or a new folder for Hugging Face",
    )
    add_options(exporting, _EXPORT)
    _add_run(exporting)


def _add_step(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "step", type=int, nargs="?", metavar="STEP", help=f"the step (default: {default})"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run",
        type=int,
        dest="of_run",  # `run` is the function to call
        metavar="RUN",
        help="the run of the step (default: the newest)",
    )


def _list(options: argparse.Namespace) -> int:
    report.list_steps(Store(options.folder), _console())
    return 0


def _show(options: argparse.Namespace) -> int:
    with report.open_step(Store(options.folder), options.step, options.of_run) as opened:
        report.show_step(opened, _console())
    return 0


def _verify(options: argparse.Namespace) -> int:
    return 0 if report.verify(Store(options.folder), options.step, _console()) else 1


def _prune(options: argparse.Namespace) -> int:
    for argument, number in (("-n", options.keep_last), ("--keep-every", options.keep_every)):
        if number is not None and number < 1:
            raise UsageError(f"{argument} is {number}; expected 1 or more.")
    best = [KeepBest.parse(text) for text in options.keep_best]
    retention = Retention(options.keep_last, best, options.keep_every)
    report.prune(
        Store(options.folder),
        retention,
        _console(),
        damaged=options.damaged,
        older_runs=options.older_runs,
        dry_run=options.dry_run,
    )
    return 0


def _export(options: argparse.Namespace, export: Export) -> int:
    with report.open_step(Store(options.folder), options.step, options.of_run) as opened:
        export(opened, options.target, options.format)
        print(f"wrote step {opened.manifest.step} to {options.target}")
    if options.target.is_dir():
        print("add your model's config.json to the folder: a checkpoint does not have it")
    return 0


def _console() -> Console:
    return Console(soft_wrap=True)
