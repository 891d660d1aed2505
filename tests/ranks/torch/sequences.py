"""Sequences of user actions on a wrapped optimizer, compared with one process with all data.

A sequence is a list of pairs (name of an action, number). All ranks get the same list; an action
derives everything random from the number, so ranks agree on which of them does what. The reference
is a copy of the model on every rank, whose gradients are computed from all ranks' batches. After
every action that leaves reduced gradients, those of all ranks must be the same bits and near the
reference's; after every step, so must the parameters.

Add an action: write a function and decorate it with `action`.
"""

import copy
import gc
import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvdkit.errors import HvdkitError
from hvdkit.reduction.accumulation import PassesDiffer
from hvdkit.reduction.step_errors import BackwardFailed, GradientsChanged
from tests.ranks.actions import Actions
from tests.ranks.torch.held_gradients import Momentum
from tests.ranks.torch.oracle import Fails

#: Relative error of one rounding on the wire; of int8, relative to the largest number.
ROUNDING = {"none": 1e-14, "fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 254}


class Model(nn.Module):
    """A model with layers that a pass may skip and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 3)
        self.branch = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def split(self) -> list[list[nn.Parameter]]:
        """The parameters of each of several optimizers."""
        parts = [[*self.first.parameters()], [*self.second.parameters()]]
        return [*parts, [self.scale], [*self.branch.parameters()]]

    def forward(self, x: torch.Tensor, part: str = "all") -> torch.Tensor:
        hidden = self.first(x).tanh()
        if part == "checkpoint":
            y = checkpoint(self.second, hidden, use_reentrant=True)
        elif part == "branch":
            # `add_parameters` adds `extra`.
            y = self.branch(hidden) + getattr(self, "extra", 0.0)
        else:
            y = self.second(hidden)
        return y * self.scale if part != "unscaled" else y


@dataclass(frozen=True)
class Setting:
    """The arguments of the wrapped optimizer, and the kind of sequence.

    Attributes:
        compression: the wire format.
        average: `Average`, else `Sum`.
        kind: "sgd", "adamw", or "momentum", whose momentum is at first the gradient itself.
        bucket_bytes: small, so that there are several buckets.
        compiled: pass the model through torch.compile with this backend, if any.
        unused: find_unused_parameters.
        window: "mean" for accumulation_steps=3, "sum" for backward_passes_per_step=3. Sequences
            then consist of `WINDOW_ACTIONS`.
        members: "" for all ranks. "some": reduce over a process set without rank 1. "halves": of 4
            or more ranks, those with even and those with odd numbers have a process set each, and
            make the same actions in opposite orders. Sequences are then without `GLOBAL_ACTIONS`.
        several: an optimizer for each part of the model. Sequences without a window then consist
            of `SEVERAL_ACTIONS`.
        max_grad_norm: the argument. Sequences then consist of `CLIPPED_ACTIONS`.
        shard: the argument. Sequences are then without actions that are not `SHARDED_ACTIONS`.
    """

    compression: str = "none"
    average: bool = True
    kind: str = "sgd"
    bucket_bytes: int = 100
    compiled: str = ""
    unused: bool = False
    window: str = ""
    members: str = ""
    several: bool = False
    shard: str | None = None
    max_grad_norm: float | None = None


class Several:
    """An optimizer for each child of the model instead of one. A pass may skip some."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers = optimizers

    def __iter__(self) -> Any:
        return iter(self.optimizers)

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **options: Any) -> None:
            for each in self.optimizers:
                getattr(each, method)(*args, **options)

        return call


@dataclass
class World:
    """The state of a sequence on one rank."""

    hvd: Any
    setting: Setting
    model: Model = field(init=False)
    run: Any = field(init=False)
    optimizer: Any = field(init=False)
    reference: Model = field(init=False)
    plain: Any = field(init=False)
    process_set: Any = field(init=False)
    #: The model that all ranks of the job train together, beside those of their process sets.
    shared: "World | None" = None
    steps: int = 0
    #: The batches of the window, and whether a rank has left out a pass of it.
    passes: int = 0
    gaps: bool = False
    #: With `max_grad_norm`: whether the reference's gradients are not clipped, and what they were
    #: before they were clipped, until a step uses them. A further pass adds to the latter.
    unclipped: bool = False
    norm: torch.Tensor | None = None
    before_clipping: list[torch.Tensor | None] = field(default_factory=list)
    #: The ranks' largest gradients since the last comparison, added up.
    largest: float = 0.0

    def __post_init__(self) -> None:
        self.process_set = self.hvd.global_process_set
        everyone = list(range(self.hvd.size()))
        if self.halves:
            sets = [set_of(self.hvd, everyone[k::2]) for k in (0, 1)]
            self.process_set = sets[self.hvd.rank() % 2]
            self.shared = World(self.hvd, Setting())
        elif self.ranks != everyone:
            self.process_set = set_of(self.hvd, self.ranks)
        torch.manual_seed(0)
        self.model = Model().double()
        self.reference = copy.deepcopy(self.model)
        self.optimizer = self.wrap()
        self.plain = self.make(self.reference)
        self.run = self.model
        if self.setting.compiled:
            self.run = torch.compile(self.model, backend=self.setting.compiled)

    def make(self, model: Model) -> Any:
        if self.setting.several:
            return Several([self.make_one(part) for part in model.split()])
        return self.make_one(list(model.parameters()))

    def make_one(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.setting.kind == "momentum":
            return Momentum(parameters)
        if self.setting.kind == "sgd":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=0.01)

    def wrap(self) -> Any:
        if self.setting.several:
            return Several([self.wrap_one(part) for part in self.model.split()])
        return self.wrap_one(list(self.model.parameters()))

    def wrap_one(self, parameters: list[nn.Parameter]) -> Any:
        return self.hvd.DistributedOptimizer(
            self.make_one(parameters),
            [
                (name, p)
                for name, p in self.model.named_parameters()
                if any(p is q for q in parameters)
            ],
            compression=self.compression,
            op=self.hvd.Average if self.setting.average else self.hvd.Sum,
            bucket_bytes=self.setting.bucket_bytes,
            find_unused_parameters=self.setting.unused,
            accumulation_steps=PASSES if self.setting.window == "mean" else 1,
            backward_passes_per_step=PASSES if self.setting.window == "sum" else 1,
            process_set=self.process_set,
            # Compare after every step: the ranks' parameters must never differ.
            check_interval=1,
            max_grad_norm=self.setting.max_grad_norm,
            shard=self.setting.shard,
        )

    @property
    def compression(self) -> Any:
        if self.setting.compression != "int8":
            return self.setting.compression
        # The gradients are small, and would be sent as bfloat16.
        return self.hvd.Int8(as_bf16=lambda name, shape: not shape)

    @property
    def halves(self) -> bool:
        """Whether there are two process sets, of at least two ranks each."""
        return self.setting.members == "halves" and self.hvd.size() > 3

    @property
    def ranks(self) -> list[int]:
        """The ranks of the process set."""
        everyone = list(range(self.hvd.size()))
        if self.halves:
            return everyone[self.hvd.rank() % 2 :: 2]
        some = self.setting.members and len(everyone) > 2
        return [rank for rank in everyone if rank != 1] if some else everyone

    def batch(self, number: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * (number % 10**6) + rank)
        x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        return 3 * x - 1 if rank == 1 else x

    def loss(self, model: Any, number: int, rank: int, part: str) -> torch.Tensor:
        result: torch.Tensor = model(self.batch(number, rank), part).square().mean()
        return result

    def parts(self, number: int, differ: bool) -> list[str]:
        """The part of the model that each rank uses."""
        draw = random.Random(number)
        names = ["all", "all", "branch", "unscaled", "checkpoint"]
        if self.setting.compiled:
            names.remove("checkpoint")
        if differ:
            return [draw.choice(names) for _ in range(self.hvd.size())]
        return [draw.choice(names)] * self.hvd.size()

    def backward(
        self,
        number: int,
        differ: bool = True,
        only: Any = None,
        factor: float = 1.0,
        parts: list[str] | None = None,
        local: bool = False,
    ) -> None:
        """Make a pass on the ranks in `only` (default: all), and the same in the reference.

        Args:
            number: the source of all random choices.
            differ: whether ranks may use different parts of the model.
            only: the ranks that make the pass.
            factor: for the reference's gradients.
            parts: the part of the model that each rank uses.
            local: whether the pass is under no_sync.
        """
        parts = self.parts(number, differ) if parts is None else parts
        ranks = self.ranks if only is None else only
        if self.hvd.rank() in ranks:
            rank = self.hvd.rank()
            self.loss(self.run, number, rank, parts[rank]).backward()
        for rank in ranks:
            # A checkpoint computes the same, and torch.autograd.grad refuses it.
            part = "all" if parts[rank] == "checkpoint" else parts[rank]
            self.add_to_reference(self.loss(self.reference, number, rank, part), factor)
        if only is None and not local:
            self.clip_reference()

    def clip_reference(self) -> None:
        """Clip the gradients by `max_grad_norm`, as each reduction does."""
        if self.setting.max_grad_norm is not None and self.unclipped:
            parameters = list(self.reference.parameters())
            self.before_clipping = [None if q.grad is None else q.grad.clone() for q in parameters]
            self.norm = nn.utils.clip_grad_norm_(parameters, self.setting.max_grad_norm)
        self.unclipped = False

    def add_to_reference(self, loss: torch.Tensor, factor: float = 1.0) -> None:
        """Add one rank's gradients to the reference's."""
        used = [q for q in self.reference.parameters() if q.requires_grad]
        share = factor / (len(self.ranks) if self.setting.average else 1)
        found = torch.autograd.grad(loss, used, allow_unused=True)
        self.largest += max((float(g.abs().max()) for g in found if g is not None), default=0.0)
        self.unclipped = True
        for q, before in zip(self.reference.parameters(), self.before_clipping, strict=False):
            q.grad = before
        self.before_clipping = []
        for q, g in zip(used, found, strict=True):
            if g is not None:
                # In place, as in a backward pass: an optimizer may hold the gradient.
                q.grad = share * g if q.grad is None else q.grad.add_(share * g)

    def pairs(self):
        return zip(self.model.named_parameters(), self.reference.parameters(), strict=True)

    def each(self) -> list[tuple[Any, Any]]:
        """Each wrapped optimizer, and the reference's."""
        if self.setting.several:
            return list(zip(self.optimizer, self.plain, strict=True))
        return [(self.optimizer, self.plain)]

    def check_gradients(self, of: Any = None) -> None:
        """Compare, and give the reference the rounded gradients, so that steps can be compared.

        Args:
            of: a wrapped optimizer whose parameters are compared; None for all parameters.
        """
        self.clip_reference()
        pairs = list(self.pairs())
        if of is not None:
            own = {id(p) for group in of.param_groups for p in group["params"]}
            pairs = [pair for pair in pairs if id(pair[0][1]) in own]
        if self.norm is not None and self.setting.compression == "none":
            torch.testing.assert_close(self.optimizer.grad_norm, self.norm, rtol=1e-9, atol=1e-12)
        self.norm = None
        # One rounding for each rank's gradient, and one for each sum, which is as large.
        n = len(self.ranks)
        bound = 4 * ROUNDING[self.setting.compression] * n * max(self.largest, 1e-3)
        if not self.setting.average:
            bound *= n
        if of is None:
            self.largest = 0.0
        named = [named for named, _ in pairs]
        whole = self.whole_gradients(of)
        self.check_same_bits(lambda p: torch.zeros_like(p) if p.grad is None else whole[p], named)
        for (name, p), q in pairs:
            own = torch.zeros_like(p) if p.grad is None else whole[p].detach()
            expected = torch.zeros_like(q) if q.grad is None else q.grad
            worst = float((own - expected).abs().max())
            assert worst <= bound, f"gradient of {name} is off by {worst}, bound {bound}"
            if p.grad is None:
                q.grad = None
            elif q.grad is None:
                q.grad = own.clone()
            else:
                q.grad.copy_(own)

    def whole_gradients(self, of: Any) -> dict[nn.Parameter, Any]:
        """Return the gradient of each parameter. A collective if the ranks divide it.

        Args:
            of: the wrapped optimizer of the parameters; None for all.
        """
        if self.setting.shard is None:
            return {p: p.grad for p in self.model.parameters()}
        return {
            p: gradient
            for own in ([each for each, _ in self.each()] if of is None else [of])
            for p, gradient in zip(
                (p for group in own.param_groups for p in group["params"]),
                own.full_gradients(),
                strict=True,
            )
        }

    def check_parameters(self) -> None:
        self.check_same_bits(lambda p: p)
        for (name, p), q in self.pairs():
            torch.testing.assert_close(
                p, q, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )

    def check_same_bits(
        self,
        value: Callable[[torch.Tensor], torch.Tensor],
        parameters: list[tuple[str, nn.Parameter]] | None = None,
    ) -> None:
        """Compare a value of parameters (default: all) between the ranks, in one collective."""
        named = list(self.model.named_parameters()) if parameters is None else parameters
        own = [value(p).detach().reshape(-1) for _, p in named]
        everyone = self.hvd.allgather(
            torch.cat(own)[None], name="same bits", process_set=self.process_set
        )
        names = [name for name, _ in named]
        sizes = [len(part) for part in own]
        for other in everyone[1:]:
            for name, a, b in zip(names, everyone[0].split(sizes), other.split(sizes), strict=True):
                assert torch.equal(a, b), f"{name} differs between ranks: {a} and {b}"

    def step(self) -> None:
        self.optimizer.step()
        self.step_of_one_process()

    def step_of_one_process(self) -> None:
        """Step after the ranks have stepped, and compare the parameters."""
        self.plain.step()
        self.before_clipping = []
        self.check_parameters()

    def zero(self) -> None:
        self.optimizer.zero_grad()
        self.plain.zero_grad()
        self.unclipped, self.before_clipping = False, []

    def adopt_rank(self, rank: int) -> None:
        """Make all ranks, and the reference, equal to one rank."""
        self.hvd.broadcast_parameters(self.model.state_dict(), root_rank=rank)
        self.hvd.broadcast_optimizer_state(self.optimizer, root_rank=rank)
        self.reference.load_state_dict(self.model.state_dict())
        self.plain.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        self.zero()

    def chosen_rank(self, number: int) -> int:
        return self.ranks[number % len(self.ranks)]


#: Passes in a window.
PASSES = 3

ACTIONS = action = Actions()
#: With an optimizer for each part of the model.
SEVERAL_ACTIONS = """
    plain_step backward step step_with_some alternating_tasks another_model zero_grad
    zero_grad_in_place zero_grad_of_the_model clip_norm clip_value clip_with_hvd scale_in_place
    accumulate_without_sync two_losses retain_graph grad_of_parameters idle_rank idle_rank_at_step
    double_and_back other_data swap_on_conversion swap_tensors freeze failing_backward wrap_again
""".split()  # noqa: SIM905
#: With `max_grad_norm`.
CLIPPED_ACTIONS = """
    plain_step backward step another_model zero_grad zero_grad_in_place clip_with_hvd
    accumulate_without_sync accumulate_and_step forget_what_was_accumulated two_losses
    grad_of_parameters idle_rank idle_rank_at_step double_and_back other_data new_parameters freeze
    failing_backward closure reload joined_epoch wrap_again add_parameters
""".split()  # noqa: SIM905
#: With `shard`.
SHARDED_ACTIONS = """
    plain_step backward step another_model zero_grad zero_grad_in_place zero_grad_of_the_model
    clip_with_hvd scale_in_place replace_gradients accumulate_without_sync accumulate_and_step
    forget_what_was_accumulated two_losses retain_graph grad_of_parameters idle_rank
    idle_rank_at_step other_data swap_on_conversion swap_tensors new_parameters freeze
    freeze_on_one_rank failing_backward create_graph reload loss_scaling wrap_again add_parameters
    step_with_some alternating_tasks window_passes window_passes_of_some_ranks grad_in_full_window
    alternating_optimizers dropped_pass_in_window flush zero_grad_in_window
""".split()  # noqa: SIM905
WINDOW_ACTIONS = """
    window_passes window_passes_of_some_ranks grad_in_full_window another_model
    alternating_optimizers dropped_pass_in_window flush zero_grad_in_window read_in_window
""".split()  # noqa: SIM905
#: Actions that all ranks of the job must take.
GLOBAL_ACTIONS = ("joined_epoch", "load_on_one_rank", "pass_too_few", "wait_for_all")
#: Actions that need several optimizers.
OF_SEVERAL = ("step_with_some", "alternating_tasks")
_sets: dict[tuple[int, ...], Any] = {}


def set_of(hvd: Any, ranks: list[int]) -> Any:
    """The process set of these ranks, registered once in a job."""
    key = tuple(ranks)
    if key not in _sets:
        _sets[key] = hvd.add_process_set(ranks)
    return _sets[key]


def actions_for(setting: Setting) -> list[str]:
    """Return the names of the actions that are possible with a setting."""
    names = _actions_without_shard(setting)
    return [name for name in names if name in SHARDED_ACTIONS] if setting.shard else names


def _actions_without_shard(setting: Setting) -> list[str]:
    if setting.window:
        return WINDOW_ACTIONS
    if setting.several:
        return SEVERAL_ACTIONS
    if setting.max_grad_norm is not None:
        return CLIPPED_ACTIONS
    left_out = {*OF_SEVERAL, *(set(WINDOW_ACTIONS) - {"another_model"})}
    left_out |= set(GLOBAL_ACTIONS if setting.members else ())
    return sorted(set(ACTIONS) - left_out)


def run_sequence(hvd: Any, setting: Setting, actions: list[tuple[str, int]]) -> None:
    """Run a sequence on this rank.

    Args:
        hvd: hvdkit.torch.
        setting: how the optimizer is wrapped.
        actions: pairs of a name and a number. If the action is impossible with the setting,
            another action takes its place.
    """
    world = World(hvd, setting)
    if hvd.rank() in world.ranks:
        names = actions_for(setting)
        if world.halves and hvd.rank() % 2:
            actions = actions[::-1]
        for name, number in actions:
            ACTIONS[name if name in names else names[number % len(names)]](world, number)
        if setting.window:
            flush(world, 7)
            window_passes(world, PASSES - 1)
        else:
            world.zero()
            plain_step(world, 7)
        # A checkpoint can be saved now.
        optimizers = world.optimizer if setting.several else [world.optimizer]
        assert not any(each.gradients_wait() for each in optimizers)
    hvd.allreduce(torch.ones(1), name="end of the sequence")


# --- the actions --------------------------------------------------------------------------------


@action
def plain_step(world: World, number: int) -> None:
    world.zero()
    world.backward(number)
    world.check_gradients()
    world.step()


@action
def backward(world: World, number: int) -> None:
    world.backward(number)
    world.check_gradients()


@action
def step(world: World, number: int) -> None:
    """Synchronize, also without a pass, or twice."""
    world.optimizer.synchronize()
    world.check_gradients()
    world.step()


@action
def step_with_some(world: World, number: int) -> None:
    """Alternate like a GAN: one optimizer steps before the pass of the others."""
    world.zero()
    world.backward(number)
    early = number % len(world.optimizer.optimizers)
    world.check_gradients()
    world.optimizer.optimizers[early].step()
    world.plain.optimizers[early].step()
    world.backward(number + 1)
    world.check_gradients()
    for k, (own, plain) in enumerate(zip(world.optimizer, world.plain, strict=True)):
        if k != early:
            own.step()
            plain.step()
    world.check_parameters()


@action
def alternating_tasks(world: World, number: int) -> None:
    """Make passes of alternating tasks. Each one steps only the optimizers that it reaches."""
    reached = {"all": (0, 1, 2), "branch": (0, 2, 3), "unscaled": (0, 1)}
    draw = random.Random(number)
    for k in range(2 + number % 3):
        task = draw.choice(list(reached))
        if k == 0 or draw.random() < 0.7:
            world.zero()
        world.backward(number + k, parts=[task] * world.hvd.size())
        for each in reached[task]:
            own, plain = world.each()[each]
            own.step()
            world.check_gradients(own)
            plain.step()
        world.check_parameters()
    world.zero()


@action
def another_model(world: World, number: int) -> None:
    """Train a model of all ranks of the job beside the sequence's, in turns in another thread."""
    if world.shared is None:
        if world.setting.members and not world.halves:
            return  # other ranks take no part
        world.shared = World(world.hvd, Setting())
    world.shared.steps += 1
    if world.shared.steps % 2:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(plain_step, world.shared, world.shared.steps).result()
    else:
        plain_step(world.shared, world.shared.steps)


@action
def zero_grad(world: World, number: int) -> None:
    world.zero()


@action
def zero_grad_in_place(world: World, number: int) -> None:
    world.optimizer.zero_grad(set_to_none=False)
    world.plain.zero_grad(set_to_none=False)
    world.before_clipping = []


@action
def zero_grad_of_the_model(world: World, number: int) -> None:
    none = bool(number % 2)
    world.model.zero_grad(set_to_none=none)
    world.reference.zero_grad(set_to_none=none)


@action
def clip_norm(world: World, number: int) -> None:
    for model in (world.model, world.reference):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    world.check_gradients()


@action
def clip_value(world: World, number: int) -> None:
    for model in (world.model, world.reference):
        if any(p.grad is not None for p in model.parameters()):
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
    world.check_gradients()


@action
def clip_with_hvd(world: World, number: int) -> None:
    norm = world.hvd.clip_grad_norm_(world.optimizer, 0.1)
    world.clip_reference()
    world.norm = None  # the optimizer has this norm from now on
    expected = nn.utils.clip_grad_norm_(world.reference.parameters(), 0.1)
    # The next pass undoes the factor of `max_grad_norm`, and not that of this call.
    factor = min(0.1 / (float(expected) + 1e-6), 1.0)
    world.before_clipping = [None if g is None else factor * g for g in world.before_clipping]
    if world.setting.compression == "none":
        torch.testing.assert_close(float(norm), float(expected), rtol=1e-9, atol=1e-12)
    world.check_gradients()


@action
def scale_in_place(world: World, number: int) -> None:
    for model in (world.model, world.reference):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


@action
def replace_gradients(world: World, number: int) -> None:
    """Assign scaled copies of the gradients after a pass. They count as reduced."""
    world.backward(number)
    # Also what an optimizer holds of the gradients is then equal, although the format rounds.
    world.check_gradients()
    for model in (world.model, world.reference):
        for p in model.parameters():
            if p.grad is not None:
                p.grad = p.grad * 0.5
    world.check_gradients()


@action
def accumulate_without_sync(world: World, number: int) -> None:
    with ExitStack() as stack:
        for each in world.optimizer if world.setting.several else [world.optimizer]:
            stack.enter_context(world.hvd.no_sync(each))
        world.backward(number, local=True)
    world.backward(number + 1)
    if world.setting.several:
        # Reduce the gradients that the second pass has not reached on any rank.
        world.optimizer.synchronize()
    world.check_gradients()


@action
def accumulate_and_step(world: World, number: int) -> None:
    """Make passes under no_sync only, so that the step reduces."""
    with world.hvd.no_sync(world.optimizer):
        world.backward(number, local=True)
        world.backward(number + 1, local=True)
    world.optimizer.synchronize()
    world.check_gradients()
    world.step()


@action
def forget_what_was_accumulated(world: World, number: int) -> None:
    # Otherwise, a pass of one process would change a gradient that the optimizer holds.
    world.zero()
    with world.hvd.no_sync(world.optimizer):
        world.backward(number, local=True)
    world.zero()


@action
def two_losses(world: World, number: int) -> None:
    for differ in (False, True):
        world.backward(number + differ, differ)
    world.check_gradients()


@action
def retain_graph(world: World, number: int) -> None:
    if world.setting.compiled:
        return
    rank = world.hvd.rank()
    loss = world.loss(world.model, number, rank, "all")
    loss.backward(retain_graph=True)
    loss.backward()
    for each in world.ranks:
        world.add_to_reference(world.loss(world.reference, number, each, "all"), 2.0)
    world.check_gradients()


@action
def grad_of_parameters(world: World, number: int) -> None:
    """Call torch.autograd.grad on one rank, which accumulates no gradients."""
    if world.hvd.rank() == world.chosen_rank(number):
        loss = world.loss(world.model, number, 0, "all")
        used = [p for p in world.model.parameters() if p.requires_grad]
        if used:
            torch.autograd.grad(loss, used, allow_unused=True)


@action
def idle_rank(world: World, number: int) -> None:
    """One rank makes no backward pass in a step; all synchronize or clip before the step."""
    step(world, number)
    world.zero()
    idle = world.chosen_rank(number)
    world.backward(number, only=[rank for rank in world.ranks if rank != idle])
    if number % 2:
        clip_with_hvd(world, number)
    else:
        world.optimizer.synchronize()
        world.check_gradients()


@action
def idle_rank_at_step(world: World, number: int) -> None:
    step(world, number)
    world.zero()
    idle = world.chosen_rank(number)
    others = [rank for rank in world.ranks if rank != idle]
    for k in range(1 + number % 3):
        world.backward(number + k, only=others)
    world.optimizer.step()
    # A rounded wire is compared with what the optimizer used.
    world.check_gradients()
    world.step_of_one_process()


@action
def idle_rank_and_changed_gradients(world: World, number: int) -> None:
    step(world, number)
    world.zero()
    idle = world.chosen_rank(number)
    world.backward(number, only=[rank for rank in world.ranks if rank != idle])
    for p in world.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
    expect(world, GradientsChanged, world.optimizer.step)


@action
def write_before_a_pass(world: World, number: int) -> None:
    """Write into the gradients of the last step, then make a pass.

    Different numbers are an error. Zeros, the same numbers on all ranks, and different numbers
    after the gradients were reset, are not.
    """
    plain_step(world, number)
    value = number % (2 if holds_gradients(world) else 4)
    if value == 3:
        zero_grad_in_place(world, number)
        written = [0.01 * (1 + rank) for rank in range(world.hvd.size())]
        total = sum(written[rank] for rank in world.ranks)
        for p, q in zip(world.model.parameters(), world.reference.parameters(), strict=True):
            if p.grad is not None and p.requires_grad:
                p.grad.fill_(written[world.hvd.rank()])
                q.grad.fill_(total / len(world.ranks) if world.setting.average else total)
        world.largest += total
        world.backward(number, parts=["all"] * world.hvd.size())
        world.check_gradients()
        world.step()
        return
    if value == 2 and len(world.ranks) > 1:
        for p in world.model.parameters():
            if p.grad is not None:
                p.grad.fill_(1.0 + world.hvd.rank())
        loss = world.loss(world.run, number, world.hvd.rank(), "all")
        expect(world, GradientsChanged, loss.backward)
        return
    for model in (world.model, world.reference):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(value)
    world.backward(number)
    world.check_gradients()
    world.step()


def holds_gradients(world: World) -> bool:
    """Return whether the optimizer's state is a gradient: numbers of one rank would stay there."""
    state = [(p.grad, world.optimizer.state.get(p, {})) for p in world.model.parameters()]
    return any(
        gradient is not None
        and "momentum" in own
        and own["momentum"].data_ptr() == gradient.data_ptr()
        for gradient, own in state
    )


@action
def double_and_back(world: World, number: int) -> None:
    """Move parameters and gradients to other memory on one rank, with Module._apply."""
    if world.hvd.rank() == world.chosen_rank(number):
        world.model.float().double()
        with torch.no_grad():
            for p, q in zip(world.model.parameters(), world.reference.parameters(), strict=True):
                p.copy_(q)
                if p.grad is not None and q.grad is not None:
                    p.grad.copy_(q.grad)


@action
def other_data(world: World, number: int) -> None:
    """Assign `p.data`: other memory on one rank, or smaller numbers on all ranks."""
    if number % 2:
        for model in (world.model, world.reference):
            for p in model.parameters():
                p.data = 0.9 * p.data
    elif world.hvd.rank() == world.chosen_rank(number):
        for p in world.model.parameters():
            p.data = p.data.clone()


def pass_without_hooks(world: World, number: int) -> None:
    """Make the first pass after PyTorch has lost the hooks: nothing reduces it before the step."""
    if number % 3 == 2:
        accumulate_without_sync(world, number)
        return
    idle = world.chosen_rank(number) if number % 3 else None
    world.backward(number, only=[rank for rank in world.ranks if rank != idle])
    world.optimizer.synchronize()
    world.clip_reference()
    world.check_gradients()


@action
def swap_on_conversion(world: World, number: int) -> None:
    """Convert the model on all ranks. PyTorch then swaps the contents of the parameters.

    A sum of reduced gradients must be reset before, because PyTorch loses the hooks.
    """
    if not world.setting.average or world.setting.max_grad_norm or number % 2:
        world.zero()
    gc.collect()
    torch.__future__.set_swap_module_params_on_conversion(True)
    # PyTorch refuses it while the graph of a pass that raised refers to the parameter.
    with suppress(RuntimeError):
        world.model.float()
        world.model.double()
    torch.__future__.set_swap_module_params_on_conversion(False)
    world.model.double()
    world.reference.float().double().load_state_dict(world.model.state_dict())
    pass_without_hooks(world, number)


@action
def swap_tensors(world: World, number: int) -> None:
    """Swap parameters with tensors that have no gradients."""
    world.zero()
    gc.collect()
    for p in world.model.parameters():
        # PyTorch refuses it while the graph of a pass that raised refers to the parameter.
        with suppress(RuntimeError):
            torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone(), p.requires_grad))
    pass_without_hooks(world, number)


@action
def new_parameters(world: World, number: int) -> None:
    """Replace the parameters of a layer by others, in the model and in the optimizer."""
    world.zero()
    name = ["first", "second", "branch"][number % 3]
    for model, optimizer in ((world.model, world.optimizer), (world.reference, world.plain)):
        layer = getattr(model, name)
        for key in ("weight", "bias"):
            old = getattr(layer, key)
            new = nn.Parameter(0.5 * old.detach(), old.requires_grad)
            setattr(layer, key, new)
            optimizer.state.pop(old, None)  # `state_dict()` does not accept state of others
            for group in optimizer.param_groups:
                group["params"][:] = [new if p is old else p for p in group["params"]]


@action
def other_memory_for_gradients(world: World, number: int) -> None:
    if world.hvd.rank() == world.chosen_rank(number):
        for p in world.model.parameters():
            if p.grad is not None:
                p.grad.data = p.grad.data.clone()


@action
def freeze(world: World, number: int) -> None:
    """Freeze or unfreeze layers on all ranks; every pass still reaches the first layer."""
    name = ["second", "branch"][number % 2]
    for model in (world.model, world.reference):
        for p in getattr(model, name).parameters():
            p.requires_grad_(not p.requires_grad)
    world.zero()


@action
def freeze_on_one_rank(world: World, number: int) -> None:
    """Freeze a parameter on one rank. The next pass is an error on all ranks."""
    world.zero()
    own = world.hvd.rank() == world.chosen_rank(number)
    weight = world.model.first.bias
    if not weight.requires_grad or not world.model.second.weight.requires_grad:
        return
    weight.requires_grad_(not own)
    expect(world, HvdkitError, lambda: world.loss(world.model, number, 0, "all").backward())
    weight.requires_grad_(True)


@action
def failing_backward(world: World, number: int) -> None:
    """The pass of one rank raises, the ranks catch the error, drop the pass and continue."""
    if world.setting.compiled or not any(p.requires_grad for p in world.model.parameters()):
        return
    world.zero()
    rank = world.hvd.rank()
    failing = rank == world.chosen_rank(number)
    place = ["forward", "loss", "hidden"][number % 3]
    caught = None
    try:
        if failing and place == "forward":
            raise Deliberate
        hidden = world.model.first(world.batch(number, rank)).tanh()
        if failing and place == "hidden":
            hidden = Fails.apply(hidden, Deliberate)
        loss = (world.model.second(hidden) * world.model.scale).square().mean()
        (Fails.apply(loss, Deliberate) if failing and place == "loss" else loss).backward()
    except (BackwardFailed, Deliberate) as error:
        caught = type(error)
        world.optimizer.drop_pass()
    assert caught is (Deliberate if failing else BackwardFailed), caught
    world.zero()


@action
def pass_too_few(world: World, number: int) -> None:
    """A rank steps after one pass, the others after two, which is an error on all ranks."""
    if len(world.ranks) < 2:
        return
    world.zero()
    world.backward(number)
    extra = world.chosen_rank(number)
    if world.hvd.rank() == extra:
        expect_here(PassesDiffer, lambda: world.loss(world.model, number, 0, "all").backward())
    else:
        world.optimizer.step()
        expect_here(PassesDiffer, lambda: world.loss(world.model, number, 0, "all").backward())
    world.zero()
    world.adopt_rank(extra)


@action
def create_graph(world: World, number: int) -> None:
    if world.setting.compiled:
        return
    world.zero()
    expect_here(
        HvdkitError, lambda: world.loss(world.model, number, 0, "all").backward(create_graph=True)
    )
    world.zero()


@action
def closure(world: World, number: int) -> None:
    """Step with a closure of one or two passes, which clips with PyTorch or with hvdkit."""

    def run() -> Any:
        world.zero()
        for k in range(1 + number % 2):
            world.backward(number + k)
        (clip_with_hvd if number % 4 > 1 else clip_norm)(world, number)
        return torch.zeros(())

    world.optimizer.step(run)
    world.step_of_one_process()


@action
def reload(world: World, number: int) -> None:
    """State of model and optimizer, as from a checkpoint."""
    world.model.load_state_dict(copy.deepcopy(world.model.state_dict()))
    world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))
    world.zero()


@action
def load_on_one_rank(world: World, number: int) -> None:
    """Rank 0 loads a state, and broadcasts it."""
    if world.hvd.rank() == 0:
        world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))
    world.hvd.broadcast_parameters(world.model.state_dict(), root_rank=0)
    world.hvd.broadcast_optimizer_state(world.optimizer, root_rank=0)
    world.zero()


@action
def loss_scaling(world: World, number: int) -> None:
    """Use PyTorch's GradScaler; on one rank the loss may be infinite."""
    world.zero()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    rank = world.hvd.rank()
    infinite = number % 3 == 0
    loss = world.loss(world.run, number, rank, "all")
    factor = float("inf") if infinite and rank == world.chosen_rank(number) else 1.0
    needs = any(p.requires_grad for p in world.model.parameters())
    if not needs:
        return
    scaler.scale(loss * factor).backward()
    scaler.unscale_(world.optimizer)
    if not infinite:
        for each in world.ranks:
            world.add_to_reference(world.loss(world.reference, number, each, "all"))
        world.check_gradients()
        world.plain.step()
    scaler.step(world.optimizer)
    scaler.update()
    assert world.optimizer.stepped == (not infinite)
    world.zero()
    world.check_parameters()


@action
def joined_epoch(world: World, number: int) -> None:
    """Ranks have different numbers of batches; afterwards all have the last one's parameters."""
    world.zero()
    for k in range((number + world.hvd.rank()) % 3):
        loss = world.loss(world.run, number + k, world.hvd.rank(), "all")
        if loss.requires_grad:
            loss.backward()
            world.optimizer.step()
            world.optimizer.zero_grad()
    last = world.hvd.join()
    world.hvd.allreduce(torch.ones(1))
    world.adopt_rank(last)


@action
def wrap_again(world: World, number: int) -> None:
    """A second optimizer for the same parameters, as in the next of several trainings."""
    world.zero()
    world.optimizer = world.wrap()
    world.plain = world.make(world.reference)


@action
def add_parameters(world: World, number: int) -> None:
    """Add a parameter, perhaps with a gradient of a pass that is reduced already."""
    if hasattr(world.model, "extra"):
        return
    world.zero()
    generator = torch.Generator().manual_seed(number)
    value = torch.randn(3, generator=generator, dtype=torch.float64)
    for model in (world.model, world.reference):
        model.register_parameter("extra", nn.Parameter(value.clone()))
    if number % 2:
        world.backward(number)
    for model, optimizer in ((world.model, world.optimizer), (world.reference, world.plain)):
        optimizer.add_param_group({"params": [model.extra]})
    if number % 2:
        world.optimizer.synchronize()
        world.check_gradients()
        world.step()


# --- in a window --------------------------------------------------------------------------------


@action
def window_passes(world: World, number: int) -> None:
    """Call step() and zero_grad() after every pass, for a number of passes."""
    for k in range(1 + number % (2 * PASSES)):
        window_pass(world, number + k, world.ranks)


@action
def window_passes_of_some_ranks(world: World, number: int) -> None:
    """Make the passes of a window, but leave out some of them on some ranks."""
    draw = random.Random(number)
    for k in range(1 + number % (2 * PASSES)):
        window_pass(world, number + k, [rank for rank in world.ranks if draw.random() < 0.6])


@action
def grad_in_full_window(world: World, number: int) -> None:
    """Call torch.autograd.grad between the last pass of a window and its step."""
    while world.passes < PASSES - 1:
        window_pass(world, number + world.passes, world.ranks)
    window_pass(world, number, world.ranks, lambda: grad_of_parameters(world, number))


def window_pass(
    world: World, number: int, ranks: list[int], before_step: Callable[[], None] | None = None
) -> None:
    mean = world.setting.window == "mean"
    world.backward(number, only=ranks, factor=1 / PASSES if mean else 1)
    world.passes += 1
    world.gaps = world.gaps or len(ranks) < len(world.ranks)
    if world.passes < PASSES:
        if mean:
            world.optimizer.step()
            assert not any(own.stepped for own, _ in world.each())
            world.optimizer.zero_grad()
        return
    if before_step is not None:
        before_step()
    if world.setting.several or world.gaps:
        world.optimizer.synchronize()
    world.check_gradients()
    world.step()
    assert all(own.stepped for own, _ in world.each())
    world.zero()
    world.passes, world.gaps = 0, False


@action
def alternating_optimizers(world: World, number: int) -> None:
    """Step some optimizers after one pass and the others after another; ranks leave out passes.

    As in a GAN, each pass reaches only the parameters of the optimizers that step after it.
    """
    if not world.setting.several or world.setting.window != "mean":
        window_passes_of_some_ranks(world, number)
        return
    flush(world, number)
    draw = random.Random(number)
    for batch in range(PASSES * (1 + number % 2)):
        last = batch % PASSES == PASSES - 1
        for half in (0, 1):
            ranks = [rank for rank in world.ranks if draw.random() < 0.6]
            parts = [draw.choice(["all", "branch", "unscaled"]) for _ in range(world.hvd.size())]
            freeze_optimizers(world.each()[1 - half :: 2], True)
            world.backward(draw.randrange(10**6), only=ranks, factor=1 / PASSES, parts=parts)
            freeze_optimizers(world.each()[1 - half :: 2], False)
            for own, plain in world.each()[half::2]:
                if last:
                    own.synchronize()
                    world.check_gradients(own)
                    plain.step()
                    plain.zero_grad()
                own.step()
                assert own.stepped == last
                own.zero_grad()
    world.check_parameters()
    world.zero()


@action
def dropped_pass_in_window(world: World, number: int) -> None:
    """One rank drops a pass, so no rank uses the window."""
    if world.setting.several or (world.setting.window == "sum" and world.gaps):
        window_passes(world, number)
        return
    for k in range(world.passes, PASSES):
        last = k == PASSES - 1
        own = k == world.passes and world.hvd.rank() == world.chosen_rank(number)
        try:
            if own:
                raise Deliberate
            world.loss(world.run, number, world.hvd.rank(), "all").backward()
        except (BackwardFailed, Deliberate):
            assert world.optimizer.drop_pass() == last
        if world.setting.window == "mean" and (not last or number % 2):
            world.optimizer.step()
            world.optimizer.zero_grad()
    world.plain.zero_grad()
    world.passes, world.gaps = 0, False
    if world.setting.window == "mean" and not number % 2:
        # A call of step() before the next pass of any rank would be that of the dropped pass.
        window_pass(world, number, world.ranks)


@action
def flush(world: World, number: int) -> None:
    """Step with fewer passes than a window has."""
    if world.setting.window == "sum":
        if world.passes:
            world.optimizer.synchronize()
            world.check_gradients()
            world.step()
            world.zero()
        world.passes, world.gaps = 0, False
        return

    def step(own: Any, plain: Any) -> None:
        for group in plain.param_groups:
            for q in group["params"]:
                if q.grad is not None:
                    q.grad *= PASSES / world.passes
        world.check_gradients(own)
        own.step()
        plain.step()

    for own, plain in world.each():
        assert own.flush(lambda own=own, plain=plain: step(own, plain)) == bool(world.passes)
    world.check_parameters()
    world.zero()
    world.passes, world.gaps = 0, False


@action
def zero_grad_in_window(world: World, number: int) -> None:
    """Call zero_grad() inside a window, which has no effect with accumulation_steps."""
    world.optimizer.zero_grad()
    if world.setting.window == "sum":
        world.plain.zero_grad()
        world.passes, world.gaps = 0, False


@action
def read_in_window(world: World, number: int) -> None:
    """Add gradients of this rank only."""
    for p in world.model.parameters():
        if p.grad is not None:
            assert torch.isfinite(p.grad).all()
    if world.setting.window == "mean" and world.passes < PASSES - 1:
        assert world.hvd.clip_grad_norm_(world.optimizer, 1.0) is None
        world.optimizer.synchronize()


def freeze_optimizers(optimizers: list[tuple[Any, Any]], frozen: bool) -> None:
    for each in itertools.chain(*optimizers):
        for group in each.param_groups:
            for p in group["params"]:
                p.requires_grad_(not frozen)


# --- helpers ------------------------------------------------------------------------------------


class Deliberate(Exception):
    """The error that a backward pass raises on purpose."""


def expect_here(kind: type[Exception], call: Callable[[], Any]) -> None:
    """Call a function that must raise on this rank."""
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def expect(world: World, kind: type[Exception], call: Callable[[], Any]) -> None:
    """Call a function that must raise on every rank, then continue with zero_grad."""
    expect_here(kind, call)
    world.zero()
