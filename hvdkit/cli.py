"""The command line of hvdkit. Each verb (`build`, `run`, …) calls one package of hvdkit."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import hvdkit
from hvdkit.console.flags import add_options
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.system.plain_files import printable
from hvdkit.system.signals import (
    STOP_SIGNALS,
    forget_noted,
    handle_stop_signals,
    note,
    status_before_start,
)

if TYPE_CHECKING:
    from hvdkit.checkpoint.reading import OpenCheckpoint

EXIT_OK, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb, and return the exit status: 0, 1 (it failed) or 2 (wrong arguments).

    `hvdkit run` returns the exit status of the job. A command that a signal ends returns 128 + the
    number of the signal. `hvdkit run` then returns `RESUMABLE` if the job can be resumed.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)

    def parse() -> Namespace:
        options = _parser(words).parse_args(words)
        options.words = words[1:]
        return options

    return _main(f"hvdkit {' '.join(words[:1])}", parse)


def horovodrun(arguments: Sequence[str] | None = None) -> int:
    """Run `horovodrun`. Returns the exit status as `hvdkit run`."""
    from hvdkit.launch.options import horovodrun

    words = list(sys.argv[1:] if arguments is None else arguments)
    return _main("horovodrun", partial(horovodrun.parse, words))


def _main(name: str, parse: Callable[[], Namespace]) -> int:
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            # The terminal may not have a character, and the name of a file may not be UTF-8.
            stream.reconfigure(errors="backslashreplace")
    assert logging.lastResort is not None  # it prints warnings
    logging.lastResort.setFormatter(_PrintableFormatter())
    forget_noted()
    with handle_stop_signals(_end):
        return _run_verb(name, parse)


class _PrintableFormatter(logging.Formatter):
    """Formats warnings, which may contain texts of others, without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _open_closed_streams() -> None:
    """Open the standard streams that the caller has closed, such as with `>&-`.

    A file that is opened later would get the number of a closed stream. Messages for the user would
    then be written to this file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # for processes that this one starts
    os.close(descriptor)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


def _run_verb(name: str, parse: Callable[[], Namespace]) -> int:
    """Parse the arguments, run the verb, and report its errors."""
    shown = Namespace(when_ended="nothing was done.", resumable_before_start=False)

    def tell(text: str) -> None:
        print(printable(f"{name}: {text}"), file=sys.stderr)

    try:
        shown = options = parse()
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except UsageError as error:
        tell(str(error))
        return EXIT_USAGE
    except HvdkitError as error:
        tell(str(error))
        return EXIT_FAILURE
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "start new thread" not in str(error):
            raise
        tell(
            f"{str(error) or 'no memory'}. This process has reached a limit of memory "
            f"(`ulimit -v`) or of processes (`ulimit -u`): raise the limit"
        )
        return EXIT_FAILURE
    except _Ended as ended:
        (number,) = ended.args
        tell(f"{number.name}; {shown.when_ended}")
        return status_before_start(number) if shown.resumable_before_start else 128 + int(number)
    except OSError as error:
        # Such as a folder of another user, or a name that is too long. Only the call that returns
        # the working directory finds no file and does not name it.
        place = error.filename
        if place is None and error.errno == errno.ENOENT:
            place = "the working directory"
        if place is not None:
            tell(f"{place}: {error.strerror}")
            return EXIT_FAILURE
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Otherwise Python prints the error again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return 128 + signal.SIGPIPE  # the reader of the output has closed it
        tell(f"cannot write the output: {error.strerror}")
        return EXIT_FAILURE


class _Ended(KeyboardInterrupt):
    """Raised when a stop signal ends the command. The argument is the signal."""


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    if note(number):
        return
    # A second Ctrl-C must not interrupt the cleanup after the first.
    for other in STOP_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise _Ended(signal.Signals(number))


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser for `words`.

    It has only the verb with which `words` begins; if that is no verb, it has all verbs. To add a
    verb, its package is imported, and to import all packages takes longer than most commands.
    """
    parser = argparse.ArgumentParser(
        prog="hvdkit",
        description="Train PyTorch, Keras and TensorFlow models with several processes.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hvdkit {hvdkit.__version__}")
    parser.set_defaults(
        when_ended="nothing was changed.",
        resumable_before_start=False,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name in words[:1] if words and words[0] in _VERBS else _VERBS:
        _VERBS[name](verbs)
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
        # With abbreviations, Python 3.11 also looks for them in the arguments of the user's script.
        # It refuses an argument that could stand for several options.
        allow_abbrev=False,
    )


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 1")
    return int(text)


def _add_build(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hvdkit.engine import command

    verb = _add_verb(verbs, "build", command.HELP, command.EXAMPLE)
    command.add_arguments(verb)
    verb.set_defaults(
        run=command.run,
        when_ended="the build was interrupted; the cache and the installed packages are complete.",
    )


def _add_doctor(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hvdkit.launch.options import arguments

    verb = _add_verb(
        verbs,
        "doctor",
        "check whether this machine, or several hosts, are ready for training, and show what to do",
        "  hvdkit doctor\n  hvdkit doctor --json\n  hvdkit doctor --hosts host1,host2 --bandwidth",
    )
    add_options(verb, "--json  machine-readable output")
    arguments.add_doctor_arguments(verb)
    verb.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from hvdkit import doctor
    from hvdkit.console import diagnostics
    from hvdkit.console.tables import Console
    from hvdkit.launch.options import arguments, command

    several = options.hosts is not None or options.hostfile is not None
    if not several:
        arguments.check_alone(options)
    results = command.examine(options) if several else doctor.examine()
    if options.json:
        print(diagnostics.as_json(results))
    else:
        diagnostics.show(results, Console(soft_wrap=True))
    return EXIT_FAILURE if diagnostics.has_error(results) else EXIT_OK


def _add_run(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hvdkit.launch.options import arguments, command

    verb = _add_verb(verbs, "run", arguments.HELP, arguments.EXAMPLE)
    arguments.add_arguments(verb)
    # While ranks run, the running job handles the stop signals itself.
    verb.set_defaults(
        run=command.run, parser=verb, when_ended="the job ends.", resumable_before_start=True
    )


def _add_bench(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hvdkit.bench import command

    verb = _add_verb(verbs, "bench", command.HELP, command.EXAMPLE)
    actions = verb.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    command.add_actions(partial(_add_verb, actions))


def _add_checkpoint(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hvdkit.checkpoint import command

    verb = _add_verb(verbs, "checkpoint", command.HELP, command.EXAMPLE)
    actions = verb.add_subparsers(dest="action", metavar="ACTION", required=True)
    command.add_actions(partial(_add_verb, actions), _export)


def _add_why(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verb = _add_verb(
        verbs,
        "why",
        "explain why a job hung or failed, from the records in its output folder",
        "  hvdkit run -np 4 --output-dir runs/ python train.py\n  hvdkit why runs/",
    )
    verb.add_argument(
        "folder", type=Path, help="a folder of `hvdkit run --output-dir`, or of HVDKIT_RECORD_DIR"
    )
    _add_timeline(verb)
    verb.set_defaults(run=_why, when_ended="nothing was changed.")


def _why(options: Namespace) -> int:
    from hvdkit.faults import command
    from hvdkit.launch.control import output_folder

    print(command.why(options.folder, options.timeline, output_folder.replayed))
    return EXIT_OK


def _add_inspect(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verb = _add_verb(
        verbs,
        "inspect",
        "show what the ranks of running jobs on this host do",
        "  hvdkit inspect --live",
    )
    verb.add_argument(
        "--live", action="store_true", required=True, help="ask the ranks that run on this host"
    )
    _add_timeline(verb)
    verb.set_defaults(run=_inspect, when_ended="nothing was changed.")


def _inspect(options: Namespace) -> int:
    from hvdkit.faults import command

    print(command.inspect_live(options.timeline))
    return EXIT_OK


def _add_report(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hvdkit.report import command

    verb = _add_verb(verbs, "report", command.HELP, command.EXAMPLE)
    command.add_arguments(verb)
    verb.set_defaults(run=command.run, when_ended="the page is as before, or complete.")


def _add_tune(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hvdkit.tune import command

    verb = _add_verb(verbs, "tune", command.HELP, command.EXAMPLE)
    command.add_arguments(verb)
    verb.set_defaults(run=command.run, when_ended="no rank runs.")


def _add_timeline(verb: argparse.ArgumentParser) -> None:
    text = "--timeline N  the number of collectives in the timeline (default: 20)"
    add_options(verb, text, {"N": _number}, timeline=20)


def _add_generate(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hvdkit.launch import generate

    verb = _add_verb(verbs, "generate", generate.HELP, generate.EXAMPLE)
    actions = verb.add_subparsers(dest="action", metavar="ACTION", required=True)
    generate.add_actions(partial(_add_verb, actions))


def _add_migrate(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hvdkit.migrate import command

    verb = _add_verb(verbs, "migrate", command.HELP, command.EXAMPLE)
    command.add_arguments(verb)
    verb.set_defaults(run=command.run, when_ended="each file is as before, or migrated.")


_VERBS = {
    "build": _add_build,
    "doctor": _add_doctor,
    "run": _add_run,
    "bench": _add_bench,
    "checkpoint": _add_checkpoint,
    "why": _add_why,
    "inspect": _add_inspect,
    "report": _add_report,
    "tune": _add_tune,
    "generate": _add_generate,
    "migrate": _add_migrate,
}


def _export(opened: OpenCheckpoint, target: Path, format: str | None) -> None:
    """Write a checkpoint's model to `target`.

    If `format` is None, the suffix of `target` decides. A target without a suffix is a folder in
    the format of Hugging Face.
    """
    if format is None:
        format = next((f for end, f in _FORMATS.items() if target.name.endswith(end)), None)
    if format is None and not target.suffix:
        format = "huggingface"
    if format is None:
        raise UsageError(
            f"the name of the file to export to is {target}; expected *.pt or *.pth (PyTorch's "
            "state_dict), *.safetensors or *.weights.h5 (Keras). For another name, give --format "
            "torch, safetensors or huggingface."
        )
    writer, function = _WRITERS[format]
    getattr(importlib.import_module(writer), function)(opened, target)


#: Suffix of a file name -> format.
_FORMATS = {
    ".pt": "torch",
    ".pth": "torch",
    ".safetensors": "safetensors",
    ".weights.h5": "keras",
}
#: Format -> the module and function that write it, imported when needed.
_WRITERS = {
    "torch": ("hvdkit.torch.checkpoint", "export"),
    "keras": ("hvdkit.checkpoint.h5", "export"),
    "safetensors": ("hvdkit.checkpoint.weights", "export_file"),
    "huggingface": ("hvdkit.checkpoint.weights", "export_folder"),
}
