"""Compare published measurements of scaling with predictions of `hvdkit bench scale`.

`scripts/validate_scale` prints the comparison.

The model is fitted to the measurements of ResNet-50 only. The compared predictions are of other
models, whose measurements are not used for the fit.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.least_squares import positive
from hvdkit.bench.figures import wide_console
from hvdkit.bench.scale import table
from hvdkit.bench.scale.layers import MODELS
from hvdkit.bench.scale.prediction import (
    BACKWARD_SHARE,
    FLAT,
    FUSION,
    ONE,
    PARAMETER,
    Link,
    Network,
    Reduction,
    Step,
    predict,
)

#: Higher efficiencies do not test the model: a constant prediction of 100 % is nearly right, too.
BELOW = 0.9

# --- Shi et al., A Quantitative Survey of Communication Optimizations in Distributed Deep Learning,
# arXiv 2005.13247. The throughputs are those of results/2020-05-29 in
# https://github.com/HKBU-HPML/ddl-benchmarks: Horovod with NCCL, hosts of four GPUs, float32.

#: Model -> samples per GPU, and samples per second of one GPU.
ONE_GPU = {"resnet50": (64, 253.1), "bert-large": (8, 49.0), "bert-base": (64, 212.8)}
GPUS = (4, 8, 16, 32)
GPUS_PER_HOST = 4
#: Network -> nominal bytes per second.
NETWORKS = {"10GbE": 1.25e9, "100GbIB": 12.5e9, "100GbE": 12.5e9}
#: WFBP sums each gradient when it is ready; BSP sums all gradients after the backward pass.
METHODS = {"WFBP": PARAMETER, "BSP": ONE}

#: Network, method, model -> samples per second of all GPUs, for each of GPUS.
THROUGHPUTS: Mapping[tuple[str, str, str], tuple[float, ...]] = {
    ("10GbE", "WFBP", "resnet50"): (1015.40, 1795.74, 3146.78, 5113.18),
    ("10GbE", "BSP", "resnet50"): (925.02, 1282.28, 2485.12, 4920.82),
    ("10GbE", "WFBP", "bert-base"): (634.10, 582.26, 1069.48, 2013.38),
    ("10GbE", "BSP", "bert-base"): (555.52, 518.94, 984.88, 1926.64),
    ("10GbE", "WFBP", "bert-large"): (56.04, 29.06, 53.42, 101.96),
    ("10GbE", "BSP", "bert-large"): (53.04, 28.96, 54.30, 105.10),
    ("100GbIB", "WFBP", "resnet50"): (1014.28, 2017.12, 3946.06, 7326.56),
    ("100GbIB", "BSP", "resnet50"): (920.28, 1821.20, 3602.90, 7126.52),
    ("100GbIB", "WFBP", "bert-base"): (631.80, 1195.68, 2217.22, 4098.68),
    ("100GbIB", "BSP", "bert-base"): (555.70, 1082.42, 2112.96, 4184.38),
    ("100GbIB", "WFBP", "bert-large"): (56.30, 101.68, 185.42, 339.82),
    ("100GbIB", "BSP", "bert-large"): (53.08, 99.18, 191.64, 375.22),
    ("100GbE", "WFBP", "resnet50"): (1015.10, 1985.74, 3650.74, 6141.38),
    ("100GbE", "BSP", "resnet50"): (926.00, 1601.36, 3087.16, 5744.76),
    ("100GbE", "WFBP", "bert-base"): (632.58, 933.20, 1671.62, 2987.48),
    ("100GbE", "BSP", "bert-base"): (555.36, 804.62, 1504.62, 2815.72),
    ("100GbE", "WFBP", "bert-large"): (56.00, 54.82, 98.98, 174.78),
    ("100GbE", "BSP", "bert-large"): (52.90, 55.80, 103.34, 187.00),
}

_FITTED_MODEL = "resnet50"
_PREDICTED_MODELS = ("bert-base", "bert-large")

# --- Sergeev and Del Balso, Horovod, arXiv 1802.05799, and docs/benchmarks.rst of Horovod: 128
# hosts of four Pascal GPUs, 25 Gbit/s with RDMA over converged Ethernet (RoCE).

#: Model -> published efficiency of 512 GPUs.
HOROVOD = {"inception3": 0.90, "resnet101": 0.90, "vgg16": 0.68}
_HOROVOD_GPUS, _HOROVOD_BATCH = 512, 64
_HOROVOD_RATE = 25e9 / 8
#: Images per second of one P100 with 64 images: https://www.tensorflow.org/performance/benchmarks
#: of May 2017 (synthetic data). ResNet-101 is interpolated, see `_resnet101`.
_P100 = {"inception3": 142.0, "resnet50": 219.0, "resnet152": 91.8, "vgg16": 154.0}
#: The latency of a message in seconds, from the fit to ResNet-50 on 100GbIB, which also has RDMA.
_RDMA_LATENCY = 4e-6
#: Horovod collected tensors in cycles of 5 ms then, so a tensor waited for half of one on average.
_HALF_CYCLE = 2.5e-3


@dataclass(frozen=True)
class Point:
    """A published efficiency, and its prediction."""

    network: str
    method: str
    model: str
    ranks: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return abs(self.predicted / self.measured - 1)


def median_error(points: Sequence[Point]) -> float:
    """Return the median error of the points whose efficiency is below `BELOW`."""
    return statistics.median(point.error for point in points if point.measured < BELOW)


@cache
def _step(model: str) -> Step:
    samples, rate = ONE_GPU[model]
    return _passes(model, samples / rate)


def _passes(model: str, seconds: float, jitter: float = 0.0) -> Step:
    backward = seconds * BACKWARD_SHARE
    return Step(MODELS[model](), seconds - backward, backward, jitter=jitter)


def _points(
    network: str, fitted: Network, models: Sequence[str], methods: Sequence[str]
) -> Iterator[Point]:
    for model in models:
        samples_per_second = ONE_GPU[model][1]
        for method in methods:
            throughputs = THROUGHPUTS[network, method, model]
            for ranks, throughput in zip(GPUS, throughputs, strict=True):
                found = predict(_step(model), fitted, Reduction(METHODS[method]), ranks)
                efficiency = throughput / ranks / samples_per_second
                yield Point(network, method, model, ranks, found.efficiency, efficiency)


def _network(latency: float, bandwidth: float, overhead: float, within: float) -> Network:
    # NCCL forms one ring over all GPUs. The latency between hosts determines its speed, so the
    # latency within hosts gets the same value.
    return Network(Link(latency, bandwidth), Link(latency, within), GPUS_PER_HOST, FLAT, overhead)


# Where the search for the parameters begins: the overhead of a collective, and a bandwidth within
# hosts of PCIe 3.0. A link may be slower than its nominal rate.
_LATENCY, _OVERHEAD, _WITHIN = 10e-6, 100e-6, 6e9
_SHARES_OF_NOMINAL = (1.0, 0.3)


def fit_each(methods: Sequence[str]) -> dict[str, Network]:
    """Fit four parameters for each network to the measurements of ResNet-50 with `methods`."""
    found = {}
    for name, rate in NETWORKS.items():

        def residuals(values: np.ndarray, name: str = name) -> np.ndarray:
            points = _points(name, _network(*values), [_FITTED_MODEL], methods)
            return np.array([point.predicted / point.measured - 1 for point in points])

        starts = [(_LATENCY, rate * share, _OVERHEAD, _WITHIN) for share in _SHARES_OF_NOMINAL]
        fits = [positive(residuals, start) for start in starts]
        best = min(fits, key=lambda values: float(np.sum(residuals(values) ** 2)))
        found[name] = _network(*best)
    return found


def fit_together(methods: Sequence[str]) -> dict[str, Network]:
    """Fit all networks to the measurements of ResNet-50 with `methods`.

    Each network has its own latency and bandwidth. All networks have the same overhead and the same
    bandwidth within hosts.
    """

    def networks(values: np.ndarray) -> dict[str, Network]:
        overhead, within = values[-2:]
        return {
            name: _network(values[2 * i], values[2 * i + 1], overhead, within)
            for i, name in enumerate(NETWORKS)
        }

    def residuals(values: np.ndarray) -> np.ndarray:
        return np.array(
            [
                point.predicted / point.measured - 1
                for name, fitted in networks(values).items()
                for point in _points(name, fitted, [_FITTED_MODEL], methods)
            ]
        )

    start = [number for rate in NETWORKS.values() for number in (_LATENCY, rate * 0.3)]
    return networks(positive(residuals, [*start, _OVERHEAD, _WITHIN]))


def predict_berts(fitted: Mapping[str, Network], method: str = "WFBP") -> list[Point]:
    """Predict both BERTs on the fitted networks."""
    return [
        point
        for name, network in fitted.items()
        for point in _points(name, network, _PREDICTED_MODELS, [method])
    ]


def _resnet101() -> float:
    """Return images per second of one P100, between those of ResNet-50 and ResNet-152.

    The time of an image is a linear function of its multiply-adds.
    """
    work = [sum(each.work for each in MODELS[f"resnet{depth}"]()) for depth in (50, 101, 152)]
    share = (work[1] - work[0]) / (work[2] - work[0])
    return 1 / ((1 - share) / _P100["resnet50"] + share / _P100["resnet152"])


def predict_horovod(jitter: float = 0.0) -> list[Point]:
    """Predict the efficiencies of 512 GPUs, without a fit to measurements of these GPUs."""
    rates = _P100 | {"resnet101": _resnet101()}
    network = Network(
        Link(_RDMA_LATENCY, _HOROVOD_RATE),
        Link(_RDMA_LATENCY, _WITHIN),
        GPUS_PER_HOST,
        FLAT,
        _HALF_CYCLE,
    )
    found = []
    for model, efficiency in HOROVOD.items():
        step = _passes(model, _HOROVOD_BATCH / rates[model], jitter)
        predicted = predict(step, network, Reduction(FUSION), _HOROVOD_GPUS).efficiency
        found.append(
            Point("25 Gbit/s RoCE", "Horovod", model, _HOROVOD_GPUS, predicted, efficiency)
        )
    return found


#: Description -> a function that fits the networks to measurements of ResNet-50.
FITS = {
    "WFBP and BSP, each network separately": lambda: fit_each(["WFBP", "BSP"]),
    "WFBP and BSP, all networks together": lambda: fit_together(["WFBP", "BSP"]),
    "WFBP, all networks together": lambda: fit_together(["WFBP"]),
    "WFBP, each network separately": lambda: fit_each(["WFBP"]),
}


def lines() -> Iterator[str]:
    """Yield the errors of all fits."""
    for name, fitted in ((name, of()) for name, of in FITS.items()):
        errors = ", ".join(
            f"{method}: median {median_error(points):.0%}, largest "
            f"{max(point.error for point in points):.0%}"
            for method in METHODS
            for points in [predict_berts(fitted, method)]
        )
        yield f"Fitted to ResNet-50 ({name}): errors of both BERTs: {errors}"


def show() -> None:
    """Print all published measurements and their predictions."""
    fitted = fit_each(list(METHODS))
    for name, network in fitted.items():
        print(
            f"{name}, fitted to ResNet-50: latency {network.between.latency * 1e6:.1f} us, "
            f"bandwidth {network.between.bandwidth / 1e9:.2f} GB/s, within a host "
            f"{network.within.bandwidth / 1e9:.2f} GB/s, overhead {network.overhead * 1e6:.0f} us"
        )
    _show("Efficiency of BERT on 4 to 32 GPUs, arXiv 2005.13247", predict_berts(fitted))
    _show("Efficiency with Horovod, arXiv 1802.05799", predict_horovod())
    _show("The same with --jitter 0.02", predict_horovod(0.02))
    for text in lines():
        wide_console().print(text)
    print(f"Medians are of points whose efficiency is below {BELOW:.0%}.")


def _show(title: str, points: Sequence[Point]) -> None:
    rows = [
        (
            (point.network, point.method, point.model, str(point.ranks)),
            point.predicted,
            point.measured,
        )
        for point in points
    ]
    table.show_comparison(title, ("network", "method", "model", "GPUs"), rows, ".1%")
