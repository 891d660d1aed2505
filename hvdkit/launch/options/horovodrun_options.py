"""The options of `horovodrun` in Horovod 0.28.1, and their values.

`OPTIONS` has a row for each option: the argument of `hvdkit run` or the variable of the ranks that
it becomes. `horovodrun --help` shows the rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.errors import UsageError


@dataclass(frozen=True)
class Option:
    """An option of Horovod's horovodrun.

    Attributes:
        names: its names, separated by spaces. The last one gives its key, see `key`.
        kind: the type of its value; None for a flag.
        becomes: an argument of `hvdkit run`, or a variable of the ranks, with the same value; empty
            if `horovodrun.translate` makes more of it.
        effect: the effect as a text for `--help`; empty for `becomes`.
        off: the names of the opposite flag, separated by spaces.
        words: the number of its values, if not 1.
        yaml: its place in a file of `--config-file`.
        values: all its values, separated by spaces, if they are few.
        times: the variable is the value times this number.
        inverse: the variable is 0 if the flag is set, and 1 if the opposite flag is set.
        needs: the key of another option, or a kind of job: without it, this option has no effect.
        default: a variable of the launcher with the value if the option is not given.
    """

    names: str
    kind: Callable[[str], Any] | None
    becomes: str = ""
    effect: str = ""
    off: str = ""
    words: int = 1
    yaml: str = ""
    least: float | None = None
    most: float | None = None
    values: str = ""
    times: int = 1
    inverse: bool = False
    needs: str = ""
    default: str = ""

    @property
    def key(self) -> str:
        return self.names.split()[-1].lstrip("-").replace("-", "_")

    @property
    def is_variable(self) -> bool:
        return bool(self.becomes) and not self.becomes.startswith("-")

    @property
    def flag(self) -> str:
        """The longest name, for messages."""
        return max(self.names.split(), key=len)


# The options, in groups. Two spaces or a line end separate the names, the type, `becomes` or
# `effect`, and the other attributes of `Option`. `count` and `number` are at least 0.
_TABLE = """
[job]
-np --num-proc  int  -np  least=1
-v --version  flag  prints the version of Horovod
-cb --check-build  flag  starts Horovod's own launcher, which prints its table
--start-timeout  int  --start-timeout  default=HOROVOD_START_TIMEOUT
--disable-cache  flag  no effect: hvdkit makes all its checks at each start
--config-file  text  reads these options from Horovod's YAML file
--verbose  flag  prints the command line of hvdkit run
[hosts]
-H --hosts  text  -H
-hostfile --hostfile  text  --hostfile
--host-discovery-script  text  --host-discovery-script
-p --ssh-port  int  --ssh-port
-i --ssh-identity-file  text  --ssh-identity
--network-interface --network-interfaces  text
    the first one: --network; all: NCCL_SOCKET_IFNAME
[launcher]
--gloo  flag  --launcher gloo
--mpi  flag  --launcher mpi
--jsrun  flag  starts Horovod's own launcher, which runs jsrun
--mpi-args  text  --mpi-args  needs=mpi
--binding-args  text  --mpi-args  needs=mpi
--mpi-threads-disable  flag  HOROVOD_MPI_THREADS_DISABLE
    off=--no-mpi-threads-disable  yaml=library_options.mpi_threads_disable
--tcp  flag  NCCL_IB_DISABLE
[output]
--output-filename  text  writes rank.N/stdout and rank.N/stderr
-prefix-timestamp --prefix-output-with-timestamp  flag
    prefix Sun Nov 29 12:00:00 2026[0]<stdout>:
--log-level  text  HOROVOD_LOG_LEVEL  yaml=logging.level
    values=TRACE,DEBUG,INFO,WARNING,ERROR,FATAL
--no-log-hide-timestamp --log-with-timestamp  flag  HOROVOD_LOG_HIDE_TIME  inverse=1
    off=--log-hide-timestamp,--log-without-timestamp  yaml=logging.with_timestamp
[elastic]
--min-np --min-num-proc  int  --min-np
--max-np --max-num-proc  int  --max-np  needs=elastic
--slots-per-host  int  --slots-per-host  needs=host_discovery_script
--elastic-timeout  int  --elastic-timeout  needs=elastic  default=HOROVOD_ELASTIC_TIMEOUT
--reset-limit  int  --reset-limit  needs=elastic
--blacklist-cooldown-range  int  --blacklist-cooldown-range  words=2  needs=elastic
[parameters]
--fusion-threshold-mb  count  HOROVOD_FUSION_THRESHOLD  times=1048576
    yaml=params.fusion_threshold_mb
--cycle-time-ms  number  HOROVOD_CYCLE_TIME  yaml=params.cycle_time_ms
--cache-capacity  count  HOROVOD_CACHE_CAPACITY  yaml=params.cache_capacity
--hierarchical-allreduce  flag  HOROVOD_HIERARCHICAL_ALLREDUCE
    off=--no-hierarchical-allreduce  yaml=params.hierarchical_allreduce
--hierarchical-allgather  flag  HOROVOD_HIERARCHICAL_ALLGATHER
    off=--no-hierarchical-allgather  yaml=params.hierarchical_allgather
--torus-allreduce  flag  HOROVOD_TORUS_ALLREDUCE
    off=--no-torus-allreduce  yaml=params.torus_allreduce
--num-nccl-streams  count  HOROVOD_NUM_NCCL_STREAMS  yaml=library_options.num_nccl_streams
--thread-affinity  count  HOROVOD_THREAD_AFFINITY  yaml=library_options.thread_affinity
--gloo-timeout-seconds  count  HOROVOD_GLOO_TIMEOUT_SECONDS
    yaml=library_options.gloo_timeout_seconds
[autotune]
--autotune  flag  HOROVOD_AUTOTUNE  off=--no-autotune  yaml=autotune.enabled
--autotune-log-file  text  HOROVOD_AUTOTUNE_LOG  yaml=autotune.log_file  needs=autotune
--autotune-warmup-samples  count  HOROVOD_AUTOTUNE_WARMUP_SAMPLES
    yaml=autotune.warmup_samples  needs=autotune
--autotune-steps-per-sample  count  HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE
    yaml=autotune.steps_per_sample  needs=autotune
--autotune-bayes-opt-max-samples  count  HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES
    yaml=autotune.bayes_opt_max_samples  needs=autotune
--autotune-gaussian-process-noise  number  HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE
    yaml=autotune.gaussian_process_noise  most=1  needs=autotune
[timeline]
--timeline-filename  text  HOROVOD_TIMELINE  yaml=timeline.filename
--timeline-mark-cycles  flag  HOROVOD_TIMELINE_MARK_CYCLES  off=--no-timeline-mark-cycles
    yaml=timeline.mark_cycles  needs=timeline_filename
[stalls]
--stall-check  flag  HOROVOD_STALL_CHECK_DISABLE  off=--no-stall-check  inverse=1
    yaml=stall_check.enabled
--stall-check-warning-time-seconds  count  HOROVOD_STALL_CHECK_TIME_SECONDS
    yaml=stall_check.warning_time_seconds
--stall-check-shutdown-time-seconds  count  HOROVOD_STALL_SHUTDOWN_TIME_SECONDS
    yaml=stall_check.shutdown_time_seconds
"""
_KINDS: Mapping[str, tuple[Callable[[str], Any] | None, float | None]] = {
    "flag": (None, None),
    "text": (str, None),
    "int": (int, None),
    "count": (int, 0),
    "number": (float, 0),
}


def _parse_table() -> dict[str, list[Option]]:
    groups: dict[str, list[Option]] = {}
    for row in re.split(r"\n(?=\S)", _TABLE.strip()):
        if row.startswith("["):
            options = groups.setdefault(row.strip("[]"), [])
            continue
        names, kind, effect, *more = re.split(r"\s{2,}", row)
        others: dict[str, Any] = dict(each.replace(",", " ").split("=", 1) for each in more)
        for name in ("words", "least", "most", "times", "inverse"):
            if name in others:
                others[name] = int(others[name])
        becomes = "becomes" if re.fullmatch(r"-+[a-zH-]+|[A-Z_]+", effect) else "effect"
        others[becomes] = effect
        others["kind"], least = _KINDS[kind]
        options.append(Option(names, **{"least": least} | others))
    return groups


#: The name of a group -> its options.
OPTIONS: Mapping[str, Sequence[Option]] = _parse_table()
#: The key of an option -> the option.
BY_KEY = {option.key: option for group in OPTIONS.values() for option in group}
# The most characters of a value in an error.
_SHOWN = 200


def shown(value: Any) -> str:
    """Return a value for an error."""
    # A few aliases of YAML stand for more values than the memory has.
    text = f"a {type(value).__name__}" if isinstance(value, list | dict) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def converted(option: Option, value: Any, source: str) -> Any:
    """Return a value that is not from the command line, as the command line would give it.

    Raises:
        UsageError: the value is not valid.
    """
    if option.kind is None:
        if not isinstance(value, bool):
            raise UsageError(f"{source} is {shown(value)}: expected true or false")
        return value
    if isinstance(value, list | dict):
        raise UsageError(f"{source} is {shown(value)}: expected one value")
    try:
        converted = option.kind(str(value))
    except ValueError as error:
        raise UsageError(f"{source} is {shown(value)}: expected a number") from error
    return checked(option, converted, source)


def checked(option: Option, value: Any, source: str) -> Any:
    """Return the value of an option.

    Raises:
        UsageError: it is out of range.
    """
    if option.values and value not in option.values.split():
        raise UsageError(f"{source} is {shown(value)}: expected {', '.join(option.values.split())}")
    least, most = option.least, option.most
    if least is not None and not least <= value <= (most or value):
        expected = f"at least {least:g}" if most is None else f"{least:g} to {most:g}"
        raise UsageError(f"{source} is {value}: expected {expected}")
    return value


def describe(option: Option) -> str:
    """Return the effect of an option."""
    elastic = "--elastic " if option.key in ("host_discovery_script", "min_num_proc") else ""
    text = option.effect or f"{elastic}{option.becomes}"
    if option.times > 1:
        text += ", in bytes"
    if option.needs:
        needs = option.needs
        needed = BY_KEY[needs].flag if needs in BY_KEY else f"{needs} jobs"
        text += f" (with {needed})" if needs != "mpi" else " (over MPI)"
    if option.default:
        text += f". Its default is {option.default}"
    return text
