"""Compare predictions with real ranks of this machine, whose passes sleep instead of computing.

`scripts/rehearse_scale` calls this module. The hosts are network namespaces with limited links. The
predictions use links that are fitted to `hvdkit bench allreduce` with two ranks, and the measured
steps of one rank. Needs root and iproute2.
"""

import contextlib
import dataclasses
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdkit.bench import link, namespaces
from hvdkit.bench.jobs import Job, JobPlan
from hvdkit.bench.places import LimitedHosts
from hvdkit.bench.scale.layers import Layer
from hvdkit.bench.scale.measured import fit_link, read_allreduces
from hvdkit.bench.scale.prediction import FLAT as FLAT_RING
from hvdkit.bench.scale.prediction import (
    HVDKIT,
    TWO_LEVELS,
    Network,
    Reduction,
    Step,
    predict,
)
from hvdkit.bench.scale.profile import LATENCY, encoding_of, shares
from hvdkit.bench.step.variants import FLAT, SINGLE, TORCH, Variant
from hvdkit.bench.turns import in_turns
from hvdkit.engine import describe
from hvdkit.errors import HvdkitError
from hvdkit.system.owned_folders import TemporaryFolder
from hvdkit.system.processes import python_command

#: The gradients: layers of a MB of float32, in buckets of four.
ELEMENTS = (250_000,) * 24
BUCKET_BYTES = 4_000_000
FORWARD, BACKWARD = 0.1, 0.4

VARIANTS = (
    Variant(TORCH, "hvdkit", "gloo", "fp32"),
    Variant(TORCH, "hvdkit", "gloo", "fp16"),
    Variant(TORCH, FLAT, "gloo", "fp32"),
)
_ONE_RANK = Variant(TORCH, SINGLE)
_WARM_STEPS = 3


@dataclass(frozen=True)
class Hosts:
    """Hosts of a measurement.

    Attributes:
        count: the number of hosts.
        ranks: the ranks of each.
        rate: of the link of each, such as `1Gbit/s`.
    """

    count: int
    ranks: int
    rate: str


def measure(hosts: Hosts, variants: Sequence[Variant], turns: int) -> Mapping[str, float]:
    """Return the median seconds of a step of each variant, without the update.

    Args:
        hosts: the hosts.
        variants: the variants to measure. `single` is measured on one rank.
        turns: the number of steps of each variant.

    Raises:
        HvdkitError: a rank failed.
    """
    found: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryFolder("hvdkit-scale-")))
        # Ranks find each other by the addresses of their hosts.
        cluster = stack.enter_context(namespaces.hosts(hosts.count, own_name_is_local=False))
        link.limit(cluster, link.parse_rate(hosts.rate, "--rate"))
        place = LimitedHosts(
            cluster=cluster,
            size=hosts.count * hosts.ranks,
            rate=hosts.rate,
            addresses=(cluster.address,),
        )
        jobs = []
        for variant in variants:
            job = Job(_plan(variant, place.size), place, folder)
            stack.callback(job.close)
            job.start()
            with job.turn():
                for _ in range(_WARM_STEPS):
                    job.ask("step")
            jobs.append(job)
        for _, job, seconds in in_turns(jobs, turns, _slowest):
            found.setdefault(job.name, []).append(seconds)
        for job in jobs:
            job.finish()
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def measure_one_rank(turns: int) -> float:
    """Return the median seconds of a step of one rank, without the update."""
    return measure(Hosts(1, 1, "1Gbit/s"), [_ONE_RANK], turns)[_ONE_RANK.name]


def _slowest(job: Job) -> float:
    return max(float(answer["seconds"]) for answer in job.ask("step"))


def _plan(variant: Variant, ranks: int) -> JobPlan:
    return JobPlan(
        name=variant.name,
        module="benchmarks.timed_rank",
        controller="gloo",
        size=ranks if variant.reduces else 1,
        spec={
            "variant": dataclasses.astuple(variant),
            "bucket_bytes": BUCKET_BYTES,
            "elements": ELEMENTS,
            "forward": FORWARD,
            "backward": BACKWARD,
        },
        engine=describe.installed() if variant.needs.engine else None,
        env={"HVDKIT_COLLECTIVES": "flat"} if variant.optimizer == FLAT else {},
    )


@dataclass(frozen=True)
class Fitted:
    """The links of this machine, and the seconds to encode a byte, see `profile.encoding_of`."""

    network: Network
    encoding: Mapping[str, float]


def predict_seconds(fitted: Fitted, one_rank: float, hosts: Hosts, variant: Variant) -> float:
    """Return the predicted seconds of a step, without the update.

    Args:
        fitted: the links.
        one_rank: the seconds of a step of one rank.
        hosts: the hosts.
        variant: the optimizer and the wire format.
    """
    backward = one_rank * BACKWARD / (FORWARD + BACKWARD)
    layers = [Layer((elements,), 1.0) for elements in ELEMENTS]
    step = Step(layers, one_rank - backward, backward)
    levels = FLAT_RING if variant.optimizer == FLAT else TWO_LEVELS
    used = replace(fitted.network, ranks_per_host=hosts.ranks, levels=levels)
    encoding = fitted.encoding.get(variant.wire, 0.0)
    reduction = Reduction(HVDKIT, *shares(variant.wire), BUCKET_BYTES, encoding)
    return predict(step, used, reduction, hosts.count * hosts.ranks).seconds


def fit_machine(rate: str, folder: Path) -> Fitted:
    """Measure allreduces with two ranks, between hosts and within one, and fit the links.

    Args:
        rate: of the links between hosts.
        folder: for the files of the measurements.

    Raises:
        HvdkitError: a measurement failed.
    """
    sizes = ["--sizes", "1KiB,4MiB,8MiB,16MiB"]
    files = []
    for place in ((), ("--two-hosts", rate)):
        path = folder / f"allreduce{len(place)}.json"
        command = python_command("-m", "hvdkit", "bench", "allreduce", "-np", "2")
        command += [*place, *sizes, "--variants", "hvdkit-gloo"]
        command += ["--wires", "none,fp16", "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise HvdkitError(f"{' '.join(command)} failed:\n{done.stderr}")
        files.append(read_allreduces(path))
    within = fit_link(files[:1], 0.0)
    between = fit_link(files[1:], LATENCY)
    network = Network(between.link, within.link, overhead=between.overhead)
    return Fitted(network, encoding_of(files[1:], network))
