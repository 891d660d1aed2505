"""Predict the time of a training step: an alpha-beta model of the network, and the overlap.

A ring of n ranks sums S bytes in 2(n-1) (latency + S / n / bandwidth) seconds. If a ring has
different links, latency and bandwidth are those of the slowest. See Thakur et al., Optimization of
Collective Communication Operations in MPICH, 2005. Two levels are a ring within each host, and one
between hosts. The collectives of a step run one after another. Each starts when its gradients are
ready (Shi et al., MG-WFBP, arXiv 1811.11141).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import NormalDist

from hvdkit.bench.scale.layers import Layer
from hvdkit.reduction import bucketing

FLAT, TWO_LEVELS = "flat", "two-level"
LEVELS = (FLAT, TWO_LEVELS)

#: hvdkit's buckets.
HVDKIT = "hvdkit"
#: Horovod's fusion: a collective sums the gradients that are ready when it starts.
FUSION = "fusion"
#: A collective for each parameter.
PARAMETER = "parameter"
#: One collective, after the backward pass.
ONE = "one"
GROUPINGS = (HVDKIT, FUSION, PARAMETER, ONE)

#: HOROVOD_FUSION_THRESHOLD.
FUSION_BYTES = 64 << 20

#: The share of the backward pass in the time of both passes. The backward pass has twice the
#: multiply-adds of the forward pass.
BACKWARD_SHARE = 2 / 3

#: The time at which gradients are ready, in seconds, and their bytes.
Ready = tuple[float, int]

_ITEMSIZE = 4


@dataclass(frozen=True)
class Link:
    """A connection between ranks.

    Attributes:
        latency: seconds of a message without data.
        bandwidth: bytes per second in each direction.
    """

    latency: float
    bandwidth: float

    def ring(self, nbytes: float, ranks: int) -> float:
        """Return the seconds of an allreduce in a ring."""
        steps = 2 * (ranks - 1)
        return steps * (self.latency + nbytes / ranks / self.bandwidth)


@dataclass(frozen=True)
class Network:
    """The links of a job, and how its collectives use them.

    Attributes:
        between: the link between hosts. All ranks of a host share the link of their host.
        within: the link between the ranks of a host.
        ranks_per_host: the number of ranks of each host.
        levels: FLAT is one ring over all ranks. TWO_LEVELS is a ring within each host, and one
            between hosts, over which a host sends its sum once.
        overhead: seconds that a collective of any size takes in addition, such as a wait for
            Horovod's next cycle.
    """

    between: Link
    within: Link
    ranks_per_host: int = 1
    levels: str = TWO_LEVELS
    overhead: float = 0.0

    def with_levels(self, levels: str) -> "Network":
        """Return the same links, used with other levels."""
        return replace(self, levels=levels)

    def allreduce(self, within: float, between: float, ranks: int) -> float:
        """Return the seconds of one allreduce.

        Args:
            within: the bytes of a rank's buffer, as it is reduced within a host.
            between: the bytes of the same buffer in the wire format between hosts.
            ranks: the number of ranks: up to `ranks_per_host`, or a multiple of it.
        """
        if ranks == 1:
            return 0.0
        local = min(ranks, self.ranks_per_host)
        hosts = ranks // local
        if hosts == 1:
            return self.overhead + self.within.ring(within, local)
        if self.levels == FLAT:
            bandwidth = self.between.bandwidth
            latency = self.between.latency
            if local > 1:
                bandwidth = min(bandwidth, self.within.bandwidth)
                latency = max(latency, self.within.latency)
            return self.overhead + Link(latency, bandwidth).ring(between, ranks)
        inside = self.within.ring(within, local) if local > 1 else 0.0
        return self.overhead + inside + self.between.ring(between, hosts)


@dataclass(frozen=True)
class Step:
    """The computation of a rank in a step.

    Attributes:
        layers: in the order of the forward pass.
        forward: seconds of the forward pass.
        backward: seconds of the backward pass, divided among the layers by their work.
        update: seconds after the last collective: the optimizer.
        alone: seconds of a step of one rank that has the machine for itself (the variant `single`
            of `hvdkit bench step`). None: the sum of
            `forward`, `backward` and `update`.
        jitter: the standard deviation of the time of a rank's passes, relative to them. The step
            waits for the slowest rank.
    """

    layers: Sequence[Layer]
    forward: float
    backward: float
    update: float = 0.0
    alone: float | None = None
    jitter: float = 0.0

    @property
    def one_rank(self) -> float:
        """The seconds of a step of one rank, which is 100 % efficient."""
        return self.forward + self.backward + self.update if self.alone is None else self.alone

    def slowest(self, ranks: int) -> float:
        """Return the expected time of the slowest rank's passes, relative to the mean of all ranks.

        The times are assumed to be independent and normally distributed. The formula is Blom's
        approximation of the largest of several normal variables (Statistical Estimates and
        Transformed Beta-Variables, 1958).
        """
        if ranks == 1 or not self.jitter:
            return 1.0
        return 1 + self.jitter * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


@dataclass(frozen=True)
class Reduction:
    """The grouping of the gradients into collectives, and their wire format.

    Attributes:
        grouping: one of GROUPINGS.
        within_share, between_share: bytes within and between hosts, relative to float32.
        bucket_bytes: the size of a bucket, if `grouping` is HVDKIT.
        encoding: seconds to encode and decode a byte of float32.
    """

    grouping: str = HVDKIT
    within_share: float = 1.0
    between_share: float = 1.0
    bucket_bytes: int = bucketing.BUCKET_BYTES
    encoding: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """A predicted step.

    Attributes:
        ranks: the number of ranks.
        seconds: the time of the step.
        efficiency: the time of a step of one rank, divided by `seconds`.
        communication: the seconds of all collectives.
        exposed: the seconds from the end of the backward pass to the end of the last collective.
        collectives: the number of collectives.
    """

    ranks: int
    seconds: float
    efficiency: float
    communication: float
    exposed: float
    collectives: int


def predict(step: Step, network: Network, reduction: Reduction, ranks: int) -> Prediction:
    """Predict a step on `ranks` ranks.

    Args:
        step: the computation.
        network: the links.
        reduction: the grouping of the gradients, and the wire format.
        ranks: a number up to the ranks of a host, or a multiple of it.
    """
    if ranks == 1:
        return Prediction(1, step.one_rank, 1.0, 0.0, 0.0, 0)
    slowdown = step.slowest(ranks)
    forward, backward = step.forward * slowdown, step.backward * slowdown

    def allreduce(nbytes: float) -> float:
        within, between = nbytes * reduction.within_share, nbytes * reduction.between_share
        return network.allreduce(within, between, ranks) + nbytes * reduction.encoding

    groups = _groups(ready_gradients(step.layers, backward), reduction)
    collectives = _collectives(groups, reduction.grouping, allreduce)
    end = max([backward, *(start + duration for start, duration in collectives)])
    seconds = forward + end + step.update
    return Prediction(
        ranks=ranks,
        seconds=seconds,
        efficiency=step.one_rank / seconds,
        communication=sum(duration for _, duration in collectives),
        exposed=end - backward,
        collectives=len(collectives),
    )


def ready_gradients(layers: Sequence[Layer], backward: float) -> list[Ready]:
    """Return when the gradient of each parameter becomes ready, and its bytes in float32.

    Args:
        layers: in the order of the forward pass.
        backward: the seconds of the backward pass.

    Returns:
        In the order of the backward pass. The times are in seconds since its beginning.
    """
    whole = sum(layer.work for layer in layers)
    backwards = list(reversed(layers))
    done = accumulate(layer.work / whole if whole else 1 / len(layers) for layer in backwards)
    return [
        (share * backward, elements * _ITEMSIZE)
        for layer, share in zip(backwards, done, strict=True)
        for elements in reversed(layer.elements)
    ]


def _groups(gradients: Sequence[Ready], reduction: Reduction) -> list[Ready]:
    """Return the groups of gradients that one collective reduces, before Horovod's fusion."""
    if reduction.grouping == ONE:
        return [(gradients[-1][0], sum(nbytes for _, nbytes in gradients))]
    if reduction.grouping != HVDKIT:
        return list(gradients)
    specs = [
        bucketing.ParameterSpec(str(i), (nbytes // _ITEMSIZE,), "float32", _ITEMSIZE, "")
        for i, (_, nbytes) in enumerate(gradients)
    ]
    plan = bucketing.plan(specs, reduction.bucket_bytes, order=range(len(specs)))
    return [
        (max(gradients[i][0] for i in bucket.parameters), bucket.elements * _ITEMSIZE)
        for bucket in plan.buckets
    ]


def _collectives(
    waiting: Sequence[Ready], grouping: str, allreduce: Callable[[float], float]
) -> list[tuple[float, float]]:
    """Return the start and the duration of each collective. They run one after another."""
    found = []
    end = 0.0
    i = 0
    while i < len(waiting):
        ready, nbytes = waiting[i]
        start = max(end, ready)
        i += 1
        while grouping == FUSION and i < len(waiting) and waiting[i][0] <= start:
            if nbytes + waiting[i][1] > FUSION_BYTES:
                break
            nbytes += waiting[i][1]
            i += 1
        duration = allreduce(nbytes)
        found.append((start, duration))
        end = start + duration
    return found
