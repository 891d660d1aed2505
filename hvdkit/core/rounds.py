"""Reduction rounds of one optimizer.

In a round every rank sends every bucket of the optimizer once. `hvdkit.core.coordination` decides,
on all ranks alike, which optimizers have a round; here is what happens in it. Names of collectives
are the same in every round, so Horovod's cache of responses serves all of them.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvdkit.core.accumulation import Window
from hvdkit.core.collectives import Collectives
from hvdkit.core.synchronizer import Synchronizer

Synchronizers = Sequence[Synchronizer[Any, Any]]


class LocalGradients(Protocol):
    """This rank's gradients, as far as rounds need to know them. An adapter implements it."""

    def signature(self, assigned: bool) -> Sequence[object]:
        """Return what must be equal on all ranks in a round, such as `requires_grad`.

        Args:
            assigned: see `begin_round`.
        """
        ...

    def explain(self) -> str:
        """Return the signature in words."""
        ...

    def removed(self) -> bool:
        """Return whether the last round left gradients and the script has removed all of them."""
        ...

    def has_new(self, assigned: bool) -> bool:
        """Return whether a gradient has been added to that has not been reduced since.

        Args:
            assigned: a gradient that the user has assigned counts as well.
        """
        ...

    def changed(self) -> bool:
        """Return whether a gradient differs from what the last round left."""
        ...

    def moved(self) -> bool:
        """Return whether parameters have another dtype or device than the buckets."""
        ...

    def replan(self) -> None:
        """Make new synchronizers for the parameters as they are now. Not a collective."""
        ...

    def adopt(self) -> bool:
        """Make a synchronizer for parameters that need gradients and have none; tell if so."""
        ...

    def are_equal(self) -> bool:
        """Return whether reduced gradients are the same bits on all ranks. A collective."""
        ...

    def count_changed_as_new(self) -> None:
        """Take gradients that the script has written in place for new ones."""
        ...

    def begin_round(self, assigned: bool) -> None:
        """Leave in each gradient only what has been added since its last reduction.

        Until `end_round` the other methods see only that and what is kept apart, and not the zeros
        that packing gives to parameters without a gradient.

        Args:
            assigned: a gradient that the user has assigned is to be reduced; otherwise it stands
                for one that has been reduced.
        """
        ...

    def end_round(self) -> None:
        """Add the reduced gradients to those that `begin_round` kept apart."""
        ...

    def end_step(self) -> None:
        """Take the gradients as they are now, which a step has used, for reduced ones."""
        ...

    def is_busy(self) -> bool:
        """Return whether a backward pass is adding to the gradients."""
        ...

    def is_sparse(self) -> bool:
        """Return whether a gradient is sparse whose bucket is dense."""
        ...

    def make_sparse(self) -> None:
        """Make those gradients sparse on every rank, and plan them so. A collective."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply the gradients by `factor`: the reduction of a single rank."""
        ...

    def invalidate(self, reason: str) -> None:
        """Record that the gradients cannot be used, and why, and forget what is kept apart."""
        ...

    def used(self) -> Sequence[int]:
        """Return 1 for each parameter that has a gradient, else 0; nothing if nobody asks."""
        ...

    def drop_unused(self, used: Sequence[int]) -> None:
        """Remove the gradients whose entry is 0."""
        ...


class Rounds:
    """The rounds of one optimizer: where this rank is in them, and what happens in each.

    Args:
        collectives: of the ranks to reduce over.
        gradients: this rank's.
        synchronizers: the optimizer's, a list that `gradients` extends.
        window: the accumulation window.
        compare: called once, when the ranks have agreed for the first time, to compare more; it
            may raise, on every rank. All ranks give it, or none.

    Attributes:
        gradients: as given.
        caught_up: whether this rank has taken part in a round since its last step.
        may_add: whether the script may have added gradients since the last round that only a step
            reduces, as it may under `no_sync`. On all ranks alike.
        latecomers: whether a rank has come to a round of this step without a pass, at a step of
            this optimizer or of another. All ranks then send a header at the step of this one.
    """

    def __init__(
        self,
        collectives: Collectives,
        gradients: LocalGradients,
        synchronizers: Synchronizers,
        window: Window,
        compare: Callable[[], None] | None = None,
    ) -> None:
        self.gradients = gradients
        self.caught_up = False
        self.latecomers = False
        self.may_add = False
        self._collectives = collectives
        self._synchronizers = synchronizers
        self._window = window
        self._compare = compare
        self._compared = False
        self._generation: int | None = None
        self._step = 0
        self._number = 0
        # For each synchronizer whose sum has started: waits for the ranks that use each parameter.
        self._used: list[Callable[[], list[int]]] = []

    # --- where this rank is ---------------------------------------------------------------------

    @property
    def agreed(self) -> bool:
        """Whether the ranks have agreed on the buckets."""
        return all(synchronizer.agreed for synchronizer in self._synchronizers)

    @property
    def moved(self) -> bool:
        """Whether parameters have another dtype or device than the buckets agreed on."""
        return self.agreed and not self._collectives.alone and self.gradients.moved()

    @property
    def in_windows(self) -> bool:
        """Whether gradients are divided by the passes of a window, on a single rank, too."""
        return self._window.size > 1

    @property
    def new(self) -> bool:
        """Whether there are gradients that have not been reduced."""
        return self.gradients.has_new(assigned=not self.caught_up)

    def renew(self) -> None:
        """Count from 0 again where ranks have started Horovod again or come back from `join`."""
        if self._generation != self._collectives.generation:
            # All ranks are here, whatever they counted before, and some may be new.
            self._generation = self._collectives.generation
            self._compared = False
            self._reset_place()

    def digest(self) -> int:
        """Return 24 bits that are equal where the step, the round and the gradients needed are."""
        # Few enough bits that the sum of squares over 30,000 ranks fits into 64.
        place = (self._step, self._number, self._window.passes, self.latecomers)
        signature = self.gradients.signature(not self.caught_up)
        return zlib.crc32(repr((*place, *signature)).encode()) & 0xFFFFFF

    def explain(self, where: str) -> str:
        """Return in words what `digest` is of.

        Args:
            where: what this rank is doing, such as "in a backward pass".
        """
        passes = self._window.passes
        return (
            f"step {self._step + 1}, reduction {self._number + 1}, {where}"
            + (f", pass {passes} of its window" if passes else "")
            + f"; {self.gradients.explain()}"
        )

    def end_step(self) -> None:
        """Record that the optimizer has made a step."""
        if not self._collectives.alone:
            self.gradients.end_step()
        self._step += 1
        self._number = 0
        self.caught_up = self.latecomers = self.may_add = False

    def _reset_place(self) -> None:
        self._used = []
        self._step = self._number = 0
        self.caught_up = self.latecomers = self.may_add = False

    # --- a round --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Leave in the gradients only what is new."""
        self.gradients.begin_round(not self.caught_up)

    def agree(self) -> None:
        """Agree with the other ranks on the buckets. A collective.

        Raises:
            RankMismatchError: on every rank, when they are to reduce different things.
        """
        if self.gradients.moved():
            self.gradients.replan()
        for synchronizer in self._synchronizers:
            if not synchronizer.agreed:
                synchronizer.agree()
        if self._compare is None:
            return
        # A rank that had joined before its first step was not there when the others compared.
        (compared,) = self._collectives.max([int(self._compared)], "hvdkit.rounds.compared")
        try:
            if not compared:
                self._compare()
        except BaseException:
            self.agree_again()
            raise
        self._compared = True

    def agree_again(self) -> None:
        """Let the next round begin with an agreement, the parameters' values included."""
        self._compared = False
        for synchronizer in self._synchronizers:
            synchronizer.forget()

    def send(self) -> None:
        """Start the buckets that have not started. The ranks have agreed before."""
        self._send(len(self._synchronizers))

    def complete(self, moved: bool, sparse: bool) -> None:
        """Wait for all buckets; afterwards every gradient is final. A collective.

        Args:
            moved: the parameters of all ranks have another dtype or device than the buckets.
            sparse: a rank has a sparse gradient in a dense bucket.
        """
        if moved:
            self.gradients.replan()
            for synchronizer in self._synchronizers:
                synchronizer.agree()
            self.send()
        used = self._wait(len(self._synchronizers))
        known = len(self._synchronizers)
        if self.gradients.adopt():
            for synchronizer in self._synchronizers[known:]:
                synchronizer.synchronize()
        if sparse:
            self.gradients.make_sparse()
        if used:
            self.gradients.drop_unused(used)
        self.gradients.end_round()
        self._number += 1
        self.caught_up = True
        self.may_add = False

    @property
    def plans_agreed(self) -> int:
        """The number of synchronizers that the ranks have agreed on, before the first other one."""
        agreed = [synchronizer.agreed for synchronizer in self._synchronizers]
        return agreed.index(False) if False in agreed else len(agreed)

    def abandon(self, plans: int) -> None:
        """Wait for the buckets of a round that cannot be used. A collective.

        Args:
            plans: the number of synchronizers that all ranks have agreed on.
        """
        self._send(plans)
        self._wait(plans)

    def reset(self, same_parameters: bool, reason: str) -> None:
        """Begin anew after an error that all ranks have seen.

        Args:
            same_parameters: whether ranks are sure to have equal parameters.
            reason: why the gradients cannot be used.
        """
        self._reset_place()
        self.gradients.invalidate(reason)
        if not same_parameters:
            self.agree_again()

    def reduce_alone(self) -> None:
        """Reduce the gradients of a single rank: divide them by the passes of a window."""
        self.begin()
        if self._window.divisor != 1:
            self.gradients.scale(1.0 / self._window.divisor)
        self.gradients.end_round()
        self.caught_up = True

    def settle(self) -> None:
        """Wait for what wire formats have deferred to the next round."""
        for synchronizer in self._synchronizers:
            synchronizer.settle()

    def _send(self, plans: int) -> None:
        """Start what has not started of the first synchronizers."""
        used = self.gradients.used()
        start = 0
        for k, synchronizer in enumerate(self._synchronizers[:plans]):
            end = start + len(synchronizer.specs)
            if used and k == len(self._used):
                name = f"{synchronizer.name}.used"
                self._used.append(self._collectives.start_sum(used[start:end], name))
            synchronizer.send()
            start = end

    def _wait(self, plans: int) -> list[int]:
        """Wait for the first synchronizers; return the ranks that use each parameter, if asked."""
        used, self._used = self._used, []
        for synchronizer in self._synchronizers[:plans]:
            synchronizer.wait()
        return [count for result in used[:plans] for count in result()]
