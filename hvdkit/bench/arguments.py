"""The arguments that all benchmarks of `hvdkit bench` share, and their checks."""

import argparse
from pathlib import Path

from hvdkit.bench import link, namespaces
from hvdkit.bench.software import STOCK, missing_module
from hvdkit.console.flags import add_options
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch.options.arguments import add_host_arguments
from hvdkit.system.whole_files import check_writable

_PICTURES = (".png", ".svg", ".pdf")


def add_arguments(verb: argparse.ArgumentParser, variants: str, turns: int) -> None:
    """Add the shared arguments.

    Args:
        verb: the parser.
        variants: which variants are measured if none are named, for the help.
        turns: the default of `--turns`.
    """
    text = f"""
-np --num-proc N          number of ranks (default: 2, or all slots)
--variants NAMES          the variants to measure, separated by commas; 'hvdkit-*' stands for
                          several (default: {variants})
--turns N                 number of turns; each turn measures every variant once
                          (default: %(default)s)
--stock DIR               the folder of another Horovod, for the stock variants; `hvdkit build
                          --patches minimal --target DIR` makes it
--two-hosts RATE          run on two hosts that are network namespaces of this machine, with a link
                          of this rate, such as 1Gbit/s; needs root and iproute2
--mpirun PROGRAM          the mpirun of the engine's MPI
"""
    add_options(verb, text, turns=turns)
    add_host_arguments(verb)
    compare = "the file of --json of an earlier run: show what has changed beyond the noise"
    add_file_arguments(
        verb,
        "write all times to FILE after each result, also if the run is interrupted",
        f"--compare FILE  {compare}",
    )


def add_file_arguments(verb: argparse.ArgumentParser, json: str, more: str = "") -> None:
    """Add the files that a benchmark writes.

    Args:
        verb: the parser.
        json: the help of `--json`.
        more: further options of the group.
    """
    text = f"""
[results]
--json FILE               {json}
--csv FILE                write a row for each result
--plot FILE               draw a picture: .png, .svg, .pdf
{more}"""
    add_options(verb, text)


def check(options: argparse.Namespace) -> None:
    """Check the shared arguments before anything is measured.

    Raises:
        UsageError: an argument is wrong, or a file cannot be written.
    """
    if options.turns < 1:
        raise UsageError(f"--turns is {options.turns}: expected at least 1")
    check_files(options)
    if options.two_hosts is not None:
        link.parse_rate(options.two_hosts, "--two-hosts")
        if (reason := namespaces.missing()) is not None:
            raise HvdkitError(f"--two-hosts: {reason}")


def check_files(options: argparse.Namespace) -> None:
    """Check that the files of `add_file_arguments` can be written.

    Raises:
        UsageError: a file cannot be written.
    """
    for option in ("json", "csv", "plot"):
        path = getattr(options, option)
        if path is not None:
            _check_writable(path, f"--{option}")
    if options.plot is not None:
        if options.plot.suffix not in _PICTURES:
            raise UsageError(
                f"--plot is {options.plot}: expected a name with one of {', '.join(_PICTURES)}"
            )
        if (reason := missing_module("matplotlib")) is not None:
            raise UsageError(f"--plot: {reason}")


def engine_folders(options: argparse.Namespace) -> dict[str, Path | None]:
    """Return the folder of each engine that the command line names."""
    return {STOCK: options.stock}


def _check_writable(path: Path, option: str) -> None:
    if path.is_dir():
        raise UsageError(f"{option} is {path}, which is a folder: expected the name of a file")
    try:
        check_writable(path)
    except OSError as error:
        folder = path.absolute().parent
        raise UsageError(
            f"{option} is {path}, but no file can be written to {folder}: {error.strerror}. Create "
            f"the folder, or give another one"
        ) from error
