"""The profile of a job: its step and its network, from files, options and defaults.

`hvdkit bench scale` builds a profile and predicts with it. Each value that was not measured, and
each source of a value, is kept as a sentence that the user reads below the prediction.
"""

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvdkit.bench import link
from hvdkit.bench.scale import measured
from hvdkit.bench.scale.layers import MODELS, Layer
from hvdkit.bench.scale.prediction import (
    BACKWARD_SHARE,
    FLAT,
    FUSION,
    FUSION_BYTES,
    HVDKIT,
    ONE,
    PARAMETER,
    TWO_LEVELS,
    Link,
    Network,
    Reduction,
    Step,
)
from hvdkit.bench.step.variants import SHARE_OF_FLOAT32
from hvdkit.errors import UsageError
from hvdkit.reduction.bucketing import BUCKET_BYTES, FIRST_BUCKET_BYTES, MB

#: The latency of a message between hosts in seconds, over TCP in a data centre.
LATENCY = 20e-6
#: The link within a host if it was neither given nor measured: like PCIe 3.0 with 16 lanes.
WITHIN = Link(5e-6, 10e9)

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_GROUPINGS = {
    HVDKIT: "hvdkit's buckets",
    FUSION: f"Horovod's fusion: gradients that are ready when a collective starts, up to "
    f"{FUSION_BYTES / MB:.0f} MB",
    PARAMETER: "a collective for each parameter",
    ONE: "one collective, after the backward pass",
}


@dataclass(frozen=True)
class Profile:
    """The input of a prediction.

    Attributes:
        model: the name of the model.
        step: the computation.
        network: the links. A prediction chooses `levels` with `Network.with_levels`.
        encoding: wire format -> seconds to encode and decode a byte of float32, if measured.
        measured_ranks_per_host: the ranks of each host in the file of `--step`; 0 without a file.
        reduced: the steps of several ranks in that file.
        assumptions: a sentence for each assumption.
    """

    model: str
    step: Step
    network: Network
    encoding: Mapping[str, float] = field(default_factory=dict)
    measured_ranks_per_host: int = 0
    reduced: Sequence[measured.MeasuredStep] = ()
    assumptions: list[str] = field(default_factory=list)


def parse_seconds(text: str, option: str) -> float:
    """Return a time in seconds.

    Args:
        text: such as `20us`, `1.5ms` or `0`.
        option: the name of the option, for the error.

    Raises:
        UsageError: the text has another form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", text.strip().lower())
    if found is None and text.strip() != "0":
        raise UsageError(f"{option} is {text!r}; expected a time with a unit, such as 20us or 1ms")
    return float(found[1]) * _SECONDS[found[2]] if found else 0.0


def show_seconds(seconds: float) -> str:
    """Return a time with a unit, such as `1.5 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def build(options: argparse.Namespace, ranks: Sequence[int]) -> Profile:
    """Return the profile that the options describe.

    Args:
        options: the command line.
        ranks: the numbers of ranks to predict.

    Raises:
        UsageError: an option is wrong or missing, or a file is of another kind.
    """
    model, step, steps, texts = _step(options)
    ranks_per_host = options.ranks_per_host or (steps.ranks_per_host if steps else 1)
    check_ranks(ranks, ranks_per_host)
    files = [measured.read_allreduces(path) for path in options.allreduce]
    several = max(ranks) > ranks_per_host
    network, of_network = _network(options, files, ranks_per_host, several)
    return Profile(
        model=model,
        step=step,
        network=network,
        encoding=encoding_of(files, network),
        measured_ranks_per_host=steps.ranks_per_host if steps else 0,
        reduced=steps.reduced if steps else (),
        assumptions=[*texts, *of_network],
    )


def _step(options: argparse.Namespace) -> tuple[str, Step, measured.Steps | None, list[str]]:
    """Return the model, the step, the content of `--step` (None without it), the assumptions."""
    given = [options.forward_ms, options.backward_ms, options.update_ms]
    if options.step is None:
        if options.model is None or options.backward_ms is None:
            raise UsageError(
                "the step is not known: give --step FILE, or --model and --backward-ms"
            )
        layers = _layers(options.model, "--model")
        backward = options.backward_ms / 1e3
        whole = backward / BACKWARD_SHARE
        forward = whole - backward if options.forward_ms is None else options.forward_ms / 1e3
        step = Step(layers, forward, backward, (options.update_ms or 0.0) / 1e3)
        texts = []
        if options.forward_ms is None:
            texts.append("The forward pass takes half the time of the backward pass.")
        if options.update_ms is None:
            texts.append("The update takes no time (--update-ms).")
        steps = None
    else:
        if any(value is not None for value in given):
            raise UsageError("--step has the times of the passes: remove --*-ms or --step")
        steps = measured.read_steps(options.step, options.model)
        layers = _layers(steps.model, f"--step {options.step}")
        if (expected := _nbytes(layers)) != steps.nbytes:
            raise UsageError(
                f"--step {options.step} has {steps.nbytes} bytes of gradients of {steps.model}; "
                f"expected {expected}: measure again with this hvdkit"
            )
        step, texts = _step_of_file(steps, layers, options.ranks_per_host)
    name = steps.model if steps else options.model
    texts.append(
        f"The gradients of {name}, {_nbytes(layers) / MB:.1f} MB of float32, become ready in "
        f"proportion to the multiply-adds of the layers."
    )
    if options.jitter:
        texts.append(
            f"The passes of the ranks vary by {options.jitter:.1%} (standard deviation), "
            f"independently. A step waits for the slowest rank."
        )
    else:
        texts.append("All ranks compute equally fast (--jitter).")
    return name, replace(step, jitter=options.jitter), steps, texts


def _step_of_file(
    steps: measured.Steps, layers: Sequence[Layer], ranks_per_host: int | None
) -> tuple[Step, list[str]]:
    texts = [f"A step of one rank takes {show_seconds(steps.one_rank)} ({steps.source})."]
    passes = steps.one_rank
    if steps.alone is not None and ranks_per_host in (None, steps.ranks_per_host):
        passes = steps.alone
        texts.append(
            f"While all ranks compute, a step without a reduction takes {show_seconds(passes)} "
            f"({steps.source}, alone)."
        )
    texts.append(
        "The backward pass takes two thirds of a step, and the update counts as a part of the "
        "passes."
    )
    backward = passes * BACKWARD_SHARE
    return Step(layers, passes - backward, backward, alone=steps.one_rank), texts


def _layers(model: str, option: str) -> list[Layer]:
    if model not in MODELS:
        raise UsageError(f"{option} has the model {model!r}; expected one of {', '.join(MODELS)}")
    return MODELS[model]()


def _nbytes(layers: Sequence[Layer]) -> int:
    """Return the bytes of all gradients in float32."""
    return 4 * sum(sum(layer.elements) for layer in layers)


def _network(
    options: argparse.Namespace,
    files: Sequence[measured.Allreduces],
    ranks_per_host: int,
    several_hosts: bool,
) -> tuple[Network, list[str]]:
    """Return the network and the assumptions. Options take precedence over files."""
    latency = _option(options.latency, "--latency")
    overhead = _option(options.overhead, "--overhead")
    here = [each for each in files if each.on_one_host]
    there = [each for each in files if not each.on_one_host]
    texts: list[str] = []
    within, cycle = _within(options, here, ranks_per_host, texts)
    if options.bandwidth is not None:
        bandwidth = link.parse_rate(options.bandwidth, "--bandwidth")
        between = Link(LATENCY if latency is None else latency, bandwidth)
        texts.append(f"Between hosts: {_show(between)} (options).")
        if latency is None:
            texts.append("The latency is that of TCP in a data centre (--latency).")
    elif there:
        fitted = measured.fit_link(there, LATENCY if latency is None else latency, within)
        between = fitted.link if latency is None else Link(latency, fitted.link.bandwidth)
        cycle = fitted.overhead
        texts.append(f"Between hosts: {_show(between)}. {_describe(fitted)}")
        if len(fitted.rings) == 1 and latency is None:
            texts.append(
                f"All files were measured with rings of {fitted.rings[0]} ranks. One ring length "
                f"cannot separate the latency of a message from the fixed time of a collective: "
                f"give --latency, or a file with another number of hosts."
            )
    elif not several_hosts:
        between = within
    else:
        raise UsageError(
            "the link between hosts is not known: give --bandwidth, or --allreduce FILE of ranks "
            "on several hosts"
        )
    overhead = (cycle or 0.0) if overhead is None else overhead
    texts.append(
        f"A collective takes {show_seconds(overhead)} in addition, whatever its size (--overhead)."
    )
    return Network(between, within, ranks_per_host, TWO_LEVELS, overhead), texts


def _within(
    options: argparse.Namespace,
    here: Sequence[measured.Allreduces],
    ranks_per_host: int,
    texts: list[str],
) -> tuple[Link, float | None]:
    """Return the link within a host, and the overhead of a collective on it if it was fitted."""
    if options.host_bandwidth is not None:
        rate = link.parse_rate(options.host_bandwidth, "--host-bandwidth")
        found, cycle, source = Link(WITHIN.latency, rate), None, "(--host-bandwidth)."
    elif here:
        fitted = measured.fit_link(here, 0.0)
        found, cycle, source = fitted.link, fitted.overhead, f". {_describe(fitted)}"
    else:
        found, cycle, source = WITHIN, None, "(--host-bandwidth, not measured)."
    if ranks_per_host > 1:
        texts.append(f"Within a host: {_show(found)} {source}".replace(" .", "."))
    return found, cycle


def _option(text: str | None, option: str) -> float | None:
    return None if text is None else parse_seconds(text, option)


def _show(found: Link) -> str:
    rate = link.show_rate(found.bandwidth)
    return f"{rate}, latency {show_seconds(found.latency)}"


def _describe(fitted: measured.FittedLink) -> str:
    return f"Fitted to {fitted.source} with a median error of {fitted.error:.0%}."


def encoding_of(files: Sequence[measured.Allreduces], network: Network) -> dict[str, float]:
    """Return the seconds to encode and decode a byte of float32, for each measured wire format."""

    def sending(wire: str) -> Callable[[measured.Allreduces, int], float]:
        within, between = shares(wire)

        def seconds(each: measured.Allreduces, size: int) -> float:
            used = replace(network, ranks_per_host=each.ranks_per_host)
            used = used.with_levels(FLAT if each.flat else TWO_LEVELS)
            return used.allreduce(size * within, size * between, each.ranks)

        return seconds

    found = {wire: measured.fit_encoding(files, wire, sending(wire)) for wire in SHARE_OF_FLOAT32}
    return {wire: seconds for wire, seconds in found.items() if seconds is not None}


def shares(wire: str) -> tuple[float, float]:
    """Return the bytes that a wire format sends within and between hosts, relative to float32."""
    share = SHARE_OF_FLOAT32[wire]
    # With int8, ranks of a host reduce in float32. Only the sum of the host is sent as int8.
    return 1.0 if wire == "int8" else share, share


def reduction(
    options: argparse.Namespace, wire: str, encoding: Mapping[str, float]
) -> tuple[Reduction, list[str]]:
    """Return how gradients are reduced in a wire format, and the assumptions.

    Args:
        options: the command line.
        wire: the wire format.
        encoding: see `Profile`.
    """
    within, between = shares(wire)
    if options.bucket_mb is not None and options.buckets != HVDKIT:
        raise UsageError(f"--bucket-mb was given with --buckets {options.buckets}: remove one")
    megabytes = BUCKET_BYTES / MB if options.bucket_mb is None else options.bucket_mb
    grouping = _GROUPINGS[options.buckets]
    if options.buckets == HVDKIT:
        first = min(FIRST_BUCKET_BYTES / MB, megabytes)
        grouping += f" of {megabytes:g} MB, the first of {first:g} MB"
    texts = [f"Gradients are reduced in {grouping}. Collectives run one after another."]
    cost = encoding.get(wire, 0.0)
    if wire != "fp32":
        time = f"{show_seconds(cost * MB)} for each MB (--allreduce)" if cost else "no time"
        texts.append(f"{wire} sends {between:.3g} of the bytes of float32. Encoding takes {time}.")
    return Reduction(options.buckets, within, between, int(megabytes * MB), cost), texts


def check_ranks(ranks: Sequence[int], ranks_per_host: int) -> None:
    """Check that all hosts would have the same number of ranks.

    Raises:
        UsageError: a number is above `ranks_per_host`, and not a multiple of it.
    """
    wrong = [n for n in ranks if n > ranks_per_host and n % ranks_per_host]
    if wrong:
        near = math.ceil(wrong[0] / ranks_per_host) * ranks_per_host
        raise UsageError(
            f"--ranks has {wrong[0]}, which does not fill hosts of {ranks_per_host} ranks; "
            f"expected a multiple of {ranks_per_host}, such as {near}, or another --ranks-per-host"
        )


LEVELS_TEXT = {
    TWO_LEVELS: "two-level: a sum within each host, then one ring between hosts.",
    FLAT: "flat: one ring over all ranks, as slow as its slowest link.",
}
