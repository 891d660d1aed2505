"""`hvdkit tune`: parse its arguments, run the trials, and print what to use."""

from __future__ import annotations

import json
import os
import shutil
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from hvdkit.bench.sizes import parse_size
from hvdkit.console.flags import TYPES, add_options, flag
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch.options import arguments
from hvdkit.launch.options.command import command_of
from hvdkit.reduction.compression import FORMATS
from hvdkit.system import cgroups
from hvdkit.system.plain_files import printable
from hvdkit.training.trial import BATCH_VARIABLE, TrialPlan
from hvdkit.tune import batch_sizes, buckets
from hvdkit.tune.trials import PLACEHOLDER, Result, Runner

HELP = "run a training for some steps, to find its fastest settings or its largest batch"
EXAMPLE = """\
  hvdkit tune -np 4 python train.py                           # bucket size, flat or two-level
  hvdkit tune -np 4 --wire-formats none,bf16 python train.py  # and these wire formats
  hvdkit tune -np 4 --batch-sizes 16..1024 python train.py --batch {batch_size}"""

#: Options of `hvdkit run` that have no meaning here.
_REFUSED = (
    *("elastic", "restarts", "nodes", "debug_rank", "output_dir"),
    *("config", "write_config", "dry_run"),
)
_MB = 1_000_000
#: The part of the free memory that ranks may use together by default.
_SHARE = 0.9


_OPTIONS = f"""
[what to measure]
--batch-sizes A..B        find the largest batch size of a rank that fits in memory, from A to B.
                          The command gets it as {PLACEHOLDER} and as ${BATCH_VARIABLE}
--memory SIZE             with --batch-sizes: the memory that each rank may use, such as 8GB, or
                          none (default on this machine without GPUs: 90 %% of the free memory,
                          divided by the ranks)
--steps N                 with --batch-sizes: the steps with each size (default: 10)
--final-steps STEPS       with --batch-sizes: the steps of the last run, which shows whether the
                          largest size survives, and measures the noise scale for advice on the
                          learning rate; 0: no such run (default: 100)
--bucket-mb MB,…          bucket sizes in MB (default: 5,25,100)
--wire-formats LIST       wire formats with which the training may run, of {",".join(FORMATS)}
                          (default: the script's own)
--collectives LIST        some of {",".join(buckets.COLLECTIVES)}: how the ranks of a host are
                          combined (default: both; with GPUs two-level)
--turns N                 turns of each candidate (default: 5)
--file FILE               for the result, which hvd.autotune of PyTorch reads (default: tuning.json)
--timeout S               seconds for each run of the command (default: %(default)s)
"""


def add_arguments(verb: ArgumentParser) -> None:
    """Add the arguments of `hvdkit tune`. The others are those of `hvdkit run`."""
    _add_own(verb)
    arguments.add_arguments(verb)


def _add_own(parser: ArgumentParser) -> None:
    types = {"N": _count, "S": _count, "STEPS": _count_or_zero, "MB,…": _numbers, "LIST": _names}
    add_options(parser, _OPTIONS, {**TYPES, **types}, timeout=900)


#: The options for each of the two tasks, by their names in a namespace.
_FOR_BATCHES = ("memory", "steps", "final_steps")
_FOR_BUCKETS = ("bucket_mb", "wire_formats", "collectives", "turns", "file")


def run(options: Namespace) -> int:
    """Run `hvdkit tune`, and return its exit status.

    Raises:
        UsageError: the arguments are wrong.
        HvdkitError: a run failed.
    """
    _check(options)
    command = command_of(options)
    if not command:
        raise UsageError("no command was given: expected the command of every rank")
    if options.batch_sizes is None:
        return _tune_buckets(options, command)
    return _find_batch_size(options, command)


def _check(options: Namespace) -> None:
    for name in _REFUSED:
        if getattr(options, name) not in (None, False):
            raise UsageError(
                f"{flag(name)} was given: `hvdkit tune` takes the options of `hvdkit run`, but not "
                f"this one"
            )
    arguments.check(options)
    batches = options.batch_sizes is not None
    for name in _FOR_BUCKETS if batches else _FOR_BATCHES:
        if getattr(options, name) is not None:
            other = "cannot be combined with" if batches else "needs"
            raise UsageError(f"{flag(name)} {other} --batch-sizes")


def _for_run(options: Namespace) -> list[str]:
    """Return the arguments of `hvdkit run` in the command line, without the command."""
    words = list(options.words)[: len(options.words) - len(options.command)]
    own = ArgumentParser(add_help=False, allow_abbrev=False)
    _add_own(own)
    _, others = own.parse_known_args(words[:-1] if words[-1:] == ["--"] else words)
    return others


def _say(text: str) -> None:
    print(printable(text), flush=True)


# --- bucket size, wire format, flat or two-level ------------------------------------------------


def _tune_buckets(options: Namespace, command: Sequence[str]) -> int:
    kinds = options.collectives or (
        [buckets.TWO_LEVEL] if _has_gpu() else list(buckets.COLLECTIVES)
    )
    _check_names("--collectives", kinds, buckets.COLLECTIVES)
    _check_names("--wire-formats", options.wire_formats or [], list(FORMATS))
    turns = options.turns or 5
    if turns < 3:
        raise UsageError(f"--turns is {turns}: expected at least 3")
    file = options.file or Path("tuning.json")
    plan = TrialPlan(
        bucket_bytes=tuple(round(size * _MB) for size in options.bucket_mb or (5, 25, 100)),
        wire_formats=tuple(options.wire_formats or ()),
    )
    # The current setting is the first one.
    if os.environ.get(buckets.VARIABLE) == "flat" and buckets.FLAT in kinds:
        kinds = sorted(kinds, key=lambda kind: kind != buckets.FLAT)
    runner = Runner(_for_run(options), command, options.python, options.timeout)
    measured = buckets.measure(runner, plan, kinds, turns, _say)
    _say("Times of a step, on the slowest rank:")
    for line in measured.table():
        _say(line)
    (kind, chosen), (current_kind, current) = measured.chosen, measured.current
    if measured.chosen == measured.current:
        _say(f"Nothing is clearly faster than the current settings: {kind}, {chosen}.")
    else:
        changes = []
        if chosen.bucket_bytes != current.bucket_bytes:
            changes.append(f"bucket_bytes={chosen.bucket_bytes}")
        if chosen.wire_format != current.wire_format:
            changes.append(f'compression="{chosen.wire_format}"')
        if changes:
            tape = "" if measured.fingerprints else " or hvd.DistributedGradientTape"
            _say(f"Pass {' and '.join(changes)} to hvd.DistributedOptimizer{tape}.")
        if kind != current_kind:
            verb = "Set" if kind == buckets.FLAT else "Unset"
            value = "=flat" if kind == buckets.FLAT else ""
            _say(f"{verb} {buckets.VARIABLE}{value} in the environment of the job.")
    if not measured.fingerprints:
        return 0  # only `hvd.autotune` of PyTorch reads the file
    measured.save(file)
    listed = f", wire_formats={json.dumps(options.wire_formats)}" if options.wire_formats else ""
    _say(
        f'wrote {file}: hvd.autotune(optimizer, "{file}"{listed}) uses this result, and measures '
        f"nothing."
    )
    return 0


# --- the largest batch size ---------------------------------------------------------------------


def _find_batch_size(options: Namespace, command: Sequence[str]) -> int:
    sizes = batch_sizes.parse(options.batch_sizes)
    steps = options.steps or 10
    final_steps = 100 if options.final_steps is None else options.final_steps
    memory, why = _memory(options)
    _say(why)
    runner = Runner(_for_run(options), command, options.python, options.timeout, memory)
    fitting: list[int] = []

    def fits(size: int) -> bool:
        passed = _try(runner, TrialPlan(steps=steps), size) is not None
        if passed:
            fitting.append(size)
        return passed

    if batch_sizes.is_range(options.batch_sizes):
        largest = batch_sizes.largest_in_range(sizes[0], sizes[1], fits)
    else:
        largest = batch_sizes.largest_of(sizes, fits)
    final: Result | None = None
    fitting.sort()
    # More steps may need more memory than a few, for example because memory is fragmented.
    while largest is not None and final_steps and final is None:
        final = _try(runner, TrialPlan(steps=final_steps, samples=largest), largest)
        if final is None:
            fitting.remove(largest)
            largest = fitting[-1] if fitting else None
    if largest is None:
        raise HvdkitError(
            f"the smallest batch size, {sizes[0]}, does not fit in memory. Give smaller ones, or "
            f"more memory"
        )
    end = " (the largest that was allowed)" if largest == sizes[-1] else ""
    _say(f"The largest batch size of a rank is {largest:,}{end}.")
    if largest != sizes[-1]:
        _say("If the memory of a step depends on its data, choose a smaller one.")
    if final is not None:
        _advise(final, fitting)
    return 0


def _try(runner: Runner, plan: TrialPlan, size: int) -> Result | None:
    """Run the command with a batch size, and print its end. Return None if it is out of memory.

    Raises:
        HvdkitError: the command failed for another reason, or made no step.
    """
    result = runner.run(plan, size)
    if result.out_of_memory:
        _say(f"  batch size {size:,}: out of memory. {result.out_of_memory}")
        return None
    peak, gpu = result.peak(), result.peak("gpu_peak_bytes")
    used = [f"{_gigabytes(peak)} of memory"] if peak else []
    used += [f"{_gigabytes(gpu)} of GPU memory"] if gpu else []
    report = result.first_report
    made = "the command has ended by itself"
    if report is not None:
        if not report["steps"]:
            raise HvdkitError(
                f"with batch size {size}, the command has ended without a step. Give smaller "
                f"batch sizes, or more data"
            )
        made = f"{report['steps']} steps"
    more = f", at most {' and '.join(used)} on a rank" if used else ""
    _say(f"  batch size {size:,}: passed ({made} in {result.seconds:.0f} s{more})")
    return result


def _advise(final: Result, fitting: Sequence[int]) -> None:
    """Print advice on the learning rate.

    Args:
        final: the run in which the noise scale was measured.
        fitting: the batch sizes that fit, in increasing order.
    """
    report = final.first_report or {}
    noise = report.get("noise") or {
        "problem": "only PyTorch can measure it, in a script that makes all steps (--final-steps)"
    }
    if "problem" in noise:
        _say(f"The noise scale was not measured: {noise['problem']}.")
        return
    ranks = len(final.reports)
    for line in batch_sizes.advice(batch_sizes.blocks_of(noise["sums"]), ranks, fitting):
        _say(line)


def _memory(options: Namespace) -> tuple[int, str]:
    """Return the limit of each rank in bytes, 0 for none, and a text about it.

    Raises:
        UsageError: --memory is not a size.
    """
    if options.memory is not None and options.memory != "none":
        try:
            size = parse_size(options.memory)
        except UsageError:
            raise UsageError(
                f"--memory is {options.memory!r}: expected a size, such as 8GB or 512MiB, or none"
            ) from None
        return size, f"Each rank may use {_gigabytes(size)} of memory."
    here = not any(
        (options.hosts, options.hostfile, options.host_discovery_script)
    ) and options.launcher in ("auto", "gloo")
    if options.memory == "none" or _has_gpu() or not here or "SLURM_JOB_ID" in os.environ:
        return 0, "There is no limit of memory but those of the hosts and GPUs (--memory sets one)."
    free = _free_memory()
    ranks = options.num_proc or 1
    size = int(free * _SHARE / ranks)
    return size, (
        f"Each rank may use {_gigabytes(size)} of memory: {_SHARE:.0%} of the free "
        f"{_gigabytes(free)}, divided by {ranks} (--memory sets another limit)."
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def _free_memory() -> int:
    """Return the bytes that new processes can use, on this machine and in this container."""
    free = int(psutil.virtual_memory().available)
    for folder, limit, used in (
        (cgroups.ROOT, "memory.max", "memory.current"),
        (cgroups.ROOT / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        most, taken = cgroups.number(folder, limit), cgroups.number(folder, used)
        if most is not None and taken is not None:
            free = min(free, max(0, most - taken))
    return free


def _has_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return shutil.which("nvidia-smi") is not None or Path("/dev/kfd").exists()


# --- values of arguments ------------------------------------------------------------------------


def _check_names(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"{option} has {name!r}: expected some of {', '.join(known)}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [0.0]
    if not all(0 < number < 1e6 for number in numbers):
        raise ArgumentTypeError(f"{text!r}: expected numbers of MB above 0, such as 5,25,100")
    return numbers


def _at_least(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text!r}: expected a number of at least {least}")
        return int(text)

    return count


_count, _count_or_zero = _at_least(1), _at_least(0)
