"""Wrapped optimizers of simulated ranks: threads with their own models, without Horovod."""

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from hvdkit.agreement.replicas import ReplicaCheck
from hvdkit.reduction.accumulation import Window
from hvdkit.reduction.compression import NoCompression
from hvdkit.reduction.plan import Reduction
from hvdkit.torch.optimizer import no_sync
from hvdkit.torch.reduction import passes
from hvdkit.torch.reduction.coordination import Coordinator
from hvdkit.torch.reduction.settings import Settings
from hvdkit.torch.wrapping import wrap
from tests.ranks.torch.oracle import Fails
from tests.simulated.backend import SimulatedBackend
from tests.simulated.ranks import SimulatedCollectives

# The first optimizer imports TorchDynamo, which sets environment variables.
torch.optim.SGD([torch.zeros(1, requires_grad=True)])


class Deliberate(Exception):
    """The error that a backward pass raises on purpose."""


class _Give(torch.autograd.Function):
    """A loss whose gradient is given."""

    @staticmethod
    def forward(ctx, parameter, gradient):
        ctx.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.gradient, None


class _Plain(torch.optim.Optimizer):
    """Record the dense gradients of each step."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.taken: list[list[Any]] = []

    def step(self, closure=None):
        self.taken.append([dense(p.grad) for g in self.param_groups for p in g["params"]])


def dense(gradient: torch.Tensor | None) -> Any:
    """Return a gradient as a list; None for none."""
    return None if gradient is None else gradient.to_dense().tolist()


def rows(values: Sequence[float]) -> torch.Tensor:
    """Return a sparse gradient of a parameter of two elements: values for the first ones."""
    return torch.sparse_coo_tensor([[*range(len(values))]], values, (2,), dtype=torch.float64)


class SimulatedOptimizer:
    """A wrapped optimizer of one simulated rank.

    Args:
        collectives: the rank's collectives.
        count: the number of parameters, named `p0` and so on; two fill a bucket.
        window: the accumulation window.
        replicas: see `Rounds`.
        frozen: the number of parameters that do not need gradients at first.
        how: settings of `Reduction`.

    Attributes:
        optimizer: the wrapped optimizer.
        parameters: its parameters, which tests may change.
        stepped: the dense gradients of each step.
    """

    def __init__(
        self,
        collectives: SimulatedCollectives,
        count: int = 4,
        window: Window | None = None,
        replicas: ReplicaCheck | None = None,
        frozen: int = 0,
        **how: Any,
    ) -> None:
        self.collectives = collectives
        self.parameters = [
            torch.nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=i >= frozen)
            for i in range(count)
        ]
        settings = Settings(
            optimizer="Plain",
            reduction=replace(Reduction(NoCompression(), bucket_bytes=32), **how),
            frozen={},
            process_set=SimpleNamespace(process_set_id=0),  # type: ignore[arg-type]
            check_parameters=False,
        )
        rank = collectives.__dict__
        self.optimizer = wrap(
            _Plain(self.parameters),
            settings,
            window or Window(1),
            {p: f"p{i}" for i, p in enumerate(self.parameters)},
            collectives=collectives,
            coordinator=rank.setdefault("coordinator", Coordinator(collectives)),
            siblings=rank.setdefault("reducers", passes.Reducers()),
            make_backend=SimulatedBackend,
        )
        self.reducer = self.optimizer.reducer
        self.gradients, self.rounds = self.reducer.gradients, self.reducer.rounds
        self.window = self.reducer.window
        self.rounds.replicas = replicas
        self.stepped: list[list[Any]] = self.optimizer.taken

    def backward(
        self,
        values: float | Mapping[int, Any],
        no_sync: bool = False,
        fails: bool = False,
    ) -> None:
        """Make a backward pass, see `backward`."""
        backward({self: values}, no_sync, fails)

    def synchronize(self) -> None:
        """Reduce all gradients."""
        self.optimizer.synchronize()

    def step(self) -> None:
        """Reduce all gradients and record them as a step, unless more passes must come."""
        self.optimizer.step()

    def flush(self) -> bool:
        """End a window early; return whether that made a step."""
        return self.optimizer.flush()

    def zero(self) -> None:
        """Remove the gradients, also inside a window."""
        self.window.close()
        self.optimizer.zero_grad()

    @property
    def dense(self) -> list[Any]:
        """Each parameter's gradient as a list, or None."""
        return [dense(p.grad) for p in self.parameters]

    @property
    def values(self) -> list[Any]:
        """The first element of each parameter's gradient, or None."""
        return [None if gradient is None else gradient[0] for gradient in self.dense]


def backward(
    reached: Mapping[SimulatedOptimizer, float | Mapping[int, Any]],
    local: bool = False,
    fails: bool = False,
) -> None:
    """Make a backward pass that reaches some optimizers of a rank.

    Args:
        reached: for each optimizer, the gradient, or parameter -> its gradient.
        local: whether the pass is under `hvd.no_sync`, with one optimizer.
        fails: whether the pass raises after half of its gradients; then take part in the rounds
            that the other ranks wait in.
    """
    losses = []
    for each, values in reached.items():
        if not isinstance(values, Mapping):
            values = dict.fromkeys(range(len(each.parameters)), values)
        for i in sorted(i for i in values if each.parameters[i].requires_grad):
            p, value = each.parameters[i], values[i]
            gradient = value if isinstance(value, torch.Tensor) else torch.full_like(p, value)
            losses.append(functools.partial(_Give.apply, p, gradient.detach().clone()))
    # PyTorch computes the gradients of the last operation first.
    failing = len(losses) - len(losses) // 2
    made = [loss() for loss in losses[:failing]]
    if fails:
        made.append(
            Fails.apply(torch.zeros((), dtype=torch.float64, requires_grad=True), Deliberate)
        )
    made += [loss() for loss in losses[failing:]]
    (first, *_) = reached
    with no_sync(first.optimizer) if local else nullcontext():
        try:
            if made:
                torch.stack([each.double() for each in made]).sum().backward()
        except Deliberate:
            reducers = [each.reducer for each in reached]
            if not any(each.pass_raised for each in reducers):
                passes.reduce((), reducers)
            for reducer in reducers:
                reducer.complete_earlier_passes()
