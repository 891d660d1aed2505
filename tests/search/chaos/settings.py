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
_FRAMEWORKS = {"torch": 12, "keras-torch": 3, "keras-tensorflow": 2}
_CONTROLLERS = {"gloo": 2, "mpi": 1}
_HOSTS = {1: 4, 2: 4, 3: 2, 4: 1}
_STORES = {"folder": 4, "s3": 1, "elsewhere": 0}
#: How the ranks are started: from one host over ssh, with `--elastic`, or with `--nodes`.
SSH, ELASTIC, NODES = "ssh", "elastic", "nodes"
_STARTS = {SSH: 6, ELASTIC: 2, NODES: 2}
STARTS = tuple(_STARTS)


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
        started: how the ranks are started, such as `NODES`.
        spares: whether agents keep spare interpreters.
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
    started: str = SSH
    spares: bool = False

    @property
    def undisturbed(self) -> Setting:
        """The job whose weights this job must have."""
        # An elastic job has another script.
        started = ELASTIC if self.started == ELASTIC else SSH
        return replace(
            self,
            store="folder",
            restarts=0,
            min_ranks=None,
            clock=False,
            started=started,
            spares=False,
        )

    @property
    def program(self) -> tuple[str, dict[str, str]]:
        """The training script, and variables of its environment."""
        return ("train_elastic.py", {}) if self.started == ELASTIC else PROGRAMS[self.framework]

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
        parts += ["--no-spares"] if self.restarts and not self.spares else []
        parts += [f"--{self.started}"] if self.started != SSH else []
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
        starts: of `Setting.started`.
        passes: the passes of a job. Repeated passes after a fault are not counted.
    """

    frameworks: tuple[str, ...] = ()
    controllers: tuple[str, ...] = ()
    hosts: tuple[int, ...] = ()
    stores: tuple[str, ...] = ()
    ranks: int = 2
    clock: bool = False
    starts: tuple[str, ...] = ()
    passes: int = 150

    def draw(self, draw: random.Random) -> Setting:
        """Return a random setting."""

        def choose(weights, allowed):
            kept = {value: weight or 1 for value, weight in weights.items() if value in allowed}
            return draw.choices(*zip(*(kept or weights).items(), strict=True))[0]

        hosts = choose(_HOSTS, self.hosts)
        per_host = draw.choice([1, 2]) if hosts == 2 else 1
        restarts = draw.choice([0, 20, 20, 20])
        framework = choose(_FRAMEWORKS, self.frameworks)
        controller = choose(_CONTROLLERS, self.controllers)
        store = choose(_STORES, self.stores)
        started = choose(_STARTS, self.starts)
        accumulation = draw.choice([1, 3])
        if started == NODES and hosts == 1:
            started = SSH
        if started != SSH:
            controller = "gloo"
        if started == ELASTIC:
            framework, restarts, accumulation = "torch", 20, 1
        min_ranks = 1 if hosts > 1 and restarts and draw.random() < 0.4 else None
        return Setting(
            framework,
            controller,
            hosts,
            self.ranks if hosts == 1 else hosts * per_host,
            draw.choice(["none", "fp16"]),
            accumulation,
            self.passes // accumulation,
            # The object store of these tests listens on this machine's loopback interface.
            store if hosts == 1 or "elsewhere" in self.stores else "folder",
            restarts,
            min_ranks,
            self.clock and hosts == 1 and draw.random() < 0.3,
            started,
            # Spares need as much time of the processors as ranks.
            bool(restarts) and draw.random() < 0.3,
        )
