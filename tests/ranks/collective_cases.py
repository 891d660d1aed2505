"""Draws calls of differentiable collectives, for the tests of both frameworks.

Horovod defines the gradient of each collective as that of the sum of all ranks' losses, times a
factor that `Case.factor` returns.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

COLLECTIVES = (
    "allreduce",
    "grouped_allreduce",
    "allgather",
    "grouped_allgather",
    "gather_for_loss",
    "broadcast",
    "alltoall",
    "reducescatter",
    "grouped_reducescatter",
)

REDUCTIONS = ("Sum", "Average", "Max", "Min", "Product")


@dataclass(frozen=True)
class Case:
    """One call, which all `members` make.

    Attributes:
        members: the calling ranks, as a process set.
        op: the reduction; "" for the collectives that have none.
        prescale: factor before the reduction.
        postscale: factor after the reduction.
        shapes: for each tensor of the call, its shape on each member.
        splits: for alltoall, rows from each member to each member; None: equal parts.
        root: the rank that broadcasts.
        transposed: whether the input of each member is a transposed view.
        name: name of the collective; None: none is given.
        second: whether a second derivative is taken.
    """

    seed: int
    collective: str
    members: Sequence[int]
    op: str
    prescale: float
    postscale: float
    shapes: Sequence[Sequence[tuple[int, ...]]]
    splits: Sequence[Sequence[int]] | None
    root: int
    transposed: Sequence[bool]
    name: str | None
    second: bool

    def options(self, hvd: Any) -> dict[str, Any]:
        """Return arguments of the reduction."""
        if not self.op:
            return {}
        return {
            "op": getattr(hvd, self.op),
            "prescale_factor": self.prescale,
            "postscale_factor": self.postscale,
        }

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.members)

    @property
    def factor(self) -> float:
        """Horovod's gradient, divided by the gradient of the sum of the members' losses."""
        kind = self.collective.removeprefix("grouped_")
        return {"allgather": 1 / self.size, "broadcast": 1 / self.size}.get(
            kind, self.size if kind == "reducescatter" else 1
        )

    def rows(self, total: int) -> list[int]:
        """Return the number of rows that each member gets of `total` by reducescatter."""
        return [total // self.size + (i < total % self.size) for i in range(self.size)]

    def inputs(self) -> list[list[np.ndarray]]:
        """Return the tensors of each member. Some values are equal, and some are zero."""
        generator = np.random.default_rng(self.seed)
        few = generator.random() < 0.5

        def draw(shape: tuple[int, ...]) -> np.ndarray:
            if few:
                return generator.integers(-1, 3, shape).astype(np.float64)
            return np.asarray(generator.normal(size=shape))

        return [[draw(tensor[i]) for tensor in self.shapes] for i in range(self.size)]

    def weights(self, member: int, tensor: int, shape: Sequence[int]) -> np.ndarray:
        """Return numbers for the loss of a member, of the given shape."""
        generator = np.random.default_rng([self.seed, member, tensor])
        return np.asarray(generator.normal(size=tuple(shape)))


def draw_case(
    seed: int, ranks: int, collectives: Sequence[str] = COLLECTIVES, second: bool = True
) -> Case:
    """Draw a case, the same on every rank."""
    draw = random.Random(seed)
    collective = draw.choice(collectives)
    kind = collective.removeprefix("grouped_")
    members = sorted(draw.sample(range(ranks), draw.randint(min(2, ranks), ranks)))
    if draw.random() < 0.4:
        members = list(range(ranks))
    n = len(members)
    op = ""
    if kind == "allreduce":
        op = draw.choice(REDUCTIONS)
    elif kind == "reducescatter":
        op = draw.choice(REDUCTIONS[:2])
    splits = None
    if kind == "alltoall" and draw.random() < 0.7:
        splits = [[draw.randint(0, 2) for _ in range(n)] for _ in range(n)]
    shapes = []
    for _ in range(draw.randint(1, 3) if collective.startswith("grouped") else 1):
        last = draw.choice([(), (2,), (3, 2)])
        if kind in ("allreduce", "broadcast"):
            shape = [draw.choice([(), (draw.randint(0, 4), *last)])] * n
        elif kind in ("allgather", "gather_for_loss"):
            shape = [(draw.randint(0, 3), *last) for _ in range(n)]
            if draw.random() < 0.2:
                shape = [()] * n
        elif kind == "reducescatter":
            shape = [(draw.randint(1, 2 * n), *last)] * n
        elif splits is not None:
            shape = [(sum(rows), *last) for rows in splits]
        else:
            shape = [(n * draw.randint(1, 2), *last)] * n
        shapes.append(tuple(shape))
    scaled = bool(op) and draw.random() < 0.5
    return Case(
        seed=seed,
        collective=collective,
        members=members,
        op=op,
        # TensorFlow keeps these factors as float32.
        prescale=draw.choice([0.5, 3.0, -0.75]) if scaled else 1.0,
        postscale=draw.choice([1.0, 2.0, -1.25]) if scaled else 1.0,
        shapes=shapes,
        splits=splits,
        root=draw.choice(members),
        transposed=[draw.random() < 0.4 for _ in members],
        name=f"case {seed}" if draw.random() < 0.5 else None,
        # The second derivative of reducescatter has another factor, that of its backward pass.
        second=second and kind != "reducescatter" and draw.random() < 0.3,
    )


def search(hvd: Any, seeds: Iterable[int], check: Callable[[Any, Case, Any], None]) -> None:
    """Draw cases, and let the members of each one check it.

    Args:
        check: called with the adapter, the case and its process set.
    """
    cases = [draw_case(seed, hvd.size()) for seed in seeds]
    sets = {tuple(range(hvd.size())): hvd.global_process_set}
    added = sorted({tuple(case.members) for case in cases} - sets.keys())
    sets |= {members: hvd.add_process_set(list(members)) for members in added}
    for case in cases:
        if hvd.rank() in case.members:
            try:
                check(hvd, case, sets[tuple(case.members)])
            except Exception as error:
                error.add_note(str(case))
                raise
    for members in added:
        hvd.remove_process_set(sets[members])
