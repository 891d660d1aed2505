"""`horovodrun`, with the options of Horovod 0.28.1, as arguments of `hvdkit run`.

`horovodrun_options` has the options, and what each becomes.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hvdkit.engine.describe import installed
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch.control import environment, prepare
from hvdkit.launch.control.output import RankFiles, TaggedOutput
from hvdkit.launch.options import arguments, command
from hvdkit.launch.options.horovodrun_options import (
    BY_KEY,
    OPTIONS,
    Option,
    checked,
    converted,
    describe,
    shown,
)
from hvdkit.system.plain_files import printable, read_text
from hvdkit.system.processes import python_command

_LAUNCHERS = ("gloo", "mpi", "jsrun")
_IMPORT_HOROVOD = re.compile(r"^\s*(import|from)\s+horovod\b", re.MULTILINE)
_USAGE = "horovodrun -np N [options] COMMAND"
# A program of Kubeflow's old MPI operators, which starts processes in pods without ssh.
_KUBEXEC = "/etc/mpi/kubexec.sh"
# The longest YAML file, in bytes.
_LONGEST_FILE = 20_000
# Hosts that Horovod's ssh accepts: also those that ssh does not know yet.
_SSH = "--ssh-arg=-oStrictHostKeyChecking=accept-new"


@dataclass(frozen=True)
class Job:
    """A command line of horovodrun.

    Attributes:
        given: the key of each given option -> its value.
        env: the environment of the launcher.
    """

    given: Mapping[str, Any]
    command: Sequence[str]
    env: Mapping[str, str]

    @property
    def elastic(self) -> bool:
        return "host_discovery_script" in self.given or "min_num_proc" in self.given

    @property
    def mpi(self) -> bool:
        """Whether the ranks run over MPI. An elastic job runs over Gloo, as in Horovod."""
        if self.elastic or "gloo" in self.given:
            return False
        return "mpi" in self.given or _controllers() == ("mpi",)

    @property
    def has_hosts(self) -> bool:
        return bool({"hosts", "hostfile", "host_discovery_script"} & self.given.keys())

    @property
    def keeps_horovods_states(self) -> bool:
        """Whether the job is elastic, and its script imports Horovod, but not hvdkit.

        Only Horovod's own launcher keeps the states of `horovod.torch` after a failure.
        """
        if not self.elastic or not self.command:
            return False
        text = "".join(map(_content, prepare.script(self.command, os.getcwd())))
        return _IMPORT_HOROVOD.search(text) is not None and "hvdkit" not in text

    @property
    def is_for_horovod(self) -> bool:
        """Whether Horovod's own launcher must run the job."""
        if {"check_build", "jsrun"} & self.given.keys() or self.keeps_horovods_states:
            return True
        if self.env.get("OMPI_MCA_plm_rsh_agent") == _KUBEXEC:
            return True
        chosen = self.elastic or {"gloo", "mpi"} & self.given.keys()
        return (
            _in_lsf(self.env)
            and not chosen
            and "mpi" in (_controllers() or ())
            and shutil.which("jsrun", path=self.env.get("PATH")) is not None
        )

    def has(self, need: str) -> bool:
        """Return whether `Option.needs` is satisfied."""
        if need in ("elastic", "mpi"):
            return bool(getattr(self, need))
        return not need or bool(self.given.get(need))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options of `hvdkit run` for a command line of horovodrun, after `horovodrun`.

    `run` of the namespace runs the job. It does not return if Horovod's own launcher runs the job.

    Raises:
        UsageError: an option is missing, not valid, or excludes another.
        HvdkitError: no Horovod is installed, which the command line needs.
    """
    job = read(words, os.environ)
    if "version" in job.given or job.is_for_horovod:
        run = _print_version if "version" in job.given else _start_horovods
        if job.keeps_horovods_states:
            print(
                "horovodrun: the script imports horovod, whose elastic states only Horovod's own "
                "launcher keeps: it runs the job, and whoever reaches its port can end it. For a "
                "job of hvdkit, import hvdkit (`hvdkit migrate`)",
                file=sys.stderr,
            )
        return argparse.Namespace(run=run, words=list(words))
    translated, notes = translate(job)
    for note in notes:
        print(f"horovodrun: {note}", file=sys.stderr)
    if "verbose" in job.given:
        print(f"horovodrun: hvdkit run {shlex.join(translated)}", file=sys.stderr)
    parser = argparse.ArgumentParser(prog="horovodrun", usage=_USAGE, allow_abbrev=False)
    arguments.add_arguments(parser)
    options = parser.parse_args(translated)
    options.make_output = _output(job)
    options.when_ended, options.resumable_before_start = "the job ends.", True
    options.run = command.run
    return options


def translate(job: Job) -> tuple[list[str], list[str]]:
    """Return the words after `hvdkit run`, and notes about options that have no effect.

    Raises:
        UsageError: an option is missing.
    """
    given, in_lsf = job.given, _in_lsf(job.env)
    if "num_proc" not in given and not in_lsf:
        raise UsageError("-np was not given: expected -np N, the number of ranks")
    words = ["--all-output", "--no-torch-env", _SSH]
    notes = []
    mpi_arguments = []
    for key, value in given.items():
        option = BY_KEY[key]
        if not job.has(option.needs):
            notes.append(f"{option.flag} has no effect here: {_NEEDS[option.needs]}")
        elif option.becomes == "--mpi-args":
            mpi_arguments.append(value)
        elif option.is_variable:
            words += ["-x", f"{option.becomes}={_variable(option, value)}"]
        elif option.becomes:
            values = value if isinstance(value, list) else [value]
            # With =, because a value may begin with a dash.
            one = option.words == 1 and option.becomes.startswith("--")
            words += [f"{option.becomes}={value}"] if one else [option.becomes, *map(str, values)]
    if mpi_arguments:
        words.append(f"--mpi-args={' '.join(mpi_arguments)}")
    words += _network(given)
    if job.elastic:
        words.append("--elastic")
        if "mpi" in given:
            notes.append("--mpi has no effect here: an elastic job runs over Gloo")
    elif "gloo" in given or "mpi" in given:
        words += ["--launcher", "mpi" if "mpi" in given else "gloo"]
    if job.has_hosts:
        # Horovod's ranks get all variables, on other hosts too, except this one.
        names = {*environment.withheld(job.env)} - {"CUDA_VISIBLE_DEVICES"}
        words += [word for name in sorted(names) for word in ("-x", name)]
    elif not in_lsf:
        words += ["-H", f"localhost:{given['num_proc']}"]
    return [*words, *job.command], notes


_NEEDS = {
    "mpi": "the ranks run over Gloo (--mpi)",
    "elastic": "the job is not elastic (--min-np or --host-discovery-script)",
    "host_discovery_script": "it needs --host-discovery-script",
    "autotune": "it needs --autotune",
    "timeline_filename": "it needs --timeline-filename",
}


def _network(given: Mapping[str, Any]) -> list[str]:
    names = given.get("network_interfaces", [])
    # On one host, hvdkit's ranks use the loopback interface anyway, which it does not list.
    networks = [f"--network={name}" for name in names[:1] if name != "lo"]
    return [*networks, "-x", f"NCCL_SOCKET_IFNAME={','.join(names)}"] if names else []


def _variable(option: Option, value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value != option.inverse))
    return str(value * option.times) if option.times != 1 else str(value)


def _output(job: Job) -> Callable[..., TaggedOutput]:
    folder = job.given.get("output_filename")
    # The same files for all starts.
    files = folder and RankFiles("--output-filename", Path(folder))
    return partial(
        TaggedOutput,
        over_mpi=job.mpi,
        with_time="prefix_output_with_timestamp" in job.given,
        files=files,
        width=len(str(job.given.get("num_proc", 1) - 1)),
    )


def _print_version(options: argparse.Namespace) -> int:  # noqa: ARG001
    print(_engine_version())
    return 0


def _start_horovods(options: argparse.Namespace) -> NoReturn:
    """Replace this process by Horovod's own launcher."""
    _engine_version()
    sys.stdout.flush()
    words = python_command("-m", "hvdkit.launch.horovods_launcher", *options.words)
    os.execv(words[0], words)


def _engine_version() -> str:
    """Return the version of Horovod, without the label of hvdkit."""
    if (engine := installed()) is None:
        raise HvdkitError("no Horovod is installed. Run `hvdkit build`")
    return engine.version.partition("+")[0]


def _content(path: str) -> str:
    try:
        return read_text(Path(path))
    except OSError:
        return ""


def _controllers() -> Sequence[str] | None:
    engine = installed()
    return None if engine is None else engine.controllers


def _in_lsf(env: Mapping[str, str]) -> bool:
    return "LSB_JOBID" in env


# The command line and the YAML file


def read(words: Sequence[str], env: Mapping[str, str]) -> Job:
    """Return the job of a command line, with the options of its `--config-file`.

    Raises:
        UsageError: an option is not valid, or excludes another.
    """
    found = vars(make_parser().parse_args(words))
    command = found.pop("command")
    given = {key: checked(BY_KEY[key], found[key], BY_KEY[key].flag) for key in found}
    if (names := given.get("network_interfaces")) is not None:
        given["network_interfaces"] = [name for name in ",".join(names).split(",") if name]
    launchers = [BY_KEY[key].flag for key in _LAUNCHERS if key in given]
    if len(launchers) > 1:
        raise UsageError(f"{' and '.join(launchers)} were given: expected one of them")
    if (path := given.get("config_file")) is not None:
        # The command line has precedence, also for the launcher.
        from_file = _read_file(Path(path))
        if launchers:
            from_file = {key: from_file[key] for key in from_file if key not in _LAUNCHERS}
        given = from_file | given
    job = Job(given, command[1:] if command[:1] == ["--"] else command, env)
    defaults = {
        option.key: converted(option, text, option.default)
        for option in BY_KEY.values()
        if (text := env.get(option.default)) and option.key not in given and job.has(option.needs)
    }
    return replace(job, given=given | defaults)


def make_parser() -> argparse.ArgumentParser:
    """Return a parser with a value only for the options that are given."""
    parser = argparse.ArgumentParser(
        prog="horovodrun",
        usage=_USAGE,
        description="Start the ranks of a job with `hvdkit run`, given the options of Horovod's "
        "horovodrun.",
        argument_default=argparse.SUPPRESS,
        # As in `hvdkit run`.
        allow_abbrev=False,
    )
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for option in options:
            _add(group, option)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command of every rank")
    return parser


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    text = describe(option).replace("%", "%%")
    names = option.names.split()
    if option.kind is None:
        group.add_argument(*names, action="store_const", const=True, dest=option.key, help=text)
        if option.off:
            group.add_argument(
                *option.off.split(), action="store_const", const=False, dest=option.key
            )
        return
    group.add_argument(
        *names,
        action="append" if option.key == "network_interfaces" else "store",
        dest=option.key,
        type=option.kind,
        nargs=None if option.words == 1 else option.words,
        metavar=names[-1].lstrip("-").upper() if option.words == 1 else None,
        choices=option.values.split() if option.values else None,
        help=text,
    )


def _read_file(path: Path) -> dict[str, Any]:
    """Return the options of a file of `--config-file`."""
    import yaml

    source = f"--config-file {path}"
    try:
        text = read_text(path.resolve(), _LONGEST_FILE).removeprefix("\ufeff")
        content = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"{source}: {error.strerror}") from error
    # Numbers and levels that are too large for Python are other errors than those of YAML.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{source}: it is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict | None):
        raise UsageError(f"{source} has {shown(content)}: expected sections, such as params")
    by_place = {option.yaml: option for option in BY_KEY.values() if option.yaml}
    found: dict[str, Any] = {}
    for place, value in _places(content or {}):
        if value is None:
            continue
        if place == "controller":
            launcher = str(value).lower()
            if launcher not in ("gloo", "mpi"):
                raise UsageError(f"{source}: controller is {shown(value)}: expected gloo or mpi")
            found[launcher] = True
        elif (option := by_place.get(place)) is not None:
            found[option.key] = converted(option, value, f"{source}: {place}")
        else:
            text = f"horovodrun: {source}: {place} has no effect: it is unknown"
            print(printable(text, one_line=True), file=sys.stderr)
    return found


def _places(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each value of a YAML file with its place, such as `params.cycle_time_ms`."""
    for section, values in content.items():
        if isinstance(values, dict):
            yield from ((f"{section}.{name}", value) for name, value in values.items())
        else:
            yield str(section), values
