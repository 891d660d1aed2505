"""The variants of a step benchmark: optimizers, controllers and wire formats."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdkit.bench.software import FLAT, INSTALLED, STOCK, Needs

TORCH, TENSORFLOW, KERAS = "torch", "tensorflow", "keras"
FRAMEWORKS = (TORCH, TENSORFLOW, KERAS)

#: All ranks compute, without reduction.
ALONE = "alone"
#: A job of one rank, without reduction.
SINGLE = "single"
#: The optimizer of another checkout of hvdkit.
BEFORE = "before"
#: The optimizers that are `hvdkit.*.DistributedOptimizer`, with any settings.
HVDKIT = ("hvdkit", FLAT, BEFORE)
#: Horovod's optimizer on the installed engine.
ENGINE = "engine"
DDP = "ddp"
#: tf.distribute.MultiWorkerMirroredStrategy.
STRATEGY = "strategy"
#: hvdkit.keras's optimizer in a loop of PyTorch, without `fit`.
KERAS_OPTIMIZER = "keras"
#: Steps without reduction, while the engine sums zeros, as many bytes as the gradients have.
BARE = "bare"

_WITHOUT_REDUCTION = (ALONE, SINGLE)

#: Bytes of each wire format, relative to float32. int8 has a scale of 4 bytes for each 256 numbers.
SHARE_OF_FLOAT32 = {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": 260 / 1024}

_Wires = Mapping[tuple[str, str], Sequence[str]]
# (Optimizer, controller) -> wire formats, of the frameworks whose loops are the user's.
_IN_LOOPS: _Wires = {
    ("hvdkit", "gloo"): ("fp32", "fp16", "bf16", "int8"),
    ("hvdkit", "mpi"): ("fp32", "fp16", "bf16", "int8"),
    (FLAT, "gloo"): ("fp32", "fp16"),
    (BEFORE, "gloo"): ("fp32", "fp16", "bf16"),
    (STOCK, "gloo"): ("fp32", "fp16"),
    (STOCK, "mpi"): ("fp32", "fp16"),
    (ENGINE, "gloo"): ("fp32", "fp16"),
    (ENGINE, "mpi"): ("fp32", "fp16"),
}
_WIRES: Mapping[str, _Wires] = {
    TORCH: {
        **_IN_LOOPS,
        (DDP, "gloo"): ("fp32", "fp16", "powersgd"),
        (KERAS_OPTIMIZER, "gloo"): ("fp32", "fp16"),
    },
    TENSORFLOW: {**_IN_LOOPS, (STRATEGY, "gloo"): ("fp32",)},
    KERAS: {
        ("hvdkit", "gloo"): ("fp32", "fp16", "bf16", "int8"),
        ("hvdkit", "mpi"): ("fp32", "fp16"),
        (FLAT, "gloo"): ("fp32", "fp16"),
        (BARE, "gloo"): ("fp32", "fp16"),
    },
}
_DEFAULT_WIRES = ("fp32", "fp16", "int8")


@dataclass(frozen=True)
class Variant:
    """An optimizer, the controller and the wire format.

    Attributes:
        framework: one of FRAMEWORKS.
        optimizer: ALONE, SINGLE, or an optimizer of the table above.
        controller: `gloo` or `mpi`; empty without reduction.
        wire: the wire format; empty without reduction.
    """

    framework: str
    optimizer: str
    controller: str = ""
    wire: str = ""

    @property
    def name(self) -> str:
        """The name on the command line and in tables: OPTIMIZER-CONTROLLER-WIRE."""
        return "-".join(filter(None, dataclasses.astuple(self)[1:]))

    @property
    def reduces(self) -> bool:
        """Whether the ranks reduce their gradients."""
        return self.optimizer not in _WITHOUT_REDUCTION

    @property
    def needs(self) -> Needs:
        """See `software.Variant`."""
        modules = {TORCH: ("torch",), TENSORFLOW: ("tensorflow", "keras")}.get(
            self.framework, ("keras", "tensorflow")
        )
        if self.optimizer == KERAS_OPTIMIZER:
            modules = (*modules, "keras")
        engine = STOCK if self.optimizer == STOCK else INSTALLED
        if self.optimizer in (*_WITHOUT_REDUCTION, DDP, STRATEGY):
            engine = ""
        return Needs(engine, modules, self.controller or "gloo")


def engine_framework(framework: str) -> str:
    """Return the framework of the engine. Keras is measured on TensorFlow."""
    return TORCH if framework == TORCH else TENSORFLOW


def known(framework: str) -> list[Variant]:
    """Return all variants of a framework."""
    found = [
        Variant(framework, optimizer, controller, wire)
        for (optimizer, controller), wires in _WIRES[framework].items()
        for wire in wires
    ]
    return [*found, Variant(framework, ALONE), Variant(framework, SINGLE)]


def by_default(variant: Variant) -> bool:
    """Return whether a variant is measured if `--variants` is not given."""
    if not variant.reduces:
        return True
    usual = variant.optimizer in ("hvdkit", STOCK, DDP) and variant.controller == "gloo"
    return usual and variant.wire in _DEFAULT_WIRES


def pairs(variants: Sequence[Variant]) -> list[tuple[Variant, Variant]]:
    """Return the pairs whose ratio is reported.

    hvdkit is compared with every other optimizer that has the same controller and wire format. Each
    optimizer's wire formats are compared with each other, and Horovod's optimizer on hvdkit's
    engine with the one on stock Horovod. hvdkit's int8 is compared with the formats of DDP that
    send less than float32.
    """
    return [(a, b) for a in variants for b in variants if _is_pair(a, b)]


def _is_pair(a: Variant, b: Variant) -> bool:
    if not (a.reduces and b.reduces) or a == b or a.controller != b.controller:
        return False
    if a.wire == b.wire:
        return a.optimizer == "hvdkit" or (a.optimizer, b.optimizer) == (ENGINE, STOCK)
    if a.optimizer == b.optimizer:
        smaller = {"fp16": ("fp32",), "powersgd": ("fp16",), "bf16": ("fp16",), "int8": ("fp16",)}
        return b.wire in smaller.get(a.wire, ())
    lossy = a.wire == "int8" and b.wire in ("fp16", "powersgd")
    return lossy and (a.optimizer, b.optimizer) == ("hvdkit", DDP)
