"""The command line. A verb is a thin call into one package below."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console

import hvdkit
from hvdkit.errors import HvdkitError, UsageError, status_before_start

if TYPE_CHECKING:
    from hvdkit.checkpoint.reading import OpenCheckpoint

EXIT_OK, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit status: 0, 1 (it failed) or 2 (the arguments are wrong)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    # What is ignored (nohup, a shell's background) stays ignored.
    ending = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _end) for number in ending}
    told = Namespace(verb="", when_ended="nothing was begun.", may_start_again=False)
    try:
        told = options = _parser().parse_args(arguments)
        options.words = list(sys.argv[1:] if arguments is None else arguments)[1:]
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except UsageError as error:
        print(f"hvdkit {told.verb}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except HvdkitError as error:
        print(f"hvdkit {told.verb}: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except _Ended as ended:
        (number,) = ended.args
        print(f"hvdkit {told.verb}: {number.name}; {told.when_ended}", file=sys.stderr)
        return status_before_start(number) if told.may_start_again else 128 + int(number)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Python would complain once more while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return 128 + signal.SIGPIPE  # whoever read the output has enough
        print(f"hvdkit {told.verb}: cannot write the output: {error.strerror}", file=sys.stderr)
        return EXIT_FAILURE
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


#: Ctrl-C, a batch system's ways to end a job, and a lost connection. All clean up alike.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class _Ended(KeyboardInterrupt):
    """A signal has ended the command; its argument is which."""


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    # A second Ctrl-C must not interrupt the cleaning up after the first.
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)
    raise _Ended(signal.Signals(number))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hvdkit",
        description="Horovod-based ring-allreduce training on today's PyTorch and TensorFlow.",
    )
    parser.add_argument("--version", action="version", version=f"hvdkit {hvdkit.__version__}")
    parser.set_defaults(when_ended="what is cached and installed is whole.", may_start_again=False)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_build(verbs)
    _add_doctor(verbs)
    _add_run(verbs)
    _add_checkpoint(verbs)
    _add_generate(verbs)
    return parser


def _add_verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, help: str, example: str
) -> argparse.ArgumentParser:
    return verbs.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _add_build(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verb = _add_verb(
        verbs,
        "build",
        "build, prove and install Horovod for the frameworks that are installed here",
        "  hvdkit build\n"
        "  hvdkit build --frameworks torch --controllers gloo,mpi --wheel-dir wheels/\n"
        "  hvdkit build --fixes minimal --target stock/    # nearly stock, to compare",
    )
    verb.add_argument(
        "--frameworks",
        type=_names,
        metavar="NAMES",
        help="torch, tensorflow or both, separated by a comma (default: those importable)",
    )
    verb.add_argument(
        "--controllers",
        type=_names,
        metavar="NAMES",
        help="gloo, mpi or both (default: gloo, and mpi when mpicxx is found)",
    )
    verb.add_argument(
        "--gpu",
        default="auto",
        metavar="auto|nccl|none",
        help="auto: NCCL when the frameworks are CUDA builds and nvcc and NCCL are found",
    )
    verb.add_argument(
        "--fixes",
        default="all",
        metavar="all|minimal",
        help="minimal: only those without which Horovod does not build (default: all)",
    )
    verb.add_argument(
        "--jobs", type=int, metavar="N", help="compilers at once (default: cores, and RAM / 2 GB)"
    )
    verb.add_argument(
        "--sdist", type=Path, metavar="FILE", help="Horovod's sdist, where there is no network"
    )
    verb.add_argument("--wheel-dir", type=Path, metavar="DIR", help="also leave the wheel here")
    verb.add_argument(
        "--target", type=Path, metavar="DIR", help="install here, not into this environment"
    )
    verb.add_argument(
        "--no-cache", action="store_true", help="build even when the cache has this very wheel"
    )
    verb.add_argument(
        "--dry-run", action="store_true", help="print what would be done, and touch nothing"
    )
    verb.add_argument("--list-fixes", action="store_true", help="print what is changed in Horovod")
    verb.set_defaults(run=_build)


def _build(options: argparse.Namespace) -> int:
    from hvdkit.engine import build, plan, report

    console = Console(soft_wrap=True)
    if options.list_fixes:
        report.list_fixes(console)
        return EXIT_OK
    made = plan.make_plan(
        plan.Request(
            frameworks=options.frameworks,
            controllers=options.controllers,
            gpu=options.gpu,
            fixes=options.fixes,
            jobs=options.jobs,
        )
    )
    report.show_plan(made, console, details=options.dry_run)
    if options.dry_run:
        return EXIT_OK
    build.build(
        made,
        build.Options(
            sdist=options.sdist,
            wheel_dir=options.wheel_dir,
            target=options.target,
            use_cache=not options.no_cache,
        ),
        console,
    )
    return EXIT_OK


def _add_doctor(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hvdkit.launch import arguments

    verb = _add_verb(
        verbs,
        "doctor",
        "say whether this machine, or several, are ready, and what to do where they are not",
        "  hvdkit doctor\n  hvdkit doctor --json\n  hvdkit doctor --hosts host1,host2 --bandwidth",
    )
    verb.add_argument("--json", action="store_true", help="machine-readable output")
    arguments.add_doctor_arguments(verb)
    verb.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from hvdkit import doctor, findings
    from hvdkit.launch import command

    several = options.hosts is not None or options.hostfile is not None
    found = command.examine(options) if several else doctor.examine()
    if options.json:
        print(findings.as_json(found))
    else:
        findings.show(found, Console(soft_wrap=True))
    return EXIT_FAILURE if findings.has_error(found) else EXIT_OK


def _add_run(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hvdkit.launch import arguments, command

    verb = _add_verb(verbs, "run", arguments.HELP, arguments.EXAMPLE)
    arguments.add_arguments(verb)
    # Once they run, `run` itself takes the signals. Before, nothing is lost.
    verb.set_defaults(
        run=command.run, parser=verb, when_ended="no rank runs.", may_start_again=True
    )


def _add_checkpoint(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hvdkit.checkpoint import command

    verb = _add_verb(verbs, "checkpoint", command.HELP, command.EXAMPLE)
    actions = verb.add_subparsers(dest="action", metavar="ACTION", required=True)
    command.add_actions(partial(_add_verb, actions), _export)


def _add_generate(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hvdkit.launch import generate

    verb = _add_verb(verbs, "generate", generate.HELP, generate.EXAMPLE)
    actions = verb.add_subparsers(dest="action", metavar="ACTION", required=True)
    generate.add_actions(partial(_add_verb, actions))


def _export(opened: OpenCheckpoint, target: Path, format: str | None) -> None:
    """Write a checkpoint's model in a format, or in the one that `target`'s name belongs to."""
    if format is None:
        format = next((f for end, f in _FORMATS.items() if target.name.endswith(end)), None)
    if format is None and not target.suffix:
        format = "huggingface"
    if format is None:
        raise UsageError(
            f"the file to export to is {target}; expected *.pt or *.pth (PyTorch's state_dict), "
            "*.safetensors, *.weights.h5 (Keras), or --format torch, safetensors or huggingface."
        )
    writer, function = _WRITERS[format]
    getattr(importlib.import_module(writer), function)(opened, target)


#: The end of a file's name -> what it is.
_FORMATS = {
    ".pt": "torch",
    ".pth": "torch",
    ".safetensors": "safetensors",
    ".weights.h5": "keras",
}
#: Format -> the module and the function that write it, each loaded only when it is needed.
_WRITERS = {
    "torch": ("hvdkit.torch.checkpoint", "export"),
    "keras": ("hvdkit.checkpoint.h5", "export"),
    "safetensors": ("hvdkit.checkpoint.weights", "export_file"),
    "huggingface": ("hvdkit.checkpoint.weights", "export_folder"),
}
