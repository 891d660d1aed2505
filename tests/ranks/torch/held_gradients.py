"""Scripts and optimizers that hold `p.grad`, or views of it, compared with one process.

A sequence is a list of pairs (name of an action, number). An action does the same to the model of
the ranks and to the reference, which one process trains with the batches of all ranks. It derives
all choices from the number. After every step, all tensors that are held must have the bits of the
reference.

A wire format rounds. So after each reduction, the values of the reference's gradients are set, in
place, to those of the ranks, if they are near enough.

Add an action: write a function and decorate it with `action`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.actions import Actions

#: Relative error of a gradient in each wire format, far above that of one rounding.
ROUNDING = {"none": 1e-5, "fp16": 2e-2, "bf16": 5e-2, "int8": 1e-1}


class Extrapolating(torch.optim.Optimizer):
    """Uses the difference to the last gradient, which it keeps, as MARS and diffGrad do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                last = self.state[p].get("last", torch.zeros_like(p))
                p.sub_(0.01 * (2 * p.grad - last))
                self.state[p]["last"] = p.grad


class Momentum(torch.optim.Optimizer):
    """Its momentum is at first the gradient itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is None:
                continue
            if "momentum" in self.state[p]:
                self.state[p]["momentum"].mul_(0.5).add_(p.grad)
            else:
                self.state[p]["momentum"] = p.grad
            p.sub_(0.01 * self.state[p]["momentum"])


class Recent(torch.optim.Optimizer):
    """Uses the mean of views of the last three gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                recent = self.state[p].setdefault("recent", [])
                recent.append(p.grad.detach().reshape(-1))
                del recent[:-3]
                p.sub_(0.01 * torch.stack(recent).mean(0).view_as(p))


OPTIMIZERS = {"extrapolating": Extrapolating, "momentum": Momentum, "recent": Recent}


@dataclass(frozen=True)
class Setting:
    """The arguments of the wrapped optimizer.

    Attributes:
        compression: the wire format.
        optimizer: a key of `OPTIMIZERS`.
        bucket_bytes: the largest size of a bucket.
        passes: `accumulation_steps`.
        counts: whether PyTorch counts references to memory; older versions do not.
        mixed: whether the buckets of some ranks are not in shared memory.
    """

    compression: str = "none"
    optimizer: str = "extrapolating"
    bucket_bytes: int = 10**6
    passes: int = 1
    counts: bool = True
    mixed: bool = False


class Side:
    """A model with its optimizer, and what the script holds: on the ranks, or in one process."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.held: list[list[torch.Tensor]] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def everything(self) -> list[torch.Tensor]:
        """Return all that must be equal on both sides."""
        state = [
            value
            for p in self.parameters
            for key, value in self.optimizer.state.get(p, {}).items()
            for value in (value if isinstance(value, list) else [value])
        ]
        held = [tensor for each in self.held for tensor in each]
        return [*(p.detach() for p in self.parameters), *self.gradients(), *state, *held]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    # The first weight is large enough for int8, and all buckets for shared memory.
    return nn.Sequential(nn.Linear(70, 60), nn.Tanh(), nn.Linear(60, 9), nn.Tanh(), nn.Linear(9, 2))


@dataclass
class World:
    """The state of a sequence on one rank."""

    hvd: Any
    setting: Setting
    own: Side = field(init=False)
    reference: Side = field(init=False)
    passes: int = 0
    #: Whether ranks may hold different tensors.
    uneven: bool = False

    def __post_init__(self) -> None:
        model = small_model()
        make = OPTIMIZERS[self.setting.optimizer]
        self.reference = Side(copy.deepcopy(model), None)
        self.reference.optimizer = make(self.reference.model.parameters())
        optimizer = self.hvd.DistributedOptimizer(
            make(model.parameters()),
            compression=self.setting.compression,
            bucket_bytes=self.setting.bucket_bytes,
            accumulation_steps=self.setting.passes,
        )
        self.own = Side(model, optimizer)

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.own, self.reference

    @property
    def reduced(self) -> bool:
        """Whether all gradients of the ranks are reduced."""
        return self.passes in (0, self.setting.passes)

    def backward(self, number: int, part: int) -> None:
        """Make a pass on all ranks, which reaches the model's last `part` layers."""
        for rank in range(self.hvd.size()):
            if rank == self.hvd.rank():
                self.loss(self.own, number, rank, part).backward()
            share = self.hvd.size() * self.setting.passes
            (self.loss(self.reference, number, rank, part) / share).backward()
        self.passes += 1
        if self.reduced:
            self.round_reference()

    @staticmethod
    def loss(side: Side, number: int, rank: int, part: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * number + rank)
        layers = list(side.model)[2 * (3 - part) :]
        x = torch.randn(4, layers[0].in_features, generator=generator)
        return nn.Sequential(*layers)(x + rank).square().mean()

    @torch.no_grad()
    def round_reference(self) -> None:
        """Give the reference the rounded gradients."""
        for p, q in zip(self.own.parameters, self.reference.parameters, strict=True):
            if q.grad is None:
                assert p.grad is None or not p.grad.any()
                q.grad = None if p.grad is None else torch.zeros_like(q)
                continue
            bound = ROUNDING[self.setting.compression] * (q.grad.abs().max() + 1e-3)
            worst = (p.grad - q.grad).abs().max()
            assert worst <= bound, f"a gradient is off by {worst}, bound {bound}"
            q.grad.copy_(p.grad)

    def check(self) -> None:
        if not self.reduced:
            return
        for own, reference in zip(self.own.everything(), self.reference.everything(), strict=True):
            torch.testing.assert_close(own, reference, rtol=1e-4, atol=1e-6)


ACTIONS = action = Actions()


def run_sequence(hvd: Any, setting: Setting, actions: list[tuple[str, int]]) -> None:
    """Run a sequence on this rank."""
    from hvdkit.torch import shared_memory
    from hvdkit.torch.reduction import holders

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        if not setting.counts:
            patch.setattr(holders, "_ALONE", None)
        if setting.mixed and hvd.rank() % 2:
            patch.setattr(
                shared_memory, "empty", lambda size, dtype: torch.empty(size, dtype=dtype)
            )
        world = World(hvd, setting)
        for name, number in actions:
            ACTIONS[name](world, number)
            world.check()
        for number in range(3):
            train(world, number)
            world.check()
        weights = torch.cat([p.detach().reshape(-1) for p in world.own.parameters])
        everyone = hvd.allgather(weights[None], name="weights of a sequence")
        assert all(torch.equal(everyone[0], other) for other in everyone)


# --- the actions --------------------------------------------------------------------------------


@action
def train(world: World, number: int) -> None:
    """Make the rest of the window, the step, and reset the gradients."""
    while world.passes < world.setting.passes:
        one_pass(world, number)
        number += 1
    for side in world.sides:
        side.optimizer.step()
    world.passes = 0
    world.check()
    zero(world, number)


@action
def one_pass(world: World, number: int) -> None:
    """Make a pass; all but the last one of a window are followed by calls that do nothing."""
    if world.passes == world.setting.passes > 1:
        return
    if world.setting.passes == 1:
        world.passes = 0  # a second loss
    world.backward(number, 1 + number % 3)
    if world.passes < world.setting.passes:
        world.own.optimizer.step()
        world.own.optimizer.zero_grad()


@action
def zero(world: World, number: int) -> None:
    """Reset the gradients in each of PyTorch's ways, outside of a window."""
    if world.passes and world.setting.passes > 1:
        return
    world.passes = 0
    for side in world.sides:
        if number % 4 == 0:
            side.optimizer.zero_grad()
        elif number % 4 == 1:
            side.optimizer.zero_grad(set_to_none=False)
        elif number % 4 == 2:
            side.model.zero_grad()
        else:
            for gradient in side.gradients():
                gradient.zero_()


@action
def hold(world: World, number: int) -> None:
    """Hold the gradients, or views of them, outside of an open window."""
    if not world.reduced:
        return
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda g: g,
        lambda g: g.detach(),
        lambda g: g.data,
        lambda g: g[:1],
        lambda g: g.t(),
        lambda g: torch.from_numpy(g.numpy()),
    ]
    for side in world.sides:
        gradients = side.gradients()
        some = gradients[number % 2 :: 1 + number % 3]
        side.held.append([views[number % len(views)](g) for g in some])


@action
def hold_in_a_graph(world: World, number: int) -> None:
    """Let only a graph of autograd hold the gradients."""
    if not world.reduced:
        return
    for side in world.sides:
        graphs = []
        for g in side.gradients():
            factor = torch.ones_like(g, requires_grad=True)
            graphs.append((factor, (factor * g).sum()))
        side.graphs = graphs  # type: ignore[attr-defined]


@action
def use_the_graph(world: World, number: int) -> None:
    if not world.reduced:
        return
    for side in world.sides:
        for factor, total in getattr(side, "graphs", []):
            try:
                (found,) = torch.autograd.grad(total, factor)
            except RuntimeError:  # the script has changed the gradients in place
                found = torch.zeros(())
            side.held.append([found])
        side.graphs = []  # type: ignore[attr-defined]


@action
def let_go(world: World, number: int) -> None:
    for side in world.sides:
        if side.held:
            del side.held[number % len(side.held)]


@action
def let_go_on_one_rank(world: World, number: int) -> None:
    """Also let go of the references on one rank only: ranks then use different memory."""
    world.uneven = True
    if world.hvd.rank() == number % world.hvd.size():
        for side in world.sides:
            side.held.clear()


@action
def write_to_held(world: World, number: int) -> None:
    """Write to what the script holds, which may be the current gradients."""
    if not world.reduced or world.uneven:
        return
    for side in world.sides:
        for tensor in side.held[-1] if side.held else ():
            tensor.mul_(0.5)


@action
def assign_clones(world: World, number: int) -> None:
    """Give the parameters other memory for their gradients."""
    if not world.reduced:
        return
    for side in world.sides:
        for p in side.parameters:
            if p.grad is not None:
                p.grad = p.grad.clone()


@action
def own_buffer(world: World, number: int) -> None:
    """Keep all gradients in one tensor of the script, as libraries for mixed precision do."""
    if world.passes:
        return
    for side in world.sides:
        parameters = side.parameters
        flat = torch.zeros(sum(p.numel() for p in parameters))
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)
        side.held.append([flat])
