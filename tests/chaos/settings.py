"""The settings of a job under faults, drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

#: Framework -> the training script, and variables of its environment.
PROGRAMS: dict[str, tuple[str, dict[str, str]]] = {
    "torch": ("train_torch.py", {}),
    "keras-torch": ("train_keras.py", {"KERAS_BACKEND": "torch"}),
    "keras-tensorflow": (
        "train_keras.py",
        {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
    ),
}
#: The weights of random choices. A job of TensorFlow takes three times as long to start.
_FRAMEWORKS = {"torch": 14, "keras-torch": 3, "keras-tensorflow": 1}
_CONTROLLERS = {"gloo": 4, "mpi": 1}
_HOSTS = {1: 5, 2: 3, 3: 1, 4: 1}
_STORES = {"folder": 4, "s3": 1, "elsewhere": 0}


@dataclass(frozen=True)
class Setting:
    """A job.

    Attributes:
        framework: a key of `PROGRAMS`.
        controller: `gloo` or `mpi`.
        hosts: the number of hosts; 1 is this machine.
        ranks: the number of ranks.
        wire: the wire format of gradients.
        accumulation: the passes of a step.
        steps: the steps of the job.
        store: `folder`, `s3`, or `elsewhere`: a place of the user.
        restarts: the value of `--restarts`.
        min_ranks: the value of `--min-np`; None without it.
        clock: whether the clock of the ranks can be changed.
    """

    framework: str
    controller: str
    hosts: int
    ranks: int
    wire: str
    accumulation: int
    steps: int
    store: str = "folder"
    restarts: int = 0
    min_ranks: int | None = None
    clock: bool = False

    @property
    def undisturbed(self) -> Setting:
        """The job whose weights this job must have."""
        return replace(self, store="folder", restarts=0, min_ranks=None, clock=False)

    def __str__(self) -> str:
        parts = [
            f"{self.framework} over {self.controller}",
            f"{self.ranks} ranks on {self.hosts} host{'s' if self.hosts > 1 else ''}",
            f"{self.wire} on the wire",
            f"{self.accumulation} passes per step",
            f"store {self.store}",
            f"--restarts {self.restarts}",
        ]
        parts += [f"--min-np {self.min_ranks}"] if self.min_ranks else []
        parts += ["a clock of their own"] if self.clock else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Limits:
    """The values that may be drawn; empty for all.

    Attributes:
        frameworks: of `Setting.framework`.
        controllers: of `Setting.controller`.
        hosts: of `Setting.hosts`.
        stores: of `Setting.store`.
        ranks: the number of ranks of a job on one host. On several hosts, each has 1 or 2.
        clock: whether the clock of ranks can be changed.
    """

    frameworks: tuple[str, ...] = ()
    controllers: tuple[str, ...] = ()
    hosts: tuple[int, ...] = ()
    stores: tuple[str, ...] = ()
    ranks: int = 2
    clock: bool = False

    def draw(self, draw: random.Random, faults: int) -> Setting:
        """Return a random setting for a job with this many faults."""

        def choose(weights, allowed):
            kept = {value: weight or 1 for value, weight in weights.items() if value in allowed}
            return draw.choices(*zip(*(kept or weights).items(), strict=True))[0]

        hosts = choose(_HOSTS, self.hosts)
        per_host = draw.choice([1, 2]) if hosts == 2 else 1
        restarts = draw.choice([0, 20, 20, 20])
        controller = choose(_CONTROLLERS, self.controllers)
        min_ranks = 1 if hosts > 1 and restarts and draw.random() < 0.4 else None
        return Setting(
            choose(_FRAMEWORKS, self.frameworks),
            controller,
            hosts,
            self.ranks if hosts == 1 else hosts * per_host,
            draw.choice(["none", "fp16"]),
            draw.choice([1, 3]),
            20 + 15 * faults,
            # The object store of these tests listens on this machine's loopback interface.
            choose(_STORES, self.stores) if hosts == 1 or "elsewhere" in self.stores else "folder",
            restarts,
            min_ranks,
            self.clock and hosts == 1 and draw.random() < 0.3,
        )
